//! Discovery log page, LID 70h (Base 2.0, 5.16.1.23): a header and one entry per way to reach a subsystem.
//!
//! TRSVCID and TRADDR are padded with spaces, SUBNQN with NUL. Readers accept either padding. The extended form, asked
//! for by [`LSP_EXTENDED`], adds attributes to each entry and the page's length to the header.

use std::net::{IpAddr, SocketAddr};

use crate::layout::Field;
use crate::{Nqn, NulPadded, ShortBuffer, SpacePadded};

/// Bit of the log specific field: extended entries.
pub const LSP_EXTENDED: u8 = 1;
/// Bytes of the header and of an entry.
pub const ENTRY_SIZE: usize = 1024;

layout! {
    /// Header of the page.
    pub struct DiscoveryHeader[1024] {
        /// Generation: a page read in parts is consistent when this was the same at its start and at its end.
        0 genctr: u64,
        /// Entries that follow.
        8 numrec: u64,
        /// Record format, 0.
        16 recfmt: u16,
        /// Bit 0: entries are extended.
        18 extended: u8,
        /// Bytes of the whole page, when extended.
        20 tdlpl: u32,
    }
}

layout! {
    /// One entry.
    pub struct DiscoveryEntry[1024] {
        /// Transport, see [`trtype`].
        0 trtype: u8,
        /// Address family, see [`adrfam`].
        1 adrfam: u8,
        /// What is reached, see [`subtype`].
        2 subtype: u8,
        /// Secure channel: 1 required, 2 not required; bit 2 submission queue flow control may be disabled.
        3 treq: u8,
        /// Port.
        4 portid: u16,
        /// Controller, `0xFFFF` for any.
        6 cntlid: u16,
        /// Entries of the admin queue.
        8 asqsz: u16,
        /// Flags, see [`eflags`].
        10 eflags: u16,
        /// Port number as decimal text.
        32 trsvcid: SpacePadded<32>,
        /// Subsystem.
        256 subnqn: NulPadded<256>,
        /// Address as text.
        512 traddr: SpacePadded<256>,
        /// Transport specific; for TCP byte 0 is the security type, see [`sectype`].
        768 tsas: [u8; 256],
    }
}

/// Values of [`DiscoveryEntry::trtype`].
pub mod trtype {
    #![allow(missing_docs)]
    pub const RDMA: u8 = 1;
    pub const FC: u8 = 2;
    pub const TCP: u8 = 3;
}

/// Values of [`DiscoveryEntry::adrfam`].
pub mod adrfam {
    #![allow(missing_docs)]
    pub const IPV4: u8 = 1;
    pub const IPV6: u8 = 2;
}

/// Values of [`DiscoveryEntry::subtype`].
pub mod subtype {
    #![allow(missing_docs)]
    pub const REFERRAL: u8 = 1;
    pub const NVM: u8 = 2;
    pub const CURRENT_DISCOVERY: u8 = 3;
}

/// Values of [`DiscoveryEntry::treq`].
pub mod treq {
    #![allow(missing_docs)]
    pub const SECURE_CHANNEL_REQUIRED: u8 = 1;
    pub const SECURE_CHANNEL_NOT_REQUIRED: u8 = 2;
}

/// Bits of [`DiscoveryEntry::eflags`].
pub mod eflags {
    /// Every entry of this subsystem returns the same information.
    pub const DUPRETINFO: u16 = 1 << 0;
    /// Explicit persistent connections to discovery controllers are supported.
    pub const EPCSD: u16 = 1 << 1;
}

/// Values of byte 0 of [`DiscoveryEntry::tsas`] for TCP.
pub mod sectype {
    #![allow(missing_docs)]
    pub const NONE: u8 = 0;
    pub const TLS_1_2: u8 = 1;
    pub const TLS_1_3: u8 = 2;
}

impl DiscoveryEntry {
    /// The entry of a subsystem, or of the discovery service itself, reached by TCP at `address`: any controller, no
    /// secure channel. `port` is the port's index in its subsystem, `admin_queue` the entries of its admin queue.
    pub fn tcp(subsystem: &Nqn, address: SocketAddr, port: u16, admin_queue: u16) -> Self {
        let (subtype, eflags) = if subsystem.is_discovery() {
            (subtype::CURRENT_DISCOVERY, eflags::DUPRETINFO | eflags::EPCSD)
        } else {
            (subtype::NVM, 0)
        };
        let mut entry = Self {
            trtype: trtype::TCP,
            adrfam: if address.is_ipv4() { adrfam::IPV4 } else { adrfam::IPV6 },
            subtype,
            eflags,
            treq: treq::SECURE_CHANNEL_NOT_REQUIRED,
            portid: port,
            cntlid: crate::fabrics::CNTLID_DYNAMIC,
            asqsz: admin_queue,
            subnqn: subsystem.to_field(),
            ..Self::default()
        };
        // Neither a port number nor an address can be longer than its field.
        entry.trsvcid = SpacePadded::new(&address.port().to_string()).unwrap_or_default();
        entry.traddr = SpacePadded::new(&address.ip().to_string()).unwrap_or_default();
        entry
    }

    /// The entry that refers a host to the discovery service at `address`, any controller.
    pub fn referral(subsystem: &Nqn, address: SocketAddr, port: u16) -> Self {
        Self { subtype: subtype::REFERRAL, eflags: 0, ..Self::tcp(subsystem, address, port, 0) }
    }

    /// The same entry with a secure channel required: TLS 1.3.
    #[must_use]
    pub fn secured(mut self) -> Self {
        self.treq = treq::SECURE_CHANNEL_REQUIRED;
        self.tsas[0] = sectype::TLS_1_3;
        self
    }

    /// The address to connect to, if this is a TCP entry with a literal address.
    pub fn address(&self) -> Option<SocketAddr> {
        if self.trtype != trtype::TCP {
            return None;
        }
        let ip: IpAddr = self.traddr.as_str().trim_end().parse().ok()?;
        let port = self.trsvcid.as_str().trim_end().parse().ok()?;
        Some(SocketAddr::new(ip, port))
    }
}

/// An attribute of an extended entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtendedAttribute {
    /// Kind, see [`exattype`].
    pub kind: u16,
    /// Value, at most 65532 bytes; padded to a multiple of 4 with zeroes on the wire.
    pub value: Vec<u8>,
}

/// Values of [`ExtendedAttribute::kind`].
pub mod exattype {
    #![allow(missing_docs)]
    pub const HOST_ID: u16 = 1;
    pub const ADMIN_LABEL: u16 = 2;
}

/// The page.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DiscoveryLog {
    /// Generation.
    pub genctr: u64,
    /// Entries.
    pub entries: Vec<DiscoveryEntry>,
}

impl DiscoveryLog {
    /// The page as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let header = DiscoveryHeader { genctr: self.genctr, numrec: self.entries.len() as u64, ..Default::default() };
        let mut out = header.encode().to_vec();
        for entry in &self.entries {
            out.extend_from_slice(&entry.encode());
        }
        out
    }

    /// The page in extended form; `attributes` gives the attributes of an entry by its index.
    pub fn encode_extended(&self, mut attributes: impl FnMut(usize) -> Vec<ExtendedAttribute>) -> Vec<u8> {
        let mut out = vec![0; ENTRY_SIZE];
        for (index, entry) in self.entries.iter().enumerate() {
            let start = out.len();
            out.extend_from_slice(&entry.encode());
            out.extend_from_slice(&[0; 8]);
            let attributes = attributes(index);
            for attribute in &attributes {
                push_attribute(&mut out, attribute);
            }
            let length = (out.len() - start) as u32;
            length.put(&mut out[start + ENTRY_SIZE..start + ENTRY_SIZE + 4]);
            (attributes.len() as u16).put(&mut out[start + ENTRY_SIZE + 4..start + ENTRY_SIZE + 6]);
        }
        let header = DiscoveryHeader {
            genctr: self.genctr,
            numrec: self.entries.len() as u64,
            recfmt: 0,
            extended: 1,
            tdlpl: out.len() as u32,
        };
        out[..ENTRY_SIZE].copy_from_slice(&header.encode());
        out
    }

    /// Reads a page of either form; attributes are skipped.
    ///
    /// # Errors
    /// [`ShortBuffer`] when the page announces more than `bytes` holds: read again with a larger buffer.
    pub fn parse(bytes: &[u8]) -> Result<Self, ShortBuffer> {
        let header = DiscoveryHeader::parse(bytes)?;
        let extended = header.extended & 1 != 0;
        let mut at = ENTRY_SIZE;
        let mut entries = Vec::new();
        for _ in 0..header.numrec {
            let short = |needed| ShortBuffer { what: "discovery log page", got: bytes.len(), needed };
            let rest = bytes.get(at..).ok_or(short(at))?;
            let entry = rest.get(..ENTRY_SIZE).ok_or(short(at + ENTRY_SIZE))?;
            entries.push(DiscoveryEntry::get(entry));
            let length = if extended {
                let tel = rest.get(ENTRY_SIZE..ENTRY_SIZE + 4).ok_or(short(at + ENTRY_SIZE + 8))?;
                (u32::get(tel) as usize).max(ENTRY_SIZE + 8)
            } else {
                ENTRY_SIZE
            };
            at = at.checked_add(length).ok_or(short(usize::MAX))?;
        }
        Ok(Self { genctr: header.genctr, entries })
    }
}

fn push_attribute(out: &mut Vec<u8>, attribute: &ExtendedAttribute) {
    let value = &attribute.value[..attribute.value.len().min(65532)];
    let padded = value.len().next_multiple_of(4);
    out.extend_from_slice(&attribute.kind.to_le_bytes());
    out.extend_from_slice(&(padded as u16).to_le_bytes());
    out.extend_from_slice(value);
    out.resize(out.len() + padded - value.len(), 0);
}
