//! What every core knows of a raid: one description, published as a whole.
//!
//! *What it is.* The control core changes a [`Layout`] and publishes it in [`Shared`]; then it asks every core to take it
//! up ([`super::core_raid::CoreRaid::apply`]). A channel that is opened in between starts from what is published.
//!
//! *Invariants.* A slot's member is told from an earlier one of the same slot by its generation. Only the control core
//! publishes, so a change is read, made and published without a wait in between.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use smallvec::SmallVec;

use crate::bdev::registry::Entry;

/// Which member, exactly: a slot may have another one later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MemberId {
    pub slot: u8,
    /// Counts the members that this process has ever had in any raid.
    pub generation: u64,
}

/// A member as cores use it.
#[derive(Debug, Clone)]
pub struct Member {
    pub id: MemberId,
    pub entry: Arc<Entry>,
    /// First block of the data on the member.
    pub data_offset: u64,
}

/// I/O that has to wait, until the hold is lifted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hold {
    pub id: u64,
    pub what: Held,
}

/// Which I/O a hold is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Held {
    /// What touches these blocks.
    Range(Range<u64>),
    /// All of it, flushes and resets too.
    Everything,
}

/// How I/O is to be carried out now.
#[derive(Debug, Clone, Default)]
pub struct Layout {
    /// By slot; the member being rebuilt is among them.
    pub members: Vec<Option<Member>>,
    /// The slot being rebuilt.
    pub target: Option<u8>,
    /// First block that the slot being rebuilt does not have yet.
    pub boundary: u64,
    pub holds: SmallVec<[Hold; 2]>,
}

/// One raid, as all cores share it.
#[derive(Debug)]
pub struct Shared {
    /// Never used twice in a process.
    pub id: u64,
    pub name: String,
    pub block_size: u32,
    num_blocks: AtomicU64,
    layout: Mutex<Arc<Layout>>,
}

/// Numbers that are never given out twice: raids, members, holds.
pub fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Shared {
    /// A raid of `num_blocks` blocks over `members`.
    #[must_use]
    pub fn new(name: String, block_size: u32, num_blocks: u64, members: Vec<Option<Member>>) -> Arc<Self> {
        let layout = Layout { members, ..Layout::default() };
        Arc::new(Self {
            id: next_number(),
            name,
            block_size,
            num_blocks: AtomicU64::new(num_blocks),
            layout: Mutex::new(Arc::new(layout)),
        })
    }

    /// Size in blocks.
    #[must_use]
    pub fn num_blocks(&self) -> u64 {
        self.num_blocks.load(Ordering::Relaxed)
    }

    /// Changes the size.
    pub fn set_num_blocks(&self, blocks: u64) {
        self.num_blocks.store(blocks, Ordering::Relaxed);
    }

    /// What is published.
    #[must_use]
    pub fn layout(&self) -> Arc<Layout> {
        Arc::clone(&self.layout.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Publishes a change; on the control core only.
    pub fn publish(&self, change: impl FnOnce(&mut Layout)) {
        let mut published = self.layout.lock().unwrap_or_else(PoisonError::into_inner);
        change(Arc::make_mut(&mut published));
    }
}
