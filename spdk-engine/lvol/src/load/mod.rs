//! Opening a store: reading its metadata, checking it, ending what a crash cut short, and working out what is used.
//!
//! Steps: super block → masks (after an orderly end) or a scan for root pages (after a crash) → chains → extent pages →
//! repair of snapshots in the making or in deletion → parents → claims: who uses which page and cluster.
//!
//! Nothing is written before the whole store has been read and found usable; then only the repairs are. The masks on disk
//! are not: they count only after an orderly end, which writes them. A load that is cut short is simply done again.
//!
//! Time and memory follow the metadata in use. After a crash the metadata region is read once, in large pieces, skipping
//! what the device knows to be holes; what is unused in it is looked at, not kept.
//!
//! # Damage
//! * After an orderly end, a blob whose metadata is damaged is left out, with all its descendants, and reported. What it
//!   names stays reserved, so that nothing of it is overwritten.
//! * After a crash, a damaged root page is as if it were not there; a damaged extent page, an unknown descriptor or a ring
//!   of chain pages makes the store as a whole unusable, because nobody can tell which clusters are free.
//! * Blobs that claim the same cluster or page are left out, all of them.
//! * An lvol without name, or a store without super blob, makes the store unusable.

mod build;
mod check;
mod extents;
mod repair;
mod roots;

use crate::{
    device::Device,
    error::Error,
    hooks::Hooks,
    map::Table,
    store::{Inner, check_blocks, read_label, read_mask},
    types::*,
};
use blobstore_format::{Bits, Geometry, MaskKind, Metadata, SuperBlock, mask, metadata::Parent};
use std::{collections::BTreeMap, rc::Rc};

/// A blob while its store is being loaded.
pub(crate) struct Loading {
    pub(crate) id: BlobId,
    pub(crate) md: Metadata,
    pub(crate) table: Table,
    pub(crate) table_mode: bool,
    pub(crate) extent_pages: Vec<u32>,
    pub(crate) chain: Vec<u32>,
    pub(crate) parent: Parent,
    /// Chunks whose page has another number of entries than the blob's size asks for.
    pub(crate) odd_chunks: Vec<usize>,
}

/// What is known so far.
pub(crate) struct Loader<'a> {
    pub(crate) device: Rc<dyn Device>,
    pub(crate) super_block: SuperBlock,
    pub(crate) geometry: Geometry,
    /// The masks on disk can be trusted.
    pub(crate) clean: bool,
    /// They were not to be trusted, by request.
    pub(crate) forced: bool,
    pub(crate) masks: Masks,
    pub(crate) blobs: BTreeMap<BlobId, Loading>,
    pub(crate) damaged: BTreeMap<BlobId, DamagedBlob>,
    pub(crate) repaired: Vec<String>,
    pub(crate) progress: &'a dyn Fn(LoadProgress),
}

/// What is used.
pub(crate) struct Masks {
    pub(crate) pages: Bits,
    pub(crate) clusters: Bits,
    pub(crate) blobids: Bits,
}

/// Opens the store.
pub(crate) async fn load(
    device: Rc<dyn Device>,
    hooks: Rc<dyn Hooks>,
    options: LoadOptions,
    progress: &dyn Fn(LoadProgress),
) -> Result<(Inner, LoadReport), Error> {
    let super_block = read_label(&*device).await?;
    let geometry =
        Geometry::of(&super_block, device.size_bytes()).map_err(|e| Error::Damaged(format!("super block: {e}")))?;
    check_blocks(&device, &geometry)?;
    let clean = super_block.masks_are_valid() && !options.force_recovery;
    let masks = if clean { read_masks(&*device, &geometry).await? } else { Masks::empty(&geometry) };
    let mut loader = Loader {
        device,
        super_block,
        geometry,
        clean,
        forced: options.force_recovery,
        masks,
        blobs: BTreeMap::new(),
        damaged: BTreeMap::new(),
        repaired: Vec::new(),
        progress,
    };
    loader.read_blobs().await?;
    loader.read_extents().await?;
    let repairs = loader.plan_repairs();
    loader.check_parents();
    loader.check_claims();
    loader.check_names()?;
    loader.finish(hooks, repairs).await
}

async fn read_masks(device: &dyn Device, geometry: &Geometry) -> Result<Masks, Error> {
    let mut all = Vec::with_capacity(3);
    for kind in [MaskKind::Pages, MaskKind::Clusters, MaskKind::BlobIds] {
        let bytes = read_mask(device, geometry, kind).await?;
        let bits = mask::parse(kind, &bytes, geometry.mask_bits(kind)).map_err(|e| Error::Damaged(e.to_string()))?;
        all.push(bits);
    }
    let mut all = all.into_iter();
    let mut next = |len| all.next().unwrap_or_else(|| Bits::new(len));
    Ok(Masks { pages: next(geometry.md_len), clusters: next(geometry.total_clusters), blobids: next(geometry.md_len) })
}

impl Masks {
    fn empty(geometry: &Geometry) -> Self {
        Self {
            pages: Bits::new(geometry.md_len),
            clusters: Bits::new(geometry.total_clusters),
            blobids: Bits::new(geometry.md_len),
        }
    }
}

impl Loader<'_> {
    pub(crate) fn report(&self, stage: LoadStage, done: u64, total: u64) {
        (self.progress)(LoadProgress { stage, done, total });
    }

    /// Leaves a blob out. What it names stays reserved.
    pub(crate) fn leave_out(&mut self, id: BlobId, reason: impl Into<String>) {
        let name = self.blobs.get(&id).and_then(|blob| name_of(&blob.md));
        let reason = reason.into();
        self.damaged.entry(id).or_insert(DamagedBlob { id, name, reason });
    }

    /// Whether a blob is (still) usable.
    pub(crate) fn usable(&self, id: BlobId) -> bool {
        self.blobs.contains_key(&id) && !self.damaged.contains_key(&id)
    }
}

pub(crate) fn name_of(md: &Metadata) -> Option<String> {
    md.xattr(blobstore_format::lvs::NAME).map(blobstore_format::lvs::name_text)
}
