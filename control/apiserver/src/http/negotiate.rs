//! In which form the client wants an answer.

use axum::http::{HeaderMap, header::ACCEPT};

use crate::error::ApiError;

/// The form of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Form {
    /// The objects themselves.
    Plain,
    /// A table.
    Table,
    /// Metadata alone.
    Partial,
    /// Aggregated discovery, in this `apiVersion`.
    Discovery(String),
}

/// The first form in `Accept` that can be served.
///
/// # Errors
/// 406 when none can.
pub fn form(headers: &HeaderMap) -> Result<Form, ApiError> {
    let accepts: Vec<&str> = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
    let accepts = accepts.join(",");
    if accepts.trim().is_empty() {
        return Ok(Form::Plain);
    }
    accepts.split(',').find_map(form_of).ok_or_else(|| ApiError::not_acceptable(&accepts))
}

fn form_of(accept: &str) -> Option<Form> {
    let mut parts = accept.split(';').map(str::trim);
    if !matches!(parts.next()?, "application/json" | "application/*" | "*/*") {
        return None;
    }
    let parameters: Vec<(&str, &str)> = parts.filter_map(|part| part.split_once('=')).collect();
    let parameter = |name: &str| parameters.iter().find(|(key, _)| *key == name).map_or("", |(_, value)| value);
    match (parameter("as"), parameter("g"), parameter("v")) {
        ("", _, _) => Some(Form::Plain),
        ("Table", "meta.k8s.io", "v1" | "v1beta1") => Some(Form::Table),
        ("PartialObjectMetadata" | "PartialObjectMetadataList", "meta.k8s.io", "v1") => Some(Form::Partial),
        ("APIGroupDiscoveryList", group @ "apidiscovery.k8s.io", version @ ("v2" | "v2beta1")) => {
            Some(Form::Discovery(format!("{group}/{version}")))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_form_that_can_be_served() {
        let form = |accept: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(ACCEPT, accept.parse().unwrap());
            super::form(&headers)
        };
        assert_eq!(form("application/json").unwrap(), Form::Plain);
        assert_eq!(form("application/json;as=Table;v=v1;g=meta.k8s.io,application/json").unwrap(), Form::Table);
        assert_eq!(form("application/vnd.kubernetes.protobuf,application/json").unwrap(), Form::Plain);
        assert_eq!(form("application/json;as=Other;v=v1;g=meta.k8s.io, */*").unwrap(), Form::Plain);
        assert_eq!(
            form("application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList").unwrap(),
            Form::Discovery("apidiscovery.k8s.io/v2".into())
        );
        assert_eq!(form("application/yaml").unwrap_err().code(), 406);
        assert_eq!(super::form(&HeaderMap::new()).unwrap(), Form::Plain);
    }
}
