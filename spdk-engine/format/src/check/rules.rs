//! What is checked. Each rule looks at one part of the store and adds its findings.

use std::collections::{BTreeSet, HashMap};

use super::{CheckError, Finding, Kind, MAX_OF_KIND, Place, Severity};
use crate::descriptor::{Flags, Xattr};
use crate::image::load::{check_parents, decide_marks, examine, stops_recovery};
use crate::image::{Blob, Blobs, Claims, ImageError, Problem, Scan};
use crate::lvs::{LvolNames, LvsError, MAX_NAME, NAME, StoreNames, UUID, name_text, parse_uuid};
use crate::metadata::{Extents, MetadataError, Parent, internal};
use crate::repair::Mark;
use crate::superblock::{BsType, SIZE, SuperError};
use crate::{Bits, BlobId, MaskKind, Metadata, ReadAt};

type Findings = (Vec<Finding>, u64);

/// Runs all rules.
pub(super) fn run(src: &(impl ReadAt + ?Sized)) -> Result<Findings, CheckError> {
    let mut checker = Checker::default();
    let scan = match Scan::read(src, None) {
        Ok(scan) => scan,
        Err(error) => return checker.unreadable(error),
    };
    checker.super_block(&scan, src.size());
    let masks = if scan.super_block.masks_are_valid() { checker.masks(&scan, src)? } else { Masks::default() };
    let marked = masks.blobids.iter().flat_map(Bits::iter).map(BlobId::from_page);
    let ids: BTreeSet<BlobId> = scan.roots().chain(marked).collect();
    let mut blobs = examine(&scan, ids.into_iter());
    checker.learn_names(&blobs);
    // Which blobs are lost, and why, is seen from the whole; every problem is then told once, with its blob.
    let (removed, _) = decide_marks(&mut blobs);
    check_parents(&mut blobs);
    for blob in blobs.values() {
        checker.blob(&scan, blob);
    }
    checker.parents(&blobs);
    let clean = scan.super_block.masks_are_valid();
    if !clean {
        checker.recovery(&scan, &blobs);
    }
    checker.claims(&scan, &masks, &blobs, &removed);
    checker.stray_pages(&scan, &masks, &blobs);
    if scan.super_block.bstype == BsType::LVOLSTORE {
        checker.lvolstore(&scan, &blobs, &removed);
    }
    Ok((checker.findings, checker.not_listed))
}

/// The masks of a clean store, as far as they could be read.
#[derive(Default)]
struct Masks {
    pages: Option<Bits>,
    clusters: Option<Bits>,
    blobids: Option<Bits>,
}

#[derive(Default)]
struct Checker {
    findings: Vec<Finding>,
    not_listed: u64,
    of_kind: HashMap<Kind, usize>,
    names: HashMap<BlobId, String>,
}

impl Checker {
    fn add(&mut self, severity: Severity, kind: Kind, place: Place, blob: Option<BlobId>, message: impl ToString) {
        let count = self.of_kind.entry(kind).or_default();
        *count += 1;
        if *count > MAX_OF_KIND {
            self.not_listed += 1;
            return;
        }
        let name = blob.and_then(|id| self.names.get(&id).cloned());
        self.findings.push(Finding { severity, kind, place, blob, name, message: message.to_string() });
    }

    /// The store as a whole cannot be looked at.
    fn unreadable(mut self, error: ImageError) -> Result<Findings, CheckError> {
        let (kind, place) = match error {
            ImageError::Io { offset, error } => return Err(CheckError::Io { offset, error }),
            ImageError::Super(error @ (SuperError::Signature(_) | SuperError::Short(_))) => {
                return Err(CheckError::NoBlobstore(error));
            }
            ImageError::Geometry(_) => (Kind::Geometry, Place::SuperBlock),
            _ => (Kind::SuperBlock, Place::SuperBlock),
        };
        self.add(Severity::Error, kind, place, None, error);
        Ok((self.findings, self.not_listed))
    }

    fn super_block(&mut self, scan: &Scan, device_size: u64) {
        let sb = &scan.super_block;
        let mut add = |severity, kind, message: String| self.add(severity, kind, Place::SuperBlock, None, message);
        if sb.bstype != BsType::LVOLSTORE {
            add(
                Severity::Error,
                Kind::StoreType,
                format!("the type is {:?}; an lvolstore has \"LVOLSTORE\"", sb.bstype),
            );
        }
        if sb.length as usize != SIZE {
            add(Severity::Warning, Kind::SuperBlock, format!("length is {}; {SIZE} is expected", sb.length));
        }
        if sb.clean > 1 {
            add(Severity::Warning, Kind::SuperBlock, format!("clean is {}; 0 and 1 are expected", sb.clean));
        }
        if sb.reserved_is_used() {
            add(Severity::Warning, Kind::SuperBlock, "bytes 96 to 4091 are reserved, but not all zero".into());
        }
        if !sb.masks_are_valid() {
            let why = if sb.clean == 0 { "it was not unloaded in order" } else { "it has no used-blobid mask" };
            add(Severity::Note, Kind::NotClean, format!("{why}: masks are not looked at, loading recovers the store"));
        }
        if scan.geometry.size < device_size {
            let message = format!("the store uses {} of the device's {device_size} bytes", scan.geometry.size);
            add(Severity::Note, Kind::DeviceLarger, message);
        }
    }

    fn masks(&mut self, scan: &Scan, src: &(impl ReadAt + ?Sized)) -> Result<Masks, CheckError> {
        let mut read = |kind| match scan.mask(src, kind) {
            Ok(bits) => Ok(Some(bits)),
            Err(ImageError::Io { offset, error }) => Err(CheckError::Io { offset, error }),
            Err(error) => {
                self.add(Severity::Error, Kind::Mask, place_of(kind), None, error);
                Ok(None)
            }
        };
        Ok(Masks {
            pages: read(MaskKind::Pages)?,
            clusters: read(MaskKind::Clusters)?,
            blobids: read(MaskKind::BlobIds)?,
        })
    }

    fn learn_names(&mut self, blobs: &Blobs) {
        for blob in blobs.values() {
            if let Some(name) = blob.metadata.as_ref().and_then(|m| m.xattr(NAME)) {
                self.names.insert(blob.id, name_text(name));
            }
        }
    }

    /// Everything about one blob.
    fn blob(&mut self, scan: &Scan, blob: &Blob) {
        let is_super = blob.id == scan.super_block.super_blob;
        for problem in &blob.problems {
            let severity = if problem.is_harmless() { Severity::Warning } else { Severity::Error };
            let place = problem.page().map_or(Place::Blob, Place::Page);
            self.add(severity, kind_of(problem), place, Some(blob.id), problem);
        }
        self.not_listed += blob.more_problems;
        if is_super && !blob.opens() {
            self.add(Severity::Error, Kind::SuperBlob, Place::Store, Some(blob.id), "the super blob cannot be opened");
        }
        let Some(metadata) = &blob.metadata else { return };
        self.flags(blob.id, metadata);
        self.xattrs(blob.id, metadata);
        for unknown in &metadata.unknown {
            let message = format!("descriptor of unknown type {:#04x}, {} bytes", unknown.kind, unknown.payload.len());
            self.add(Severity::Warning, Kind::UnknownDescriptor, Place::Blob, Some(blob.id), message);
        }
        if let Ok(Some(mark)) = Mark::of(metadata) {
            let what = match mark {
                Mark::Creating(other) => format!("this snapshot of blob {other} was being made"),
                Mark::Deleting(other) => format!("this snapshot of blob {other} was being deleted"),
            };
            let message = format!("{what}; loading the store finishes that or takes it back");
            self.add(Severity::Warning, Kind::UnfinishedSnapshot, Place::Blob, Some(blob.id), message);
        }
    }

    fn flags(&mut self, id: BlobId, blob: &Metadata) {
        let mut add = |kind, message: String| self.add(Severity::Warning, kind, Place::Blob, Some(id), message);
        let (flags, unfinished) = (blob.flags, !matches!(Mark::of(blob), Ok(None)));
        if flags.unknown_data_ro() != 0 {
            let message = format!("data_ro_flags is {:#x}; 0x1 is known: it is opened read-only", flags.data_ro);
            add(Kind::UnknownFlags, message);
        }
        if flags.unknown_md_ro() != 0 {
            let message = format!("md_ro_flags is {:#x}; 0x3 is known: its metadata is not changed", flags.md_ro);
            add(Kind::UnknownFlags, message);
        }
        let has = |bit| flags.invalid & bit != 0;
        let mut contradicts = |what: &str| {
            add(Kind::FlagsContradict, format!("invalid_flags is {:#x}, {what}", flags.invalid));
        };
        match (has(Flags::INTERNAL_XATTRS), blob.internal_xattrs.is_empty()) {
            (true, true) => contradicts("with 0x2, but there is no internal xattr"),
            // A snapshot being made has the flags of the blob it is made of.
            (false, false) if !unfinished => contradicts("without 0x2, but there are internal xattrs"),
            _ => {}
        }
        if matches!(blob.extents, Extents::Table(_)) && !has(Flags::EXTENT_TABLE) {
            contradicts("without 0x4, but there is an extent table");
        }
        if blob.internal_xattr(internal::EXTERNAL_SNAPSHOT).is_some() && !flags.external() {
            contradicts("without 0x8, but there is an EXTSNAP xattr");
        }
    }

    fn xattrs(&mut self, id: BlobId, blob: &Metadata) {
        for (kind, xattrs) in [("xattr", &blob.xattrs), ("internal xattr", &blob.internal_xattrs)] {
            let mut seen = BTreeSet::new();
            for Xattr { name, .. } in xattrs {
                if !seen.insert(name) {
                    let message =
                        format!("{kind} {:?} is there twice; the first counts", String::from_utf8_lossy(name));
                    self.add(Severity::Warning, Kind::DuplicateXattr, Place::Blob, Some(id), message);
                }
            }
        }
    }

    fn parents(&mut self, blobs: &Blobs) {
        for blob in blobs.values() {
            let Some(Ok(Parent::Snapshot(id))) = blob.metadata.as_ref().map(Metadata::parent) else { continue };
            let Some(parent) = blobs.get(&id).and_then(|parent| parent.metadata.as_ref()) else { continue };
            let unfinished = !matches!(Mark::of(parent), Ok(None));
            if !parent.flags.data_is_read_only() && !unfinished {
                let message = format!("its parent, blob {id}, is not read-only");
                self.add(Severity::Warning, Kind::ParentWritable, Place::Blob, Some(blob.id), message);
            }
        }
    }

    fn recovery(&mut self, scan: &Scan, blobs: &Blobs) {
        for blob in blobs.values() {
            if let Some(problem) = stops_recovery(scan, blob) {
                let message = format!("the store cannot be recovered: {problem}");
                self.add(Severity::Error, Kind::Recovery, Place::Blob, Some(blob.id), message);
            }
        }
    }

    /// What blobs use, against each other and against the masks.
    fn claims(&mut self, scan: &Scan, masks: &Masks, blobs: &Blobs, removed: &[BlobId]) {
        let g = &scan.geometry;
        let md_clusters = g.md_clusters();
        let remaining = || blobs.values().filter(|blob| !removed.contains(&blob.id));
        for conflict in Claims::clusters(remaining(), g).conflicts() {
            let place = Place::Clusters(conflict.first, conflict.count);
            let message = format!("also owned by blob {}", conflict.owners.0);
            self.add(Severity::Error, Kind::ClusterShared, place, Some(conflict.owners.1), message);
        }
        for conflict in Claims::pages(remaining(), g).conflicts() {
            let message = format!("also used by blob {}", conflict.owners.0);
            self.add(Severity::Error, Kind::PageShared, Place::Page(conflict.first), Some(conflict.owners.1), message);
        }
        let (clusters, pages) = (Claims::clusters(blobs.values(), g), Claims::pages(blobs.values(), g));
        if let Some(mask) = &masks.clusters {
            if let Some(clear) = mask.first_clear(0).filter(|clear| *clear < md_clusters) {
                let message = format!("does not mark cluster {clear}, which holds the store's metadata");
                self.add(Severity::Error, Kind::ClusterNotMarked, Place::ClusterMask, None, message);
            }
            for (cluster, blob) in clusters.unmarked(mask) {
                let message = "used, but not marked in the used-cluster mask: it may be given away again";
                self.add(Severity::Error, Kind::ClusterNotMarked, Place::Clusters(cluster, 1), Some(blob), message);
            }
            for (first, end) in clusters.unclaimed(mask, md_clusters).take(MAX_OF_KIND + 1) {
                let place = Place::Clusters(first, u64::from(end - first));
                self.add(Severity::Warning, Kind::ClusterLeaked, place, None, "marked as used, but no blob has it");
            }
        }
        if let Some(mask) = &masks.pages {
            for (page, blob) in pages.unmarked(mask) {
                let message = "used, but not marked in the used-page mask: it may be overwritten";
                self.add(Severity::Error, Kind::PageNotMarked, Place::Page(page), Some(blob), message);
            }
            for (first, end) in pages.unclaimed(mask, 0).take(MAX_OF_KIND + 1) {
                let more = if end - first > 1 { format!(" (so are all up to {})", end - 1) } else { String::new() };
                let message = format!("marked as used, but no blob has it{more}");
                self.add(Severity::Warning, Kind::PageLeaked, Place::Page(first), None, message);
            }
        }
        if let Some(mask) = &masks.blobids {
            for blob in scan.roots().filter(|id| id.page().is_some_and(|page| !mask.get(page))) {
                let message = "the blob exists, but is not marked in the used-blobid mask: it would not be found";
                self.add(Severity::Error, Kind::BlobNotMarked, Place::Blob, Some(blob), message);
            }
        }
    }

    /// Metadata pages that are not empty, but belong to no blob.
    fn stray_pages(&mut self, scan: &Scan, masks: &Masks, blobs: &Blobs) {
        let used: BTreeSet<u32> = blobs
            .values()
            .flat_map(|blob| blob.chain.iter().chain(&blob.extent_pages).copied())
            .chain(blobs.values().flat_map(|blob| blob.problems.iter().filter_map(Problem::page)))
            .collect();
        for (index, page) in scan.pages().filter(|(index, _)| !used.contains(index)) {
            match page {
                Ok(page) => {
                    let message = format!("in order, but of no blob's use (written by blob {})", page.id);
                    self.add(Severity::Note, Kind::PageOrphaned, Place::Page(index), None, message);
                }
                Err(damaged) => {
                    let root = damaged.sequence == 0 && damaged.id == BlobId::from_page(index);
                    let severity = match masks.pages.as_ref().map(|mask| mask.get(index)) {
                        _ if root => Severity::Error,
                        Some(false) => Severity::Note,
                        _ => Severity::Warning,
                    };
                    let what =
                        if root { "it seems to be the root page of a blob, which is lost" } else { "no blob uses it" };
                    let blob = root.then_some(damaged.id);
                    let message = format!("{}; {what}", damaged.error);
                    self.add(severity, Kind::PageDamaged, Place::Page(index), blob, message);
                }
            }
        }
    }

    /// Names and UUIDs of the store and its lvols.
    fn lvolstore(&mut self, scan: &Scan, blobs: &Blobs, removed: &[BlobId]) {
        let id = scan.super_block.super_blob;
        if id == BlobId::INVALID {
            let message = "super_block names no super blob: an lvolstore has one";
            self.add(Severity::Error, Kind::SuperBlob, Place::SuperBlock, None, message);
        } else if !blobs.contains_key(&id) {
            let message = format!("the super blob, {id}, does not exist or is damaged");
            self.add(Severity::Error, Kind::SuperBlob, Place::SuperBlock, None, message);
        } else if let Some(metadata) = &blobs[&id].metadata
            && let Err(error) = StoreNames::of(metadata)
        {
            self.add(Severity::Error, Kind::SuperBlob, Place::Blob, Some(id), error);
        }
        let (mut names, mut uuids) = (HashMap::new(), HashMap::new());
        for blob in blobs.values().filter(|blob| blob.id != id && !removed.contains(&blob.id)) {
            let Some(metadata) = &blob.metadata else { continue };
            self.uuid(blob.id, metadata);
            match LvolNames::of(metadata) {
                Ok(lvol) => {
                    self.name(blob.id, metadata);
                    if let Some(other) = names.insert(lvol.name, blob.id) {
                        let message = format!("blob {other} has the same name");
                        self.add(Severity::Error, Kind::SameName, Place::Blob, Some(blob.id), message);
                    }
                    if !lvol.uuid.is_nil()
                        && let Some(other) = uuids.insert(lvol.uuid, blob.id)
                    {
                        let message = format!("blob {other} has the same UUID, {}", lvol.uuid);
                        self.add(Severity::Error, Kind::SameUuid, Place::Blob, Some(blob.id), message);
                    }
                }
                Err(error @ (LvsError::Missing { .. } | LvsError::NameValue { .. })) => {
                    self.add(Severity::Error, Kind::Name, Place::Blob, Some(blob.id), error);
                }
                Err(error) => self.add(Severity::Warning, Kind::Name, Place::Blob, Some(blob.id), error),
            }
        }
    }

    fn name(&mut self, id: BlobId, blob: &Metadata) {
        let Some(value) = blob.xattr(NAME) else { return };
        let text = value.split(|b| *b == 0).next().unwrap_or_default();
        let wrong = if text.is_empty() {
            "it is empty"
        } else if text.len() > MAX_NAME {
            "it is not ended by a NUL"
        } else if std::str::from_utf8(text).is_err() {
            "it is not UTF-8"
        } else {
            return;
        };
        let message = format!("the name is {:?}: {wrong}", value.escape_ascii().to_string());
        self.add(Severity::Warning, Kind::Name, Place::Blob, Some(id), message);
    }

    fn uuid(&mut self, id: BlobId, blob: &Metadata) {
        let message = match blob.xattr(UUID) {
            None => "it has no xattr \"uuid\": it is shown with a nil UUID".to_owned(),
            Some(value) if parse_uuid(value).is_none() => {
                let value = value.escape_ascii().to_string();
                format!("the xattr \"uuid\" is {value:?}; 36 characters of a UUID and a NUL are allowed")
            }
            Some(_) => return,
        };
        self.add(Severity::Warning, Kind::Uuid, Place::Blob, Some(id), message);
    }
}

fn place_of(kind: MaskKind) -> Place {
    match kind {
        MaskKind::Pages => Place::PageMask,
        MaskKind::Clusters => Place::ClusterMask,
        MaskKind::BlobIds => Place::BlobidMask,
    }
}

fn kind_of(problem: &Problem) -> Kind {
    match problem {
        Problem::Page { .. } => Kind::Chain,
        Problem::Cycle { .. } => Kind::ChainCycle,
        Problem::Metadata(MetadataError::UnknownFlags(_)) => Kind::UnknownFlags,
        Problem::Metadata(MetadataError::ThickHole(_)) => Kind::ThickHole,
        Problem::Metadata(_) => Kind::Metadata,
        Problem::ExtentPageLost { .. } | Problem::ExtentPage { .. } | Problem::ExtentGap { .. } => Kind::ExtentPage,
        Problem::Resized { .. } => Kind::Resized,
        Problem::ClusterBeyond { .. } => Kind::ClusterBeyondDevice,
        Problem::ClusterInMetadata { .. } => Kind::ClusterInMetadata,
        Problem::ClusterShared { .. } => Kind::ClusterShared,
        Problem::PageShared { .. } => Kind::PageShared,
        Problem::ParentMissing(_) => Kind::ParentMissing,
        Problem::ParentCycle(_) => Kind::ParentCycle,
        Problem::ParentLost(_) => Kind::ParentLost,
        Problem::Undecided(_) => Kind::Undecided,
        Problem::SameName { .. } => Kind::SameName,
        Problem::SameUuid(_) => Kind::SameUuid,
        Problem::Lvs(_) => Kind::Name,
    }
}
