//! What an image holds, as data for JSON and as text for people: super block, masks, and every blob with its flags,
//! xattrs and clusters. Nothing is judged here, see [`check`](crate::check); what cannot be read is shown as such.

use std::collections::BTreeSet;
use std::fmt;

use serde::Serialize;

use crate::descriptor::{Flags, Xattr};
use crate::image::load::{check_parents, examine};
use crate::image::{Blob, Blobs, ImageError, Scan};
use crate::lvs::{NAME, name_text};
use crate::metadata::{Extents, Parent};
use crate::superblock::Region;
use crate::{Bits, BlobId, MaskKind, Metadata, ReadAt};

/// The super block, with the values that zeroes of old stores stand for.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct SuperDump {
    pub version: u32,
    pub clean: bool,
    pub bstype: String,
    pub super_blob: Option<BlobId>,
    pub size: u64,
    pub io_unit_size: u32,
    pub md_page_size: u32,
    pub cluster_size: u32,
    pub total_clusters: u32,
    pub data_clusters: u32,
    pub md_clusters: u32,
    pub md_start: u32,
    pub md_len: u32,
    pub max_growable_size: u64,
}

/// A mask as it is on disk, whether it may be trusted or not.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct MaskDump {
    pub mask: String,
    pub start: u32,
    pub len: u32,
    /// Bits set and in all; none when the mask cannot be read.
    pub bits: Option<(u32, u32)>,
    /// Why it cannot be read.
    pub problem: Option<String>,
}

/// An xattr, its value as text: bytes that are not ASCII text are escaped.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct XattrDump {
    pub name: String,
    pub value: String,
    pub length: usize,
}

/// A run of clusters: of the blob, on the device, and how many.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct RunDump {
    pub at: u64,
    pub cluster: u32,
    pub length: u32,
}

/// A blob.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct BlobDump {
    pub id: BlobId,
    pub name: Option<String>,
    pub pages: Vec<u32>,
    pub extent_pages: Vec<u32>,
    pub flags: Option<[String; 3]>,
    pub thin: bool,
    pub read_only: bool,
    pub clear_method: Option<String>,
    /// `table` or `runs`.
    pub extents: Option<&'static str>,
    pub xattrs: Vec<XattrDump>,
    pub internal_xattrs: Vec<XattrDump>,
    pub parent: Option<BlobId>,
    pub external: Option<String>,
    pub clones: Vec<BlobId>,
    pub num_clusters: u64,
    pub allocated_clusters: u64,
    pub runs: Vec<RunDump>,
    pub problems: Vec<String>,
}

/// A whole image.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Dump {
    pub super_block: SuperDump,
    pub masks: Vec<MaskDump>,
    pub blobs: Vec<BlobDump>,
}

/// Everything that the blobstore in `src` holds.
pub fn dump(src: &(impl ReadAt + ?Sized)) -> Result<Dump, ImageError> {
    let scan = Scan::read(src, None)?;
    let mut masks = Vec::new();
    let mut marked = None;
    for kind in [MaskKind::Pages, MaskKind::Clusters, MaskKind::BlobIds] {
        let region = scan.geometry.mask(kind);
        if region.len == 0 {
            continue;
        }
        let found = scan.mask(src, kind);
        if let Err(ImageError::Io { offset, error }) = found {
            return Err(ImageError::Io { offset, error });
        }
        masks.push(mask_dump(kind, region, &found));
        if kind == MaskKind::BlobIds && scan.super_block.masks_are_valid() {
            marked = found.ok();
        }
    }
    let ids: BTreeSet<BlobId> = marked.iter().flat_map(Bits::iter).map(BlobId::from_page).chain(scan.roots()).collect();
    let mut blobs = examine(&scan, ids.into_iter());
    check_parents(&mut blobs);
    let blobs = blobs.values().map(|blob| blob_dump(blob, &blobs)).collect();
    Ok(Dump { super_block: super_dump(&scan), masks, blobs })
}

fn super_dump(scan: &Scan) -> SuperDump {
    let (sb, g) = (&scan.super_block, &scan.geometry);
    SuperDump {
        version: sb.version,
        clean: sb.clean != 0,
        bstype: sb.bstype.text(),
        super_blob: (sb.super_blob != BlobId::INVALID).then_some(sb.super_blob),
        size: g.size,
        io_unit_size: g.io_unit_size,
        md_page_size: g.md_page_size,
        cluster_size: g.cluster_size,
        total_clusters: g.total_clusters,
        data_clusters: g.data_clusters(),
        md_clusters: g.md_clusters(),
        md_start: g.md_start,
        md_len: g.md_len,
        max_growable_size: g.max_growable_size(),
    }
}

fn mask_dump(kind: MaskKind, region: Region, found: &Result<Bits, ImageError>) -> MaskDump {
    MaskDump {
        mask: kind.to_string(),
        start: region.start,
        len: region.len,
        bits: found.as_ref().ok().map(|bits| (bits.count(), bits.len())),
        problem: found.as_ref().err().map(ToString::to_string),
    }
}

fn xattr_dump(xattrs: &[Xattr]) -> Vec<XattrDump> {
    let text = |bytes: &[u8]| match bytes.iter().rposition(|b| *b != 0) {
        // Text with NULs after it, as names and UUIDs are stored.
        Some(last) if bytes.len() != 8 => bytes[..=last].escape_ascii().to_string(),
        _ => bytes.escape_ascii().to_string(),
    };
    let id = |bytes: &[u8]| bytes.try_into().ok().map(|raw| BlobId(u64::from_le_bytes(raw)).to_string());
    xattrs
        .iter()
        .map(|xattr| XattrDump {
            name: xattr.name.escape_ascii().to_string(),
            value: match xattr.name.as_slice() {
                b"SNAP" | b"SNAPTMP" | b"SNAPRM" => id(&xattr.value).unwrap_or_else(|| text(&xattr.value)),
                _ => text(&xattr.value),
            },
            length: xattr.value.len(),
        })
        .collect()
}

fn blob_dump(blob: &Blob, all: &Blobs) -> BlobDump {
    let parent_of = |metadata: &Metadata| metadata.parent().ok();
    let metadata = blob.metadata.as_ref();
    let parent = metadata.and_then(parent_of);
    let names = |other: &Blob| other.metadata.as_ref().and_then(parent_of) == Some(Parent::Snapshot(blob.id));
    let hex = |word: u64| format!("{word:#x}");
    BlobDump {
        id: blob.id,
        name: metadata.and_then(|m| m.xattr(NAME)).map(name_text),
        pages: blob.chain.clone(),
        extent_pages: blob.extent_pages.clone(),
        flags: metadata.map(|m| [hex(m.flags.invalid), hex(m.flags.data_ro), hex(m.flags.md_ro)]),
        thin: metadata.is_some_and(|m| m.flags.thin()),
        read_only: metadata.is_some_and(|m| m.flags.data_is_read_only()),
        clear_method: metadata.map(|m| clear_method(m.flags)),
        extents: metadata.map(|m| match m.extents {
            Extents::Table(_) => "table",
            Extents::Runs(_) => "runs",
        }),
        xattrs: metadata.map(|m| xattr_dump(&m.xattrs)).unwrap_or_default(),
        internal_xattrs: metadata.map(|m| xattr_dump(&m.internal_xattrs)).unwrap_or_default(),
        parent: match &parent {
            Some(Parent::Snapshot(id)) => Some(*id),
            _ => None,
        },
        external: match &parent {
            Some(Parent::External(id)) => Some(name_text(id)),
            _ => None,
        },
        clones: all.values().filter(|other| names(other)).map(|other| other.id).collect(),
        num_clusters: blob.map.len(),
        allocated_clusters: blob.map.num_allocated(),
        runs: blob.map.allocated().map(|(at, run)| RunDump { at, cluster: run.cluster, length: run.length }).collect(),
        problems: blob.problems.iter().map(ToString::to_string).collect(),
    }
}

fn clear_method(flags: Flags) -> String {
    use crate::descriptor::ClearMethod;
    match flags.clear_method() {
        ClearMethod::Default => "default",
        ClearMethod::None => "none",
        ClearMethod::Unmap => "unmap",
        ClearMethod::WriteZeroes => "write zeroes",
    }
    .to_owned()
}

impl fmt::Display for Dump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sb = &self.super_block;
        let super_blob = sb.super_blob.map_or("none".to_owned(), |id| id.to_string());
        writeln!(f, "blobstore version {}, type {:?}, super blob {super_blob}", sb.version, sb.bstype)?;
        writeln!(f, "  {}", if sb.clean { "clean" } else { "not clean: loading recovers it" })?;
        writeln!(f, "  {} bytes in {} clusters of {} bytes", sb.size, sb.total_clusters, sb.cluster_size)?;
        writeln!(f, "  {} clusters for data, {} for metadata", sb.data_clusters, sb.md_clusters)?;
        writeln!(f, "  io unit {} bytes, metadata page {} bytes", sb.io_unit_size, sb.md_page_size)?;
        writeln!(f, "  metadata pages {} to {}", sb.md_start, u64::from(sb.md_start) + u64::from(sb.md_len) - 1)?;
        writeln!(f, "  can grow to {} bytes", sb.max_growable_size)?;
        for mask in &self.masks {
            write!(f, "{} at page {}, {} pages: ", mask.mask, mask.start, mask.len)?;
            match (&mask.bits, &mask.problem) {
                (Some((set, all)), _) => writeln!(f, "{set} of {all} used")?,
                (None, problem) => writeln!(f, "{}", problem.as_deref().unwrap_or("not read"))?,
            }
        }
        self.blobs.iter().try_for_each(|blob| write!(f, "{blob}"))
    }
}

impl fmt::Display for BlobDump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "blob {} {:?}", self.id, self.name.as_deref().unwrap_or(""))?;
        writeln!(f, "  pages {:?}, extent pages {:?}", self.pages, self.extent_pages)?;
        if let Some([invalid, data_ro, md_ro]) = &self.flags {
            let kind = if self.thin { "thin" } else { "thick" };
            let access = if self.read_only { "read-only" } else { "writable" };
            let clear = self.clear_method.as_deref().unwrap_or_default();
            let extents = self.extents.unwrap_or_default();
            writeln!(f, "  {kind}, {access}, clear method {clear}, extent {extents}")?;
            writeln!(f, "  invalid_flags {invalid}, data_ro_flags {data_ro}, md_ro_flags {md_ro}")?;
        }
        for (kind, xattrs) in [("xattr", &self.xattrs), ("internal xattr", &self.internal_xattrs)] {
            for xattr in xattrs {
                writeln!(f, "  {kind} {}: {} ({} bytes)", xattr.name, xattr.value, xattr.length)?;
            }
        }
        if let Some(parent) = self.parent {
            writeln!(f, "  parent {parent}")?;
        }
        if let Some(external) = &self.external {
            writeln!(f, "  clone of external device {external}")?;
        }
        if !self.clones.is_empty() {
            writeln!(f, "  clones {:?}", self.clones)?;
        }
        writeln!(f, "  {} clusters, {} allocated", self.num_clusters, self.allocated_clusters)?;
        for run in &self.runs {
            let (at, first) = (run.at, u64::from(run.cluster));
            let last = u64::from(run.length) - 1;
            writeln!(f, "    {at}..={} at {first}..={}", at + last, first + last)?;
        }
        self.problems.iter().try_for_each(|problem| writeln!(f, "  problem: {problem}"))
    }
}
