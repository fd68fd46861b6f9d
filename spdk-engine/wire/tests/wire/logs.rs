use std::net::SocketAddr;

use nvme_wire::ana::{AnaGroup, AnaLog, AnaState};
use nvme_wire::discovery::{DiscoveryEntry, DiscoveryLog, ExtendedAttribute, exattype};
use nvme_wire::features::{AsyncEvent, AsyncEventConfig, NumberOfQueues, ReservationMask, round_keep_alive};
use nvme_wire::log::{EffectsLog, changed_namespaces, id_table_entry, lid, supported_log_pages, window};
use nvme_wire::namespace::parse_namespace_list;
use nvme_wire::{Nqn, SpacePadded, Status};
use proptest::prelude::*;

#[test]
fn windows_follow_the_offset_rules() {
    let page: Vec<u8> = (0..20).collect();
    let mut out = [0xFF; 8];
    assert_eq!(window(&page, 4, &mut out), Ok(8));
    assert_eq!(out, [4, 5, 6, 7, 8, 9, 10, 11]);
    assert_eq!(window(&page, 16, &mut out), Ok(4));
    assert_eq!(out, [16, 17, 18, 19, 0, 0, 0, 0]);
    assert_eq!(window(&page, 20, &mut out), Ok(0));
    assert_eq!(window(&page, 24, &mut out), Err(Status::INVALID_FIELD));
    assert_eq!(window(&page, 2, &mut out), Err(Status::INVALID_FIELD));
    assert_eq!(window(&page, u64::MAX - 3, &mut out), Err(Status::INVALID_FIELD));
}

#[test]
fn supported_pages_are_marked() {
    let page = supported_log_pages([lid::SUPPORTED, lid::ANA]);
    assert_eq!((id_table_entry(&page, 0), id_table_entry(&page, 0x0C), id_table_entry(&page, 1)), (1, 1, 0));
    assert_eq!(page[48..52], [1, 0, 0, 0]);
    assert_eq!(id_table_entry(&page[..10], 0x0C), 0);
}

#[test]
fn effects_follow_the_optional_commands() {
    let all = EffectsLog::target(nvme_wire::identify::oncs::TARGET_DEFAULT);
    let supported = |table: &[u32; 256]| -> Vec<usize> { (0..256).filter(|i| table[*i] & 1 != 0).collect() };
    assert_eq!(supported(&all.admin), [0x02, 0x06, 0x08, 0x09, 0x0A, 0x0C, 0x18]);
    assert_eq!(supported(&all.io), [0x00, 0x01, 0x02, 0x05, 0x08, 0x09, 0x0D, 0x0E, 0x11, 0x15, 0x19]);
    let writers: Vec<usize> = (0..256).filter(|i| all.io[*i] & 2 != 0).collect();
    assert_eq!(writers, [0x01, 0x08, 0x09, 0x19]);
    assert_eq!(supported(&EffectsLog::target(0).io), [0x00, 0x01, 0x02]);
}

#[test]
fn too_many_changed_namespaces_are_told_by_one_entry() {
    let few = changed_namespaces(&[1, 5]);
    assert_eq!(parse_namespace_list(&few).collect::<Vec<_>>(), [1, 5]);
    let many: Vec<u32> = (1..=1025).collect();
    assert_eq!(parse_namespace_list(&changed_namespaces(&many[..1024])).count(), 1024);
    assert_eq!(parse_namespace_list(&changed_namespaces(&many)).collect::<Vec<_>>(), [0xFFFF_FFFF]);
}

#[test]
fn ana_page_as_bytes() {
    let group = AnaGroup { id: 2, state: AnaState::Inaccessible, change_count: 5, nsids: vec![2, 9] };
    let log = AnaLog { change_count: 1, groups: vec![group] };
    let bytes = log.encode(false);
    assert_eq!(bytes.len(), 16 + 32 + 8);
    assert_eq!(bytes[..10], [1, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
    assert_eq!(bytes[16..33], [2, 0, 0, 0, 2, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 3]);
    assert_eq!(bytes[48..], [2, 0, 0, 0, 9, 0, 0, 0]);
    assert_eq!(AnaLog::parse(&bytes), Ok(log.clone()));
    assert_eq!((log.state_of(9), log.state_of(3)), (Some(AnaState::Inaccessible), None));
    let short = log.encode(true);
    assert_eq!(short.len(), 48);
    assert_eq!(AnaLog::parse(&short).unwrap().groups[0].nsids, []);
    assert_eq!(AnaLog::parse(&bytes[..52]).unwrap_err().needed, 56);
    assert_eq!(AnaLog::parse(&bytes[..20]).unwrap_err().needed, 48);
}

#[test]
fn ana_states_refuse_io_by_path_status() {
    for raw in 0..16 {
        assert_eq!(AnaState::from_raw(raw).raw(), raw);
    }
    assert_eq!(AnaState::Optimized.refusal(), None);
    assert_eq!(AnaState::NonOptimized.refusal(), None);
    assert_eq!(AnaState::Inaccessible.refusal(), Some(Status::new(3, 2)));
    assert_eq!(AnaState::PersistentLoss.refusal(), Some(Status::new(3, 1)));
    assert_eq!(AnaState::Change.refusal(), Some(Status::new(3, 3)));
}

fn entry(port: u16) -> DiscoveryEntry {
    let subsystem = Nqn::new("nqn.2026-11.io.addax:volume:a").unwrap();
    DiscoveryEntry::tcp(&subsystem, SocketAddr::from(([127, 0, 0, 1], port)), 3, 128)
}

#[test]
fn discovery_entry_as_bytes() {
    let bytes = entry(4420).encode();
    assert_eq!(bytes[..12], [3, 1, 2, 2, 3, 0, 0xFF, 0xFF, 128, 0, 0, 0]);
    assert_eq!(&bytes[32..64], b"4420                            ");
    assert_eq!(&bytes[256..286], b"nqn.2026-11.io.addax:volume:a\0");
    assert_eq!(&bytes[512..522], b"127.0.0.1 ");
    assert_eq!(bytes[767], b' ');
    assert_eq!(bytes[768], 0);
    let secured = entry(4420).secured().encode();
    assert_eq!((secured[3], secured[768]), (1, 2));
}

#[test]
fn discovery_addresses_are_read_whatever_the_padding() {
    let v4 = entry(4420);
    assert_eq!(v4.address(), Some(SocketAddr::from(([127, 0, 0, 1], 4420))));
    let v6 = DiscoveryEntry::tcp(&Nqn::discovery(), "[::1]:8009".parse().unwrap(), 0, 128);
    assert_eq!((v6.adrfam, v6.subtype, v6.eflags), (2, 3, 3));
    assert_eq!(v6.address(), Some("[::1]:8009".parse().unwrap()));
    let mut nul = [0; 32];
    nul[..4].copy_from_slice(b"4420");
    assert_eq!(DiscoveryEntry { trsvcid: SpacePadded::from_bytes(nul), ..v4.clone() }.address(), v4.address());
    assert_eq!(DiscoveryEntry { trtype: 1, ..v4.clone() }.address(), None);
    assert_eq!(DiscoveryEntry { traddr: SpacePadded::new("host").unwrap(), ..v4 }.address(), None);
    let referral = DiscoveryEntry::referral(&Nqn::discovery(), "127.0.0.1:8009".parse().unwrap(), 0);
    assert_eq!((referral.subtype, referral.asqsz, referral.eflags), (1, 0, 0));
}

#[test]
fn discovery_page_as_bytes() {
    let log = DiscoveryLog { genctr: 7, entries: vec![entry(4420), entry(4421)] };
    let bytes = log.encode();
    assert_eq!(bytes.len(), 3 * 1024);
    assert_eq!(bytes[..18], [7, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(DiscoveryLog::parse(&bytes), Ok(log));
    assert_eq!(DiscoveryLog::parse(&bytes[..3071]).unwrap_err().needed, 3072);
    assert!(DiscoveryLog::parse(&bytes[..1023]).is_err());
    let mut many = bytes;
    many[8..16].fill(0xFF);
    assert!(DiscoveryLog::parse(&many).is_err());
}

#[test]
fn extended_discovery_page_carries_attributes() {
    let log = DiscoveryLog { genctr: 1, entries: vec![entry(4420), entry(4421)] };
    let label = |index: usize| match index {
        0 => vec![ExtendedAttribute { kind: exattype::ADMIN_LABEL, value: b"label-1 x".to_vec() }],
        _ => vec![],
    };
    let bytes = log.encode_extended(label);
    assert_eq!(bytes.len(), 1024 + (1024 + 8 + 4 + 12) + (1024 + 8));
    assert_eq!(bytes[18], 1);
    assert_eq!(bytes[20..24], (bytes.len() as u32).to_le_bytes());
    assert_eq!(bytes[2048..2056], [0x18, 4, 0, 0, 1, 0, 0, 0]);
    assert_eq!(&bytes[2056..2072], b"\x02\0\x0C\0label-1 x\0\0\0");
    assert_eq!(DiscoveryLog::parse(&bytes), Ok(log));
}

#[test]
fn events_as_bytes() {
    for (event, dw0) in [
        (AsyncEvent::NamespaceAttribute, 0x0004_0002),
        (AsyncEvent::AnaChange, 0x000C_0302),
        (AsyncEvent::DiscoveryChange, 0x0070_F002),
        (AsyncEvent::ReservationLog, 0x0080_0006),
        (AsyncEvent::Error(5), 0x0001_0500),
        (AsyncEvent::Health(1), 0x0002_0101),
        (AsyncEvent::FirmwareActivation, 0x0003_0102),
    ] {
        assert_eq!(event.dw0(), dw0, "{event:?}");
        assert_eq!(AsyncEvent::from_dw0(dw0), event);
        assert_eq!(u32::from(event.log_page()), dw0 >> 16 & 0xFF);
    }
    assert_eq!(AsyncEventConfig::target_default(true).0, 0x900);
    assert_eq!(AsyncEventConfig::target_default(false).0, 0x100);
    assert_eq!(AsyncEvent::AnaChange.config(), Some(AsyncEventConfig(0x800)));
    assert_eq!(AsyncEvent::Error(0).config(), None);
    assert!(AsyncEventConfig(0x900).contains(AsyncEventConfig::ANA_CHANGE));
    assert!(!AsyncEventConfig(0x100).contains(AsyncEventConfig::ANA_CHANGE));
    assert_eq!(AsyncEventConfig::DISCOVERY_CHANGE.0, 0x8000_0000);
}

#[test]
fn numbers_of_queues_are_zero_based() {
    assert_eq!(NumberOfQueues::both(127).raw(), 0x007E_007E);
    let queues = NumberOfQueues { submission: 1, completion: 3 };
    assert_eq!(queues.raw(), 0x0002_0000);
    assert_eq!(NumberOfQueues::from_raw(0x0002_0000), Ok(queues));
    assert_eq!(NumberOfQueues::from_raw(0x0000_FFFF), Err(Status::INVALID_FIELD));
    assert_eq!(NumberOfQueues::from_raw(0xFFFF_0000), Err(Status::INVALID_FIELD));
    assert!(NumberOfQueues::from_raw(0xFFFE_FFFE).is_ok());
}

#[test]
fn keep_alive_is_rounded_up() {
    let round = |kato| round_keep_alive(kato, 10_000);
    assert_eq!((round(0), round(1), round(1000), round(10_000), round(12_345)), (0, 10_000, 10_000, 10_000, 20_000));
    assert_eq!(round(u32::MAX), 4_294_960_000);
    assert_eq!(round_keep_alive(5, 0), 5);
}

#[test]
fn a_mask_bit_silences_its_notification() {
    use nvme_wire::reservation::notification;
    assert!(ReservationMask(2).silences(notification::REGISTRATION_PREEMPTED));
    assert!(ReservationMask(4).silences(notification::RESERVATION_RELEASED));
    assert!(ReservationMask(8).silences(notification::RESERVATION_PREEMPTED));
    assert!(!ReservationMask(0).silences(1));
    assert!(!ReservationMask(u32::MAX).silences(200));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn ana_pages_survive(
        change_count: u64,
        groups in prop::collection::vec(
            (any::<u32>(), 0..16u8, any::<u64>(), prop::collection::vec(any::<u32>(), 0..5)), 0..6),
    ) {
        let groups = groups
            .into_iter()
            .map(|(id, state, change_count, nsids)| AnaGroup { id, state: AnaState::from_raw(state), change_count, nsids })
            .collect();
        let log = AnaLog { change_count, groups };
        prop_assert_eq!(AnaLog::parse(&log.encode(false)), Ok(log));
    }

    #[test]
    fn discovery_pages_survive(genctr: u64, ports in prop::collection::vec(any::<u16>(), 0..5), label: Vec<u8>) {
        let log = DiscoveryLog { genctr, entries: ports.into_iter().map(entry).collect() };
        prop_assert_eq!(&DiscoveryLog::parse(&log.encode()).unwrap(), &log);
        let attributes = |_| vec![ExtendedAttribute { kind: exattype::ADMIN_LABEL, value: label.clone() }];
        prop_assert_eq!(&DiscoveryLog::parse(&log.encode_extended(attributes)).unwrap(), &log);
    }

    #[test]
    fn events_survive(dw0 in any::<u32>().prop_map(|dw0| dw0 & 0x00FF_FF07)) {
        prop_assert_eq!(AsyncEvent::from_dw0(dw0).dw0(), dw0);
    }

    #[test]
    fn numbers_of_queues_survive(submission in 1..=65_535u32, completion in 1..=65_535u32) {
        let queues = NumberOfQueues { submission, completion };
        prop_assert_eq!(NumberOfQueues::from_raw(queues.raw()), Ok(queues));
    }
}
