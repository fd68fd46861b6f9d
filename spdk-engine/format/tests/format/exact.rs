//! Byte for byte what SPDK wrote: everything in the golden images that can be parsed is emitted to the same bytes.

use blobstore_format::extent::ExtentPage;
use blobstore_format::geometry::Plan;
use blobstore_format::image::{Blob, Scan};
use blobstore_format::lvs::{LvolNames, StoreNames};
use blobstore_format::metadata::chain;
use blobstore_format::{Geometry, MaskKind, MdPage, ReadAt, SuperBlock, mask};
use blobstore_golden::{Case, Class, Sparse, cases};

fn whole() -> impl Iterator<Item = &'static Case> {
    cases().iter().filter(|case| !case.is_damaged())
}

fn bytes(image: &Sparse, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    image.read_at(offset, &mut bytes).unwrap();
    bytes
}

#[test]
fn super_blocks_and_masks() {
    let mut masks = 0;
    for case in whole() {
        let image = case.image();
        let scan = Scan::read(&image, None).unwrap();
        let on_disk = bytes(&image, 0, 4096);
        assert_eq!(SuperBlock::parse(&on_disk).unwrap().emit(), on_disk, "{}", case.name);
        if !scan.super_block.masks_are_valid() {
            continue;
        }
        for kind in [MaskKind::Pages, MaskKind::Clusters, MaskKind::BlobIds] {
            let (offset, len) = scan.geometry.region_bytes(scan.geometry.mask(kind));
            let on_disk = bytes(&image, offset, len as usize);
            let emitted = mask::emit(kind, &scan.mask(&image, kind).unwrap(), len as usize).unwrap();
            assert_eq!(emitted, on_disk, "{}: {kind}", case.name);
            masks += 1;
        }
    }
    // All three masks of the 30 clean images: none was passed over.
    assert_eq!(masks, 90);
}

#[test]
fn geometry_of_a_new_store() {
    let mut planned = 0;
    for case in whole() {
        let image = case.image();
        let scan = Scan::read(&image, None).unwrap();
        let (sb, g) = (&scan.super_block, scan.geometry);
        // Made on a smaller device, or by an older version.
        if case.name.ends_with("grown") && !case.name.starts_with("esnap") || case.name.starts_with("crafted-old") {
            continue;
        }
        let plan = Plan {
            device_size: case.device_size,
            block_size: case.block_size,
            physical_block_size: case.block_size,
            cluster_size: sb.cluster_size,
            md_page_size: case.md_page_size,
            md_pages: sb.md_len,
        };
        let new = Geometry::plan(&plan).unwrap();
        assert_eq!(new, g, "{}", case.name);
        let mut made = new.super_block(sb.bstype);
        (made.clean, made.super_blob) = (sb.clean, sb.super_blob);
        assert_eq!(made.emit(), bytes(&image, 0, 4096), "{}", case.name);
        planned += 1;
    }
    assert!(planned > 50, "{planned}");
}

#[test]
fn a_grown_store() {
    for name in ["grown", "dirty-grown"] {
        let case = blobstore_golden::case(name);
        let scan = Scan::read(&case.image(), None).unwrap();
        let plan = Plan {
            device_size: 64 << 20,
            block_size: case.block_size,
            physical_block_size: case.block_size,
            cluster_size: scan.super_block.cluster_size,
            md_page_size: 0,
            md_pages: scan.super_block.md_len,
        };
        assert_eq!(Geometry::plan(&plan).unwrap().grown(case.device_size).unwrap(), scan.geometry, "{name}");
    }
}

#[test]
fn blobs_and_extent_pages() {
    let (mut blobs, mut chains, mut extent_pages) = (0, 0, 0);
    for case in whole() {
        let image = case.image();
        let scan = Scan::read(&image, None).unwrap();
        let page_at = |index: u32| bytes(&image, scan.geometry.page_offset(index), 4096);
        for id in scan.roots() {
            let blob = Blob::examine(&scan, id);
            assert_eq!(blob.problems, [], "{}", case.name);
            let mut pages = blob.metadata.as_ref().unwrap().emit().unwrap();
            chain(&mut pages, &blob.chain).unwrap();
            for (page, index) in pages.iter().zip(&blob.chain) {
                assert_eq!(page.emit(), page_at(*index), "{}: page {index} of blob {id}", case.name);
            }
            for index in &blob.extent_pages {
                let page = MdPage::parse(&page_at(*index)).unwrap();
                let emitted = ExtentPage::parse(&page).unwrap().emit(page.id).emit();
                assert_eq!(emitted, page_at(*index), "{}: extent page {index}", case.name);
            }
            blobs += 1;
            chains += usize::from(blob.chain.len() > 1);
            extent_pages += blob.extent_pages.len();
        }
    }
    // None was passed over; the chains are those of the two long tables.
    assert_eq!((blobs, chains, extent_pages), (708, 2, 1110));
}

#[test]
fn names_of_stores_and_new_lvols() {
    let mut named = 0;
    for case in whole().filter(|case| case.class != Class::Crafted && case.name != "renamed") {
        let scan = Scan::read(&case.image(), None).unwrap();
        for id in scan.roots() {
            let metadata = Blob::examine(&scan, id).metadata.unwrap();
            let made = if id == scan.super_block.super_blob {
                StoreNames::of(&metadata).unwrap().xattrs().unwrap()
            } else {
                LvolNames::of(&metadata).unwrap().xattrs().unwrap()
            };
            assert_eq!(made, metadata.xattrs, "{}: blob {id}", case.name);
            named += 1;
        }
    }
    assert!(named > 600, "{named}");
}
