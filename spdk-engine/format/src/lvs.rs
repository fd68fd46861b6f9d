//! What makes a blobstore an lvolstore.
//!
//! The store's super blob carries its name and UUID as xattrs; every other blob is an lvol and carries its own. Names are
//! C strings of at most 63 bytes: an lvol's is padded to 64 bytes when it is made and ends after its NUL once renamed.
//! UUIDs are 36 lower-case characters and a NUL.

use thiserror::Error;
use uuid::Uuid;

use crate::descriptor::Xattr;
use crate::{BlobId, Metadata};

/// Xattr with the name, of the super blob and of lvols.
pub const NAME: &str = "name";
/// Xattr with the UUID, of the super blob and of lvols.
pub const UUID: &str = "uuid";
/// The longest name, in bytes.
pub const MAX_NAME: usize = 63;
/// Bytes of a UUID's text with its NUL.
pub const UUID_SIZE: usize = 37;
/// Cluster size that a store is made with by default, in bytes.
pub const DEFAULT_CLUSTER_SIZE: u32 = 4 << 20;
/// Metadata pages per hundred clusters by default.
pub const DEFAULT_MD_RATIO: u32 = 100;

/// Why a blob is not what an lvolstore needs.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LvsError {
    /// An xattr that has to be there.
    #[error("blob {blob} has no xattr {name:?}")]
    Missing {
        /// The blob.
        blob: BlobId,
        /// The xattr.
        name: &'static str,
    },
    /// A name that is too long, or none.
    #[error("a name is {0} bytes long; 1 to {MAX_NAME} are allowed")]
    NameLength(usize),
    /// A name with a NUL in it.
    #[error("a name holds a NUL at byte {0}; none is allowed")]
    NameNul(usize),
    /// A stored name of too many bytes.
    #[error("the xattr \"name\" of blob {blob} is {length} bytes long; at most 64 are allowed")]
    NameValue {
        /// The blob.
        blob: BlobId,
        /// Bytes of the value.
        length: usize,
    },
    /// Not a UUID.
    #[error("the xattr \"uuid\" of blob {blob} is {value:?}; 36 characters of a UUID and a NUL are allowed")]
    Uuid {
        /// The blob.
        blob: BlobId,
        /// The value.
        value: String,
    },
}

/// Metadata pages of a new store of `total_clusters` clusters, with `ratio` pages per hundred clusters. In 32 bits, as
/// SPDK calculates.
pub fn md_pages(ratio: u32, total_clusters: u32) -> u32 {
    ratio.wrapping_mul(total_clusters) / 100
}

/// Checks a name that somebody wants to give.
pub fn check_name(name: &str) -> Result<(), LvsError> {
    if name.is_empty() || name.len() > MAX_NAME {
        return Err(LvsError::NameLength(name.len()));
    }
    match name.bytes().position(|b| b == 0) {
        Some(at) => Err(LvsError::NameNul(at)),
        None => Ok(()),
    }
}

/// The value of an lvol's name when it is made: padded to 64 bytes.
pub fn created_name(name: &str) -> Result<Vec<u8>, LvsError> {
    check_name(name)?;
    let mut value = name.as_bytes().to_vec();
    value.resize(MAX_NAME + 1, 0);
    Ok(value)
}

/// The value of a store's name, and of an lvol's after a rename: up to its NUL.
pub fn short_name(name: &str) -> Result<Vec<u8>, LvsError> {
    check_name(name)?;
    let mut value = name.as_bytes().to_vec();
    value.push(0);
    Ok(value)
}

/// The value of a UUID.
pub fn uuid_value(uuid: Uuid) -> Vec<u8> {
    let mut value = uuid.hyphenated().to_string().into_bytes();
    value.push(0);
    value
}

/// A UUID's value; `None` when it is not one.
pub fn parse_uuid(value: &[u8]) -> Option<Uuid> {
    let text = value.strip_suffix(&[0]).filter(|text| text.len() == UUID_SIZE - 1)?;
    Uuid::try_parse(std::str::from_utf8(text).ok()?).ok()
}

/// A name's value as text, up to its NUL. Bytes that are not UTF-8 are replaced.
pub fn name_text(value: &[u8]) -> String {
    let len = value.iter().position(|b| *b == 0).unwrap_or(value.len());
    String::from_utf8_lossy(&value[..len]).into_owned()
}

fn name_of(blob: &Metadata) -> Result<String, LvsError> {
    let value = blob.xattr(NAME).ok_or(LvsError::Missing { blob: blob.id, name: NAME })?;
    if value.len() > MAX_NAME + 1 {
        return Err(LvsError::NameValue { blob: blob.id, length: value.len() });
    }
    Ok(name_text(value))
}

/// What the super blob says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreNames {
    /// The store's name.
    pub name: String,
    /// The store's UUID.
    pub uuid: Uuid,
}

impl StoreNames {
    /// From the super blob. Both name and UUID have to be there.
    pub fn of(blob: &Metadata) -> Result<Self, LvsError> {
        let value = blob.xattr(UUID).ok_or(LvsError::Missing { blob: blob.id, name: UUID })?;
        let uuid = parse_uuid(value)
            .ok_or_else(|| LvsError::Uuid { blob: blob.id, value: value.escape_ascii().to_string() })?;
        Ok(Self { name: name_of(blob)?, uuid })
    }

    /// The super blob's xattrs, in the order in which they are set.
    pub fn xattrs(&self) -> Result<Vec<Xattr>, LvsError> {
        Ok(vec![Xattr::new(UUID, uuid_value(self.uuid)), Xattr::new(NAME, short_name(&self.name)?)])
    }
}

/// What an lvol's blob says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LvolNames {
    /// The lvol's name.
    pub name: String,
    /// Its UUID; nil when there is none that can be read.
    pub uuid: Uuid,
}

impl LvolNames {
    /// From a blob. An lvol has to have a name; without a UUID it has the nil one.
    pub fn of(blob: &Metadata) -> Result<Self, LvsError> {
        let uuid = blob.xattr(UUID).and_then(parse_uuid).unwrap_or(Uuid::nil());
        Ok(Self { name: name_of(blob)?, uuid })
    }

    /// A new lvol's xattrs, in the order in which they are set.
    pub fn xattrs(&self) -> Result<Vec<Xattr>, LvsError> {
        Ok(vec![Xattr::new(NAME, created_name(&self.name)?), Xattr::new(UUID, uuid_value(self.uuid))])
    }

    /// What tells the lvol from all others: its UUID, or where there is none, the store's and the blob's id.
    pub fn unique_id(&self, store: Uuid, blob: BlobId) -> String {
        if self.uuid.is_nil() { format!("{store}_{}", blob.0) } else { self.uuid.to_string() }
    }
}

/// The EXTSNAP value of a clone of the device with this UUID.
pub fn external_id(device: Uuid) -> Vec<u8> {
    uuid_value(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_uuids_as_stored() {
        let value = created_name("vol").unwrap();
        assert_eq!((value.len(), name_text(&value).as_str()), (64, "vol"));
        assert_eq!(short_name("vol").unwrap(), b"vol\0");
        assert_eq!(created_name(&"n".repeat(63)).unwrap().len(), 64);
        assert_eq!(created_name(&"n".repeat(64)), Err(LvsError::NameLength(64)));
        assert_eq!(check_name(""), Err(LvsError::NameLength(0)));
        assert_eq!(check_name("a\0b"), Err(LvsError::NameNul(1)));
        let uuid = Uuid::from_u128(0x1234_5678_9abc_def0_1234_5678_9abc_def0);
        assert_eq!(parse_uuid(&uuid_value(uuid)), Some(uuid));
        assert_eq!(parse_uuid(&uuid_value(uuid)[..36]), None);
        assert_eq!(parse_uuid(b"{12345678-9abc-def0-1234-56789abcde}\0"), None);
        assert_eq!(md_pages(100, 31), 31);
        assert_eq!(md_pages(100, 50_000_000), (100u64 * 50_000_000 % (1 << 32) / 100) as u32);
        let lvol = LvolNames { name: "v".into(), uuid: Uuid::nil() };
        assert_eq!(lvol.unique_id(uuid, BlobId::from_page(3)), format!("{uuid}_4294967299"));
    }
}
