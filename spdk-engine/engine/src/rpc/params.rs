//! Decoding of parameters: strict as SPDK's decoder, with each module's own error text.
//!
//! `serde`'s `deny_unknown_fields` on the parameter struct makes a call strict; [`decode_relaxed`] is for the few
//! methods that SPDK decodes leniently (their structs do not deny). Duplicate members are refused by the JSON reader
//! of [`super::server`].

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::RpcError;

/// The error for methods of bdev modules.
#[must_use]
pub fn decode_failed() -> RpcError {
    RpcError::internal("spdk_json_decode_object failed")
}

/// The error for methods of the target.
#[must_use]
pub fn invalid_parameters() -> RpcError {
    RpcError::invalid_params("Invalid parameters")
}

/// Decodes parameters; absent parameters are an empty object. What was wrong goes to the log and, as the field's
/// standard clients print only the message, behind the fixed text as well.
pub fn decode<T: DeserializeOwned>(params: Option<Value>, error: fn() -> RpcError) -> Result<T, RpcError> {
    let value = params.unwrap_or_else(|| Value::Object(serde_json::Map::new()));
    if !value.is_object() {
        return Err(error());
    }
    serde_json::from_value(value).map_err(|reason| {
        tracing::warn!(%reason, "parameters refused");
        error()
    })
}

/// As [`decode`], for structs that do not deny unknown members; the name says so at the call.
pub fn decode_relaxed<T: DeserializeOwned>(params: Option<Value>, error: fn() -> RpcError) -> Result<T, RpcError> {
    decode(params, error)
}

/// Refuses any parameters.
pub fn none(params: Option<&Value>, method: &str) -> Result<(), RpcError> {
    match params {
        None => Ok(()),
        Some(_) => Err(RpcError::invalid_params(format!("{method} requires no parameters"))),
    }
}

/// An integer as SPDK takes it: any JSON number that is a whole number in range, `1.0e3` included.
pub fn whole<'de, D: serde::Deserializer<'de>, T: TryFrom<u64>>(deserializer: D) -> Result<T, D::Error> {
    use serde::Deserialize;
    use serde::de::Error;
    let number = serde_json::Number::deserialize(deserializer)?;
    let value = number.as_u64().or_else(|| {
        let float = number.as_f64()?;
        // Every whole number below 2^53 is exact as a float.
        (float.fract() == 0.0 && (0.0..9_007_199_254_740_992.0).contains(&float)).then_some(float as u64)
    });
    value.and_then(|v| T::try_from(v).ok()).ok_or_else(|| D::Error::custom(format!("{number} is not in range")))
}
