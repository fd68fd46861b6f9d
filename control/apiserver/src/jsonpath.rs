//! The part of JSONPath that printer columns and selectable fields use.
//!
//! Understood: `.name`, `\.` for a dot inside a name, `['name']`, `[0]`, `[-1]`, `[*]`, and
//! `[?(@.path=="value")]` with `==` and `!=`. Anything else is refused when the path is parsed.

use serde_json::Value;

/// A parsed path.
#[derive(Debug, Clone, PartialEq)]
pub struct JsonPath(Vec<Step>);

#[derive(Debug, Clone, PartialEq)]
enum Step {
    Field(String),
    Index(i64),
    All,
    Filter { path: JsonPath, equal: bool, value: Value },
}

/// The path is outside the part of JSONPath that is understood.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
#[error(
    "JSONPath {path:?} is not understood at {rest:?}; allowed are .name, ['name'], [index], [*] and [?(@.name==\"value\")]"
)]
pub struct JsonPathError {
    path: String,
    rest: String,
}

impl JsonPath {
    /// Parses a path such as `.status.conditions[?(@.type=="Ready")].status`.
    ///
    /// # Errors
    /// When the path uses anything that is not understood.
    pub fn parse(path: &str) -> Result<Self, JsonPathError> {
        let mut steps = Vec::new();
        let mut rest = path.trim().trim_start_matches('$');
        while !rest.is_empty() {
            let error = || JsonPathError { path: path.to_owned(), rest: rest.to_owned() };
            let (step, after) = match rest.strip_prefix('[') {
                Some(inside) => {
                    let end = bracket_end(inside).ok_or_else(error)?;
                    (parse_bracket(&inside[..end]).ok_or_else(error)?, &inside[end + 1..])
                }
                None => {
                    let (name, after) = take_name(rest.strip_prefix('.').unwrap_or(rest));
                    if name.is_empty() {
                        return Err(error());
                    }
                    (if name == "*" { Step::All } else { Step::Field(name) }, after)
                }
            };
            steps.push(step);
            rest = after;
        }
        Ok(Self(steps))
    }

    /// Every value the path leads to.
    pub fn select<'a>(&self, root: &'a Value) -> Vec<&'a Value> {
        self.0.iter().fold(vec![root], |values, step| values.into_iter().flat_map(|value| step.select(value)).collect())
    }

    /// The first value the path leads to.
    pub fn first<'a>(&self, root: &'a Value) -> Option<&'a Value> {
        self.select(root).into_iter().next()
    }
}

impl Step {
    fn select<'a>(&self, value: &'a Value) -> Vec<&'a Value> {
        match self {
            Self::Field(name) => value.get(name).into_iter().collect(),
            Self::Index(index) => element(value, *index).into_iter().collect(),
            Self::All => children(value),
            Self::Filter { path, equal, value: wanted } => children(value)
                .into_iter()
                .filter(|child| path.first(child).is_some_and(|found| (found == wanted) == *equal))
                .collect(),
        }
    }
}

fn element(value: &Value, index: i64) -> Option<&Value> {
    let array = value.as_array()?;
    let length = i64::try_from(array.len()).ok()?;
    let index = if index < 0 { length + index } else { index };
    array.get(usize::try_from(index).ok()?)
}

fn children(value: &Value) -> Vec<&Value> {
    match value {
        Value::Array(array) => array.iter().collect(),
        Value::Object(object) => object.values().collect(),
        _ => Vec::new(),
    }
}

/// The index of the bracket that closes the one just opened, quotes respected.
fn bracket_end(inside: &str) -> Option<usize> {
    let mut quote = None;
    let mut depth = 0;
    for (at, c) in inside.char_indices() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(c),
            (None, '[') => depth += 1,
            (None, ']') if depth == 0 => return Some(at),
            (None, ']') => depth -= 1,
            _ => {}
        }
    }
    None
}

fn parse_bracket(inside: &str) -> Option<Step> {
    let inside = inside.trim();
    if inside == "*" {
        return Some(Step::All);
    }
    if let Some(condition) = inside.strip_prefix("?(").and_then(|rest| rest.strip_suffix(')')) {
        return parse_filter(condition);
    }
    if let Some(name) = unquote(inside) {
        return Some(Step::Field(name.to_owned()));
    }
    inside.parse().ok().map(Step::Index)
}

fn parse_filter(condition: &str) -> Option<Step> {
    let (equal, at) = match (condition.find("=="), condition.find("!=")) {
        (Some(at), _) => (true, at),
        (None, Some(at)) => (false, at),
        (None, None) => return None,
    };
    let path = JsonPath::parse(condition[..at].trim().strip_prefix('@')?).ok()?;
    let literal = condition[at + 2..].trim();
    let value = match unquote(literal) {
        Some(text) => Value::String(text.to_owned()),
        None => serde_json::from_str(literal).ok()?,
    };
    Some(Step::Filter { path, equal, value })
}

fn unquote(text: &str) -> Option<&str> {
    ['"', '\''].iter().find_map(|&quote| text.strip_prefix(quote)?.strip_suffix(quote))
}

/// The name up to the next `.` or `[`, with `\.` standing for a dot.
fn take_name(rest: &str) -> (String, &str) {
    let mut name = String::new();
    let mut chars = rest.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => {
                if let Some((_, escaped)) = chars.next() {
                    name.push(escaped);
                }
            }
            '.' | '[' => return (name, &rest[at..]),
            c => name.push(c),
        }
    }
    (name, "")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn first(path: &str) -> Option<Value> {
        let root = json!({
            "spec": {"size": 5, "a.b": "dotted", "list": [1, 2, 3]},
            "status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "Other", "status": "False"}]},
        });
        JsonPath::parse(path).unwrap().first(&root).cloned()
    }

    #[test]
    fn each_step_selects_what_it_says() {
        assert_eq!(first(".spec.size"), Some(json!(5)));
        assert_eq!(first("$.spec.size"), Some(json!(5)));
        assert_eq!(first(r".spec.a\.b"), Some(json!("dotted")));
        assert_eq!(first(".spec['a.b']"), Some(json!("dotted")));
        assert_eq!(first(".spec.list[1]"), Some(json!(2)));
        assert_eq!(first(".spec.list[-1]"), Some(json!(3)));
        assert_eq!(first(r#".status.conditions[?(@.type=="Ready")].status"#), Some(json!("True")));
        assert_eq!(first(".status.conditions[?(@.type!='Ready')].status"), Some(json!("False")));
        assert_eq!(first(".status.conditions[*].type"), Some(json!("Ready")));
        assert_eq!(first(".spec.missing.deeper"), None);
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for path in [".spec[", ".spec..size", ".spec[1:2]", ".a[?(@.b>1)]", ".a[?(b==1)]"] {
            assert!(JsonPath::parse(path).is_err(), "{path}");
        }
    }
}
