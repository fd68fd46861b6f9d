//! Named encryption keys (`accel_crypto_key_*`), and keys from files of the keyring.
//!
//! *Invariants.* Key material leaves this module only through `accel_crypto_keys_get` and saved configuration, as SPDK has
//! it; it is never logged, and overwritten when dropped. A key from a file is in neither: only its name is. A key that a
//! device uses is not destroyed.
//!
//! *When things fail.* Codes and texts are SPDK's.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use zeroize::{Zeroize, Zeroizing};

use super::xts::Xts;
use crate::app::App;
use crate::rpc::{Methods, RpcError, RpcResult, When};

/// Longest key in hexadecimal digits.
const HEX_MAX: usize = 256;

/// A key.
#[derive(Debug)]
pub struct Key {
    pub name: String,
    pub xts: Xts,
    shown: Option<Shown>,
}

/// What `accel_crypto_keys_get` shows.
struct Shown {
    key: Zeroizing<String>,
    key2: Zeroizing<String>,
    /// Whether it was told how tweaks are made: then it is shown, too.
    with_mode: bool,
}

impl std::fmt::Debug for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(secret)")
    }
}

#[derive(Default)]
struct Keys(RefCell<Vec<Arc<Key>>>);

/// Adds this module's methods.
pub fn register(m: &mut Methods) {
    m.add("accel_crypto_key_create", When::Runtime, |app, p| async move { create(&app, p) });
    m.add("accel_crypto_key_destroy", When::Runtime, |app, p| async move { destroy(&app, p) });
    m.add("accel_crypto_keys_get", When::Runtime, |app, p| async move { get(&app, p) });
    m.add_config("accel", |app| {
        let keys = app.module(Keys::default);
        let keys = keys.0.borrow();
        keys.iter().filter_map(|key| Some(("accel_crypto_key_create".to_owned(), show(key)?))).collect()
    });
}

/// Decodes parameters that hold secrets: what was wrong with them is not logged.
pub fn decode_secret<T: DeserializeOwned>(params: Option<Value>, text: &str) -> Result<T, RpcError> {
    let failed = || RpcError::new(RpcError::PARSE, text);
    let value = params.filter(Value::is_object).ok_or_else(failed)?;
    serde_json::from_value(value).map_err(|_| failed())
}

const DECODE_FAILED: &str = "spdk_json_decode_object failed";

/// The key of that name.
pub fn find(app: &App, name: &str) -> Option<Arc<Key>> {
    app.module(Keys::default).0.borrow().iter().find(|key| key.name == name).cloned()
}

/// The key in a file that the keyring knows by `name`: the hexadecimal digits of both keys, one after the other.
///
/// # Errors
/// ENOKEY when the keyring has no such key, EINVAL when the file does not hold two keys, and why it cannot be read.
pub fn from_keyring(app: &App, name: &str) -> Result<Arc<Key>, i32> {
    let text = crate::keyring::read(app, name, 2 * HEX_MAX)?;
    let text = std::str::from_utf8(&text).map_err(|_| libc::EINVAL)?.trim_ascii();
    let (key, key2) = text.split_at_checked(text.len() / 2).ok_or(libc::EINVAL)?;
    let xts = checked(key, key2)?;
    Ok(Arc::new(Key { name: name.to_owned(), xts, shown: None }))
}

fn checked(key: &str, key2: &str) -> Result<Xts, i32> {
    let (key, key2) = (unhex(key).ok_or(libc::EINVAL)?, unhex(key2).ok_or(libc::EINVAL)?);
    // Compared without haste: how far they agree must not show in the time it takes.
    let differs = key.iter().zip(key2.iter()).fold(0, |all, (a, b)| all | (a ^ b)) != 0;
    let xts = Xts::new(&key, &key2).ok_or(libc::EINVAL)?;
    if differs { Ok(xts) } else { Err(libc::EINVAL) }
}

fn unhex(text: &str) -> Option<Zeroizing<Vec<u8>>> {
    if text.is_empty() || text.len() > HEX_MAX || !text.len().is_multiple_of(2) {
        return None;
    }
    let digit = |byte: &u8| char::from(*byte).to_digit(16).map(|d| d as u8);
    let mut bytes = Zeroizing::new(Vec::with_capacity(text.len() / 2));
    for pair in text.as_bytes().chunks(2) {
        bytes.push(digit(&pair[0])? << 4 | digit(&pair[1])?);
    }
    Some(bytes)
}

/// Makes a key under a name of its own.
///
/// # Errors
/// EINVAL for a cipher, a mode or keys that cannot be used, EEXIST for a name that is taken.
pub fn make(
    app: &App,
    name: &str,
    cipher: &str,
    hex: (&str, Option<&str>),
    mode: Option<TweakMode>,
) -> Result<Arc<Key>, i32> {
    let keys = app.module(Keys::default);
    let (key, Some(key2)) = hex else { return Err(libc::EINVAL) };
    if cipher != "AES_XTS" || mode.unwrap_or_default() != TweakMode::SimpleLba {
        return Err(libc::EINVAL);
    }
    let xts = checked(key, key2)?;
    if find(app, name).is_some() {
        return Err(libc::EEXIST);
    }
    let (key, key2) = (Zeroizing::new(key.to_owned()), Zeroizing::new(key2.to_owned()));
    let shown = Some(Shown { key, key2, with_mode: mode.is_some() });
    let made = Arc::new(Key { name: name.to_owned(), xts, shown });
    keys.0.borrow_mut().push(Arc::clone(&made));
    Ok(made)
}

/// Forgets a key, whoever uses it.
pub fn forget(app: &App, name: &str) {
    app.module(Keys::default).0.borrow_mut().retain(|key| key.name != name);
}

fn show(key: &Key) -> Option<Value> {
    let shown = key.shown.as_ref()?;
    let mut value = json!({ "name": key.name, "cipher": "AES_XTS", "key": *shown.key, "key2": *shown.key2 });
    if shown.with_mode {
        value["tweak_mode"] = json!("SIMPLE_LBA");
    }
    Some(value)
}

#[derive(Deserialize)]
enum Cipher {
    #[serde(rename = "AES_CBC")]
    Cbc,
    #[serde(rename = "AES_XTS")]
    Xts,
}

/// How a tweak is made of a block's number; only the first is there.
#[derive(Deserialize, Clone, Copy, PartialEq, Eq, Default)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum TweakMode {
    #[default]
    SimpleLba,
    JoinNegLbaWithLba,
    #[serde(rename = "INCR_512_FULL_LBA")]
    Incr512FullLba,
    #[serde(rename = "INCR_512_UPPER_LBA")]
    Incr512UpperLba,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Create {
    cipher: Cipher,
    key: String,
    key2: Option<String>,
    #[serde(default)]
    tweak_mode: TweakMode,
    name: String,
}

fn create(app: &App, params: Option<Value>) -> RpcResult {
    let mut request: Create = decode_secret(params, DECODE_FAILED)?;
    let cipher = match request.cipher {
        Cipher::Cbc => "AES_CBC",
        Cipher::Xts => "AES_XTS",
    };
    let hex = (request.key.as_str(), request.key2.as_deref());
    let made = make(app, &request.name, cipher, hex, Some(request.tweak_mode));
    request.key.zeroize();
    request.key2.zeroize();
    made.map_err(|errno| RpcError::invalid_params(format!("failed to create DEK, rc -{errno}")))?;
    Ok(json!(true))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Destroy {
    key_name: String,
}

fn destroy(app: &App, params: Option<Value>) -> RpcResult {
    let request: Destroy = decode_secret(params, DECODE_FAILED)?;
    let key = find(app, &request.key_name).ok_or_else(|| RpcError::invalid_params("No key object found"))?;
    // One handle is ours, one is the list's.
    if Arc::strong_count(&key) > 2 {
        return Err(RpcError::invalid_params(format!("Failed to destroy key, rc -{}", libc::EBUSY)));
    }
    forget(app, &request.key_name);
    Ok(json!(true))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Get {
    key_name: Option<String>,
}

fn get(app: &App, params: Option<Value>) -> RpcResult {
    let request = match params {
        None => Get { key_name: None },
        Some(params) => decode_secret(Some(params), DECODE_FAILED)?,
    };
    let Some(name) = request.key_name else {
        let keys: Rc<Keys> = app.module(Keys::default);
        return Ok(keys.0.borrow().iter().filter_map(|key| show(key)).collect());
    };
    let key = find(app, &name).ok_or_else(|| RpcError::invalid_params("key was not found"))?;
    Ok(show(&key).into_iter().collect())
}
