//! What the fuzz targets do with their input. The crate's own tests run the same on the kept seeds and on changes of
//! them, so that every test run covers the targets without a fuzzer. Each tells whether its input was accepted.
#![allow(dead_code)]

mod base;

use blobstore_format::check::{Outcome, Severity, check};
use blobstore_format::dump::dump;
use blobstore_format::extent::ExtentPage;
use blobstore_format::image::{Image, Mode};
use blobstore_format::metadata::Reading;
use blobstore_format::raid::{self, RaidSuperblock};
use blobstore_format::{Geometry, MaskKind, MdPage, Metadata, SuperBlock, crc};

thread_local! {
    /// The base store, unloaded in order and not.
    static BASES: [Vec<u8>; 2] = [base::store(true), base::store(false)];
}
/// Bytes of the device that super blocks are read for.
const DEVICE: u64 = 64 << 20;

/// A page of input: zeroes after its end, and a valid CRC at its end unless the input is as long as the page.
fn page_of(bytes: &[u8]) -> Vec<u8> {
    let mut page = bytes[..bytes.len().min(4096)].to_vec();
    if page.len() < 4096 {
        page.resize(4096, 0);
        fix_crc(&mut page);
    }
    page
}

fn fix_crc(page: &mut [u8]) {
    let crc = crc::blobstore(&page[..4092]);
    page[4092..4096].copy_from_slice(&crc.to_le_bytes());
}

/// A super block.
pub fn super_block(bytes: &[u8]) -> bool {
    let page = page_of(bytes);
    let Ok(sb) = SuperBlock::parse(&page) else { return false };
    assert_eq!(sb.emit(), page);
    let Ok(g) = Geometry::of(&sb, DEVICE) else { return false };
    assert!(g.size <= DEVICE && g.md_clusters() <= g.total_clusters);
    assert!(g.page_offset(g.md_len - 1) + u64::from(g.md_page_size) <= g.size);
    assert!(g.cluster_offset(g.total_clusters) <= g.size);
    for kind in [MaskKind::Pages, MaskKind::Clusters, MaskKind::BlobIds] {
        let (offset, len) = g.region_bytes(g.mask(kind));
        assert!(g.mask(kind).len == 0 || offset + len <= g.size);
    }
    if let Ok(grown) = g.grown(DEVICE * 3) {
        assert!(grown.used_cluster_mask.len <= g.cluster_mask_room);
    }
    true
}

/// A metadata page, as a blob's only one and as an extent page.
pub fn page(bytes: &[u8]) -> bool {
    let bytes = page_of(bytes);
    let Ok(page) = MdPage::parse(&bytes) else { return false };
    assert_eq!(page.emit(), bytes);
    let _ = format!("{page:?}");
    if let Ok(extents) = ExtentPage::parse(&page) {
        assert_eq!(ExtentPage::parse(&extents.emit(page.id)).as_ref(), Ok(&extents));
    }
    let _ = Metadata::parse(page.id, std::slice::from_ref(&page), Reading::Replay);
    let Ok(blob) = Metadata::parse(page.id, std::slice::from_ref(&page), Reading::Load) else { return false };
    let pages = blob.emit().expect("what came from a page fits into pages");
    assert_eq!(Metadata::parse(blob.id, &pages, Reading::Load), Ok(blob));
    true
}

/// A small store with parts of its metadata overwritten. The input is a byte of options and then any number of changes:
/// place (two bytes, times 4), length (one byte), contents.
pub fn image(input: &[u8]) -> bool {
    let Some((options, mut rest)) = input.split_first() else { return false };
    let mut image = BASES.with(|bases| bases[usize::from(options & 1)].clone());
    while let Some((head, tail)) = rest.split_at_checked(3) {
        let at = usize::from(u16::from_le_bytes([head[0], head[1]])) * 4 % base::METADATA;
        let (part, more) = tail.split_at(usize::from(head[2]).min(tail.len()));
        let end = (at + part.len()).min(base::METADATA);
        image[at..end].copy_from_slice(&part[..end - at]);
        rest = more;
    }
    if options & 2 == 0 {
        image[..base::METADATA].chunks_exact_mut(4096).enumerate().for_each(|(i, page)| {
            // Masks have no CRC, and empty pages stay empty.
            if !base::MASKS.contains(&i) && page.iter().any(|b| *b != 0) {
                fix_crc(page);
            }
        });
    }
    look_at(&image)
}

fn look_at(image: &[u8]) -> bool {
    let Ok(report) = check(image) else { return false };
    let _ = report.to_string();
    if let Ok(dump) = dump(image) {
        let _ = dump.to_string();
    }
    for mode in [Mode::AsMarked, Mode::Recover] {
        let opened = Image::open(image, mode);
        if let Ok(opened) = &opened {
            whole(opened);
        }
        if mode == Mode::AsMarked {
            // What the checker finds nothing wrong with opens as a whole.
            let errors = report.count(Severity::Error);
            let opens = matches!(report.outcome, Outcome::Opens { lost: 0, .. });
            assert!(opens || errors > 0, "{report}");
            assert_eq!(matches!(report.outcome, Outcome::Opens { .. }), opened.is_ok());
        }
    }
    matches!(report.outcome, Outcome::Opens { .. })
}

/// What opens can be read, and no two lvols have a cluster in common.
fn whole(image: &Image<&[u8]>) {
    let mut owned = blobstore_format::Bits::new(image.geometry.total_clusters);
    for lvol in image.lvols() {
        for (_, run) in lvol.map.allocated() {
            assert!(run.cluster >= image.geometry.md_clusters());
            for cluster in run.cluster..run.cluster + run.length {
                assert!(owned.set(cluster), "cluster {cluster} has two owners");
            }
        }
        let size = image.size(lvol);
        let mut buf = [0; 512];
        for offset in [0, size / 2, size.saturating_sub(512)] {
            let _ = image.read(lvol.id, offset, &mut buf, &());
        }
    }
    assert!(owned.count() + image.free_clusters <= image.geometry.data_clusters());
}

/// A RAID superblock; shorter input is filled up to what it says to be its length.
pub fn raid(bytes: &[u8]) -> bool {
    let mut bytes = bytes.to_vec();
    if bytes.len() >= raid::HEADER
        && let Ok(need) = RaidSuperblock::length(&bytes)
        && bytes.len() < need
    {
        bytes.resize(need, 0);
        bytes[16..20].fill(0);
        let crc = crc::raid(&bytes);
        bytes[16..20].copy_from_slice(&crc.to_le_bytes());
    }
    let Ok(sb) = RaidSuperblock::parse(&bytes) else { return false };
    let length = RaidSuperblock::length(&bytes).expect("what was parsed has a length");
    assert_eq!(sb.emit().expect("what was parsed can be emitted"), bytes[..length]);
    true
}
