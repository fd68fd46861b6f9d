//! The keyring: names for keys that lie in files.
//!
//! *Invariants.* The bytes of a key are read when they are needed, and held no longer than that. A file that others than
//! its owner, who runs this process, may touch is refused: when it is added and again when it is read.
//!
//! *When things fail.* Errors are SPDK's errnos.

use std::cell::RefCell;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};
use zeroize::Zeroizing;

use crate::app::App;
use crate::rpc::params::decode_relaxed;
use crate::rpc::{Methods, RpcError, RpcResult, When};

/// Permission bits of others than the owner.
const OTHERS: u32 = 0o077;

#[derive(Default)]
struct Keyring(RefCell<Vec<FileKey>>);

struct FileKey {
    name: String,
    path: PathBuf,
}

/// Adds this module's methods.
pub fn register(m: &mut Methods) {
    m.add("keyring_file_add_key", When::Runtime, |app, p| async move { add(&app, p) });
    m.add("keyring_file_remove_key", When::Runtime, |app, p| async move { remove(&app, p) });
    m.add("keyring_get_keys", When::Runtime, |app, _| async move { Ok(get(&app)) });
    m.add_config("keyring", |app| {
        let keyring = app.module(Keyring::default);
        let keys = keyring.0.borrow();
        let params = |key: &FileKey| json!({ "name": key.name, "path": key.path.display().to_string() });
        keys.iter().map(|key| ("keyring_file_add_key".to_owned(), params(key))).collect()
    });
}

fn decode_error() -> RpcError {
    RpcError::invalid_params(nix::errno::Errno::EINVAL.desc())
}

#[derive(Deserialize)]
struct Add {
    name: String,
    path: PathBuf,
}

/// "key" and ":key" are the same key of the only keyring there is.
fn bare(name: &str) -> &str {
    name.split_once(':').map_or(name, |(_, rest)| rest)
}

fn add(app: &App, params: Option<Value>) -> RpcResult {
    let request: Add = decode_relaxed(params, decode_error)?;
    if request.name.find(':').is_some_and(|at| at > 0) {
        return Err(RpcError::errno(libc::EINVAL));
    }
    let keyring = app.module(Keyring::default);
    if keyring.0.borrow().iter().any(|key| bare(&key.name) == bare(&request.name)) {
        return Err(RpcError::errno(libc::EEXIST));
    }
    check(&request.path).map_err(RpcError::errno)?;
    keyring.0.borrow_mut().push(FileKey { name: request.name, path: request.path });
    Ok(json!(true))
}

/// Whether a file may hold a key.
fn check(path: &Path) -> Result<(), i32> {
    let refuse = |reason: &str, errno: i32| {
        tracing::error!(path = %path.display(), reason, "key file refused");
        Err(errno)
    };
    if !path.is_absolute() {
        return refuse("the path is not absolute", libc::EPERM);
    }
    let meta = match std::fs::metadata(path) {
        Ok(meta) => meta,
        Err(error) => return refuse(&error.to_string(), error.raw_os_error().unwrap_or(libc::EIO)),
    };
    if meta.mode() & OTHERS != 0 {
        return refuse("others than its owner may read or write it: its mode must be 0600 or less", libc::EPERM);
    }
    if meta.uid() != nix::unistd::getuid().as_raw() {
        return refuse("it belongs to another user", libc::EPERM);
    }
    Ok(())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Remove {
    name: String,
}

fn remove(app: &App, params: Option<Value>) -> RpcResult {
    let request: Remove = crate::rpc::params::decode(params, decode_error)?;
    let keyring = app.module(Keyring::default);
    let mut keys = keyring.0.borrow_mut();
    let at = keys.iter().position(|key| bare(&key.name) == bare(&request.name));
    keys.remove(at.ok_or_else(|| RpcError::errno(libc::ENOKEY))?);
    Ok(json!(true))
}

fn get(app: &App) -> Value {
    let keyring = app.module(Keyring::default);
    let keys = keyring.0.borrow();
    let shown = keys.iter().map(|key| {
        json!({ "name": key.name, "module": "keyring_file", "removed": false, "probed": false, "refcnt": 1,
            "path": key.path.display().to_string() })
    });
    shown.collect()
}

/// The bytes of a key.
///
/// # Errors
/// ENOKEY when there is none of that name, ENOBUFS when it is longer than `most` bytes, and what keeps the file from
/// being read.
pub fn read(app: &App, name: &str, most: usize) -> Result<Zeroizing<Vec<u8>>, i32> {
    let keyring = app.module(Keyring::default);
    let path = {
        let keys = keyring.0.borrow();
        keys.iter().find(|key| bare(&key.name) == bare(name)).map(|key| key.path.clone()).ok_or(libc::ENOKEY)?
    };
    check(&path)?;
    let errno = |error: std::io::Error| error.raw_os_error().unwrap_or(libc::EIO);
    let file = std::fs::File::open(&path).map_err(errno)?;
    let mut bytes = Zeroizing::new(Vec::with_capacity(most + 1));
    file.take(most as u64 + 1).read_to_end(&mut bytes).map_err(errno)?;
    if bytes.len() > most { Err(libc::ENOBUFS) } else { Ok(bytes) }
}
