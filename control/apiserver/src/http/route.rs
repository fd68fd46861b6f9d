//! Paths and queries.

use axum::http::Uri;

/// What a path leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route {
    /// `/api`.
    CoreVersions,
    /// `/apis`.
    Groups,
    /// `/apis/<group>`.
    Group(String),
    /// `/api/v1`, `/apis/<group>/<version>`.
    Resources(String, String),
    /// `/version`.
    Version,
    /// `/healthz`, `/readyz`, `/livez` and below.
    Health,
    /// `/openapi/v3`.
    OpenApiIndex,
    /// `/openapi/v3/api/v1`, `/openapi/v3/apis/<group>/<version>`.
    OpenApi(String, String),
    /// An object or a collection.
    Resource(ResourcePath),
    /// Nothing.
    Unknown,
}

/// The path of an object or a collection.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResourcePath {
    /// API group, empty for core.
    pub group: String,
    /// API version.
    pub version: String,
    /// `None` for cluster-scoped objects and for all namespaces.
    pub namespace: Option<String>,
    /// The plural.
    pub resource: String,
    /// `None` for collections.
    pub name: Option<String>,
    /// `status` and the like.
    pub subresource: Option<String>,
}

impl Route {
    /// Parses a path.
    pub fn parse(path: &str) -> Self {
        let segments: Option<Vec<String>> = path.split('/').filter(|segment| !segment.is_empty()).map(decode).collect();
        let Some(segments) = segments else { return Self::Unknown };
        let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
        match segments.as_slice() {
            ["api"] => Self::CoreVersions,
            ["apis"] => Self::Groups,
            ["version"] => Self::Version,
            ["healthz" | "readyz" | "livez", ..] => Self::Health,
            ["openapi", "v3"] => Self::OpenApiIndex,
            ["openapi", "v3", "api", version] => Self::OpenApi(String::new(), (*version).to_owned()),
            ["openapi", "v3", "apis", group, version] => Self::OpenApi((*group).to_owned(), (*version).to_owned()),
            ["api", version] => Self::Resources(String::new(), (*version).to_owned()),
            ["api", version, rest @ ..] => Self::resource("", version, rest),
            ["apis", group] => Self::Group((*group).to_owned()),
            ["apis", group, version] => Self::Resources((*group).to_owned(), (*version).to_owned()),
            ["apis", group, version, rest @ ..] => Self::resource(group, version, rest),
            _ => Self::Unknown,
        }
    }

    fn resource(group: &str, version: &str, rest: &[&str]) -> Self {
        let owned = |text: &&str| (*text).to_owned();
        let (namespace, rest) = match rest {
            // `namespaces/x` and `namespaces/x/status` are the namespace itself.
            ["namespaces", _] | ["namespaces", _, "status" | "finalize"] => (None, rest),
            ["namespaces", namespace, rest @ ..] => (Some(owned(namespace)), rest),
            rest => (None, rest),
        };
        let (resource, name, subresource) = match rest {
            [resource] => (resource, None, None),
            [resource, name] => (resource, Some(name), None),
            [resource, name, subresource] => (resource, Some(name), Some(subresource)),
            _ => return Self::Unknown,
        };
        Self::Resource(ResourcePath {
            group: group.to_owned(),
            version: version.to_owned(),
            namespace,
            resource: owned(resource),
            name: name.map(owned),
            subresource: subresource.map(owned),
        })
    }
}

/// A path segment without its percent escapes; `None` when they are wrong.
fn decode(segment: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(segment.len());
    let mut rest = segment.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits = [rest.next()?, rest.next()?];
        bytes.push(u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?);
    }
    String::from_utf8(bytes).ok()
}

/// The query of a request.
#[derive(Debug, Clone, Default)]
pub struct Query(Vec<(String, String)>);

impl Query {
    /// Parses the query; `None` when it is not one.
    pub fn parse(uri: &Uri) -> Option<Self> {
        axum::extract::Query::try_from_uri(uri).ok().map(|axum::extract::Query(pairs)| Self(pairs))
    }

    /// The first value of a parameter, empty when it is not there.
    pub fn text(&self, name: &str) -> &str {
        self.0.iter().find(|(key, _)| key == name).map_or("", |(_, value)| value)
    }

    /// Whether a parameter is `true` or `1`.
    pub fn flag(&self, name: &str) -> bool {
        matches!(self.text(name), "true" | "1" | "True" | "TRUE")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resource(path: &str) -> (String, Option<String>, String, Option<String>, Option<String>) {
        match Route::parse(path) {
            Route::Resource(path) => (path.group, path.namespace, path.resource, path.name, path.subresource),
            other => panic!("{path}: {other:?}"),
        }
    }

    #[test]
    fn each_form_of_path() {
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(Route::parse("/api"), Route::CoreVersions);
        assert_eq!(Route::parse("/apis/"), Route::Groups);
        assert_eq!(Route::parse("/apis/addax.io"), Route::Group("addax.io".into()));
        assert_eq!(Route::parse("/api/v1"), Route::Resources(String::new(), "v1".into()));
        assert_eq!(Route::parse("/livez/ping"), Route::Health);
        assert_eq!(Route::parse("/apis/a/v1/namespaces/n/things/x/status/more"), Route::Unknown);
        assert_eq!(Route::parse("/%zz"), Route::Unknown);
        assert_eq!(
            resource("/apis/a/v1/namespaces/n/things/x/status"),
            ("a".into(), some("n"), "things".into(), some("x"), some("status"))
        );
        assert_eq!(resource("/apis/a/v1/things"), ("a".into(), None, "things".into(), None, None));
        assert_eq!(resource("/apis/a/v1/things/x%2Dy"), ("a".into(), None, "things".into(), some("x-y"), None));
        assert_eq!(resource("/api/v1/namespaces"), (String::new(), None, "namespaces".into(), None, None));
        assert_eq!(resource("/api/v1/namespaces/n"), (String::new(), None, "namespaces".into(), some("n"), None));
        assert_eq!(resource("/api/v1/namespaces/n/events"), (String::new(), some("n"), "events".into(), None, None));
        assert_eq!(
            resource("/api/v1/namespaces/n/status"),
            (String::new(), None, "namespaces".into(), some("n"), some("status"))
        );
    }

    #[test]
    fn queries() {
        let query = Query::parse(&"/x?labelSelector=a%3Db&watch=1&limit".parse().unwrap()).unwrap();
        assert_eq!(query.text("labelSelector"), "a=b");
        assert!(query.flag("watch"));
        assert!(!query.flag("other"));
    }
}
