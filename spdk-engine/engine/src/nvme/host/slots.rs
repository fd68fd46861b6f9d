//! Command slots of one queue pair, and the command identifiers that name them.
//!
//! *Invariants.* An identifier is a slot's number and, in the bits above, the slot's generation, which changes with
//! every use. So a late or repeated answer names a command that does not exist, and is seen for the protocol error that
//! it is instead of ending another command.

use super::data::Data;
use crate::reactor::driver::Nanos;

/// Most commands of one queue pair: enough generations must be left in 16 bits.
pub const MAX_SLOTS: u16 = 4096;

/// A command that was sent and has not ended.
#[derive(Debug)]
pub struct Busy {
    /// Whom it belongs to.
    pub tag: u64,
    /// When it must have ended; `Nanos::MAX` for never.
    pub deadline: Nanos,
    pub data: Data,
    /// Bytes of data.
    pub len: u32,
    /// Bytes that were received, or given to the output.
    pub moved: u32,
    /// Some of its data came with a wrong digest.
    pub corrupt: bool,
}

#[derive(Debug, Default)]
struct Slot {
    generation: u16,
    busy: Option<Busy>,
}

/// The slots; see the module.
#[derive(Debug)]
pub struct Slots {
    slots: Vec<Slot>,
    free: Vec<u16>,
    index_bits: u32,
    /// Outstanding commands that have a deadline.
    timed: usize,
}

impl Slots {
    /// `depth` slots, at least 1 and at most [`MAX_SLOTS`].
    #[must_use]
    pub fn new(depth: u16) -> Self {
        let depth = depth.clamp(1, MAX_SLOTS);
        Self {
            slots: (0..depth).map(|_| Slot::default()).collect(),
            free: (0..depth).rev().collect(),
            index_bits: u16::BITS - (depth - 1).leading_zeros(),
            timed: 0,
        }
    }

    /// Slots that are free.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Commands outstanding.
    #[must_use]
    pub fn used(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Takes a slot for a command and gives its identifier; the command back when there is none.
    pub fn take(&mut self, busy: Busy) -> Result<u16, Busy> {
        let Some(index) = self.free.pop() else { return Err(busy) };
        self.timed += usize::from(busy.deadline != Nanos::MAX);
        let slot = &mut self.slots[usize::from(index)];
        slot.busy = Some(busy);
        Ok(slot.generation << self.index_bits | index)
    }

    fn index(&self, cid: u16) -> Option<usize> {
        let index = cid & ((1u32 << self.index_bits) - 1) as u16;
        let slot = self.slots.get(usize::from(index))?;
        (slot.busy.is_some() && slot.generation << self.index_bits | index == cid).then_some(usize::from(index))
    }

    /// The command of that identifier, if it is outstanding.
    #[must_use]
    pub fn get(&self, cid: u16) -> Option<&Busy> {
        self.slots[self.index(cid)?].busy.as_ref()
    }

    /// As [`Self::get`], to change it.
    pub fn get_mut(&mut self, cid: u16) -> Option<&mut Busy> {
        let index = self.index(cid)?;
        self.slots[index].busy.as_mut()
    }

    /// Ends a command.
    pub fn end(&mut self, cid: u16) -> Option<Busy> {
        let index = self.index(cid)?;
        let slot = &mut self.slots[index];
        let busy = slot.busy.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.timed -= usize::from(busy.deadline != Nanos::MAX);
        self.free.push(index as u16);
        Some(busy)
    }

    /// Whether some command has a deadline.
    #[must_use]
    pub fn has_deadlines(&self) -> bool {
        self.timed > 0
    }

    /// Whether a command should have ended by `now`.
    #[must_use]
    pub fn expired(&self, now: Nanos) -> bool {
        self.timed > 0 && self.slots.iter().filter_map(|s| s.busy.as_ref()).any(|b| b.deadline <= now)
    }
}
