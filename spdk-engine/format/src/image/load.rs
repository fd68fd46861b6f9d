//! Loading: which blobs there are, which of them open, and what the masks have to say.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::claims::{Blobs, Claims};
use super::{Blob, Image, ImageError, Lost, Lvol, Mode, Problem, Scan};
use crate::lvs::{LvolNames, LvsError, NAME, StoreNames, name_text};
use crate::metadata::{MetadataError, Parent, Reading};
use crate::repair::{Mark, Verdict, verdict};
use crate::superblock::BsType;
use crate::{Bits, BlobId, MaskKind, Metadata, ReadAt};

/// The masks of a clean store.
struct Masks {
    pages: Bits,
    clusters: Bits,
    blobids: Bits,
}

pub(super) fn open<S: ReadAt>(src: S, mode: Mode) -> Result<Image<S>, ImageError> {
    let scan = Scan::read(&src, Some(BsType::LVOLSTORE))?;
    let masks = match mode {
        Mode::AsMarked if scan.super_block.masks_are_valid() => Some(Masks {
            pages: scan.mask(&src, MaskKind::Pages)?,
            clusters: scan.mask(&src, MaskKind::Clusters)?,
            blobids: scan.mask(&src, MaskKind::BlobIds)?,
        }),
        _ => None,
    };
    let mut blobs = match &masks {
        Some(masks) => examine(&scan, masks.blobids.iter().map(BlobId::from_page)),
        None => examine(&scan, scan.roots()),
    };
    if let Some(masks) = &masks {
        check_masks(&scan, masks, &blobs)?;
    } else {
        check_recovery(&scan, &blobs)?;
    }
    let names = super_blob(&scan, &blobs)?;
    let (removed, kept) = decide_marks(&mut blobs);
    let gone: Vec<Blob> = removed.iter().filter_map(|id| blobs.remove(id)).collect();
    let free_clusters = match &masks {
        Some(masks) if gone.is_empty() => scan.geometry.total_clusters - masks.clusters.count(),
        _ => {
            let used = Claims::clusters(blobs.values(), &scan.geometry).count(scan.geometry.md_clusters());
            scan.geometry.data_clusters() - used as u32
        }
    };
    check_shared(&mut blobs, &scan);
    check_parents(&mut blobs);
    let super_id = scan.super_block.super_blob;
    check_names(&mut blobs, super_id)?;
    let (lvols, lost) = sort_out(blobs, &kept, super_id)?;
    Ok(Image {
        src,
        super_block: scan.super_block,
        geometry: scan.geometry,
        names,
        recovered: masks.is_none(),
        free_clusters,
        lost,
        removed,
        lvols,
    })
}

/// Examines blobs.
pub(crate) fn examine(scan: &Scan, ids: impl Iterator<Item = BlobId>) -> Blobs {
    ids.map(|id| (id, Blob::examine(scan, id))).collect()
}

fn check_masks(scan: &Scan, masks: &Masks, blobs: &Blobs) -> Result<(), ImageError> {
    let missing = scan.roots().find(|id| id.page().is_some_and(|page| !masks.blobids.get(page)));
    if let Some(blob) = missing {
        let number = blob.page().unwrap_or_default();
        return Err(ImageError::NotMarked { kind: MaskKind::BlobIds, number, blob });
    }
    let pages = Claims::pages(blobs.values(), &scan.geometry);
    if let Some((number, blob)) = pages.unmarked(&masks.pages).next() {
        return Err(ImageError::NotMarked { kind: MaskKind::Pages, number, blob });
    }
    let clusters = Claims::clusters(blobs.values(), &scan.geometry);
    if let Some((number, blob)) = clusters.unmarked(&masks.clusters).next() {
        return Err(ImageError::NotMarked { kind: MaskKind::Clusters, number, blob });
    }
    Ok(())
}

fn check_recovery(scan: &Scan, blobs: &Blobs) -> Result<(), ImageError> {
    for blob in blobs.values() {
        if let Some(problem) = stops_recovery(scan, blob) {
            return Err(ImageError::Recovery { blob: blob.id, problem });
        }
    }
    Ok(())
}

/// What keeps a store with this blob from being recovered, if anything. Replaying refuses what an ordinary load passes
/// over: descriptors that may claim clusters in a way not known here.
pub(crate) fn stops_recovery(scan: &Scan, blob: &Blob) -> Option<Problem> {
    if let Some(problem) = blob.problems.iter().find(|p| p.stops_recovery()) {
        return Some(problem.clone());
    }
    let pages: Vec<_> = blob.chain.iter().filter_map(|page| scan.page(*page).ok().cloned()).collect();
    match Metadata::parse(blob.id, &pages, Reading::Replay) {
        Err(error @ (MetadataError::Descriptor { .. } | MetadataError::TableEntry { .. })) => Some(error.into()),
        _ => None,
    }
}

fn super_blob(scan: &Scan, blobs: &Blobs) -> Result<StoreNames, ImageError> {
    let id = scan.super_block.super_blob;
    if id == BlobId::INVALID {
        return Err(ImageError::NoSuperBlob);
    }
    let missing;
    let blob = match blobs.get(&id) {
        Some(blob) => blob,
        None => {
            missing = Blob::examine(scan, id);
            &missing
        }
    };
    match (blob.first_problem(), &blob.metadata) {
        (None, Some(metadata)) => Ok(StoreNames::of(metadata)?),
        (Some(problem), _) => Err(ImageError::SuperBlob { blob: id, problem: problem.clone() }),
        (None, None) => Err(ImageError::NoSuperBlob),
    }
}

/// Decides on unfinished snapshots: those to remove, and those that stay. One of which nothing can be decided gets a
/// problem instead.
pub(crate) fn decide_marks(blobs: &mut Blobs) -> (Vec<BlobId>, BTreeSet<BlobId>) {
    let (mut removed, mut kept, mut wrong) = (Vec::new(), BTreeSet::new(), Vec::new());
    for blob in blobs.values().filter(|blob| blob.opens()) {
        let Some(metadata) = &blob.metadata else { continue };
        let decision = Mark::of(metadata).and_then(|mark| {
            let Some(mark) = mark else { return Ok(None) };
            let other = blobs.get(&mark.other()).filter(|other| other.opens());
            let Some(other) = other.and_then(|other| other.metadata.as_ref()) else {
                wrong.push((blob.id, Problem::Undecided(mark.other())));
                return Ok(None);
            };
            verdict(blob.id, other).map(Some)
        });
        match decision {
            Ok(Some(Verdict::Keep)) => {
                kept.insert(blob.id);
            }
            Ok(Some(Verdict::Remove)) => removed.push(blob.id),
            Ok(None) => {}
            Err(error) => wrong.push((blob.id, error.into())),
        }
    }
    add_problems(blobs, wrong);
    (removed, kept)
}

fn add_problems(blobs: &mut Blobs, problems: Vec<(BlobId, Problem)>) {
    for (id, problem) in problems {
        if let Some(blob) = blobs.get_mut(&id) {
            blob.problem(problem);
        }
    }
}

/// Blobs that claim the same cluster or page are both lost.
fn check_shared(blobs: &mut Blobs, scan: &Scan) {
    let mut found = Vec::new();
    for conflict in Claims::clusters(blobs.values(), &scan.geometry).conflicts() {
        let (a, b) = conflict.owners;
        let cluster = conflict.first;
        found.push((a, Problem::ClusterShared { cluster, other: b }));
        found.push((b, Problem::ClusterShared { cluster, other: a }));
    }
    for conflict in Claims::pages(blobs.values(), &scan.geometry).conflicts() {
        let (a, b) = conflict.owners;
        let page = conflict.first;
        found.push((a, Problem::PageShared { page, other: b }));
        found.push((b, Problem::PageShared { page, other: a }));
    }
    add_problems(blobs, found);
}

/// Follows parents: clones whose parents are missing, go round or cannot be opened get a problem. Every blob is
/// visited once.
pub(crate) fn check_parents(blobs: &mut Blobs) {
    let ids: Vec<BlobId> = blobs.keys().copied().collect();
    let mut done = BTreeSet::new();
    for start in ids {
        let (mut path, mut on_path, mut next) = (Vec::new(), HashMap::new(), Some(start));
        let mut found = Vec::new();
        while let Some(id) = next.filter(|id| !done.contains(id) && blobs.contains_key(id)) {
            if let Some(at) = on_path.get(&id) {
                found.extend(path[*at..].iter().map(|(id, parent)| (*id, Problem::ParentCycle(*parent))));
                break;
            }
            on_path.insert(id, path.len());
            next = match blobs.get(&id).and_then(|blob| blob.metadata.as_ref()).map(|m| m.parent()) {
                Some(Ok(Parent::Snapshot(parent))) => Some(parent),
                Some(Err(error)) => {
                    found.push((id, error.into()));
                    None
                }
                _ => None,
            };
            path.push((id, next.unwrap_or(BlobId::INVALID)));
        }
        add_problems(blobs, found);
        for (id, parent) in path.into_iter().rev() {
            let problem = match blobs.get(&parent) {
                _ if parent == BlobId::INVALID => None,
                None => Some(Problem::ParentMissing(parent)),
                Some(blob) if !blob.opens() => Some(Problem::ParentLost(parent)),
                Some(_) => None,
            };
            if let Some(problem) = problem
                && blobs.get(&id).is_some_and(Blob::opens)
            {
                add_problems(blobs, vec![(id, problem)]);
            }
            done.insert(id);
        }
    }
}

/// Lvols need names, which one alone may have; the first keeps it. So it is with UUIDs.
fn check_names(blobs: &mut Blobs, super_id: BlobId) -> Result<(), LvsError> {
    let (mut names, mut uuids, mut found) = (HashMap::new(), HashMap::new(), Vec::new());
    for blob in blobs.values().filter(|blob| blob.opens() && blob.id != super_id) {
        let Some(metadata) = &blob.metadata else { continue };
        let lvol = LvolNames::of(metadata)?;
        if let Some(other) = names.get(&lvol.name) {
            found.push((blob.id, Problem::SameName { name: lvol.name, other: *other }));
            continue;
        }
        if let Some(other) = uuids.get(&lvol.uuid).filter(|_| !lvol.uuid.is_nil()) {
            found.push((blob.id, Problem::SameUuid(*other)));
            continue;
        }
        uuids.insert(lvol.uuid, blob.id);
        names.insert(lvol.name, blob.id);
    }
    add_problems(blobs, found);
    check_parents(blobs);
    Ok(())
}

type Sorted = (BTreeMap<BlobId, Lvol>, Vec<Lost>);

fn sort_out(blobs: Blobs, kept: &BTreeSet<BlobId>, super_id: BlobId) -> Result<Sorted, LvsError> {
    let (mut lvols, mut lost) = (BTreeMap::new(), Vec::new());
    for (id, blob) in blobs.into_iter().filter(|(id, _)| *id != super_id) {
        let problem = blob.first_problem().cloned();
        match (problem, blob.metadata) {
            (Some(problem), metadata) => {
                let name = metadata.and_then(|m| m.xattr(NAME).map(name_text));
                lost.push(Lost { id, name, problem });
            }
            (None, Some(metadata)) => {
                // Both were parsed before; there is no blob for which that went wrong.
                let (names, parent) = (LvolNames::of(&metadata)?, metadata.parent().unwrap_or(Parent::None));
                let read_only = metadata.flags.metadata_is_read_only() || kept.contains(&id);
                let lvol = Lvol { id, names, read_only, parent, clones: Vec::new(), metadata, map: blob.map };
                lvols.insert(id, lvol);
            }
            (None, None) => {}
        }
    }
    let links: Vec<(BlobId, BlobId)> = lvols
        .values()
        .filter_map(|lvol| match lvol.parent {
            Parent::Snapshot(parent) => Some((parent, lvol.id)),
            _ => None,
        })
        .collect();
    for (parent, clone) in links {
        if let Some(parent) = lvols.get_mut(&parent) {
            parent.clones.push(clone);
        }
    }
    Ok((lvols, lost))
}
