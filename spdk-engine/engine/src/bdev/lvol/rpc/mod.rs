//! The `bdev_lvol_*` methods of SPDK, and Addax's `addax_lvol_*`.
//!
//! *Errors.* As SPDK's: what is checked at once answers with the negated errno, what fails later with -32602 (a deletion:
//! -32603) and the errno's text.

mod copy;
mod parent_calls;
mod reports;
mod store_calls;
mod volume_calls;

use std::rc::Rc;

use lvol_core::{ClearMethod, Error};
use serde::Deserialize;
use uuid::Uuid;

use super::stores::{LvolStore, Lvols, Volume};
use crate::rpc::{Methods, RpcError};

/// Longest name of a store or volume, in bytes.
const NAME_BYTES_MAX: usize = lvol_core::NAME_MAX;

/// Adds the methods.
pub fn register(m: &mut Methods) {
    store_calls::register(m);
    volume_calls::register(m);
    parent_calls::register(m);
    reports::register(m);
    copy::register(m);
}

/// Parameters of `bdev_lvol_rename` and `bdev_lvol_rename_lvstore`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rename {
    old_name: String,
    new_name: String,
}

/// What fails after it has begun.
fn failed(error: &Error) -> RpcError {
    tracing::warn!(%error, "lvol call failed");
    late(error.errno())
}

/// -32602 with the text of an errno.
fn late(errno: i32) -> RpcError {
    RpcError::invalid_params(nix::errno::Errno::from_raw(errno).desc())
}

fn check_name(name: &str) -> Result<(), i32> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX { Err(libc::EINVAL) } else { Ok(()) }
}

/// The store by UUID or by name; exactly one must be given.
fn find_store(lvols: &Lvols, uuid: Option<&str>, name: Option<&str>) -> Result<Rc<LvolStore>, RpcError> {
    let found = match (uuid, name) {
        (Some(uuid), None) => uuid.parse::<Uuid>().ok().and_then(|uuid| lvols.store_with_uuid(uuid)),
        (None, Some(name)) => lvols.store_named(name),
        _ => return Err(RpcError::errno(libc::EINVAL)),
    };
    found.filter(|s| !s.is_closing()).ok_or_else(|| RpcError::errno(libc::ENODEV))
}

/// The volume whose device has that name.
fn find_volume(lvols: &Lvols, name: &str) -> Result<(Rc<LvolStore>, Rc<Volume>), RpcError> {
    lvols.volume_named(name).ok_or_else(|| RpcError::errno(libc::ENODEV))
}

/// Clear methods of a store.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum StoreClear {
    #[default]
    Unmap,
    WriteZeroes,
    None,
}

impl From<StoreClear> for ClearMethod {
    fn from(clear: StoreClear) -> Self {
        match clear {
            StoreClear::Unmap => Self::Unmap,
            StoreClear::WriteZeroes => Self::WriteZeroes,
            StoreClear::None => Self::None,
        }
    }
}

/// Clear methods of a volume.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum VolumeClear {
    #[default]
    Default,
    None,
    Unmap,
    WriteZeroes,
}

impl From<VolumeClear> for ClearMethod {
    fn from(clear: VolumeClear) -> Self {
        match clear {
            VolumeClear::Default => Self::Default,
            VolumeClear::None => Self::None,
            VolumeClear::Unmap => Self::Unmap,
            VolumeClear::WriteZeroes => Self::WriteZeroes,
        }
    }
}
