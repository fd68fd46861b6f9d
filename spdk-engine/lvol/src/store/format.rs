//! Making a store, and wiping one.
//!
//! Sequence: super block zeroed → flush (a store that was there is gone, whole) → metadata region zeroed → the rest
//! cleared as asked → flush → super blob, with name and UUID → flush → super block → flush. Before the last write there is
//! no store, after it there is.

use super::{Inner, Phase, State, Store, disk::check_blocks, write_super};
use crate::{
    alloc::{Clusters, Pages},
    blob::Blob,
    device::Device,
    error::Error,
    hooks::Hooks,
    map::{Backing, Table},
    types::*,
};
use blobstore_format::{
    Bits, Geometry, Metadata,
    extent::ExtentTable,
    geometry::{GeometryError, Plan},
    lvs::{self, StoreNames},
    metadata::{Extents, Parent},
    superblock::BsType,
};
use std::{
    collections::{BTreeMap, HashMap},
    rc::Rc,
};

/// Bytes that one request clears at most.
const PIECE: u64 = 1 << 30;

impl Store {
    /// Makes a new store; what was on the device is lost. The super block comes last, so that a half-made store is none.
    ///
    /// Errors: [`Error::Invalid`] for sizes and names, [`Error::NoSpace`] when metadata alone would fill the device.
    pub async fn format(device: Rc<dyn Device>, hooks: Rc<dyn Hooks>, options: FormatOptions) -> Result<Self, Error> {
        let geometry = plan(&device, &options)?;
        let names = StoreNames { name: options.name.clone(), uuid: options.uuid };
        let mut md = Metadata::new(BlobId::from_page(0), false);
        md.xattrs = names.xattrs().map_err(|e| Error::Invalid(e.to_string()))?;
        let mut super_block = geometry.super_block(BsType::LVOLSTORE);
        super_block.super_blob = md.id;

        wipe_super(&*device, &geometry).await?;
        let zeroed = clear(&*device, &geometry, options.clear_method).await?;
        flush(&*device).await?;
        let mut page = md.emit().map_err(|e| Error::Invalid(e.to_string()))?.swap_remove(0).emit();
        page.resize(geometry.md_page_size as usize, 0);
        device.write(geometry.page_offset(0), &page).await?;
        flush(&*device).await?;
        write_super(&*device, &super_block).await?;
        flush(&*device).await?;

        let mut pages = Bits::new(geometry.md_len);
        pages.set(0);
        let mut clusters = Clusters::new(geometry.total_clusters, geometry.md_clusters());
        if zeroed {
            clusters.all_free_are_zeroed();
        }
        md.extents = Extents::Table(ExtentTable::default());
        let super_blob = Blob::new(md, Table::new(0, Backing::Zeroes), true, Vec::new(), vec![0], Parent::None);
        let state = State {
            geometry,
            super_block,
            dirty: true,
            uncertain: false,
            clusters,
            pages: Pages::from_used(pages.clone()),
            blobids: pages,
            super_blob: Rc::new(super_blob),
            blobs: BTreeMap::new(),
            names: HashMap::new(),
            uuids: HashMap::new(),
            externals: HashMap::new(),
            name: options.name,
            uuid: options.uuid,
        };
        Ok(Self { inner: Rc::new(Inner::new(device, hooks, state)) })
    }

    /// Zeroes the super block, then clears what the volumes used.
    pub(super) async fn wipe(&self) -> Result<(), Error> {
        let inner = &self.inner;
        debug_assert_eq!(inner.phase.get(), Phase::Unloading);
        wipe_super(&*inner.device, &inner.geometry()).await?;
        let blobs: Vec<_> = inner.state.borrow().blobs.values().cloned().collect();
        for blob in blobs {
            blob.removed.set(true);
            let clusters = blob.map.table().allocated().map(|(_, at)| at).collect();
            inner.retire_clusters(clusters, blob.clear_method()).await;
        }
        Ok(())
    }
}

/// Where everything will lie.
fn plan(device: &Rc<dyn Device>, options: &FormatOptions) -> Result<Geometry, Error> {
    if options.cluster_size == 0 {
        return Err(Error::Invalid("the cluster size is 0; a multiple of 4096 is needed".into()));
    }
    let total = u32::try_from(device.size_bytes() / u64::from(options.cluster_size))
        .map_err(|_| Error::Invalid("the device has more than 2^32 clusters".into()))?;
    let plan = Plan {
        device_size: device.size_bytes(),
        block_size: device.block_size(),
        physical_block_size: device.physical_block_size(),
        cluster_size: options.cluster_size,
        md_page_size: options.md_page_size,
        md_pages: lvs::md_pages(options.md_pages_per_cluster_ratio, total),
    };
    let geometry = Geometry::plan(&plan).map_err(|error| match error {
        GeometryError::Metadata { .. } => Error::NoSpace("metadata takes the whole device"),
        error => Error::Invalid(error.to_string()),
    })?;
    check_blocks(device, &geometry)?;
    Ok(geometry)
}

/// Clears the device; answers whether all of it reads as zeroes now.
async fn clear(device: &dyn Device, geometry: &Geometry, method: ClearMethod) -> Result<bool, Error> {
    let metadata = geometry.page_offset(0) + u64::from(geometry.md_len) * u64::from(geometry.md_page_size);
    let block = u64::from(device.block_size());
    let end = device.size_bytes() / block * block;
    for (offset, len) in split(0, metadata) {
        device.write_zeroes(offset, len).await?;
    }
    match method {
        ClearMethod::None => Ok(false),
        ClearMethod::Default | ClearMethod::Unmap if !device.can_unmap() => Ok(false),
        ClearMethod::Default | ClearMethod::Unmap => {
            for (offset, len) in split(metadata, end) {
                device.unmap(offset, len).await?;
            }
            Ok(device.unmap_reads_zeroes())
        }
        ClearMethod::WriteZeroes => {
            for (offset, len) in split(metadata, end) {
                device.write_zeroes(offset, len).await?;
            }
            Ok(true)
        }
    }
}

fn split(start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
    (start..end).step_by(PIECE as usize).map(move |at| (at, PIECE.min(end - at)))
}

async fn wipe_super(device: &dyn Device, geometry: &Geometry) -> Result<(), Error> {
    device.write(0, &vec![0; geometry.md_page_size as usize]).await?;
    flush(device).await
}

async fn flush(device: &dyn Device) -> Result<(), Error> {
    if device.write_cache() { Ok(device.flush().await?) } else { Ok(()) }
}
