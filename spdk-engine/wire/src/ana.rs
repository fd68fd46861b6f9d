//! Asymmetric Namespace Access log page, LID 0Ch (Base 2.0, 5.16.1.13).

use crate::ShortBuffer;
use crate::layout::Field;

/// Access state of an ANA group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum AnaState {
    /// 01h.
    #[default]
    Optimized,
    /// 02h.
    NonOptimized,
    /// 03h.
    Inaccessible,
    /// 04h.
    PersistentLoss,
    /// 0Fh, in transition between states.
    Change,
    /// Any other value.
    Other(u8),
}

impl AnaState {
    /// From the value on the wire, bits 3:0.
    pub const fn from_raw(raw: u8) -> Self {
        match raw & 0xF {
            0x1 => Self::Optimized,
            0x2 => Self::NonOptimized,
            0x3 => Self::Inaccessible,
            0x4 => Self::PersistentLoss,
            0xF => Self::Change,
            other => Self::Other(other),
        }
    }

    /// The value on the wire.
    pub const fn raw(self) -> u8 {
        match self {
            Self::Optimized => 0x1,
            Self::NonOptimized => 0x2,
            Self::Inaccessible => 0x3,
            Self::PersistentLoss => 0x4,
            Self::Change => 0xF,
            Self::Other(other) => other & 0xF,
        }
    }

    /// Whether I/O is served in this state.
    pub const fn is_accessible(self) -> bool {
        matches!(self, Self::Optimized | Self::NonOptimized)
    }

    /// The status of an I/O command in this state, unless it is served.
    pub const fn refusal(self) -> Option<crate::Status> {
        match self {
            Self::Optimized | Self::NonOptimized => None,
            Self::Inaccessible => Some(crate::Status::ANA_INACCESSIBLE),
            Self::PersistentLoss => Some(crate::Status::ANA_PERSISTENT_LOSS),
            Self::Change | Self::Other(_) => Some(crate::Status::ANA_TRANSITION),
        }
    }
}

/// One ANA group.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AnaGroup {
    /// Group identifier, from 1.
    pub id: u32,
    /// State on this controller.
    pub state: AnaState,
    /// Change count of the group.
    pub change_count: u64,
    /// Its namespaces, ascending; empty in a page read with Return Groups Only.
    pub nsids: Vec<u32>,
}

/// The page.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AnaLog {
    /// Change count of the page.
    pub change_count: u64,
    /// Groups with at least one namespace, by ascending identifier.
    pub groups: Vec<AnaGroup>,
}

/// Bit of the log specific field: Return Groups Only.
pub const LSP_GROUPS_ONLY: u8 = 1;
/// Bytes of the page's header.
pub const HEADER_SIZE: usize = 16;
/// Bytes of a group descriptor without its namespaces.
pub const GROUP_SIZE: usize = 32;

layout! {
    /// Header of the page.
    pub struct AnaHeader[16] {
        /// Change count.
        0 change_count: u64,
        /// Group descriptors that follow.
        8 groups: u16,
    }
}

layout! {
    /// Group descriptor, followed by its namespaces.
    pub struct AnaGroupHeader[32] {
        /// Group identifier.
        0 id: u32,
        /// Namespaces that follow.
        4 nsids: u32,
        /// Change count.
        8 change_count: u64,
        /// State, see [`AnaState::from_raw`].
        16 state: u8,
    }
}

impl AnaLog {
    /// The page as bytes; without namespaces when `groups_only`. At most 65535 groups are written.
    pub fn encode(&self, groups_only: bool) -> Vec<u8> {
        let groups = &self.groups[..self.groups.len().min(usize::from(u16::MAX))];
        let header = AnaHeader { change_count: self.change_count, groups: groups.len() as u16 };
        let mut out = header.encode().to_vec();
        for group in groups {
            let nsids = if groups_only { &[] } else { group.nsids.as_slice() };
            let descriptor = AnaGroupHeader {
                id: group.id,
                nsids: nsids.len() as u32,
                change_count: group.change_count,
                state: group.state.raw(),
            };
            out.extend_from_slice(&descriptor.encode());
            out.extend(nsids.iter().flat_map(|nsid| nsid.to_le_bytes()));
        }
        out
    }

    /// Reads a page.
    ///
    /// # Errors
    /// [`ShortBuffer`] when the page announces more than `bytes` holds: read again with a larger buffer.
    pub fn parse(bytes: &[u8]) -> Result<Self, ShortBuffer> {
        let short = |needed| ShortBuffer { what: "ANA log page", got: bytes.len(), needed };
        let header = AnaHeader::parse(bytes)?;
        let mut at = HEADER_SIZE;
        let mut groups = Vec::new();
        for _ in 0..header.groups {
            let descriptor = bytes.get(at..at + GROUP_SIZE).ok_or(short(at + GROUP_SIZE))?;
            let descriptor = AnaGroupHeader::get(descriptor);
            at += GROUP_SIZE;
            let end = usize::try_from(descriptor.nsids).ok().and_then(|n| n.checked_mul(4)?.checked_add(at));
            let end = end.ok_or(short(usize::MAX))?;
            let nsids = bytes.get(at..end).ok_or(short(end))?;
            groups.push(AnaGroup {
                id: descriptor.id,
                state: AnaState::from_raw(descriptor.state),
                change_count: descriptor.change_count,
                nsids: nsids.chunks_exact(4).map(u32::get).collect(),
            });
            at = end;
        }
        Ok(Self { change_count: header.change_count, groups })
    }

    /// The state of the group of namespace `nsid`, if the page lists it.
    pub fn state_of(&self, nsid: u32) -> Option<AnaState> {
        self.groups.iter().find(|group| group.nsids.contains(&nsid)).map(|group| group.state)
    }
}
