//! PDU headers, at both ends, before and after initialisation: decoding in one go and in pieces must agree, the parts
//! of an accepted PDU must add up to its length, and every refusal must be a termination request the peer can read.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nvme_wire::link::{Decoded, HeaderDecoder, Link, Role};
use nvme_wire::pdu::{IcReq, Pdu, TermError};

fuzz_target!(|input: (u8, u8, &[u8])| {
    let (options, piece, bytes) = input;
    let link = link(options);
    let whole = link.decode(bytes);
    let mut decoder = HeaderDecoder::new();
    let pieces = decode_in_pieces(&mut decoder, &link, bytes, usize::from(piece).max(1));
    match whole {
        Ok(Decoded::Need(total)) => {
            assert!(total > bytes.len());
            assert_eq!(pieces, Ok(None));
        }
        Ok(Decoded::Header(pdu, layout)) => {
            assert_eq!(pieces, Ok(Some((layout.header_end as usize, pdu))));
            let digest = if layout.data_digest { 4 } else { 0 };
            assert!(layout.header_end <= layout.data_offset);
            match layout.data_len {
                0 => assert_eq!(layout.plen, layout.header_end),
                len => assert_eq!(layout.plen, layout.data_offset + len + digest),
            }
        }
        Err(error) => {
            assert_eq!(pieces, Err(error));
            let quoted = decoder.received();
            let sent = link.encode_term(error, quoted);
            // A request that quotes nothing is one the other end would refuse for its length.
            if !quoted.is_empty() {
                match peer(&link).decode(&sent) {
                    Ok(Decoded::Header(Pdu::C2hTermReq(read) | Pdu::H2cTermReq(read), _)) => assert_eq!(read, error),
                    other => panic!("peer reads {other:?}"),
                }
            }
        }
    }
});

fn decode_in_pieces(
    decoder: &mut HeaderDecoder,
    link: &Link,
    bytes: &[u8],
    piece: usize,
) -> Result<Option<(usize, Pdu)>, TermError> {
    let mut at = 0;
    for chunk in bytes.chunks(piece) {
        let (taken, found) = decoder.push(link, chunk)?;
        at += taken;
        if let Some((pdu, _)) = found {
            return Ok(Some((at, pdu)));
        }
    }
    Ok(None)
}

/// Bits 7:3 alignment, bits 2:1 digests, bit 0 role; all of them zero but the role for a fresh connection.
fn link(options: u8) -> Link {
    let role = if options & 1 == 0 { Role::Controller } else { Role::Host };
    if options >> 1 == 0 { Link::new(role) } else { established(role, options) }
}

/// An initialised other end: digests and alignment make no difference to a termination request.
fn peer(link: &Link) -> Link {
    match link.role() {
        Role::Controller => established(Role::Host, 0),
        Role::Host => established(Role::Controller, 0),
    }
}

fn established(role: Role, options: u8) -> Link {
    let request = IcReq {
        hpda: options >> 3,
        header_digest: options & 2 != 0,
        data_digest: options & 4 != 0,
        ..IcReq::default()
    };
    let mut controller = Link::new(Role::Controller);
    let response = controller.accept(&request, 131_072);
    if role == Role::Controller {
        return controller;
    }
    let mut host = Link::new(Role::Host);
    host.established(&request, &response).expect("the controller only echoes");
    host
}
