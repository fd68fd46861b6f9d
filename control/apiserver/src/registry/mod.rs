//! The kinds that the server serves: those of the given CRDs and a few built-in ones.
//!
//! A [`Kind`] is everything the rest of the server needs to know about one resource in one version. Versions of one
//! resource share their storage; only `apiVersion` is rewritten between them. The registry is fixed at start.

pub mod builtin;
pub mod events;

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::{Value, json};

use crate::{
    error::About,
    jsonpath::{JsonPath, JsonPathError},
    schema::{ObjectSchema, SchemaError},
    store::Key,
};

/// A list of kinds that cannot be served.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// The CRD lacks something it must have.
    #[error("CRD {crd:?}: {what}")]
    Definition {
        /// Name of the CRD.
        crd: String,
        /// What is wrong.
        what: String,
    },
    /// The schema cannot be compiled.
    #[error("CRD {crd:?}: {source}")]
    Schema {
        /// Name of the CRD.
        crd: String,
        /// Why.
        source: SchemaError,
    },
    /// A printer column or selectable field has a path that is not understood.
    #[error("CRD {crd:?}: {source}")]
    Path {
        /// Name of the CRD.
        crd: String,
        /// Why.
        source: JsonPathError,
    },
    /// Two kinds claim one place.
    #[error("{0} is defined twice")]
    Twice(String),
}

/// Where the content of a printed column comes from.
#[derive(Debug, Clone)]
pub enum CellSource {
    /// The first of these paths that leads to something.
    FirstOf(Vec<JsonPath>),
    /// The number of entries of the maps or lists at these paths.
    CountOf(Vec<JsonPath>),
    /// The values at these paths, lower case, with `/` between.
    Joined(Vec<JsonPath>),
}

/// A printed column.
#[derive(Debug, Clone)]
pub struct Column {
    /// Heading.
    pub name: String,
    /// `string`, `integer`, `number`, `boolean` or `date`.
    pub value_type: String,
    /// OpenAPI format, may be empty.
    pub format: String,
    /// What the column says.
    pub description: String,
    /// Columns above 0 are shown in wide output only.
    pub priority: i64,
    /// The content.
    pub source: CellSource,
}

/// What may be done with a kind from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Everything.
    ReadWrite,
    /// Get, list and watch.
    ReadOnly,
}

/// How a served version differs from what is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Conversion {
    /// Only in `apiVersion`.
    ApiVersion,
    /// Served as `events.k8s.io/v1`, stored as core `v1` events.
    Events,
}

/// One resource in one version.
#[derive(Debug)]
pub struct Kind {
    /// API group, empty for core.
    pub group: String,
    /// API version, such as `v1alpha1`.
    pub version: String,
    /// Kind, such as `Volume`.
    pub kind: String,
    /// Kind of lists.
    pub list_kind: String,
    /// Name in paths.
    pub plural: String,
    /// Name for one.
    pub singular: String,
    /// Abbreviations.
    pub short_names: Vec<String>,
    /// Groups of resources such as `all`.
    pub categories: Vec<String>,
    /// Whether objects live in namespaces.
    pub namespaced: bool,
    /// Whether `status` is written by its own subresource only.
    pub status_subresource: bool,
    /// Whether `metadata.generation` is kept.
    pub has_generation: bool,
    /// What may be done.
    pub access: Access,
    /// How objects are read and written in this version.
    pub conversion: Conversion,
    /// `apiVersion` of stored objects.
    pub stored_api_version: String,
    /// The compiled schema.
    pub schema: ObjectSchema,
    /// The schema as given, for OpenAPI.
    pub open_api: Value,
    /// Columns after the name.
    pub columns: Vec<Column>,
    /// Fields that field selectors may name.
    pub selectable_fields: Vec<String>,
}

impl Kind {
    /// `<group>/<version>`, or the version alone for core.
    pub fn api_version(&self) -> String {
        group_version(&self.group, &self.version)
    }

    /// Where objects of this resource are stored, whatever the version.
    pub fn storage(&self) -> String {
        match self.conversion {
            Conversion::Events => builtin::EVENTS.to_owned(),
            Conversion::ApiVersion if self.group.is_empty() => self.plural.clone(),
            Conversion::ApiVersion => format!("{}.{}", self.plural, self.group),
        }
    }

    /// The key of an object.
    pub fn key(&self, namespace: &str, name: &str) -> Key {
        Key::new(self.storage(), namespace, name)
    }

    /// An object of this kind, for refusals.
    pub fn about(&self, name: &str) -> About {
        About { group: self.group.clone(), kind: self.plural.clone(), name: name.to_owned(), uid: String::new() }
    }

    /// An object of this kind, for refusals that name the kind itself.
    pub fn about_kind(&self, name: &str) -> About {
        About { kind: self.kind.clone(), ..self.about(name) }
    }

    /// An object as this version shows it.
    pub fn served(&self, stored: &Arc<Value>) -> Arc<Value> {
        match self.conversion {
            Conversion::Events => Arc::new(events::to_events_v1(stored)),
            Conversion::ApiVersion if self.api_version() == self.stored_api_version => stored.clone(),
            Conversion::ApiVersion => {
                let mut object = stored.as_ref().clone();
                object["apiVersion"] = json!(self.api_version());
                Arc::new(object)
            }
        }
    }

    /// An object as it is stored.
    pub fn stored(&self, mut served: Value) -> Value {
        if self.conversion == Conversion::Events {
            return events::to_core_v1(&served);
        }
        served["apiVersion"] = json!(self.stored_api_version);
        served
    }

    /// The verbs of discovery.
    pub fn verbs(&self) -> &'static [&'static str] {
        match self.access {
            Access::ReadWrite => &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"],
            Access::ReadOnly => &["get", "list", "watch"],
        }
    }
}

/// `<group>/<version>`, or the version alone for core.
pub fn group_version(group: &str, version: &str) -> String {
    if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") }
}

/// All kinds.
#[derive(Debug)]
pub struct Registry {
    kinds: BTreeMap<(String, String, String), Arc<Kind>>,
    /// Groups with their versions, preferred first.
    groups: Vec<(String, Vec<String>)>,
    definitions: Vec<Value>,
}

impl Registry {
    /// Compiles the CRDs and adds the built-in kinds.
    ///
    /// # Errors
    /// Names the CRD and the place in it that cannot be served.
    pub fn new(crds: &[CustomResourceDefinition]) -> Result<Self, RegistryError> {
        let mut registry = Self { kinds: BTreeMap::new(), groups: Vec::new(), definitions: Vec::new() };
        for kind in builtin::kinds()? {
            registry.add(kind)?;
        }
        for crd in crds {
            let definition = serde_json::to_value(crd)
                .map_err(|error| definition_error(crd.metadata.name.as_deref(), &error.to_string()))?;
            for kind in kinds_of(&definition)? {
                registry.add(kind)?;
            }
            registry.definitions.push(definition);
        }
        Ok(registry)
    }

    fn add(&mut self, kind: Kind) -> Result<(), RegistryError> {
        match self.groups.iter_mut().find(|(group, _)| *group == kind.group) {
            Some((_, versions)) if versions.contains(&kind.version) => {}
            Some((_, versions)) => versions.push(kind.version.clone()),
            None => self.groups.push((kind.group.clone(), vec![kind.version.clone()])),
        }
        let place = (kind.group.clone(), kind.version.clone(), kind.plural.clone());
        match self.kinds.insert(place.clone(), Arc::new(kind)) {
            None => Ok(()),
            Some(_) => Err(RegistryError::Twice(format!("{} of {}", place.2, group_version(&place.0, &place.1)))),
        }
    }

    /// The kind at a path.
    pub fn get(&self, group: &str, version: &str, plural: &str) -> Option<&Arc<Kind>> {
        self.kinds.get(&(group.to_owned(), version.to_owned(), plural.to_owned()))
    }

    /// The kind that an owner reference names, in any version.
    pub fn by_kind(&self, api_version: &str, kind: &str) -> Option<&Arc<Kind>> {
        let group = api_version.rsplit_once('/').map_or("", |(group, _)| group);
        self.kinds.values().find(|candidate| candidate.group == group && candidate.kind == kind)
    }

    /// A kind that reads and writes a place in the store as it is.
    pub fn by_storage(&self, storage: &str) -> Option<&Arc<Kind>> {
        self.kinds.values().find(|kind| {
            kind.conversion == Conversion::ApiVersion
                && kind.api_version() == kind.stored_api_version
                && kind.storage() == storage
        })
    }

    /// All groups but core, with their versions, preferred first.
    pub fn groups(&self) -> impl Iterator<Item = (&str, &[String])> {
        self.groups.iter().map(|(group, versions)| (group.as_str(), versions.as_slice()))
    }

    /// The kinds of a group and version, by plural.
    pub fn kinds_in<'a>(&'a self, group: &'a str, version: &'a str) -> impl Iterator<Item = &'a Arc<Kind>> {
        self.kinds.values().filter(move |kind| kind.group == group && kind.version == version)
    }

    /// The CRDs as given.
    pub fn definitions(&self) -> &[Value] {
        &self.definitions
    }
}

fn definition_error(crd: Option<&str>, what: &str) -> RegistryError {
    RegistryError::Definition { crd: crd.unwrap_or_default().to_owned(), what: what.to_owned() }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn texts(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().map(text).collect()
}

/// The kinds of a definition, one for each served version, the storage version first.
fn kinds_of(definition: &Value) -> Result<Vec<Kind>, RegistryError> {
    let crd = text(&definition["metadata"]["name"]);
    let spec = &definition["spec"];
    let versions = spec["versions"].as_array().map(Vec::as_slice).unwrap_or_default();
    let stored = versions.iter().find(|version| version["storage"] == true);
    let Some(stored) = stored else { return Err(definition_error(Some(&crd), "no version has storage: true")) };
    let expected = format!("{}.{}", text(&spec["names"]["plural"]), text(&spec["group"]));
    if crd != expected {
        return Err(definition_error(
            Some(&crd),
            &format!("metadata.name must be spec.names.plural + \".\" + spec.group: {expected:?}"),
        ));
    }
    let mut served: Vec<&Value> = versions.iter().filter(|version| version["served"] == true).collect();
    served.sort_by_key(|version| version["storage"] != true);
    served.into_iter().map(|version| kind_of(&crd, spec, version, &text(&stored["name"]))).collect()
}

fn kind_of(crd: &str, spec: &Value, version: &Value, stored_version: &str) -> Result<Kind, RegistryError> {
    let names = &spec["names"];
    let group = text(&spec["group"]);
    let kind = text(&names["kind"]);
    let or = |value: &Value, otherwise: String| if value.is_string() { text(value) } else { otherwise };
    let open_api = version["schema"]["openAPIV3Schema"].clone();
    let path = |path: &Value| {
        JsonPath::parse(&text(path)).map_err(|source| RegistryError::Path { crd: crd.to_owned(), source })
    };
    let mut selectable_fields = vec!["metadata.name".to_owned(), "metadata.namespace".to_owned()];
    for field in version["selectableFields"].as_array().into_iter().flatten() {
        path(&field["jsonPath"])?;
        selectable_fields.push(text(&field["jsonPath"]).trim_start_matches('.').to_owned());
    }
    let columns = version["additionalPrinterColumns"].as_array().into_iter().flatten();
    let mut columns: Vec<Column> =
        columns.map(|column| column_of(column, path(&column["jsonPath"])?)).collect::<Result<_, RegistryError>>()?;
    if columns.is_empty() {
        columns.push(age_column());
    }
    Ok(Kind {
        stored_api_version: group_version(&group, stored_version),
        list_kind: or(&names["listKind"], format!("{kind}List")),
        singular: or(&names["singular"], kind.to_lowercase()),
        plural: text(&names["plural"]),
        version: text(&version["name"]),
        short_names: texts(&names["shortNames"]),
        categories: texts(&names["categories"]),
        namespaced: spec["scope"] == "Namespaced",
        status_subresource: version["subresources"]["status"].is_object(),
        has_generation: true,
        access: Access::ReadWrite,
        conversion: Conversion::ApiVersion,
        schema: ObjectSchema::compile(&open_api)
            .map_err(|source| RegistryError::Schema { crd: crd.to_owned(), source })?,
        open_api,
        columns,
        selectable_fields,
        group,
        kind,
    })
}

fn column_of(column: &Value, path: JsonPath) -> Result<Column, RegistryError> {
    Ok(Column {
        name: text(&column["name"]),
        value_type: text(&column["type"]),
        format: text(&column["format"]),
        description: text(&column["description"]),
        priority: column["priority"].as_i64().unwrap_or(0),
        source: CellSource::FirstOf(vec![path]),
    })
}

/// The column that kinds without columns of their own get.
fn age_column() -> Column {
    let path = JsonPath::parse(".metadata.creationTimestamp");
    Column {
        name: "Age".to_owned(),
        value_type: "date".to_owned(),
        format: String::new(),
        description: "Time since the object was created.".to_owned(),
        priority: 0,
        source: CellSource::FirstOf(path.into_iter().collect()),
    }
}
