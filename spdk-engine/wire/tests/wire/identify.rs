//! The values a target reports, against bytes seen from an SPDK target.

use nvme_wire::identify::{ControllerData, DiscoveryController, IoController};
use nvme_wire::namespace::{
    LbaFormat, Namespace, NamespaceData, NamespaceIds, encode_namespace_list, parse_namespace_list,
};
use nvme_wire::{DISCOVERY_NQN, Nqn};
use proptest::prelude::*;
use uuid::Uuid;

fn expect(bytes: &[u8], values: &[(usize, &[u8])]) {
    for (offset, value) in values {
        assert_eq!(&bytes[*offset..offset + value.len()], *value, "byte {offset}");
    }
}

#[test]
fn io_controller_reports_what_spdk_reports() {
    let params = IoController {
        serial: "SN1",
        subnqn: "nqn.2026-11.io.addax:volume:a",
        cntlid: 0x0102,
        ana: true,
        crdt: [1, 2, 3],
        ..IoController::default()
    };
    let bytes = params.build().unwrap().encode();
    expect(
        &bytes,
        &[
            (0, &[0x86, 0x80, 0x86, 0x80]),
            (4, b"SN1                 SPDK bdev Controller                    26.09   "),
            (72, &[6, 0xE4, 0xD2, 0x5C, 0x0B, 5, 2, 1]),
            (80, &[0, 0, 2, 0]),
            (92, &[0, 9, 0, 0, 1, 0, 0, 0]),
            (111, &[1]),
            (128, &[1, 0, 2, 0, 3, 0]),
            (256, &[0, 0, 3, 3, 3, 0x26, 127, 0]),
            (266, &[0x57, 1, 0x75, 1]),
            (320, &[100, 0]),
            (342, &[10, 0x47, 32, 0, 0, 0, 32, 0, 0, 0]),
            (512, &[0x66, 0x44, 128, 0, 32, 0, 0, 0, 0x2D, 1, 1, 0, 0, 5]),
            (532, &[0, 0, 1, 0, 5, 0, 0x10, 0, 32, 0, 0, 0]),
            (768, b"nqn.2026-11.io.addax:volume:a\0"),
            (1792, &[4, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0]),
        ],
    );
    let data = ControllerData::parse(&bytes).unwrap();
    assert_eq!((data.sn.as_str(), data.mn.as_str(), data.fr.as_str()), ("SN1", "SPDK bdev Controller", "26.09"));
    assert_eq!((data.max_transfer(), data.in_capsule_data()), (Some(131_072), 4096));
    assert!(data.has_ana() && data.has_write_cache());
    assert_eq!(Nqn::from_field(data.subnqn.as_bytes()).unwrap().as_str(), params.subnqn);
}

#[test]
fn without_ana_and_write_cache() {
    let data = IoController { write_cache: false, ..IoController::default() }.build().unwrap();
    assert_eq!((data.cmic, data.oaes, data.vwc, data.mnan), (0x03, 0x100, 0x4, 0));
    assert_eq!((data.anatt, data.anacap, data.anagrpmax, data.nanagrpid), (0, 0, 0, 0));
    assert!(!data.has_ana() && !data.has_write_cache());
}

#[test]
fn texts_that_do_not_fit_are_refused() {
    assert!(IoController { serial: "123456789012345678901", ..IoController::default() }.build().is_err());
    assert!(IoController { model: &"m".repeat(41), ..IoController::default() }.build().is_err());
    assert!(IoController { firmware: "123456789", ..IoController::default() }.build().is_err());
    assert!(DiscoveryController { firmware: "123456789", ..DiscoveryController::default() }.build().is_err());
}

#[test]
fn discovery_controller_has_no_identity() {
    let data = DiscoveryController { cntlid: 9, ..DiscoveryController::default() }.build().unwrap();
    assert_eq!((data.vid, data.kas, data.cntrltype, data.oaes), (0, 0, 2, 0x8000_0000));
    assert_eq!((data.sn.as_bytes(), data.mn.as_bytes()), (&[0; 20], &[0; 40]));
    assert_eq!((data.lpa, data.mdts, data.maxcmd, data.cntlid), (0x04, 5, 128, 9));
    assert_eq!(data.subnqn.as_str(), DISCOVERY_NQN);
    assert!(!data.has_write_cache());
}

#[test]
fn transfer_limits() {
    let with = |mdts| ControllerData { mdts, ..ControllerData::default() }.max_transfer();
    assert_eq!((with(0), with(1), with(5)), (None, Some(8192), Some(131_072)));
    assert_eq!((with(51), with(52), with(255)), (Some(1 << 63), None, None));
    let mdts = |max_io_size| IoController { max_io_size, ..IoController::default() }.build().unwrap().mdts;
    assert_eq!((mdts(8192), mdts(131_072), mdts(1 << 20), mdts(1)), (1, 5, 8, 0));
    assert_eq!(ControllerData { ioccsz: 3, ..ControllerData::default() }.in_capsule_data(), 0);
}

#[test]
fn namespace_reports_what_spdk_reports() {
    let namespace = Namespace { blocks: 0x0102_0304, nguid: [7; 16], anagrpid: 1, ..Namespace::default() };
    let data = namespace.build();
    assert_eq!((data.nsze, data.ncap, data.nuse), (0x0102_0304, 0x0102_0304, 0x0102_0304));
    assert_eq!((data.nsfeat, data.nlbaf, data.flbas, data.nmic, data.rescap), (0x12, 0, 0, 1, 0xFE));
    assert_eq!((data.nows, data.noiob, data.npwg, data.nacwu), (0xFF, 0, 0, 0));
    assert_eq!((data.mssrl, data.mcl, data.msrc, data.anagrpid), (65_535, 65_535, 0, 1));
    assert_eq!(data.lbaf[0], LbaFormat { ms: 0, lbads: 9, rp: 0 });
    assert_eq!(data.block_size(), Some(512));
    assert!(data.is_shared());
    let hidden = Namespace { inaccessible: true, persistent_reservations: true, ..namespace }.build();
    assert_eq!((hidden.nsze, hidden.nuse, hidden.rescap), (0x0102_0304, 0, 0xFF));
}

#[test]
fn performance_hints_stay_within_the_transfer_limit() {
    let large = Namespace {
        block_size: 4096,
        physical_block_size: 16_384,
        optimal_io_boundary: 1000,
        acwu: 8,
        optimal_write_blocks: 16,
        max_copy: 64,
        ..Namespace::default()
    };
    let data = large.build();
    // 128 KiB are 32 blocks of 4 KiB.
    assert_eq!((data.noiob, data.nows, data.nacwu), (32, 15, 7));
    assert_eq!((data.npwg, data.npwa, data.npdg, data.npda, data.nawupf), (3, 3, 3, 3, 3));
    assert_eq!((data.mssrl, data.mcl), (64, 64));
    assert_eq!(Namespace { has_write_unit: true, ..large.clone() }.build().noiob, 0);
    assert_eq!(Namespace { optimal_io_boundary: 8, ..large }.build().noiob, 8);
}

#[test]
fn metadata_is_interleaved() {
    let data = Namespace { block_size: 520, metadata_size: 8, ..Namespace::default() }.build();
    assert_eq!((data.flbas, data.mc), (0x10, 1));
    assert_eq!(data.lbaf[0], LbaFormat { ms: 8, lbads: 9, rp: 0 });
}

#[test]
fn the_format_in_use_is_found_by_both_halves_of_flbas() {
    let mut data = NamespaceData { flbas: 0x63, ..NamespaceData::default() };
    data.lbaf[0x33].lbads = 12;
    assert_eq!(data.block_size(), Some(4096));
    data.flbas = 0x7F;
    data.lbaf[63].lbads = 200;
    assert_eq!(data.block_size(), None);
    assert_eq!(NamespaceData::default().block_size(), None);
}

#[test]
fn identifiers_come_in_order_without_the_zero_ones() {
    let ids =
        NamespaceIds { eui64: Some([1; 8]), nguid: Some([2; 16]), uuid: Some(Uuid::from_bytes([3; 16])), csi: Some(0) };
    let bytes = ids.encode();
    assert_eq!(bytes[..12], [1, 8, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]);
    assert_eq!(bytes[12..17], [2, 16, 0, 0, 2]);
    assert_eq!(bytes[32..37], [3, 16, 0, 0, 3]);
    assert_eq!(bytes[52..], [0; 4044]);
    assert_eq!(NamespaceIds::parse(&bytes), NamespaceIds { csi: None, ..ids });
    assert_eq!(NamespaceIds { csi: Some(2), ..NamespaceIds::default() }.encode()[..5], [4, 1, 0, 0, 2]);
    assert_eq!(NamespaceIds::default().encode(), [0; 4096]);
}

#[test]
fn odd_identifiers_are_skipped() {
    // A command set must be one byte, even when that byte would be the first of more.
    assert_eq!(NamespaceIds::parse(&[4, 4, 0, 0, 0, 3, 0, 0]), NamespaceIds::default());
    // An unknown kind, a UUID of the wrong length, then a good EUI64 and one cut short.
    let bytes = [9, 2, 0, 0, 1, 1, 3, 2, 0, 0, 1, 1, 1, 8, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 2, 16, 0, 0, 1];
    let ids = NamespaceIds::parse(&bytes);
    assert_eq!(ids, NamespaceIds { eui64: Some([1, 2, 3, 4, 5, 6, 7, 8]), ..NamespaceIds::default() });
}

#[test]
fn namespace_lists_hold_1024() {
    let bytes = encode_namespace_list(1..=3);
    assert_eq!(bytes[..16], [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
    let full = encode_namespace_list(1..=2000);
    assert_eq!(parse_namespace_list(&full).count(), 1024);
    assert_eq!(parse_namespace_list(&full).last(), Some(1024));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn identifiers_survive(eui64: Option<[u8; 8]>, nguid: Option<[u8; 16]>, uuid: Option<[u8; 16]>) {
        let ids = NamespaceIds { eui64, nguid, uuid: uuid.map(Uuid::from_bytes), csi: None };
        prop_assert_eq!(NamespaceIds::parse(&ids.encode()), ids);
    }

    #[test]
    fn namespace_lists_survive(nsids in prop::collection::vec(1..u32::MAX, 0..1024)) {
        let bytes = encode_namespace_list(nsids.iter().copied());
        prop_assert_eq!(parse_namespace_list(&bytes).collect::<Vec<_>>(), nsids);
    }

    #[test]
    fn namespaces_survive(blocks: u64, shift in 9..=16u32, boundary: u32, ana: u32, nguid: [u8; 16]) {
        let namespace = Namespace {
            blocks,
            block_size: 1 << shift,
            physical_block_size: 1 << shift,
            optimal_io_boundary: boundary,
            anagrpid: ana,
            nguid,
            ..Namespace::default()
        };
        let data = namespace.build();
        prop_assert_eq!(&NamespaceData::parse(&data.encode()).unwrap(), &data);
        prop_assert_eq!(data.block_size(), Some(namespace.block_size));
        prop_assert!(u32::from(data.noiob) * namespace.block_size <= namespace.max_io_size);
        prop_assert!((u32::from(data.nows) + 1) * namespace.block_size <= namespace.max_io_size);
    }
}
