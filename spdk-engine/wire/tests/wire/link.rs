//! PDU headers as they are on the wire, and the checks on what comes in.

use nvme_wire::link::{Decoded, HeaderDecoder, Layout, Link, Role};
use nvme_wire::pdu::{C2hData, CommonHeader, DataDigest, Fes, H2cData, IcReq, IcResp, Pdu, PduType, R2t, crc32c};
use nvme_wire::{Cqe, Sgl, Sqe, Status, TermError};
use proptest::prelude::*;
use zerocopy::IntoBytes;

const MAX_H2C: u32 = 131_072;

/// Both ends of a connection after initialisation.
fn ends(hpda: u8, header_digest: bool, data_digest: bool) -> (Link, Link) {
    let request = IcReq { hpda, header_digest, data_digest, ..IcReq::default() };
    let (mut host, mut controller) = (Link::new(Role::Host), Link::new(Role::Controller));
    let response = controller.accept(&request, MAX_H2C);
    host.established(&request, &response).unwrap();
    (host, controller)
}

fn header(link: &Link, bytes: &[u8]) -> (Pdu, Layout) {
    match link.decode(bytes).unwrap() {
        Decoded::Header(pdu, layout) => (pdu, layout),
        Decoded::Need(total) => panic!("wants {total} bytes, has {}", bytes.len()),
    }
}

/// Decodes a common header followed by zeroes and says what the peer is told.
fn refusal(link: &Link, pdu_type: u8, hlen: u8, pdo: u8, plen: u32) -> Option<(u16, u32)> {
    let common = CommonHeader { pdu_type, flags: 0, hlen, pdo, plen };
    let mut bytes = [0; 152];
    bytes[..8].copy_from_slice(&common.encode());
    link.decode(&bytes).err().map(|e| (e.fes.raw(), e.fei))
}

#[test]
fn initialisation_pdus_as_bytes() {
    let request = IcReq { hpda: 3, header_digest: true, data_digest: false, maxr2t: 0x0102_0304, pfv: 0 };
    let bytes = Link::new(Role::Host).encode(&Pdu::IcReq(request), 0);
    assert_eq!(bytes[..16], [0, 0, 128, 0, 128, 0, 0, 0, 0, 0, 3, 1, 4, 3, 2, 1]);
    assert_eq!(bytes[16..], [0; 112]);
    let mut controller = Link::new(Role::Controller);
    let (pdu, layout) = header(&controller, &bytes);
    assert_eq!(pdu, Pdu::IcReq(request));
    assert_eq!((layout.plen, layout.data_len), (128, 0));

    let response = controller.accept(&request, MAX_H2C);
    assert_eq!(response, IcResp { pfv: 0, cpda: 3, header_digest: true, data_digest: false, maxh2cdata: MAX_H2C });
    let bytes = controller.encode(&Pdu::IcResp(response), 0);
    assert_eq!(bytes[..16], [1, 0, 128, 0, 128, 0, 0, 0, 0, 0, 3, 1, 0, 0, 2, 0]);
    assert_eq!(bytes.len(), 128);
    assert_eq!(header(&Link::new(Role::Host), &bytes).0, Pdu::IcResp(response));
}

#[test]
fn digest_bits_are_apart() {
    let dgst = |header_digest, data_digest| {
        let request = IcReq { header_digest, data_digest, ..IcReq::default() };
        Link::new(Role::Host).encode(&Pdu::IcReq(request), 0)[11]
    };
    assert_eq!((dgst(true, false), dgst(false, true), dgst(true, true)), (1, 2, 3));
}

#[test]
fn the_host_refuses_digests_it_did_not_ask_for() {
    let mut host = Link::new(Role::Host);
    let response = IcResp { header_digest: true, maxh2cdata: 4096, ..IcResp::default() };
    assert_eq!(host.established(&IcReq::default(), &response), Err(TermError::new(Fes::InvalidHeaderField, 11)));
    assert!(!host.is_ready());
    let wanted = IcReq { header_digest: true, ..IcReq::default() };
    host.established(&wanted, &IcResp { header_digest: false, ..response }).unwrap();
    assert!(host.is_ready() && !host.header_digest());
}

#[test]
fn command_capsule_as_bytes() {
    let (host, controller) = ends(0, false, false);
    let sqe = Sqe::new(0x02, 0x0102, 1, Sgl::transport(512));
    let bytes = host.encode(&Pdu::CapsuleCmd(sqe), 0);
    assert_eq!(bytes[..8], [4, 0, 72, 0, 72, 0, 0, 0]);
    assert_eq!(&bytes[8..], sqe.as_bytes());
    assert_eq!(header(&controller, &bytes).0, Pdu::CapsuleCmd(sqe));
    // In-capsule data goes right behind the header.
    let bytes = host.encode(&Pdu::CapsuleCmd(sqe), 4096);
    assert_eq!(bytes[..8], [4, 0, 72, 72, 0x48, 0x10, 0, 0]);
    let layout = header(&controller, &bytes).1;
    assert_eq!((layout.data_offset, layout.data_len, layout.plen), (72, 4096, 4168));
}

#[test]
fn response_capsule_is_24_bytes_and_28_with_a_digest() {
    let cqe = Cqe::new(7, 1, Status::TRANSIENT_TRANSPORT_ERROR);
    let (host, controller) = ends(0, false, false);
    let bytes = controller.encode(&Pdu::CapsuleResp(cqe), 0);
    assert_eq!(bytes[..8], [5, 0, 24, 0, 24, 0, 0, 0]);
    assert_eq!(&bytes[8..], cqe.as_bytes());
    assert_eq!(header(&host, &bytes).0, Pdu::CapsuleResp(cqe));
    let (host, controller) = ends(0, true, true);
    let bytes = controller.encode(&Pdu::CapsuleResp(cqe), 0);
    assert_eq!(bytes[..8], [5, 1, 24, 0, 28, 0, 0, 0]);
    assert_eq!(bytes[24..], crc32c(&bytes[..24]).to_le_bytes());
    assert_eq!(header(&host, &bytes).0, Pdu::CapsuleResp(cqe));
}

#[test]
fn data_pdus_as_bytes() {
    let (host, controller) = ends(0, false, false);
    let data = C2hData { cid: 0x0102, datao: 0x0304_0506, datal: 131_072, last: true, success: false };
    let bytes = controller.encode(&Pdu::C2hData(data), 131_072);
    // 128 KiB go in one PDU of 131096 bytes.
    assert_eq!(bytes[..], [7, 4, 24, 24, 0x18, 0, 2, 0, 2, 1, 0, 0, 6, 5, 4, 3, 0, 0, 2, 0, 0, 0, 0, 0]);
    assert_eq!(header(&host, &bytes).0, Pdu::C2hData(data));
    assert_eq!(controller.encode(&Pdu::C2hData(C2hData { success: true, ..data }), 1)[1], 0x0C);
    assert_eq!(controller.encode(&Pdu::C2hData(C2hData { last: false, ..data }), 1)[1], 0);

    let data = H2cData { cid: 0x0102, ttag: 8, datao: 0x0304_0506, datal: 4096, last: true };
    let bytes = host.encode(&Pdu::H2cData(data), 4096);
    assert_eq!(bytes[..], [6, 4, 24, 24, 0x18, 0x10, 0, 0, 2, 1, 8, 0, 6, 5, 4, 3, 0, 0x10, 0, 0, 0, 0, 0, 0]);
    assert_eq!(header(&controller, &bytes).0, Pdu::H2cData(data));
    assert_eq!(host.encode(&Pdu::H2cData(H2cData { last: false, ..data }), 1)[1], 0);

    let r2t = R2t { cid: 0x0102, ttag: 8, r2to: 0x0304_0506, r2tl: 4096 };
    let bytes = controller.encode(&Pdu::R2t(r2t), 0);
    assert_eq!(bytes[..], [9, 0, 24, 0, 24, 0, 0, 0, 2, 1, 8, 0, 6, 5, 4, 3, 0, 0x10, 0, 0, 0, 0, 0, 0]);
    assert_eq!(header(&host, &bytes).0, Pdu::R2t(r2t));
}

#[test]
fn termination_request_quotes_the_offending_header() {
    let controller = Link::new(Role::Controller);
    let error = TermError::new(Fes::InvalidHeaderField, 0x0102_0304);
    let bytes = controller.encode_term(error, &[0xAB; 72]);
    assert_eq!(bytes[..14], [3, 0, 24, 0, 96, 0, 0, 0, 1, 0, 4, 3, 2, 1]);
    assert_eq!(bytes[14..24], [0; 10]);
    assert_eq!(bytes[24..], [0xAB; 72]);
    let (pdu, layout) = header(&Link::new(Role::Host), &bytes);
    assert_eq!(pdu, Pdu::C2hTermReq(error));
    assert_eq!((layout.data_offset, layout.data_len), (24, 72));
    assert_eq!(controller.encode_term(error, &[]).len(), 24);
    assert_eq!(controller.encode_term(error, &[0; 200]).len(), 152);

    // Digests and alignment do not apply to it.
    let (host, controller) = ends(31, true, true);
    let bytes = host.encode_term(error, &[1; 24]);
    assert_eq!((bytes[0], bytes.len()), (2, 48));
    assert_eq!(header(&controller, &bytes).0, Pdu::H2cTermReq(error));
}

#[test]
fn alignment_pads_after_the_header_digest() {
    let (host, controller) = ends(3, true, true);
    let sqe = Sqe::new(0x01, 1, 1, Sgl::in_capsule(512));
    let bytes = host.encode(&Pdu::CapsuleCmd(sqe), 512);
    // 72 + 4 bytes, padded to a multiple of 16; the data and its digest follow.
    assert_eq!(bytes.len(), 80);
    assert_eq!(bytes[..4], [4, 3, 72, 80]);
    let layout = header(&controller, &bytes).1;
    assert_eq!((layout.header_end, layout.data_offset, layout.data_len), (76, 80, 512));
    assert!(layout.data_digest);
    assert_eq!(layout.plen, 80 + 512 + 4);
    // Without data there is nothing to align or digest.
    let bytes = host.encode(&Pdu::CapsuleCmd(sqe), 0);
    assert_eq!(bytes[..8], [4, 1, 72, 0, 76, 0, 0, 0]);
    let layout = header(&controller, &bytes).1;
    assert_eq!((layout.data_len, layout.data_digest), (0, false));
    let (host, _) = ends(31, true, false);
    assert_eq!(host.encode(&Pdu::CapsuleCmd(sqe), 1).len(), 128);
}

#[test]
fn each_direction_has_its_own_alignment() {
    let request = IcReq { hpda: 0, ..IcReq::default() };
    let mut host = Link::new(Role::Host);
    host.established(&request, &IcResp { cpda: 7, maxh2cdata: 4096, ..IcResp::default() }).unwrap();
    assert_eq!(host.max_h2c_data(), 4096);
    // What the host sends starts at a multiple of 32 bytes; what it receives may start anywhere.
    assert_eq!(host.encode(&Pdu::H2cData(H2cData::default()), 1).len(), 32);
    assert_eq!(refusal(&host, 7, 24, 27, 27), Some((1, 4)), "no data left");
    let common = CommonHeader { pdu_type: 7, flags: 0, hlen: 24, pdo: 27, plen: 28 };
    assert_eq!(host.check_common(&common).map(|layout| (layout.data_offset, layout.data_len)), Ok((27, 1)));
}

#[test]
fn controller_refuses_types_out_of_order() {
    let fresh = Link::new(Role::Controller);
    for kind in (1..=255u8).filter(|kind| *kind != 0) {
        assert_eq!(refusal(&fresh, kind, 24, 0, 24), Some((2, 0)), "type {kind} before ICReq");
    }
    let (_, ready) = ends(0, false, false);
    assert_eq!(refusal(&ready, 0x00, 128, 0, 128), Some((2, 0)), "second ICReq");
    for kind in [0x01, 0x03, 0x05, 0x07, 0x08, 0x09, 0x0A, 0xFF] {
        assert_eq!(refusal(&ready, kind, 24, 0, 24), Some((1, 0)), "type {kind}");
    }
}

#[test]
fn controller_checks_hlen_then_pdo_then_plen() {
    let fresh = Link::new(Role::Controller);
    assert_eq!(refusal(&fresh, 0, 127, 0, 1), Some((1, 2)));
    assert_eq!(refusal(&fresh, 0, 128, 0, 127), Some((1, 4)));
    assert_eq!(refusal(&fresh, 0, 128, 0, 129), Some((1, 4)));
    assert_eq!(refusal(&fresh, 0, 128, 0, 128), None);

    let (_, ready) = ends(0, false, false);
    assert_eq!(refusal(&ready, 4, 71, 1, 0), Some((1, 2)));
    assert_eq!(refusal(&ready, 4, 72, 1, 72), None, "PDO is not looked at without data and alignment");
    assert_eq!(refusal(&ready, 4, 72, 0, 71), Some((1, 4)));
    assert_eq!(refusal(&ready, 6, 24, 0, 23), Some((1, 4)));
    assert_eq!(refusal(&ready, 2, 24, 0, 24), Some((1, 4)));
    assert_eq!(refusal(&ready, 2, 24, 0, 25), None);
    assert_eq!(refusal(&ready, 2, 24, 0, 152), None);
    assert_eq!(refusal(&ready, 2, 24, 0, 153), Some((1, 4)));

    let (_, aligned) = ends(3, false, false);
    assert_eq!(refusal(&aligned, 4, 72, 72, 584), Some((1, 3)));
    assert_eq!(refusal(&aligned, 4, 72, 72, 1), Some((1, 3)), "PDO before PLEN");
    assert_eq!(refusal(&aligned, 4, 73, 72, 1), Some((1, 2)), "HLEN before PDO");
    assert_eq!(refusal(&aligned, 4, 72, 80, 592), None);
    assert_eq!(refusal(&aligned, 6, 24, 24, 536), Some((1, 3)));
}

#[test]
fn data_must_fit_into_the_pdu() {
    let (_, ready) = ends(0, false, false);
    assert_eq!(refusal(&ready, 4, 72, 200, 100), Some((1, 4)), "data would start past the end");
    let (_, digested) = ends(0, true, true);
    assert_eq!(refusal(&digested, 4, 72, 76, 72), Some((1, 4)), "no room for the header digest");
    assert_eq!(refusal(&digested, 4, 72, 76, 78), Some((1, 4)), "no room for the data digest");
    assert_eq!(refusal(&digested, 4, 72, 76, 80), Some((1, 4)), "a data digest without data");
}

#[test]
fn a_pdo_inside_the_header_means_its_end() {
    let (_, ready) = ends(0, false, false);
    let common = CommonHeader { pdu_type: 4, flags: 0, hlen: 72, pdo: 0, plen: 584 };
    let layout = ready.check_common(&common).unwrap();
    assert_eq!((layout.data_offset, layout.data_len), (72, 512));
}

#[test]
fn host_checks_what_it_receives() {
    let fresh = Link::new(Role::Host);
    for kind in [0x00, 0x04, 0x05, 0x07, 0x09, 0xFF] {
        assert_eq!(refusal(&fresh, kind, 24, 0, 24), Some((2, 0)), "type {kind} before ICResp");
    }
    assert_eq!(refusal(&fresh, 3, 24, 0, 48), None, "may be refused before it is welcomed");
    assert_eq!(refusal(&fresh, 1, 128, 0, 127), Some((1, 4)));
    assert_eq!(refusal(&fresh, 1, 128, 0, 128), Some((1, 12)), "MAXH2CDATA below 4096");
    let (ready, _) = ends(0, false, false);
    assert_eq!(refusal(&ready, 1, 128, 0, 128), Some((2, 0)));
    for kind in [0x00, 0x02, 0x04, 0x06, 0x08] {
        assert_eq!(refusal(&ready, kind, 24, 0, 24), Some((1, 0)), "type {kind}");
    }
    assert_eq!(refusal(&ready, 5, 24, 0, 24), None);
    assert_eq!(refusal(&ready, 5, 24, 0, 28), Some((1, 4)));
    assert_eq!(refusal(&ready, 9, 24, 0, 25), Some((1, 4)));
    assert_eq!(refusal(&ready, 7, 24, 60, 50), Some((1, 4)));
    let (digested, _) = ends(0, true, false);
    assert_eq!(refusal(&digested, 5, 24, 0, 24), Some((1, 4)));
}

#[test]
fn initialisation_fields_are_checked() {
    let decode = |pfv: u16, hpda: u8| {
        let mut bytes = Link::new(Role::Host).encode(&Pdu::IcReq(IcReq::default()), 0).to_vec();
        bytes[8..10].copy_from_slice(&pfv.to_le_bytes());
        bytes[10] = hpda;
        Link::new(Role::Controller).decode(&bytes).err()
    };
    assert_eq!(decode(0, 31), None);
    assert_eq!(decode(1, 32), Some(TermError::new(Fes::InvalidHeaderField, 8)));
    assert_eq!(decode(0, 32), Some(TermError::new(Fes::InvalidHeaderField, 10)));
}

#[test]
fn datal_must_be_the_data_in_the_pdu() {
    let (host, controller) = ends(0, false, false);
    let data = H2cData { datal: 512, ..H2cData::default() };
    let bytes = host.encode(&Pdu::H2cData(data), 511);
    assert_eq!(controller.decode(&bytes), Err(TermError::new(Fes::InvalidHeaderField, 16)));
}

#[test]
fn a_wrong_header_digest_is_reported_with_its_value() {
    let (host, controller) = ends(0, true, false);
    let bytes = host.encode(&Pdu::CapsuleCmd(Sqe::default()), 0).to_vec();
    assert!(controller.decode(&bytes).is_ok());
    for at in [8, 40, 71, 72, 75] {
        let mut bad = bytes.clone();
        bad[at] ^= 0x10;
        let received = u32::from_le_bytes([bad[72], bad[73], bad[74], bad[75]]);
        assert_eq!(controller.decode(&bad), Err(TermError::new(Fes::HeaderDigest, received)), "byte {at}");
    }
}

#[test]
fn digests_are_crc32c() {
    assert_eq!(crc32c(b"123456789"), 0xE306_9283);
    assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
    let mut digest = DataDigest::new();
    digest.update(b"1234");
    assert!(!digest.matches(0xE306_9283u32.to_le_bytes()));
    digest.update(b"56789");
    assert_eq!(digest.to_bytes(), [0x83, 0x92, 0x06, 0xE3]);
    assert!(digest.matches([0x83, 0x92, 0x06, 0xE3]));
}

#[test]
fn decoding_says_how_much_it_needs() {
    let (host, controller) = ends(0, true, false);
    let bytes = host.encode(&Pdu::CapsuleCmd(Sqe::default()), 4096);
    assert_eq!(controller.decode(&bytes[..7]), Ok(Decoded::Need(8)));
    assert_eq!(controller.decode(&bytes[..8]), Ok(Decoded::Need(76)));
    assert_eq!(controller.decode(&bytes[..75]), Ok(Decoded::Need(76)));
    assert!(matches!(controller.decode(&bytes[..76]), Ok(Decoded::Header(..))));
}

#[test]
fn the_decoder_stops_at_the_end_of_each_header() {
    let (host, controller) = ends(0, true, false);
    let mut stream = host.encode(&Pdu::CapsuleCmd(Sqe::default()), 0).to_vec();
    stream.extend_from_slice(&host.encode(&Pdu::H2cData(H2cData { datal: 8, ..H2cData::default() }), 8));
    stream.extend_from_slice(&[0xEE; 8]);
    let mut decoder = HeaderDecoder::new();
    assert_eq!(decoder.wants(&controller), 8);
    let (taken, pdu) = decoder.push(&controller, &stream).unwrap();
    assert_eq!((taken, pdu.unwrap().0), (76, Pdu::CapsuleCmd(Sqe::default())));
    assert_eq!(decoder.received(), &stream[..76]);
    assert_eq!(decoder.wants(&controller), 8);
    let (taken, pdu) = decoder.push(&controller, &stream[76..]).unwrap();
    let (_, layout) = pdu.unwrap();
    assert_eq!((taken, layout.pdu_type, layout.data_len), (28, PduType::H2cData, 8));
}

#[test]
fn the_decoder_keeps_the_offending_header() {
    let (_, controller) = ends(0, false, false);
    let mut decoder = HeaderDecoder::new();
    let bad = [0x42, 0, 24, 0, 24, 0, 0, 0, 9, 9];
    assert_eq!(decoder.push(&controller, &bad[..5]).unwrap(), (5, None));
    assert_eq!(decoder.wants(&controller), 3);
    assert!(decoder.push(&controller, &bad[5..]).is_err());
    assert_eq!(decoder.received(), &bad[..8]);
    assert_eq!(decoder.wants(&controller), 0);
}

#[test]
fn headers_can_be_written_into_a_buffer() {
    let bytes = Link::new(Role::Host).encode(&Pdu::IcReq(IcReq::default()), 0);
    let mut out = [0xFF; 130];
    assert_eq!(bytes.write_to(&mut out[..127]), None);
    assert_eq!(bytes.write_to(&mut out), Some(128));
    assert_eq!(out[..128], *bytes.as_bytes());
    assert_eq!(out[128..], [0xFF; 2]);
}

fn pdu_to_controller() -> impl Strategy<Value = (Pdu, u32)> {
    prop_oneof![
        (any::<[u8; 64]>(), 0..9000u32).prop_map(|(raw, data)| (Pdu::CapsuleCmd(Sqe::parse(&raw).unwrap()), data)),
        (any::<(u16, u16, u32, bool)>(), 1..=MAX_H2C).prop_map(|((cid, ttag, datao, last), datal)| {
            (Pdu::H2cData(H2cData { cid, ttag, datao, datal, last }), datal)
        }),
    ]
}

fn pdu_to_host() -> impl Strategy<Value = (Pdu, u32)> {
    prop_oneof![
        any::<[u8; 16]>().prop_map(|raw| (Pdu::CapsuleResp(Cqe::parse(&raw).unwrap()), 0)),
        (any::<(u16, u32, bool, bool)>(), 1..=MAX_H2C).prop_map(|((cid, datao, last, success), datal)| {
            (Pdu::C2hData(C2hData { cid, datao, datal, last, success }), datal)
        }),
        any::<(u16, u16, u32, u32)>().prop_map(|(cid, ttag, r2to, r2tl)| (Pdu::R2t(R2t { cid, ttag, r2to, r2tl }), 0)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn headers_survive(
        to_controller in pdu_to_controller(),
        to_host in pdu_to_host(),
        hpda in 0..=31u8,
        digests: (bool, bool),
        piece in 1..40usize,
    ) {
        let (host, controller) = ends(hpda, digests.0, digests.1);
        for (from, to, (pdu, data_len)) in [(host, controller, to_controller), (controller, host, to_host)] {
            let bytes = from.encode(&pdu, data_len);
            let mut decoder = HeaderDecoder::new();
            let (mut at, mut found) = (0, None);
            while found.is_none() {
                let end = (at + piece).min(bytes.len());
                let (taken, pdu) = decoder.push(&to, &bytes[at..end]).unwrap();
                at += taken;
                found = pdu;
            }
            let (decoded, layout) = found.unwrap();
            prop_assert_eq!(decoded, pdu);
            prop_assert_eq!(layout.data_len, data_len);
            prop_assert_eq!(at, layout.header_end as usize);
            let digest = if layout.data_digest { 4 } else { 0 };
            if data_len > 0 {
                prop_assert_eq!(layout.data_offset as usize, bytes.len());
                prop_assert_eq!(layout.data_offset % ((u32::from(hpda) + 1) * 4), 0);
                prop_assert_eq!(layout.plen, layout.data_offset + data_len + digest);
                prop_assert_eq!(layout.data_digest, digests.1);
            } else {
                prop_assert_eq!(layout.plen as usize, bytes.len());
            }
        }
    }

    #[test]
    fn pieces_give_the_same_digest(data in prop::collection::vec(any::<u8>(), 0..600), cut in 0..600usize) {
        let cut = cut.min(data.len());
        let mut digest = DataDigest::new();
        digest.update(&data[..cut]);
        digest.update(&data[cut..]);
        prop_assert_eq!(digest.value(), crc32c(&data));
    }
}

proptest! {
    /// The short ways give what the general ones give, or nothing.
    #[test]
    fn short_ways_agree(
        digests in any::<(bool, bool)>(),
        alignment in prop_oneof![Just(0u8), 0u8..32],
        head in any::<[u8; 8]>(),
        genuine in any::<bool>(),
        extra in prop_oneof![Just(0u32), 0u32..9000],
        body in prop::collection::vec(any::<u8>(), 0..80),
        cqe in any::<[u8; 16]>(),
        data in any::<(u16, u32, u32, bool, bool)>(),
    ) {
        let request = IcReq { pfv: 0, hpda: alignment, header_digest: digests.0, data_digest: digests.1, maxr2t: 0 };
        let mut link = Link::new(Role::Controller);
        link.accept(&request, 131_072);
        let mut bytes = head.to_vec();
        if genuine {
            let plen = (72 + extra).to_le_bytes();
            bytes = vec![4, 0, 72, if extra > 0 { 72 } else { 0 }, plen[0], plen[1], plen[2], plen[3]];
        }
        bytes.extend_from_slice(&body);
        if let Some((sqe, layout)) = link.decode_command(&bytes) {
            prop_assert_eq!(link.decode(&bytes), Ok(Decoded::Header(Pdu::CapsuleCmd(sqe), layout)));
        } else if genuine && digests == (false, false) && alignment == 0 {
            prop_assert!(bytes.len() < 72);
        }
        let cqe = Cqe::parse(&cqe).unwrap();
        if let Some(short) = link.encode_response(&cqe) {
            let long = link.encode(&Pdu::CapsuleResp(cqe), 0);
            prop_assert_eq!(&short[..], long.as_bytes());
        }
        let (cid, datao, datal, last, success) = data;
        let data = C2hData { cid, datao, datal, last, success };
        if let Some(short) = link.encode_c2h_data(&data) {
            let long = link.encode(&Pdu::C2hData(data), datal);
            prop_assert_eq!(&short[..], long.as_bytes());
        }
    }
}
