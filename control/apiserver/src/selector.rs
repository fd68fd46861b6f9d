//! Label and field selectors of lists, watches and collection deletes.

use serde_json::Value;

use crate::{error::ApiError, jsonpath::JsonPath, registry::Kind};

/// What an object must satisfy to be in a list.
#[derive(Debug, Clone, Default)]
pub struct Selector {
    labels: Vec<Requirement>,
    fields: Vec<FieldRequirement>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Requirement {
    key: String,
    rule: Rule,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Rule {
    Exists,
    DoesNotExist,
    In(Vec<String>),
    NotIn(Vec<String>),
    GreaterThan(i64),
    LessThan(i64),
}

#[derive(Debug, Clone)]
struct FieldRequirement {
    path: JsonPath,
    equal: bool,
    value: String,
}

impl Selector {
    /// Parses `labelSelector` and `fieldSelector`.
    ///
    /// # Errors
    /// 400 when a selector cannot be parsed, or the kind has no such selectable field.
    pub fn parse(kind: &Kind, labels: &str, fields: &str) -> Result<Self, ApiError> {
        let labels = split_outside_parentheses(labels)
            .into_iter()
            .map(|text| parse_requirement(text).ok_or_else(|| unparsable("labelSelector", text)))
            .collect::<Result<_, _>>()?;
        let fields = fields
            .split(',')
            .map(str::trim)
            .filter(|text| !text.is_empty())
            .map(|text| parse_field(kind, text))
            .collect::<Result<_, _>>()?;
        Ok(Self { labels, fields })
    }

    /// Whether everything is selected.
    pub fn is_everything(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    /// Whether the object is selected.
    pub fn matches(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        self.labels.iter().all(|requirement| requirement.matches(labels))
            && self.fields.iter().all(|field| field.matches(object))
    }
}

impl Requirement {
    fn matches(&self, labels: &Value) -> bool {
        let value = labels.get(&self.key).and_then(Value::as_str);
        match &self.rule {
            Rule::Exists => value.is_some(),
            Rule::DoesNotExist => value.is_none(),
            Rule::In(values) => value.is_some_and(|value| values.iter().any(|allowed| allowed == value)),
            Rule::NotIn(values) => value.is_none_or(|value| values.iter().all(|refused| refused != value)),
            Rule::GreaterThan(than) => number(value).is_some_and(|value| value > *than),
            Rule::LessThan(than) => number(value).is_some_and(|value| value < *than),
        }
    }
}

fn number(value: Option<&str>) -> Option<i64> {
    value?.parse().ok()
}

impl FieldRequirement {
    fn matches(&self, object: &Value) -> bool {
        let found = match self.path.first(object) {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
        };
        (found == self.value) == self.equal
    }
}

fn unparsable(field: &str, text: &str) -> ApiError {
    ApiError::bad_request(format!(
        "{field}: unable to parse requirement {text:?}; allowed are key, !key, key=value, key!=value, key in (a,b), key notin (a,b)"
    ))
}

fn split_outside_parentheses(text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let (mut depth, mut start) = (0_i32, 0);
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts.into_iter().map(str::trim).filter(|part| !part.is_empty()).collect()
}

fn parse_requirement(text: &str) -> Option<Requirement> {
    let requirement =
        |key: &str, rule| is_label_key(key.trim()).then(|| Requirement { key: key.trim().to_owned(), rule });
    let one = |value: &str| vec![value.trim().to_owned()];
    if let Some(key) = text.strip_prefix('!') {
        return requirement(key, Rule::DoesNotExist);
    }
    if let Some((key, set)) = text.split_once(" notin ") {
        return requirement(key, Rule::NotIn(parse_set(set)?));
    }
    if let Some((key, set)) = text.split_once(" in ") {
        return requirement(key, Rule::In(parse_set(set)?));
    }
    if let Some((key, value)) = text.split_once("!=") {
        return requirement(key, Rule::NotIn(one(value)));
    }
    if let Some((key, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
        return requirement(key, Rule::In(one(value)));
    }
    if let Some((key, value)) = text.split_once('>') {
        return requirement(key, Rule::GreaterThan(value.trim().parse().ok()?));
    }
    if let Some((key, value)) = text.split_once('<') {
        return requirement(key, Rule::LessThan(value.trim().parse().ok()?));
    }
    requirement(text, Rule::Exists)
}

fn parse_set(set: &str) -> Option<Vec<String>> {
    let inside = set.trim().strip_prefix('(')?.strip_suffix(')')?;
    Some(inside.split(',').map(|value| value.trim().to_owned()).collect())
}

fn is_label_key(key: &str) -> bool {
    !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c))
}

fn parse_field(kind: &Kind, text: &str) -> Result<FieldRequirement, ApiError> {
    let (name, equal, value) = text
        .split_once("!=")
        .map(|(name, value)| (name, false, value))
        .or_else(|| text.split_once("==").map(|(name, value)| (name, true, value)))
        .or_else(|| text.split_once('=').map(|(name, value)| (name, true, value)))
        .ok_or_else(|| unparsable("fieldSelector", text))?;
    let name = name.trim();
    if !kind.selectable_fields.iter().any(|field| field == name) {
        return Err(ApiError::bad_request(format!(
            "field label not supported: {name:?}; allowed for {} are {}",
            kind.plural,
            kind.selectable_fields.join(", ")
        )));
    }
    let path = JsonPath::parse(name).map_err(|error| ApiError::bad_request(format!("fieldSelector: {error}")))?;
    Ok(FieldRequirement { path, equal, value: value.trim().to_owned() })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn matches(selector: &str) -> bool {
        let labels = json!({"app": "db", "size": "5"});
        split_outside_parentheses(selector).into_iter().all(|text| parse_requirement(text).unwrap().matches(&labels))
    }

    #[test]
    fn each_form_of_label_requirement() {
        for yes in [
            "app",
            "app=db",
            "app==db",
            "app!=web",
            "app in (web, db)",
            "app notin (web)",
            "!other",
            "size>4",
            "size<6",
            "",
        ] {
            assert!(matches(yes), "{yes}");
        }
        for no in
            ["other", "app=web", "app!=db", "app in (web)", "app notin (db,web)", "!app", "size>5", "app=db,other"]
        {
            assert!(!matches(no), "{no}");
        }
        assert!(parse_requirement("a b").is_none());
        assert!(parse_requirement("app in db").is_none());
    }
}
