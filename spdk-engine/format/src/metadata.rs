//! One blob's metadata as a whole: flags, xattrs, where its clusters lie.
//!
//! It is parsed from, and emitted as, the chain of pages that begins with the blob's root page, in SPDK's order: flags,
//! xattrs, internal xattrs, extents. Descriptors of unknown types are kept (between xattrs and extents), because a newer
//! blobstore may have left them; while replaying after a crash they are refused, as SPDK does.

use thiserror::Error;

use crate::BlobId;
use crate::bytes::{put, u64_at};
use crate::descriptor::{self, ClearMethod, DescriptorError, Flags, HEADER, Xattr, kind};
use crate::extent::{ExtentTable, MAX_CLUSTERS, Run, TableRun, pages_for, push_run};
use crate::page::{DESCRIPTORS, MdPage};

/// Names of internal xattrs.
pub mod internal {
    /// Of a clone: the id of its snapshot.
    pub const SNAPSHOT: &str = "SNAP";
    /// Of a snapshot being made: the id of the blob it is made of.
    pub const SNAPSHOT_IN_PROGRESS: &str = "SNAPTMP";
    /// Of a snapshot being deleted: the id of its clone.
    pub const SNAPSHOT_PENDING_REMOVAL: &str = "SNAPRM";
    /// Of a clone of an external device: that device's name.
    pub const EXTERNAL_SNAPSHOT: &str = "EXTSNAP";
}

/// Why pages are not a blob's metadata.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MetadataError {
    /// Another blob's page.
    #[error("page {sequence} of the chain belongs to blob {found}, not to {expected}")]
    Id {
        /// Position in the chain.
        sequence: usize,
        /// The blob looked for.
        expected: BlobId,
        /// The blob found.
        found: BlobId,
    },
    /// A page from elsewhere in a chain.
    #[error("page {expected} of the chain has sequence number {found}")]
    Sequence {
        /// Position in the chain.
        expected: usize,
        /// As recorded.
        found: u32,
    },
    /// A descriptor that cannot be read.
    #[error("page {sequence} of the chain: {error}")]
    Descriptor {
        /// Position in the chain.
        sequence: usize,
        /// What is wrong.
        error: DescriptorError,
    },
    /// Made by a blobstore with features that are not known here.
    #[error("invalid_flags is {0:#x}; only bits within {known:#x} are known", known = Flags::KNOWN_INVALID)]
    UnknownFlags(u64),
    /// Two ways of listing clusters in one blob.
    #[error("the blob has both an extent table and run-length extents; one of them is allowed")]
    MixedExtents,
    /// The parts of a table do not agree.
    #[error("the extent table's parts give {first} and {second} clusters; all have to give the same")]
    TableParts {
        /// The first part.
        first: u64,
        /// A further part.
        second: u64,
    },
    /// A length no blob can have.
    #[error("the blob is {0} clusters long; at most {MAX_CLUSTERS} are allowed")]
    TooLong(u64),
    /// The table does not have one entry for each 512 clusters.
    #[error("the extent table has {found} extent pages for {num_clusters} clusters; {} are needed", pages_for(*.num_clusters))]
    TableLength {
        /// Extent pages found.
        found: u64,
        /// The blob's length.
        num_clusters: u64,
    },
    /// A run of extent pages that exist.
    #[error("the extent table's entry for page {page} stands for {count} pages; 1 is allowed")]
    TableEntry {
        /// The page.
        page: u32,
        /// Its count.
        count: u32,
    },
    /// A cluster that does not exist, in a blob that allocates all.
    #[error("the blob is thick, but has no cluster allocated at {0}")]
    ThickHole(u64),
    /// Run-length extents that list nothing.
    #[error("the run-length extents list no cluster; at least one is needed")]
    EmptyRuns,
    /// An internal xattr that names a blob, but is not an id.
    #[error("the internal xattr {name} is {length} bytes long; a blob id has 8")]
    IdLength {
        /// The xattr.
        name: &'static str,
        /// Its length.
        length: usize,
    },
    /// The mark of an external clone without its name.
    #[error("the blob is marked as a clone of an external device, but has no EXTSNAP xattr")]
    NoExternalId,
}

/// Why metadata cannot be emitted.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum EmitError {
    /// A descriptor must fit into one page.
    #[error("xattr {name:?} takes {bytes} bytes with its value; {DESCRIPTORS} are allowed")]
    XattrTooLong {
        /// Its name.
        name: String,
        /// Bytes of its descriptor.
        bytes: usize,
    },
    /// Pages and places do not match.
    #[error("{pages} pages, but {places} places to chain them")]
    Places {
        /// Number of pages.
        pages: usize,
        /// Number of places.
        places: usize,
    },
}

/// What metadata is read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// To open a blob: descriptors of unknown types are kept and not interpreted.
    Load,
    /// To recover after a crash: they are refused, because they might claim clusters. What only opening checks (flags,
    /// the table's length, holes) is not looked at.
    Replay,
}

/// Where a blob's clusters lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extents {
    /// In extent pages, named by a table.
    Table(ExtentTable),
    /// In run-length lists within the chain itself, as old stores have it.
    Runs(Vec<Run>),
}

/// What lies below a blob's unallocated clusters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parent {
    /// Zeroes.
    None,
    /// A snapshot.
    Snapshot(BlobId),
    /// An external device, by the contents of the EXTSNAP xattr.
    External(Vec<u8>),
}

/// A descriptor of an unknown type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownDescriptor {
    /// Its type.
    pub kind: u8,
    /// Its contents.
    pub payload: Vec<u8>,
}

/// A blob's metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// The blob.
    pub id: BlobId,
    /// Its flags.
    pub flags: Flags,
    /// Its user's xattrs, in the order in which they were set.
    pub xattrs: Vec<Xattr>,
    /// The blobstore's own xattrs.
    pub internal_xattrs: Vec<Xattr>,
    /// What is not known, kept.
    pub unknown: Vec<UnknownDescriptor>,
    /// Where its clusters lie.
    pub extents: Extents,
}

impl Metadata {
    /// An empty blob with an extent table, as it is created today.
    pub fn new(id: BlobId, thin: bool) -> Self {
        let invalid = Flags::EXTENT_TABLE | if thin { Flags::THIN } else { 0 };
        Self {
            id,
            flags: Flags { invalid, data_ro: 0, md_ro: ClearMethod::Default as u64 },
            xattrs: Vec::new(),
            internal_xattrs: Vec::new(),
            unknown: Vec::new(),
            extents: Extents::Table(ExtentTable::default()),
        }
    }

    /// The metadata of blob `id` in its chain of pages, root page first.
    pub fn parse(id: BlobId, pages: &[MdPage], reading: Reading) -> Result<Self, MetadataError> {
        let mut parser = Parser::new(id, reading);
        for (sequence, page) in pages.iter().enumerate() {
            if page.id != id {
                return Err(MetadataError::Id { sequence, expected: id, found: page.id });
            }
            if page.sequence as usize != sequence {
                return Err(MetadataError::Sequence { expected: sequence, found: page.sequence });
            }
            parser.page(sequence, page)?;
        }
        parser.finish()
    }

    /// Length in clusters.
    pub fn num_clusters(&self) -> u64 {
        match &self.extents {
            Extents::Table(table) => table.num_clusters,
            Extents::Runs(runs) => runs.iter().map(|run| u64::from(run.length)).sum(),
        }
    }

    /// The value of a user's xattr.
    pub fn xattr(&self, name: &str) -> Option<&[u8]> {
        find(&self.xattrs, name)
    }

    /// Sets a user's xattr: in its place when there is one of that name, else at the end.
    pub fn set_xattr(&mut self, name: &str, value: impl Into<Vec<u8>>) {
        set(&mut self.xattrs, name, value.into());
    }

    /// Removes a user's xattr; returns whether there was one.
    pub fn remove_xattr(&mut self, name: &str) -> bool {
        remove(&mut self.xattrs, name)
    }

    /// The value of an internal xattr.
    pub fn internal_xattr(&self, name: &str) -> Option<&[u8]> {
        find(&self.internal_xattrs, name)
    }

    /// Sets an internal xattr, and the flag that says that there are some.
    pub fn set_internal_xattr(&mut self, name: &str, value: impl Into<Vec<u8>>) {
        set(&mut self.internal_xattrs, name, value.into());
        self.flags.invalid |= Flags::INTERNAL_XATTRS;
    }

    /// Removes an internal xattr, and with the last one the flag; returns whether there was one.
    pub fn remove_internal_xattr(&mut self, name: &str) -> bool {
        let removed = remove(&mut self.internal_xattrs, name);
        if self.internal_xattrs.is_empty() {
            self.flags.invalid &= !Flags::INTERNAL_XATTRS;
        }
        removed
    }

    /// A blob id in an internal xattr.
    pub fn internal_id(&self, name: &'static str) -> Result<Option<BlobId>, MetadataError> {
        match self.internal_xattr(name) {
            None => Ok(None),
            Some(value) if value.len() == 8 => Ok(Some(BlobId(u64_at(value, 0)))),
            Some(value) => Err(MetadataError::IdLength { name, length: value.len() }),
        }
    }

    /// Sets an internal xattr to a blob id.
    pub fn set_internal_id(&mut self, name: &'static str, id: BlobId) {
        self.set_internal_xattr(name, id.0.to_le_bytes());
    }

    /// What lies below unallocated clusters. A thick blob has no parent, whatever its xattrs say.
    pub fn parent(&self) -> Result<Parent, MetadataError> {
        if self.flags.external() {
            let id = self.internal_xattr(internal::EXTERNAL_SNAPSHOT).ok_or(MetadataError::NoExternalId)?;
            return Ok(Parent::External(id.to_vec()));
        }
        if !self.flags.thin() {
            return Ok(Parent::None);
        }
        Ok(self.internal_id(internal::SNAPSHOT)?.map_or(Parent::None, Parent::Snapshot))
    }

    /// The pages to write, root page first; their `next` fields are set by [`chain`].
    pub fn emit(&self) -> Result<Vec<MdPage>, EmitError> {
        let mut out = Emitter::new(self.id);
        out.whole(&self.flags.emit());
        for (xattrs, kind) in [(&self.xattrs, kind::XATTR), (&self.internal_xattrs, kind::INTERNAL_XATTR)] {
            for xattr in xattrs {
                let bytes = HEADER + 4 + xattr.name.len() + xattr.value.len();
                if bytes > DESCRIPTORS {
                    let name = String::from_utf8_lossy(&xattr.name).into_owned();
                    return Err(EmitError::XattrTooLong { name, bytes });
                }
                out.whole(&xattr.emit(kind));
            }
        }
        for unknown in &self.unknown {
            out.whole(&descriptor::emit(unknown.kind, &unknown.payload));
        }
        match &self.extents {
            Extents::Table(table) => out.table(table),
            Extents::Runs(runs) => out.runs(runs),
        }
        Ok(out.pages)
    }
}

/// Links pages as they are to be written: each to the place of the next. `places` has the index of every page.
pub fn chain(pages: &mut [MdPage], places: &[u32]) -> Result<(), EmitError> {
    if pages.len() != places.len() {
        return Err(EmitError::Places { pages: pages.len(), places: places.len() });
    }
    for (page, next) in pages.iter_mut().zip(&places[1.min(places.len())..]) {
        page.next = *next;
    }
    Ok(())
}

fn find<'a>(xattrs: &'a [Xattr], name: &str) -> Option<&'a [u8]> {
    xattrs.iter().find(|x| x.name == name.as_bytes()).map(|x| x.value.as_slice())
}

fn set(xattrs: &mut Vec<Xattr>, name: &str, value: Vec<u8>) {
    match xattrs.iter_mut().find(|x| x.name == name.as_bytes()) {
        Some(xattr) => xattr.value = value,
        None => xattrs.push(Xattr::new(name, value)),
    }
}

fn remove(xattrs: &mut Vec<Xattr>, name: &str) -> bool {
    let before = xattrs.len();
    xattrs.retain(|x| x.name != name.as_bytes());
    xattrs.len() != before
}

/// Gathers the descriptors of a chain.
struct Parser {
    reading: Reading,
    table: Option<ExtentTable>,
    runs: Option<Vec<Run>>,
    out: Metadata,
}

impl Parser {
    fn new(id: BlobId, reading: Reading) -> Self {
        let mut out = Metadata::new(id, false);
        out.flags = Flags::default();
        Self { reading, table: None, runs: None, out }
    }

    fn page(&mut self, sequence: usize, page: &MdPage) -> Result<(), MetadataError> {
        let refused = |error| MetadataError::Descriptor { sequence, error };
        for raw in descriptor::iter(page.descriptors()) {
            let raw = raw.map_err(refused)?;
            match raw.kind {
                kind::FLAGS => {
                    self.out.flags = Flags::parse(&raw).map_err(refused)?;
                    if self.reading == Reading::Load && self.out.flags.unknown_invalid() != 0 {
                        return Err(MetadataError::UnknownFlags(self.out.flags.invalid));
                    }
                }
                kind::XATTR => self.out.xattrs.push(Xattr::parse(&raw).map_err(refused)?),
                kind::INTERNAL_XATTR => self.out.internal_xattrs.push(Xattr::parse(&raw).map_err(refused)?),
                kind::EXTENT_RLE => self.runs(&Run::parse(&raw).map_err(refused)?)?,
                kind::EXTENT_TABLE => {
                    let (num_clusters, entries) = ExtentTable::parse_piece(&raw).map_err(refused)?;
                    self.table(num_clusters, &entries)?;
                }
                // An extent page's descriptor has no place in a chain, except as the page of its own that it is.
                kind::EXTENT_PAGE => {
                    let allowed = "no extents of this kind in a chain";
                    let length = raw.payload.len();
                    return Err(refused(DescriptorError::Length { at: raw.at, kind: raw.kind, length, allowed }));
                }
                unknown if self.reading == Reading::Replay => {
                    return Err(refused(DescriptorError::Unknown { at: raw.at, kind: unknown }));
                }
                unknown => {
                    self.out.unknown.push(UnknownDescriptor { kind: unknown, payload: raw.payload.to_vec() });
                }
            }
        }
        Ok(())
    }

    fn runs(&mut self, more: &[Run]) -> Result<(), MetadataError> {
        if self.table.is_some() {
            return Err(MetadataError::MixedExtents);
        }
        if more.is_empty() {
            return Err(MetadataError::EmptyRuns);
        }
        let runs = self.runs.get_or_insert_default();
        more.iter().for_each(|run| push_run(runs, *run));
        Ok(())
    }

    fn table(&mut self, num_clusters: u64, entries: &[TableRun]) -> Result<(), MetadataError> {
        if self.runs.is_some() {
            return Err(MetadataError::MixedExtents);
        }
        let table = self.table.get_or_insert_with(|| ExtentTable { num_clusters, runs: Vec::new() });
        if table.num_clusters != num_clusters {
            return Err(MetadataError::TableParts { first: table.num_clusters, second: num_clusters });
        }
        for entry in entries {
            if entry.page != 0 && entry.count != 1 {
                return Err(MetadataError::TableEntry { page: entry.page, count: entry.count });
            }
            table.push(*entry);
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Metadata, MetadataError> {
        // While replaying, the claims of a blob count even when it could not be opened.
        let check = self.reading == Reading::Load;
        let thin = self.out.flags.thin();
        self.out.extents = match (self.table, self.runs) {
            (Some(table), _) => {
                if check && table.num_clusters > MAX_CLUSTERS {
                    return Err(MetadataError::TooLong(table.num_clusters));
                }
                if check && table.len() != pages_for(table.num_clusters) {
                    let (found, num_clusters) = (table.len(), table.num_clusters);
                    return Err(MetadataError::TableLength { found, num_clusters });
                }
                if check && !thin {
                    no_hole(table.runs.iter().map(|run| (run.page, u64::from(run.count) * 512)))?;
                }
                Extents::Table(table)
            }
            (None, runs) => {
                let runs = runs.unwrap_or_default();
                let length: u64 = runs.iter().map(|run| u64::from(run.length)).sum();
                if check && length > MAX_CLUSTERS {
                    return Err(MetadataError::TooLong(length));
                }
                if check && !thin {
                    no_hole(runs.iter().map(|run| (run.cluster, u64::from(run.length))))?;
                }
                Extents::Runs(runs)
            }
        };
        Ok(self.out)
    }
}

/// Refuses the first entry that is 0; entries are given with the number of clusters they stand for.
fn no_hole(entries: impl Iterator<Item = (u32, u64)>) -> Result<(), MetadataError> {
    let mut at = 0;
    for (entry, clusters) in entries {
        if entry == 0 {
            return Err(MetadataError::ThickHole(at));
        }
        at += clusters;
    }
    Ok(())
}

/// Fills pages with descriptors.
struct Emitter {
    id: BlobId,
    pages: Vec<MdPage>,
    used: usize,
}

impl Emitter {
    fn new(id: BlobId) -> Self {
        Self { id, pages: vec![MdPage::new(id, 0)], used: 0 }
    }

    fn room(&self) -> usize {
        DESCRIPTORS - self.used
    }

    fn next_page(&mut self) {
        let sequence = self.pages.len() as u32;
        self.pages.push(MdPage::new(self.id, sequence));
        self.used = 0;
    }

    /// A descriptor that is not split: into the present page, or else the next.
    fn whole(&mut self, bytes: &[u8]) {
        if bytes.len() > self.room() {
            self.next_page();
        }
        if let Some(page) = self.pages.last_mut() {
            put(page.descriptors_mut(), self.used, bytes);
        }
        self.used += bytes.len();
    }

    /// The table, in as many parts as pages need. There is always one part, else a reader would take the blob for one
    /// with run-length extents.
    fn table(&mut self, table: &ExtentTable) {
        let mut rest = table.runs.as_slice();
        loop {
            if self.room() >= HEADER + 8 {
                let (now, later) = rest.split_at(rest.len().min((self.room() - HEADER - 8) / 8));
                let mut payload = table.num_clusters.to_le_bytes().to_vec();
                for run in now {
                    payload.extend_from_slice(&run.page.to_le_bytes());
                    payload.extend_from_slice(&run.count.to_le_bytes());
                }
                self.whole(&descriptor::emit(kind::EXTENT_TABLE, &payload));
                rest = later;
                if rest.is_empty() {
                    return;
                }
            }
            self.next_page();
        }
    }

    /// Run-length extents; none for an empty blob.
    fn runs(&mut self, runs: &[Run]) {
        let mut rest = runs;
        while !rest.is_empty() {
            if self.room() < HEADER + 8 {
                self.next_page();
            }
            let (now, later) = rest.split_at(rest.len().min((self.room() - HEADER) / 8));
            let mut payload = Vec::with_capacity(8 * now.len());
            for run in now {
                payload.extend_from_slice(&run.cluster.to_le_bytes());
                payload.extend_from_slice(&run.length.to_le_bytes());
            }
            self.whole(&descriptor::emit(kind::EXTENT_RLE, &payload));
            rest = later;
        }
    }
}
