//! The store that images are made from: small, with a blob of every kind.

use std::ops::Range;

use blobstore_format::descriptor::Flags;
use blobstore_format::extent::{ExtentPage, ExtentTable, Run};
use blobstore_format::geometry::Plan;
use blobstore_format::lvs::{LvolNames, StoreNames};
use blobstore_format::metadata::{Extents, chain, internal};
use blobstore_format::superblock::BsType;
use blobstore_format::{Bits, BlobId, Geometry, MaskKind, Metadata, mask};
use uuid::Uuid;

const CLUSTER: u32 = 16 << 10;
const MD_PAGES: u32 = 28;
const CLUSTERS: u32 = 64;
/// Bytes of super block, masks and metadata pages.
pub const METADATA: usize = (4 + MD_PAGES as usize) * 4096;
/// The pages of the masks.
pub const MASKS: Range<usize> = 1..4;

struct Builder {
    geometry: Geometry,
    image: Vec<u8>,
    pages: Bits,
    clusters: Bits,
    blobids: Bits,
}

impl Builder {
    fn put(&mut self, index: u32, page: &[u8]) {
        let at = self.geometry.page_offset(index) as usize;
        self.image[at..at + page.len()].copy_from_slice(page);
        self.pages.set(index);
    }

    fn blob(&mut self, blob: &Metadata, further: &[u32]) {
        let root = blob.id.page().expect("a blob of the base has a page");
        let places: Vec<u32> = std::iter::once(root).chain(further.iter().copied()).collect();
        let mut pages = blob.emit().expect("the base's blobs fit");
        chain(&mut pages, &places).expect("every page of the base has a place");
        for (page, place) in pages.iter().zip(&places) {
            self.put(*place, &page.emit());
        }
        self.blobids.set(root);
    }

    /// An extent page with these clusters, and the table that names it.
    fn extents(&mut self, id: BlobId, page: u32, clusters: &[u32]) -> Extents {
        let extents = ExtentPage { start_cluster: 0, clusters: clusters.to_vec() };
        self.put(page, &extents.emit(id).emit());
        for cluster in clusters.iter().filter(|cluster| **cluster != 0) {
            self.clusters.set(*cluster);
        }
        Extents::Table(ExtentTable::from_pages(clusters.len() as u64, [page]))
    }
}

fn lvol(page: u32, name: &str, thin: bool) -> Metadata {
    let mut blob = Metadata::new(BlobId::from_page(page), thin);
    let names = LvolNames { name: name.to_owned(), uuid: Uuid::from_u128(u128::from(page) + 77) };
    blob.xattrs = names.xattrs().expect("the base's names are allowed");
    blob
}

/// The store, unloaded in order or not.
pub fn store(clean: bool) -> Vec<u8> {
    let plan = Plan {
        device_size: u64::from(CLUSTER * CLUSTERS),
        block_size: 512,
        physical_block_size: 512,
        cluster_size: CLUSTER,
        md_page_size: 0,
        md_pages: MD_PAGES,
    };
    let geometry = Geometry::plan(&plan).expect("the base's numbers fit");
    let mut b = Builder {
        geometry,
        image: vec![0; plan.device_size as usize],
        pages: Bits::new(MD_PAGES),
        clusters: Bits::new(CLUSTERS),
        blobids: Bits::new(MD_PAGES),
    };
    (0..geometry.md_clusters()).for_each(|cluster| {
        b.clusters.set(cluster);
    });
    let mut store = Metadata::new(BlobId::from_page(0), false);
    let names = StoreNames { name: "base".to_owned(), uuid: Uuid::from_u128(1) };
    store.xattrs = names.xattrs().expect("the base's name is allowed");
    b.blob(&store, &[]);

    let mut thick = lvol(1, "thick", false);
    thick.extents = b.extents(thick.id, 2, &[10, 11, 12]);
    b.blob(&thick, &[]);

    let mut snapshot = lvol(3, "snapshot", true);
    snapshot.flags.data_ro = Flags::READ_ONLY;
    snapshot.extents = b.extents(snapshot.id, 4, &[20, 0, 22, 21]);
    b.blob(&snapshot, &[]);

    let mut clone = lvol(5, "clone", true);
    clone.set_internal_id(internal::SNAPSHOT, snapshot.id);
    clone.extents = b.extents(clone.id, 6, &[0, 30, 0, 0, 31]);
    b.blob(&clone, &[]);

    let mut old = lvol(7, "old", true);
    old.flags.invalid &= !Flags::EXTENT_TABLE;
    old.extents = Extents::Runs(vec![Run { cluster: 40, length: 3 }, Run { cluster: 0, length: 5 }]);
    (40..43).for_each(|cluster| {
        b.clusters.set(cluster);
    });
    b.blob(&old, &[]);

    // Too long for one page.
    let mut long = lvol(8, "long", true);
    long.set_xattr("big", vec![7; 3000]);
    long.set_xattr("also-big", vec![8; 3000]);
    b.blob(&long, &[9]);

    // Its map is already that of the blob it is made of.
    let mut unfinished = lvol(10, "unfinished", true);
    unfinished.set_internal_id(internal::SNAPSHOT_IN_PROGRESS, thick.id);
    b.blob(&unfinished, &[]);
    finish(b, clean)
}

fn finish(mut b: Builder, clean: bool) -> Vec<u8> {
    let g = b.geometry;
    for (kind, bits) in
        [(MaskKind::Pages, &b.pages), (MaskKind::Clusters, &b.clusters), (MaskKind::BlobIds, &b.blobids)]
    {
        let (offset, len) = g.region_bytes(g.mask(kind));
        let bytes = mask::emit(kind, bits, len as usize).expect("the base's masks fit");
        b.image[offset as usize..(offset + len) as usize].copy_from_slice(&bytes);
    }
    let mut sb = g.super_block(BsType::LVOLSTORE);
    sb.clean = u32::from(clean);
    sb.super_blob = BlobId::from_page(0);
    b.image[..4096].copy_from_slice(&sb.emit());
    b.image
}
