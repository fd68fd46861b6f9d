//! Structural schemas: the `openAPIV3Schema` of a kind, compiled once and applied to every write.
//!
//! *Flow* of a write: [`prune`] drops unknown fields and reports them, [`default`] fills in defaults, [`validate`] checks
//! structure and values, [`cel`] checks the rules written in CEL. Each later step relies on the earlier ones.
//!
//! *Invariants.* A compiled schema never fails on an object: everything that can be wrong with the schema itself (an
//! unparsable pattern or rule, an unknown type) is refused by [`ObjectSchema::compile`] when the server starts.

pub mod cel;
pub mod default;
pub mod format;
pub mod prune;
pub mod validate;

use std::collections::BTreeMap;

use regex::Regex;
use serde_json::{Map, Number, Value};

use self::cel::CelRules;

/// Deepest nesting of a schema, so that recursion over it is bounded.
const DEPTH_MAX: usize = 64;

/// A schema that cannot be served.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
#[error("schema at {path:?}: {what}")]
pub struct SchemaError {
    /// Where in the schema.
    pub path: String,
    /// What is wrong, and what is allowed.
    pub what: String,
}

/// The compiled schema of a kind.
#[derive(Debug)]
pub struct ObjectSchema {
    /// Structure and values.
    pub root: Schema,
    /// Rules in CEL, `None` when there are none.
    pub rules: Option<CelRules>,
}

impl ObjectSchema {
    /// Compiles an `openAPIV3Schema`.
    ///
    /// # Errors
    /// Names the place in the schema that cannot be used.
    pub fn compile(schema: &Value) -> Result<Self, SchemaError> {
        Ok(Self { root: Schema::compile(schema, "", 0)?, rules: CelRules::compile(schema)? })
    }
}

/// JSON types of a schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    /// A map with named or free fields.
    Object,
    /// A list.
    Array,
    /// A text.
    String,
    /// A whole number.
    Integer,
    /// Any number.
    Number,
    /// True or false.
    Boolean,
}

impl Type {
    fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "object" => Self::Object,
            "array" => Self::Array,
            "string" => Self::String,
            "integer" => Self::Integer,
            "number" => Self::Number,
            "boolean" => Self::Boolean,
            _ => return None,
        })
    }

    /// The name in schemas.
    pub fn name(self) -> &'static str {
        match self {
            Self::Object => "object",
            Self::Array => "array",
            Self::String => "string",
            Self::Integer => "integer",
            Self::Number => "number",
            Self::Boolean => "boolean",
        }
    }
}

/// What a map may hold beside its named fields.
#[derive(Debug)]
pub enum Additional {
    /// Nothing: unknown fields are pruned.
    Nothing,
    /// Anything.
    Anything,
    /// Values of one schema.
    Schema(Box<Schema>),
}

/// How a list's entries are told apart.
#[derive(Debug, PartialEq, Eq)]
pub enum ListType {
    /// They are not.
    Atomic,
    /// By their whole value.
    Set,
    /// By these fields.
    Map(Vec<String>),
}

/// One node of a compiled schema.
#[derive(Debug)]
pub struct Schema {
    /// `None` only with `int_or_string`, `preserve_unknown`, or inside `allOf` and its kin.
    pub value_type: Option<Type>,
    /// Whether `null` is a value.
    pub nullable: bool,
    /// Whether both whole numbers and texts are values.
    pub int_or_string: bool,
    /// Whether unknown fields are kept.
    pub preserve_unknown: bool,
    /// Whether `apiVersion`, `kind` and `metadata` are implied.
    pub embedded: bool,
    /// Named fields.
    pub properties: BTreeMap<String, Schema>,
    /// Other fields.
    pub additional: Additional,
    /// Entries of a list.
    pub items: Option<Box<Schema>>,
    /// Fields that must be there.
    pub required: Vec<String>,
    /// Value of a missing field.
    pub default: Option<Value>,
    /// All allowed values.
    pub allowed: Option<Vec<Value>>,
    /// Smallest number, and whether it is itself excluded.
    pub minimum: Option<(Number, bool)>,
    /// Largest number, and whether it is itself excluded.
    pub maximum: Option<(Number, bool)>,
    /// Numbers are multiples of this.
    pub multiple_of: Option<Number>,
    /// Fewest characters.
    pub length_min: Option<u64>,
    /// Most characters.
    pub length_max: Option<u64>,
    /// Texts match this.
    pub pattern: Option<Regex>,
    /// Named form of a text or number.
    pub format: Option<String>,
    /// Fewest entries of a list.
    pub items_min: Option<u64>,
    /// Most entries of a list.
    pub items_max: Option<u64>,
    /// Fewest fields of a map.
    pub properties_min: Option<u64>,
    /// Most fields of a map.
    pub properties_max: Option<u64>,
    /// How entries of a list are told apart.
    pub list_type: ListType,
    /// All must hold.
    pub all_of: Vec<Schema>,
    /// At least one must hold.
    pub any_of: Vec<Schema>,
    /// Exactly one must hold.
    pub one_of: Vec<Schema>,
    /// Must not hold.
    pub not: Option<Box<Schema>>,
}

impl Schema {
    fn compile(schema: &Value, path: &str, depth: usize) -> Result<Self, SchemaError> {
        let error = |what: String| SchemaError { path: path.to_owned(), what };
        if depth > DEPTH_MAX {
            return Err(error(format!("nested deeper than {DEPTH_MAX}")));
        }
        let map = schema.as_object().ok_or_else(|| error("a schema is an object".to_owned()))?;
        let value_type = match map.get("type").and_then(Value::as_str) {
            None | Some("") => None,
            Some(name) => Some(Type::parse(name).ok_or_else(|| error(format!("unknown type {name:?}")))?),
        };
        let flag = |name: &str| map.get(name).and_then(Value::as_bool).unwrap_or(false);
        let count = |name: &str| map.get(name).and_then(Value::as_u64);
        let bound = |name: &str, exclusive: &str| {
            map.get(name).and_then(Value::as_number).map(|number| (number.clone(), flag(exclusive)))
        };
        let below = |name: &str| compile_list(map, name, path, depth);
        Ok(Self {
            value_type,
            nullable: flag("nullable"),
            int_or_string: flag("x-kubernetes-int-or-string"),
            preserve_unknown: flag("x-kubernetes-preserve-unknown-fields"),
            embedded: flag("x-kubernetes-embedded-resource"),
            properties: compile_properties(map, path, depth)?,
            additional: compile_additional(map, path, depth)?,
            items: compile_boxed(map, "items", &format!("{path}[]"), depth)?,
            required: strings(map.get("required")),
            default: map.get("default").cloned(),
            allowed: map.get("enum").and_then(Value::as_array).cloned(),
            minimum: bound("minimum", "exclusiveMinimum"),
            maximum: bound("maximum", "exclusiveMaximum"),
            multiple_of: map.get("multipleOf").and_then(Value::as_number).cloned(),
            length_min: count("minLength"),
            length_max: count("maxLength"),
            pattern: compile_pattern(map).map_err(error)?,
            format: map.get("format").and_then(Value::as_str).map(str::to_owned),
            items_min: count("minItems"),
            items_max: count("maxItems"),
            properties_min: count("minProperties"),
            properties_max: count("maxProperties"),
            list_type: list_type(map),
            all_of: below("allOf")?,
            any_of: below("anyOf")?,
            one_of: below("oneOf")?,
            not: compile_boxed(map, "not", path, depth)?,
        })
    }
}

/// The path of a field below another.
pub(crate) fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

fn strings(value: Option<&Value>) -> Vec<String> {
    let texts = value.and_then(Value::as_array).into_iter().flatten();
    texts.filter_map(Value::as_str).map(str::to_owned).collect()
}

fn compile_properties(
    map: &Map<String, Value>,
    path: &str,
    depth: usize,
) -> Result<BTreeMap<String, Schema>, SchemaError> {
    map.get("properties")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
        .map(|(name, schema)| Ok((name.clone(), Schema::compile(schema, &join(path, name), depth + 1)?)))
        .collect()
}

fn compile_additional(map: &Map<String, Value>, path: &str, depth: usize) -> Result<Additional, SchemaError> {
    Ok(match map.get("additionalProperties") {
        None | Some(Value::Bool(false)) => Additional::Nothing,
        Some(Value::Bool(true)) => Additional::Anything,
        Some(schema) => Additional::Schema(Box::new(Schema::compile(schema, &join(path, "*"), depth + 1)?)),
    })
}

fn compile_boxed(
    map: &Map<String, Value>,
    name: &str,
    path: &str,
    depth: usize,
) -> Result<Option<Box<Schema>>, SchemaError> {
    map.get(name).map(|schema| Schema::compile(schema, path, depth + 1).map(Box::new)).transpose()
}

fn compile_list(map: &Map<String, Value>, name: &str, path: &str, depth: usize) -> Result<Vec<Schema>, SchemaError> {
    let branches = map.get(name).and_then(Value::as_array).into_iter().flatten();
    branches.map(|schema| Schema::compile(schema, path, depth + 1)).collect()
}

fn compile_pattern(map: &Map<String, Value>) -> Result<Option<Regex>, String> {
    let Some(pattern) = map.get("pattern").and_then(Value::as_str) else { return Ok(None) };
    Regex::new(pattern).map(Some).map_err(|error| format!("pattern {pattern:?}: {error}"))
}

fn list_type(map: &Map<String, Value>) -> ListType {
    match map.get("x-kubernetes-list-type").and_then(Value::as_str) {
        Some("set") => ListType::Set,
        Some("map") => ListType::Map(strings(map.get("x-kubernetes-list-map-keys"))),
        _ if map.get("uniqueItems").and_then(Value::as_bool) == Some(true) => ListType::Set,
        _ => ListType::Atomic,
    }
}
