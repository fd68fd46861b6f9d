//! What is emitted is parsed to the same, and what is parsed is emitted to the same bytes.

use blobstore_format::descriptor::{Flags, Xattr};
use blobstore_format::extent::{ExtentPage, ExtentTable, Run, TableRun, pages_for, push_run};
use blobstore_format::metadata::{Extents, Reading, UnknownDescriptor, chain};
use blobstore_format::raid::{Level, Member, MemberState, RaidSuperblock};
use blobstore_format::superblock::{BsType, Region};
use blobstore_format::{Bits, BlobId, MaskKind, MdPage, Metadata, SuperBlock, mask};
use proptest::prelude::*;
use uuid::Uuid;

fn xattrs() -> impl Strategy<Value = Vec<Xattr>> {
    let name = prop::collection::vec(1u8..=255, 0..40);
    let value = prop_oneof![prop::collection::vec(any::<u8>(), 0..70), prop::collection::vec(any::<u8>(), 3000..4020)];
    prop::collection::vec((name, value), 0..5)
        .prop_map(|all| all.into_iter().map(|(name, value)| Xattr { name, value }).collect())
}

fn table(entries: usize) -> impl Strategy<Value = Extents> {
    let runs =
        prop::collection::vec(prop_oneof![Just((0, 1)), (Just(0), 1u32..3000), (1u32..9999, Just(1))], 0..entries);
    (runs, 0u64..512).prop_map(|(runs, short)| {
        let mut table = ExtentTable::default();
        runs.into_iter().for_each(|(page, count)| table.push(TableRun { page, count }));
        table.num_clusters = (table.len() * 512).saturating_sub(short);
        Extents::Table(table)
    })
}

fn rle(entries: usize) -> impl Strategy<Value = Extents> {
    prop::collection::vec((0u32..50, 1u32..9), 0..entries).prop_map(|all| {
        let mut runs = Vec::new();
        all.into_iter().for_each(|(cluster, length)| push_run(&mut runs, Run { cluster, length }));
        Extents::Runs(runs)
    })
}

prop_compose! {
    fn metadata()(
        page: u32,
        ro in any::<(u64, u64)>(),
        xattrs in xattrs(),
        internal_xattrs in xattrs(),
        unknown in prop::collection::vec((7u8..=255, prop::collection::vec(any::<u8>(), 0..30)), 0..3),
        extents in prop_oneof![table(4), table(2000), rle(4), rle(2000)],
    ) -> Metadata {
        let unknown = unknown.into_iter().map(|(kind, payload)| UnknownDescriptor { kind, payload }).collect();
        let flags = Flags { invalid: Flags::THIN, data_ro: ro.0, md_ro: ro.1 };
        Metadata { id: BlobId::from_page(page), flags, xattrs, internal_xattrs, unknown, extents }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn metadata_comes_back(blob in metadata()) {
        let mut pages = blob.emit().unwrap();
        let places: Vec<u32> = (0..pages.len() as u32).map(|i| i * 3 + 7).collect();
        chain(&mut pages, &places).unwrap();
        let read: Vec<MdPage> = pages.iter().map(|p| MdPage::parse(&p.emit()).unwrap()).collect();
        prop_assert_eq!(&read, &pages);
        for (page, next) in read.iter().zip(places.iter().skip(1)) {
            prop_assert_eq!(page.next, *next);
        }
        prop_assert_eq!(Metadata::parse(blob.id, &read, Reading::Load).unwrap(), blob);
    }

    #[test]
    fn extent_pages_come_back(start: u32, clusters in prop::collection::vec(any::<u32>(), 1..=512), id: u64) {
        let extents = ExtentPage { start_cluster: start, clusters };
        let page = MdPage::parse(&extents.emit(BlobId(id)).emit()).unwrap();
        prop_assert_eq!(ExtentPage::parse(&page).unwrap(), extents);
    }

    #[test]
    fn super_blocks_come_back(fields in any::<[u32; 12]>(), size: u64, blob: u64, kind: [u8; 16], junk: u8) {
        let mut sb = SuperBlock::new(BsType(kind));
        sb.super_blob = BlobId(blob);
        sb.size = size;
        sb.used_page_mask = Region { start: fields[0], len: fields[1] };
        sb.used_cluster_mask = Region { start: fields[2], len: fields[3] };
        sb.used_blobid_mask = Region { start: fields[4], len: fields[5] };
        [sb.md_start, sb.md_len, sb.cluster_size, sb.io_unit_size, sb.md_page_size, sb.clean] =
            [fields[6], fields[7], fields[8], fields[9], fields[10], fields[11]];
        let mut bytes = sb.emit();
        prop_assert_eq!(SuperBlock::parse(&bytes).unwrap(), sb);
        // A reserved byte of a later version is kept.
        bytes[2000] = junk;
        let crc = blobstore_format::crc::blobstore(&bytes[..4092]);
        bytes[4092..].copy_from_slice(&crc.to_le_bytes());
        let sb = SuperBlock::parse(&bytes).unwrap();
        prop_assert_eq!(sb.reserved_is_used(), junk != 0);
        prop_assert_eq!(sb.emit(), bytes);
    }

    #[test]
    fn masks_come_back(len in 0u32..70000, set in prop::collection::vec(any::<u32>(), 0..40)) {
        let mut bits = Bits::new(len);
        set.into_iter().for_each(|n| { bits.set(n % len.max(1)); });
        let room = mask::bytes_for(len).next_multiple_of(4096) as usize;
        for kind in [MaskKind::Pages, MaskKind::Clusters, MaskKind::BlobIds] {
            let bytes = mask::emit(kind, &bits, room).unwrap();
            prop_assert_eq!(mask::parse(kind, &bytes, len).unwrap(), bits.clone());
        }
    }

    #[test]
    fn raid_superblocks_come_back(
        name in "[a-zA-Z0-9_é]{1,31}", seq: u64, members in prop::collection::vec(any::<(u128, u64, u64, u8)>(), 1..255),
    ) {
        let places = members.len() as u8;
        let states = [MemberState::Missing, MemberState::Configured, MemberState::Failed, MemberState::Spare];
        let members = members.into_iter().map(|(uuid, offset, size, pick)| {
            Member::new(Uuid::from_u128(uuid), offset, size, states[usize::from(pick % 4)], pick % places)
        });
        let mut sb = RaidSuperblock::new(Uuid::from_u128(1), name, Level::Raid1, 512, 0, members.collect());
        sb.seq_number = seq;
        let bytes = sb.emit().unwrap();
        let read = RaidSuperblock::parse(&bytes).unwrap();
        prop_assert_eq!(read.emit().unwrap(), bytes);
        prop_assert_eq!(read, sb);
    }
}

#[test]
fn a_table_has_an_entry_for_each_512_clusters() {
    let table = ExtentTable::from_pages(1300, [3, 0, 0]);
    assert_eq!(table.runs, [TableRun { page: 3, count: 1 }, TableRun { page: 0, count: 2 }]);
    assert_eq!((table.len(), pages_for(1300)), (3, 3));
    assert_eq!(table.pages().collect::<Vec<_>>(), [3, 0, 0]);
    assert_eq!(table.allocated().collect::<Vec<_>>(), [(0, 3)]);
}
