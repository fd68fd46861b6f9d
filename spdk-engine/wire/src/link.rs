//! One end of an NVMe/TCP connection: what was agreed on, and the header checks and framing that follow from it.
//!
//! A [`Link`] is a small value without I/O. It starts knowing only its [`Role`]; the initialisation PDUs turn it ready
//! ([`Link::accept`] at the controller, [`Link::established`] at the host). [`Link::decode`] reads a header from bytes
//! as they come in and [`Link::encode`] writes one; [`HeaderDecoder`] gathers a header that arrives in pieces.
//!
//! # Checks
//! In this order, as an SPDK target does them; each failure is the [`TermError`] to send back:
//! 1. a type that may not come now: FES 2; an unknown type, or one the peer never sends: FES 1, offset 0;
//! 2. HLEN other than the type's: FES 1, offset 2;
//! 3. PDO not at the agreed alignment (only when one was agreed on, and for PDUs with data): FES 1, offset 3;
//! 4. PLEN impossible for the type: FES 1, offset 4;
//! 5. header digest wrong: FES 3;
//! 6. PFV, HPDA or CPDA, MAXH2CDATA: FES 1, offsets 8, 10, 12; DATAL other than the data in the PDU: FES 1, offset 16.
//!
//! A PDO smaller than the header is read as the end of the header.

use crate::command::{Cqe, Sqe};
use zerocopy::IntoBytes;

use crate::pdu::{
    C2hData, CAPSULE_CMD_SIZE, COMMON_HEADER_SIZE, CommonHeader, DIGEST_SIZE, Fes, IcReq, IcResp, MAX_DATA_ALIGNMENT,
    MAX_HEADER_SIZE, MAX_TERM_SIZE, Pdu, PduType, TERM_SIZE, TermError, crc32c, flags,
};

/// Which end of the connection this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// The controller side: receives ICReq, CapsuleCmd, H2CData, H2CTermReq.
    Controller,
    /// The host side: receives ICResp, CapsuleResp, C2HData, R2T, C2HTermReq.
    Host,
}

/// What the two ends agreed on, as seen from one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    role: Role,
    ready: bool,
    header_digest: bool,
    data_digest: bool,
    rx_alignment: u8,
    tx_alignment: u8,
    max_h2c_data: u32,
}

/// Where the parts of a received PDU are, in bytes from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Type.
    pub pdu_type: PduType,
    /// End of the header, its digest not counted.
    pub header_len: u32,
    /// End of the header, its digest counted.
    pub header_end: u32,
    /// Start of the data; what lies between `header_end` and here is padding.
    pub data_offset: u32,
    /// Bytes of data, digest not counted; 0 when there is none.
    pub data_len: u32,
    /// A data digest of 4 bytes follows the data.
    pub data_digest: bool,
    /// Bytes of the whole PDU.
    pub plen: u32,
}

/// Outcome of [`Link::decode`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decoded {
    /// The header is not complete: at least this many bytes, counted from the start of the PDU, are needed.
    Need(usize),
    /// The header, and where the rest of the PDU is.
    Header(Pdu, Layout),
}

impl Link {
    /// A connection on which nothing was exchanged yet.
    pub const fn new(role: Role) -> Self {
        Self {
            role,
            ready: false,
            header_digest: false,
            data_digest: false,
            rx_alignment: 0,
            tx_alignment: 0,
            max_h2c_data: 0,
        }
    }

    /// Which end this is.
    pub const fn role(&self) -> Role {
        self.role
    }

    /// Whether initialisation is done.
    pub const fn is_ready(&self) -> bool {
        self.ready
    }

    /// Whether PDUs carry header digests.
    pub const fn header_digest(&self) -> bool {
        self.header_digest
    }

    /// Whether data carries digests.
    pub const fn data_digest(&self) -> bool {
        self.data_digest
    }

    /// Most data in one H2CData PDU, in bytes; 0 before initialisation.
    pub const fn max_h2c_data(&self) -> u32 {
        self.max_h2c_data
    }

    /// Controller: takes the host's ICReq as it asks and becomes ready. The answer echoes the host's alignment and
    /// digests; it must be encoded and sent before anything else. `max_h2c_data` is in bytes.
    pub fn accept(&mut self, request: &IcReq, max_h2c_data: u32) -> IcResp {
        let alignment = request.hpda.min(MAX_DATA_ALIGNMENT);
        self.ready = true;
        self.header_digest = request.header_digest;
        self.data_digest = request.data_digest;
        self.rx_alignment = alignment;
        self.tx_alignment = alignment;
        self.max_h2c_data = max_h2c_data;
        IcResp {
            pfv: 0,
            cpda: alignment,
            header_digest: request.header_digest,
            data_digest: request.data_digest,
            maxh2cdata: max_h2c_data,
        }
    }

    /// Host: takes the controller's answer to `request` and becomes ready.
    ///
    /// # Errors
    /// FES 1 with the offset of DGST when the controller turned on a digest that was not asked for. That it left one
    /// out which was asked for is for the caller to judge, from [`Link::header_digest`] and [`Link::data_digest`].
    pub fn established(&mut self, request: &IcReq, response: &IcResp) -> Result<(), TermError> {
        if response.header_digest && !request.header_digest || response.data_digest && !request.data_digest {
            return Err(TermError::field(11));
        }
        self.ready = true;
        self.header_digest = response.header_digest;
        self.data_digest = response.data_digest;
        self.rx_alignment = request.hpda.min(MAX_DATA_ALIGNMENT);
        self.tx_alignment = response.cpda.min(MAX_DATA_ALIGNMENT);
        self.max_h2c_data = response.maxh2cdata;
        Ok(())
    }

    /// Checks a common header and works out where the parts of its PDU are.
    ///
    /// # Errors
    /// Checks 1 to 4 of the module documentation.
    pub fn check_common(&self, header: &CommonHeader) -> Result<Layout, TermError> {
        let kind = self.expected_type(header.pdu_type)?;
        let hlen = kind.header_size();
        if header.hlen != hlen {
            return Err(TermError::field(2));
        }
        let digested = !kind.is_connection_control();
        let alignment = (u32::from(self.rx_alignment) + 1) * 4;
        let is_transfer = digested && kind.carries_data();
        if is_transfer && self.rx_alignment != 0 && !u32::from(header.pdo).is_multiple_of(alignment) {
            return Err(TermError::field(3));
        }
        let header_len = u32::from(hlen);
        let digest = if digested && self.header_digest { DIGEST_SIZE as u32 } else { 0 };
        let header_end = header_len + digest;
        let mut layout = Layout {
            pdu_type: kind,
            header_len,
            header_end,
            data_offset: header_end,
            data_len: 0,
            data_digest: false,
            plen: header.plen,
        };
        self.place_data(header, &mut layout).ok_or(TermError::field(4)).map(|()| layout)
    }

    /// Fills in where the data is; `None` when PLEN cannot be.
    fn place_data(&self, header: &CommonHeader, layout: &mut Layout) -> Option<()> {
        let plen = header.plen;
        match layout.pdu_type {
            PduType::H2cTermReq | PduType::C2hTermReq => {
                let in_range = plen > u32::from(TERM_SIZE) && plen <= MAX_TERM_SIZE as u32;
                layout.data_len = plen.checked_sub(layout.header_end)?;
                return in_range.then_some(());
            }
            kind if !kind.carries_data() => return (plen == layout.header_end).then_some(()),
            _ => {}
        }
        if plen == layout.header_end {
            return Some(());
        }
        layout.data_offset = u32::from(header.pdo).max(layout.header_end);
        let digest = if self.data_digest { DIGEST_SIZE as u32 } else { 0 };
        layout.data_digest = self.data_digest;
        layout.data_len = plen.checked_sub(layout.data_offset)?.checked_sub(digest)?;
        (layout.data_len > 0).then_some(())
    }

    /// Check 1: the type, if it may come now.
    fn expected_type(&self, raw: u8) -> Result<PduType, TermError> {
        let kind = PduType::from_raw(raw);
        let opening = match self.role {
            Role::Controller => PduType::IcReq,
            Role::Host => PduType::IcResp,
        };
        match kind {
            Some(kind) if kind == opening => {
                if self.ready {
                    Err(TermError::sequence())
                } else {
                    Ok(kind)
                }
            }
            // A host may be told to go away instead of being welcomed.
            Some(PduType::C2hTermReq) if self.role == Role::Host => Ok(PduType::C2hTermReq),
            _ if !self.ready => Err(TermError::sequence()),
            Some(kind) if self.receives(kind) => Ok(kind),
            _ => Err(TermError::field(0)),
        }
    }

    const fn receives(&self, kind: PduType) -> bool {
        match self.role {
            Role::Controller => matches!(kind, PduType::CapsuleCmd | PduType::H2cData | PduType::H2cTermReq),
            Role::Host => matches!(kind, PduType::CapsuleResp | PduType::C2hData | PduType::R2t),
        }
    }

    /// Reads a PDU's header from the bytes that arrived so far, which start with it. The common header is checked as
    /// soon as its 8 bytes are there.
    ///
    /// # Errors
    /// Any check of the module documentation.
    pub fn decode(&self, bytes: &[u8]) -> Result<Decoded, TermError> {
        let Some((common, _)) = bytes.split_first_chunk::<COMMON_HEADER_SIZE>() else {
            return Ok(Decoded::Need(COMMON_HEADER_SIZE));
        };
        let layout = self.check_common(&CommonHeader::parse(common))?;
        let end = layout.header_end as usize;
        let Some(header) = bytes.get(..end) else {
            return Ok(Decoded::Need(end));
        };
        let (header, digest) = header.split_at(layout.header_len as usize);
        if let Some(digest) = digest.first_chunk::<DIGEST_SIZE>()
            && crc32c(header) != u32::from_le_bytes(*digest)
        {
            return Err(TermError::new(Fes::HeaderDigest, u32::from_le_bytes(*digest)));
        }
        let mut fields = [0; MAX_HEADER_SIZE];
        fields[..header.len()].copy_from_slice(header);
        let pdu = Pdu::parse_fields(layout.pdu_type, &fields)?;
        let datal = match &pdu {
            Pdu::H2cData(data) => data.datal,
            Pdu::C2hData(data) => data.datal,
            _ => layout.data_len,
        };
        if datal != layout.data_len {
            return Err(TermError::field(16));
        }
        Ok(Decoded::Header(pdu, layout))
    }

    /// Controller: what [`Self::decode`] finds in the commonest case, a whole command header on a connection without
    /// digests and alignment; `None` in every other case.
    pub fn decode_command(&self, bytes: &[u8]) -> Option<(Sqe, Layout)> {
        let plain = self.ready && !self.header_digest && !self.data_digest && self.rx_alignment == 0;
        if !plain || !matches!(self.role, Role::Controller) {
            return None;
        }
        let header = bytes.first_chunk::<{ CAPSULE_CMD_SIZE as usize }>()?;
        let common = CommonHeader::parse(header.first_chunk()?);
        let expected = common.pdu_type == PduType::CapsuleCmd as u8 && common.hlen == CAPSULE_CMD_SIZE;
        let size = u32::from(CAPSULE_CMD_SIZE);
        if !expected || common.plen < size {
            return None;
        }
        let data_offset = if common.plen == size { size } else { u32::from(common.pdo).max(size) };
        let layout = Layout {
            pdu_type: PduType::CapsuleCmd,
            header_len: size,
            header_end: size,
            data_offset,
            data_len: common.plen.checked_sub(data_offset)?,
            data_digest: false,
            plen: common.plen,
        };
        // No data behind its padding is a mistake, for the full check to name.
        if layout.data_len == 0 && common.plen > size {
            return None;
        }
        Some((Sqe::parse(&header[COMMON_HEADER_SIZE..])?, layout))
    }

    /// Writes the header of `pdu` with room for `data_len` bytes of data: digest and padding included, the data and
    /// its digest to be sent after it by the caller. Whether a data digest goes after the data says
    /// [`Link::data_digest`]. `data_len` is ignored for types that carry none.
    pub fn encode(&self, pdu: &Pdu, data_len: u32) -> EncodedHeader {
        let kind = pdu.pdu_type();
        let hlen = kind.header_size();
        let digested = !kind.is_connection_control();
        let mut out = EncodedHeader { bytes: [0; EncodedHeader::CAPACITY], len: usize::from(hlen) };
        let header_digest = digested && self.header_digest;
        let mut common =
            CommonHeader { pdu_type: kind as u8, flags: pdu.own_flags(), hlen, pdo: 0, plen: u32::from(hlen) };
        if header_digest {
            common.flags |= flags::HEADER_DIGEST;
            out.len += DIGEST_SIZE;
        }
        common.plen = out.len as u32;
        if kind.carries_data() && data_len > 0 {
            let mut trailer = 0;
            if digested {
                out.len = out.len.next_multiple_of((usize::from(self.tx_alignment) + 1) * 4);
                common.pdo = out.len as u8;
                if self.data_digest {
                    common.flags |= flags::DATA_DIGEST;
                    trailer = DIGEST_SIZE as u32;
                }
            }
            common.plen = (out.len as u32).saturating_add(data_len).saturating_add(trailer);
        }
        if let Some(fields) = out.bytes.first_chunk_mut::<MAX_HEADER_SIZE>() {
            fields[..COMMON_HEADER_SIZE].copy_from_slice(&common.encode());
            pdu.put_fields(fields);
        }
        if header_digest {
            let (header, rest) = out.bytes.split_at_mut(usize::from(hlen));
            rest[..DIGEST_SIZE].copy_from_slice(&crc32c(header).to_le_bytes());
        }
        out
    }

    /// Controller: what [`Self::encode`] gives for a response capsule, on a connection without header digests.
    pub fn encode_response(&self, cqe: &Cqe) -> Option<[u8; SHORT_SIZE]> {
        if self.header_digest {
            return None;
        }
        let mut out = short_header(PduType::CapsuleResp, 0, 0, SHORT_SIZE as u32);
        out[COMMON_HEADER_SIZE..].copy_from_slice(cqe.as_bytes());
        Some(out)
    }

    /// Controller: what [`Self::encode`] gives for data to the host, on a connection without digests and alignment.
    pub fn encode_c2h_data(&self, data: &C2hData) -> Option<[u8; SHORT_SIZE]> {
        if self.header_digest || self.data_digest || self.tx_alignment != 0 || data.datal == 0 {
            return None;
        }
        let flag = |set, bit| if set { bit } else { 0 };
        let flags = flag(data.last, flags::LAST) | flag(data.success, flags::SUCCESS);
        let plen = (SHORT_SIZE as u32).saturating_add(data.datal);
        let mut out = short_header(PduType::C2hData, flags, SHORT_SIZE as u8, plen);
        out[8..10].copy_from_slice(&data.cid.to_le_bytes());
        out[12..16].copy_from_slice(&data.datao.to_le_bytes());
        out[16..20].copy_from_slice(&data.datal.to_le_bytes());
        Some(out)
    }

    /// The whole termination request this end sends for `error`; `offending` is the header that caused it, as far as
    /// it is at hand, and is cut at [`MAX_HEADER_SIZE`].
    pub fn encode_term(&self, error: TermError, offending: &[u8]) -> EncodedHeader {
        let offending = &offending[..offending.len().min(MAX_HEADER_SIZE)];
        let pdu = match self.role {
            Role::Controller => Pdu::C2hTermReq(error),
            Role::Host => Pdu::H2cTermReq(error),
        };
        let mut out = self.encode(&pdu, offending.len() as u32);
        out.bytes[out.len..out.len + offending.len()].copy_from_slice(offending);
        out.len += offending.len();
        out
    }
}

/// Bytes of the headers of responses and data.
const SHORT_SIZE: usize = 24;

fn short_header(kind: PduType, flags: u8, pdo: u8, plen: u32) -> [u8; SHORT_SIZE] {
    let mut out = [0; SHORT_SIZE];
    out[0] = kind as u8;
    out[1] = flags;
    out[2] = SHORT_SIZE as u8;
    out[3] = pdo;
    out[4..8].copy_from_slice(&plen.to_le_bytes());
    out
}

/// A written header, ready to be sent. Dereferences to its bytes.
#[derive(Clone, Copy)]
pub struct EncodedHeader {
    bytes: [u8; Self::CAPACITY],
    len: usize,
}

impl EncodedHeader {
    /// Most bytes there can be: a whole termination request.
    pub const CAPACITY: usize = MAX_TERM_SIZE;

    /// The bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Writes the bytes to the start of `out` and says how many there are; `None`, and `out` untouched, when it is too
    /// small.
    pub fn write_to(&self, out: &mut [u8]) -> Option<usize> {
        out.get_mut(..self.len)?.copy_from_slice(self.as_bytes());
        Some(self.len)
    }
}

impl std::ops::Deref for EncodedHeader {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.as_bytes()
    }
}

impl std::fmt::Debug for EncodedHeader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EncodedHeader({:02x?})", self.as_bytes())
    }
}

/// Gathers a header that arrives in pieces. After a header was returned, the next piece starts a new one; data and
/// padding are the caller's to take from the stream in between.
#[derive(Debug, Clone)]
pub struct HeaderDecoder {
    bytes: [u8; MAX_HEADER_SIZE + DIGEST_SIZE],
    len: usize,
    done: bool,
}

impl HeaderDecoder {
    /// A decoder at the start of a PDU.
    pub const fn new() -> Self {
        Self { bytes: [0; MAX_HEADER_SIZE + DIGEST_SIZE], len: 0, done: false }
    }

    /// How many more bytes can be taken right now, never past the end of the header.
    pub fn wants(&self, link: &Link) -> usize {
        let have = if self.done { 0 } else { self.len };
        match link.decode(&self.bytes[..have]) {
            Ok(Decoded::Need(total)) => total - have,
            _ => 0,
        }
    }

    /// Takes what it needs from the start of `input`. Returns how many bytes were taken, and the header once it is
    /// complete.
    ///
    /// # Errors
    /// As [`Link::decode`]. The decoder then keeps what it has, see [`HeaderDecoder::received`].
    pub fn push(&mut self, link: &Link, input: &[u8]) -> Result<(usize, Option<(Pdu, Layout)>), TermError> {
        if self.done {
            self.len = 0;
            self.done = false;
        }
        let mut taken = 0;
        loop {
            match link.decode(&self.bytes[..self.len])? {
                Decoded::Header(pdu, layout) => {
                    self.done = true;
                    return Ok((taken, Some((pdu, layout))));
                }
                Decoded::Need(total) => {
                    let count = (total - self.len).min(input.len() - taken);
                    if count == 0 {
                        return Ok((taken, None));
                    }
                    self.bytes[self.len..self.len + count].copy_from_slice(&input[taken..taken + count]);
                    self.len += count;
                    taken += count;
                }
            }
        }
    }

    /// The header bytes received so far of this PDU, or of the last one: what a termination request quotes.
    pub fn received(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Default for HeaderDecoder {
    fn default() -> Self {
        Self::new()
    }
}
