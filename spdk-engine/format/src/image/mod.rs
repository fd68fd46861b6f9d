//! A read-only reader of a whole lvolstore in an image.
//!
//! [`Image::open`] finds what an engine would find after loading the store, without writing anything: by the masks when
//! the store was unloaded in order, by scanning all metadata when not, with unfinished snapshots decided (see
//! [`repair`](crate::repair)). An lvol that cannot be opened is listed as lost, with the reason, and so is every clone of
//! it. The store is refused
//! * when its super block, its super blob or an lvol's name cannot be used,
//! * when it is clean, but its masks contradict its metadata: whoever trusts them writes over lvols,
//! * when it is not clean, and it cannot be known which clusters are used.
//!
//! It is stricter than SPDK where SPDK would serve two lvols from one cluster, or an lvol from the store's metadata.
//!
//! # Bounds
//! Time and memory are bounded by what was written to the image's metadata, whatever it says: chains that go round are
//! noticed, lengths that are only claimed cost nothing. Masks take a bit per cluster and page of the device.

mod blob;
mod claims;
pub(crate) mod load;
mod map;
mod problem;
mod scan;

pub use blob::Blob;
pub use claims::{Blobs, Claims, Conflict};
pub use map::ClusterMap;
pub use problem::{PageProblem, Problem};
pub use scan::{Damaged, Scan};

use std::collections::BTreeMap;
use std::io;

use thiserror::Error;

use crate::geometry::GeometryError;
use crate::lvs::{LvolNames, LvsError, StoreNames};
use crate::mask::MaskError;
use crate::metadata::Parent;
use crate::superblock::{BsType, SuperError};
use crate::{BlobId, Geometry, MaskKind, Metadata, ReadAt, SuperBlock};

/// Why a store is refused.
#[derive(Debug, Error)]
pub enum ImageError {
    /// It cannot be read.
    #[error("reading at byte {offset}: {error}")]
    Io {
        /// Where.
        offset: u64,
        /// Why.
        error: io::Error,
    },
    /// The super block.
    #[error(transparent)]
    Super(#[from] SuperError),
    /// Not an lvolstore.
    #[error("the blobstore's type is {found:?}; {expected:?} is expected")]
    Type {
        /// Its type.
        found: BsType,
        /// The type looked for.
        expected: BsType,
    },
    /// The super block's numbers.
    #[error("the super block is wrong: {0}")]
    Geometry(#[from] GeometryError),
    /// A mask of a clean store.
    #[error(transparent)]
    Mask(#[from] MaskError),
    /// A mask of a clean store does not mark what a blob uses.
    #[error(
        "the {kind} does not mark {number}, which blob {blob} uses: the store is marked clean, but its masks are wrong"
    )]
    NotMarked {
        /// The mask.
        kind: MaskKind,
        /// Page or cluster.
        number: u32,
        /// The blob that uses it.
        blob: BlobId,
    },
    /// The super block names no super blob.
    #[error("the super block names no super blob")]
    NoSuperBlob,
    /// The super blob cannot be opened.
    #[error("the super blob, {blob}, cannot be opened: {problem}")]
    SuperBlob {
        /// The blob.
        blob: BlobId,
        /// Why.
        problem: Problem,
    },
    /// The super blob does not describe a store, or an lvol has no name.
    #[error(transparent)]
    Lvs(#[from] LvsError),
    /// A blob for which it cannot be known which clusters are used.
    #[error("the store was not unloaded in order and cannot be recovered: blob {blob}: {problem}")]
    Recovery {
        /// The blob.
        blob: BlobId,
        /// What is wrong with it.
        problem: Problem,
    },
}

/// How a store is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// As the super block says: by the masks when clean.
    #[default]
    AsMarked,
    /// By scanning all metadata, whatever the super block says.
    Recover,
}

/// An lvol of an image.
#[derive(Clone, Debug)]
pub struct Lvol {
    /// Its blob.
    pub id: BlobId,
    /// Its name and UUID.
    pub names: LvolNames,
    /// Whether it must not be written: also when only its metadata must not, and when it is an unfinished snapshot that
    /// stays.
    pub read_only: bool,
    /// What lies below clusters that are not allocated.
    pub parent: Parent,
    /// The lvols that have it as parent.
    pub clones: Vec<BlobId>,
    /// Everything its metadata says.
    pub metadata: Metadata,
    /// Where its clusters lie.
    pub map: ClusterMap,
}

/// A blob that cannot be opened.
#[derive(Clone, Debug)]
pub struct Lost {
    /// The blob.
    pub id: BlobId,
    /// Its name, as far as it can be read.
    pub name: Option<String>,
    /// Why.
    pub problem: Problem,
}

/// An opened image.
pub struct Image<S> {
    src: S,
    /// Its super block.
    pub super_block: SuperBlock,
    /// Where everything lies.
    pub geometry: Geometry,
    /// The store's name and UUID.
    pub names: StoreNames,
    /// Whether all metadata was scanned, rather than the masks trusted.
    pub recovered: bool,
    /// Clusters that are free once loaded.
    pub free_clusters: u32,
    /// Blobs that cannot be opened.
    pub lost: Vec<Lost>,
    /// Unfinished snapshots that are removed by loading.
    pub removed: Vec<BlobId>,
    lvols: BTreeMap<BlobId, Lvol>,
}

/// Why contents cannot be read.
#[derive(Debug, Error)]
pub enum ReadError {
    /// No such lvol.
    #[error("there is no lvol {0}")]
    NoLvol(BlobId),
    /// Beyond the end.
    #[error("{len} bytes from byte {offset} on; the lvol has {size}")]
    Range {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: usize,
        /// The lvol's size.
        size: u64,
    },
    /// The device below an external clone is not there.
    #[error("external device {0:?} is not there")]
    NoExternal(String),
    /// The image or the external device cannot be read.
    #[error("reading at byte {offset}: {error}")]
    Io {
        /// Where.
        offset: u64,
        /// Why.
        error: io::Error,
    },
}

/// Where external devices are looked up, by the contents of an EXTSNAP xattr.
pub trait Externals {
    /// The device, if there is one.
    fn find(&self, id: &[u8]) -> Option<&dyn ReadAt>;
}

/// No external devices.
impl Externals for () {
    fn find(&self, _: &[u8]) -> Option<&dyn ReadAt> {
        None
    }
}

impl<S: ReadAt> Image<S> {
    /// Opens the lvolstore in `src`.
    pub fn open(src: S, mode: Mode) -> Result<Self, ImageError> {
        load::open(src, mode)
    }

    /// All lvols, by blob id.
    pub fn lvols(&self) -> impl Iterator<Item = &Lvol> {
        self.lvols.values()
    }

    /// The lvol of that blob.
    pub fn lvol(&self, id: BlobId) -> Option<&Lvol> {
        self.lvols.get(&id)
    }

    /// The lvol of that name.
    pub fn find(&self, name: &str) -> Option<&Lvol> {
        self.lvols.values().find(|lvol| lvol.names.name == name)
    }

    /// An lvol's size in bytes.
    pub fn size(&self, lvol: &Lvol) -> u64 {
        lvol.map.len() * u64::from(self.geometry.cluster_size)
    }

    /// Reads an lvol's contents from byte `offset` on.
    pub fn read(&self, id: BlobId, offset: u64, buf: &mut [u8], ext: &dyn Externals) -> Result<(), ReadError> {
        let lvol = self.lvol(id).ok_or(ReadError::NoLvol(id))?;
        let (size, len) = (self.size(lvol), buf.len());
        if offset.checked_add(len as u64).is_none_or(|end| end > size) {
            return Err(ReadError::Range { offset, len, size });
        }
        let cluster_size = u64::from(self.geometry.cluster_size);
        let (mut at, mut rest) = (offset, buf);
        while !rest.is_empty() {
            let within = at % cluster_size;
            let n = (cluster_size - within).min(rest.len() as u64) as usize;
            let (part, more) = rest.split_at_mut(n);
            self.read_part(lvol, at, part, ext)?;
            at += n as u64;
            rest = more;
        }
        Ok(())
    }

    /// Whether any byte of cluster `at` may be other than zero, as far as the store knows.
    pub fn may_hold_data(&self, lvol: &Lvol, at: u64) -> bool {
        let mut top = lvol;
        loop {
            if top.map.get(at).is_some() {
                return true;
            }
            match &top.parent {
                Parent::None => return false,
                Parent::External(_) => return true,
                Parent::Snapshot(id) => match self.lvols.get(id) {
                    Some(parent) if at < parent.map.len() => top = parent,
                    _ => return false,
                },
            }
        }
    }

    /// Reads within one cluster: from the lvol itself or the nearest parent that has the cluster. Parents never go
    /// round: lvols for which they do are lost.
    fn read_part(&self, lvol: &Lvol, at: u64, buf: &mut [u8], ext: &dyn Externals) -> Result<(), ReadError> {
        let cluster_size = u64::from(self.geometry.cluster_size);
        let cluster = at / cluster_size;
        let mut top = lvol;
        loop {
            if let Some(found) = top.map.get(cluster) {
                let offset = self.geometry.cluster_offset(found) + at % cluster_size;
                return self.src.read_at(offset, buf).map_err(|error| ReadError::Io { offset, error });
            }
            match &top.parent {
                Parent::External(id) => {
                    let device = ext.find(id).ok_or_else(|| ReadError::NoExternal(crate::lvs::name_text(id)))?;
                    return device.read_at(at, buf).map_err(|error| ReadError::Io { offset: at, error });
                }
                Parent::Snapshot(id) => match self.lvols.get(id) {
                    Some(parent) if cluster < parent.map.len() => top = parent,
                    _ => break,
                },
                Parent::None => break,
            }
        }
        buf.fill(0);
        Ok(())
    }
}
