//! `crypto`: a device whose base holds everything encrypted with AES-XTS.
//!
//! | Module | Job |
//! |---|---|
//! | [`xts`] | the cipher |
//! | [`keys`] | named keys, and keys from files of the keyring |
//! | [`channel`] | I/O |
//!
//! *Invariants.* A disk is read by SPDK's `crypto` with the same keys, and the reverse. A device is named by its key's
//! name; the key is of the keys made by `accel_crypto_key_create`, or else a file of the keyring.
//!
//! *When things fail.* A wrong key is not noticed here: everything reads as noise. Freed blocks read as noise, too.

pub mod channel;
pub mod keys;
#[cfg(test)]
mod tests;
pub mod xts;

use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;
use zeroize::Zeroizing;

use super::over::{self, Over};
use super::registry::Entry;
use super::{Bdev, BdevError, BdevInfo, Channel, IoTypes};
use crate::app::App;
use crate::reactor::Core;
use crate::rpc::params::{decode, invalid_parameters};
use crate::rpc::{Methods, RpcError, RpcResult, When};
use channel::CryptoChannel;
use keys::Key;

const MODULE: &str = "crypto";
/// What a device's UUID is derived in, from its base's.
const NAMESPACE: Uuid = Uuid::from_u128(0x078e_3cf7_f4b4_4545_b2c3_d400_45a6_4ae2);
/// The cipher of a call that names neither a key nor one.
const DEFAULT_CIPHER: &str = "AES_CBC";

/// Adds this module's methods.
pub fn register(m: &mut Methods) {
    keys::register(m);
    m.add("bdev_crypto_create", When::Runtime, |app, p| async move { create(&app, p) });
    m.add("bdev_crypto_delete", When::Runtime, |app, p| async move { delete(&app, p).await });
    m.add_config("bdev", |app| over::saved(app, MODULE));
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "members without effect are decoded so that they are accepted and checked")]
struct Create {
    base_bdev_name: String,
    name: String,
    crypto_pmd: Option<String>,
    key: Option<Zeroizing<String>>,
    cipher: Option<String>,
    key2: Option<Zeroizing<String>>,
    key_name: Option<String>,
}

fn create(app: &App, params: Option<Value>) -> RpcResult {
    let request: Create = keys::decode_secret(params, "Failed to decode crypto disk create parameters.")?;
    let (key, made) = key_for(app, &request)?;
    let key_name = key.name.clone();
    let name = request.name.clone();
    let make = move |base: &Arc<Entry>| {
        let uuid = Uuid::new_v5(&NAMESPACE, base.bdev.info().uuid.as_bytes());
        let device = Crypto { name: name.clone(), uuid, base: Arc::clone(base), key: Arc::clone(&key) };
        Ok(Arc::new(device) as Arc<dyn Bdev>)
    };
    let config =
        json!({ "base_bdev_name": request.base_bdev_name, "name": request.name, "key_name": key_name.clone() });
    let created = over::create(
        app,
        Over {
            name: request.name.clone(),
            base: request.base_bdev_name,
            module: MODULE,
            make: Rc::new(make),
            config: ("bdev_crypto_create", config),
        },
    );
    if let (Err(error), true) = (&created, made) {
        keys::forget(app, &key_name);
        return Err(error.clone());
    }
    created?;
    if made {
        app.module(OwnKeys::default).0.borrow_mut().insert(request.name.clone(), key_name);
    }
    Ok(json!(request.name))
}

/// Keys that a device's call has made, by the device's name: they go with it.
#[derive(Default)]
struct OwnKeys(std::cell::RefCell<std::collections::HashMap<String, String>>);

/// The key that a call names or gives; true when it has been made for it.
fn key_for(app: &App, request: &Create) -> Result<(Arc<Key>, bool), RpcError> {
    if let Some(name) = &request.key_name {
        if let Some(key) = keys::find(app, name) {
            return Ok((key, false));
        }
        let key = keys::from_keyring(app, name).map_err(|errno| {
            if errno != libc::ENOKEY {
                let reason = nix::errno::Errno::from_raw(errno).desc();
                tracing::error!(key = name, reason, "the keyring's file cannot be used as a key");
            }
            RpcError::invalid_params("Key was not found")
        })?;
        return Ok((key, false));
    }
    let cipher = request.cipher.as_deref().unwrap_or(DEFAULT_CIPHER);
    let name = format!("{}_{cipher}", request.name);
    if let Some(key) = keys::find(app, &name) {
        return Ok((key, false));
    }
    let missing = || RpcError::internal("No key was found");
    let key = request.key.as_deref().ok_or_else(missing)?;
    let key2 = request.key2.as_deref().map(String::as_str);
    let made = keys::make(app, &name, cipher, (key, key2), None);
    Ok((made.map_err(|_| missing())?, true))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Delete {
    name: String,
}

async fn delete(app: &App, params: Option<Value>) -> RpcResult {
    let request: Delete = decode(params, invalid_parameters)?;
    over::delete(app, MODULE, &request.name).await?;
    if let Some(key) = app.module(OwnKeys::default).0.borrow_mut().remove(&request.name) {
        keys::forget(app, &key);
    }
    Ok(json!(true))
}

#[derive(Debug)]
struct Crypto {
    name: String,
    uuid: Uuid,
    base: Arc<Entry>,
    key: Arc<Key>,
}

impl Bdev for Crypto {
    fn info(&self) -> BdevInfo {
        let base = self.base.bdev.info();
        let t = base.io_types;
        // Zeroes are written as blocks, by the layer above: they have to be encrypted.
        let io_types = IoTypes {
            read: t.read,
            write: t.write,
            unmap: t.unmap,
            flush: t.flush,
            reset: t.reset,
            ..IoTypes::READ_WRITE
        };
        BdevInfo { name: self.name.clone(), uuid: self.uuid, product_name: MODULE, io_types, ..base }
    }
    fn num_blocks(&self) -> u64 {
        self.base.bdev.num_blocks()
    }
    fn open(&self, core: &Core) -> Result<Rc<dyn Channel>, BdevError> {
        let block_size = self.base.bdev.info().block_size as usize;
        Ok(Rc::new(CryptoChannel::new(self.base.open(core)?, Arc::clone(&self.key), block_size)))
    }
    fn holds_guest_data(&self) -> bool {
        self.base.bdev.holds_guest_data()
    }
    fn driver_specific(&self) -> Value {
        json!({ "crypto": { "base_bdev_name": self.base.bdev.info().name, "name": self.name, "key_name": self.key.name } })
    }
    fn config(&self) -> Option<(&'static str, Value)> {
        // Saved by the module, which also knows devices whose base is away.
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
