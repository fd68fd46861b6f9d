//! No input makes a parser panic, and what a parser accepts it can write again.

use nvme_wire::admin::AdminCommand;
use nvme_wire::ana::AnaLog;
use nvme_wire::discovery::{DiscoveryEntry, DiscoveryLog};
use nvme_wire::fabrics::{ConnectData, FabricsCommand};
use nvme_wire::identify::ControllerData;
use nvme_wire::link::{Decoded, HeaderDecoder, Link, Role};
use nvme_wire::log::{id_table_entry, window};
use nvme_wire::namespace::{NamespaceData, NamespaceIds, parse_namespace_list};
use nvme_wire::pdu::IcReq;
use nvme_wire::{Cqe, IoCommand, Nqn, Sgl, Sqe};
use proptest::prelude::*;

fn links(hpda: u8, digests: (bool, bool)) -> [Link; 4] {
    let request = IcReq { hpda, header_digest: digests.0, data_digest: digests.1, ..IcReq::default() };
    let (mut host, mut controller) = (Link::new(Role::Host), Link::new(Role::Controller));
    let response = controller.accept(&request, 131_072);
    host.established(&request, &response).unwrap();
    [Link::new(Role::Host), Link::new(Role::Controller), host, controller]
}

/// Bytes that often begin with a plausible common header.
fn pdu_bytes() -> impl Strategy<Value = Vec<u8>> {
    let hlen = prop_oneof![Just(24u8), Just(72), Just(128), any::<u8>()];
    let plen = prop_oneof![0..300u32, any::<u32>()];
    (0..11u8, any::<u8>(), hlen, any::<u8>(), plen, prop::collection::vec(any::<u8>(), 0..200)).prop_map(
        |(kind, flags, hlen, pdo, plen, tail)| {
            let mut bytes = vec![kind, flags, hlen, pdo];
            bytes.extend_from_slice(&plen.to_le_bytes());
            bytes.extend_from_slice(&tail);
            bytes
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn pdu_headers(
        bytes in prop_oneof![pdu_bytes(), prop::collection::vec(any::<u8>(), 0..200)],
        hpda in 0..=40u8,
        digests: (bool, bool),
    ) {
        for link in links(hpda, digests) {
            let mut decoder = HeaderDecoder::new();
            let pushed = decoder.push(&link, &bytes);
            match link.decode(&bytes) {
                Ok(Decoded::Header(pdu, layout)) => {
                    prop_assert_eq!(pushed.unwrap(), (layout.header_end as usize, Some((pdu, layout))));
                    prop_assert!(layout.header_end <= layout.data_offset);
                    let digest = if layout.data_digest { 4 } else { 0 };
                    if layout.data_len > 0 {
                        prop_assert_eq!(layout.plen, layout.data_offset + layout.data_len + digest);
                    } else {
                        prop_assert_eq!(layout.plen, layout.header_end);
                    }
                }
                Ok(Decoded::Need(total)) => {
                    prop_assert!(total > bytes.len());
                    prop_assert_eq!(pushed.unwrap(), (bytes.len(), None));
                }
                Err(error) => {
                    prop_assert_eq!(pushed.unwrap_err(), error);
                    let term = link.encode_term(error, decoder.received());
                    prop_assert_eq!(term.len(), 24 + decoder.received().len().min(128));
                }
            }
            let _ = decoder.wants(&link);
        }
    }

    #[test]
    fn entries(bytes: [u8; 64], data in prop::collection::vec(any::<u8>(), 0..100), opcode in 0..0x20u8, nsid: u32) {
        let mut sqe = Sqe::parse(&bytes).unwrap();
        for opcode in [bytes[0], opcode, 0x7F] {
            sqe.opcode = opcode;
            let _ = (sqe.fuse(), sqe.direction(), sqe.fctype());
            if let Ok(command) = IoCommand::parse(&sqe) {
                prop_assert_eq!(IoCommand::parse(&command.to_sqe(0, nsid, Sgl::NONE)), Ok(command));
            }
            if let Ok(command) = AdminCommand::parse(&sqe) {
                prop_assert_eq!(AdminCommand::parse(&command.to_sqe(0, nsid, Sgl::NONE)), Ok(command));
            }
            if let Ok(command) = FabricsCommand::parse(&sqe) {
                prop_assert_eq!(FabricsCommand::parse(&command.to_sqe(0, Sgl::NONE)), Ok(command));
            }
        }
        if let Ok(sgl) = Sgl::parse(&sqe.dptr) {
            let _ = sgl.check(131_072, 4096, 512);
        }
        let _ = (Sqe::parse(&data), Cqe::parse(&data));
    }

    #[test]
    fn pages(bytes in prop::collection::vec(any::<u8>(), 0..300), offset: u64, id: u8) {
        let _ = AnaLog::parse(&bytes);
        let _ = DiscoveryLog::parse(&bytes);
        let _ = NamespaceIds::parse(&bytes);
        let _ = parse_namespace_list(&bytes).count();
        let _ = id_table_entry(&bytes, id);
        let _ = window(&bytes, offset, &mut [0; 16]);
    }

    #[test]
    fn structures(seed: u64) {
        // Cheap noise: a whole page from proptest would be most of the test's time.
        let mut state = seed | 1;
        let bytes: Vec<u8> = (0..4096)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state as u8
            })
            .collect();
        let controller = ControllerData::parse(&bytes).unwrap();
        let _ = (controller.max_transfer(), controller.in_capsule_data(), controller.sn.as_str());
        prop_assert_eq!(ControllerData::parse(&controller.encode()).unwrap(), controller);
        let namespace = NamespaceData::parse(&bytes).unwrap();
        let _ = namespace.block_size();
        prop_assert_eq!(NamespaceData::parse(&namespace.encode()).unwrap(), namespace);
        let connect = ConnectData::parse(&bytes).unwrap();
        let _ = Nqn::from_field(connect.subnqn.as_bytes());
        prop_assert_eq!(ConnectData::parse(&connect.encode()).unwrap(), connect);
        let entry = DiscoveryEntry::parse(&bytes).unwrap();
        let _ = entry.address();
        prop_assert_eq!(DiscoveryEntry::parse(&entry.encode()).unwrap(), entry);
        let _ = DiscoveryLog::parse(&bytes);
        let _ = AnaLog::parse(&bytes);
    }
}
