//! Commands of one queue, by slot.
//!
//! *Invariants.* A slot is in use from the arrival of its command until its response is queued. Slot numbers are below
//! the queue depth; the transfer tag of a slot is its number plus one.

use addax_hugepages::BufSlice;
use nvme_wire::command::Direction;
use nvme_wire::{Sqe, Status};

/// How far a command has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    Free,
    /// Waits for a buffer.
    Starved,
    /// An R2T was sent; its data is being received.
    Receiving,
    /// Given to the owner of the session.
    Executing,
}

/// One command.
#[derive(Debug)]
pub struct Slot {
    pub sqe: Sqe,
    pub stage: Stage,
    pub direction: Direction,
    /// Bytes of the transfer.
    pub len: u32,
    /// Bytes received so far.
    pub received: u32,
    pub data: Option<BufSlice>,
    /// Its data took a buffer of the pool.
    pub pooled: bool,
    /// The answer, when it is certain before the command was executed.
    pub verdict: Option<Status>,
}

impl Slot {
    fn free() -> Self {
        Self {
            sqe: Sqe::default(),
            stage: Stage::Free,
            direction: Direction::None,
            len: 0,
            received: 0,
            data: None,
            pooled: false,
            verdict: None,
        }
    }
}

/// The table of slots.
#[derive(Debug)]
pub struct Slots {
    table: Vec<Slot>,
    free: Vec<u16>,
    depth: usize,
    /// Commands whose data took a buffer of the pool.
    pooled: u32,
}

impl Slots {
    pub fn new(depth: u16) -> Self {
        Self { table: Vec::new(), free: Vec::new(), depth: usize::from(depth), pooled: 0 }
    }

    /// Changes how many commands may be outstanding.
    pub fn set_depth(&mut self, depth: u16) {
        self.depth = usize::from(depth);
    }

    /// Commands outstanding.
    pub fn in_use(&self) -> usize {
        self.table.len() - self.free.len()
    }

    /// A slot for a command; `None` when the host has exceeded the queue depth.
    pub fn take(&mut self, sqe: &Sqe) -> Option<u16> {
        if self.in_use() >= self.depth {
            return None;
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.table.push(Slot::free());
            (self.table.len() - 1) as u16
        });
        let slot = self.get_mut(index);
        slot.direction = sqe.direction();
        slot.sqe = *sqe;
        slot.stage = Stage::Executing;
        slot.len = 0;
        slot.received = 0;
        slot.verdict = None;
        Some(index)
    }

    /// Gives a slot back.
    pub fn release(&mut self, index: u16) {
        let slot = self.get_mut(index);
        if slot.stage != Stage::Free {
            slot.stage = Stage::Free;
            slot.data = None;
            if std::mem::take(&mut slot.pooled) {
                self.pooled -= 1;
            }
            self.free.push(index);
        }
    }

    pub fn get(&self, index: u16) -> &Slot {
        &self.table[usize::from(index)]
    }

    pub fn get_mut(&mut self, index: u16) -> &mut Slot {
        &mut self.table[usize::from(index)]
    }

    /// Gives a command the buffer for its data.
    pub fn give(&mut self, index: u16, data: BufSlice) {
        let slot = self.get_mut(index);
        slot.data = Some(data);
        slot.pooled = true;
        self.pooled += 1;
    }

    /// Buffers of the pool that the commands have.
    pub fn pooled(&self) -> u32 {
        self.pooled
    }

    /// The slot of a transfer tag.
    pub fn by_tag(&self, tag: u16) -> Option<u16> {
        let index = tag.checked_sub(1)?;
        let slot = self.table.get(usize::from(index))?;
        (slot.stage != Stage::Free).then_some(index)
    }

    /// Slots in use.
    pub fn used(&self) -> impl Iterator<Item = (u16, &Slot)> {
        self.table.iter().enumerate().filter(|(_, s)| s.stage != Stage::Free).map(|(i, s)| (i as u16, s))
    }
}
