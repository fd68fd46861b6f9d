//! The state of the modelled world, and its normal form.
//!
//! *What it is.* Plain values, all of them bounded: the arbiter's record and the swaps that may still reach it, two
//! engines, three replicas, and what hosts know. One block of data; writes are increasing numbers.
//!
//! *Normal form.* Replicas have no names that a rule looks at, and neither have engines. [`State::normal`] renames
//! them, so that states that differ in names alone are one state, and forgets what nothing can ask for any more:
//! requests whose expected record is gone, epochs older than every live engine's, and what a replica holds that no
//! record's `S` names and that is not copied. The last forgets on the unsafe side: such a replica counts as the oldest
//! there is.
//!
//! *What is left out.* Superblocks (the arbiter is never lost here), region stamps (every rebuild is a full copy),
//! volatile caches (what a replica has it keeps), more than one block, resizing and snapshots.

use std::hash::{Hash, Hasher};

use crate::set::{REPLICAS, Set};

/// Engines that can be alive at a time.
pub const ENGINES: usize = 2;
/// Most requests under way to the arbiter that may still take effect.
pub const QUEUE_MAX: usize = 4;

/// What a compare-and-swap compares, in the order in which records follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Version {
    /// Epoch `g`.
    pub epoch: u8,
    /// Configuration number `k`.
    pub number: u8,
    /// Engine instance `e` that owns the epoch.
    pub owner: u8,
}

/// The configuration record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Record {
    /// `g`, `e`, `k`.
    pub version: Version,
    /// In-sync set `S`.
    pub in_sync: Set,
    /// Rebuilding set `R`.
    pub rebuilding: Set,
}

/// A swap on its way to the arbiter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Request {
    /// What the record must be.
    pub expect: Version,
    /// What it becomes.
    pub next: Record,
}

/// A replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Replica {
    /// The block.
    pub data: u8,
    /// A write that the disk has and has not done yet; 0 is none.
    pub disk: u8,
    /// A write of an older session that was not drained (only when rule 13 is broken); 0 is none.
    pub ghost: u8,
    /// Epoch it was promoted to. An epoch has one owner, so the instance follows.
    pub promoted: u8,
    /// Whose session is open: 0 nobody's, else the engine's index and one.
    pub session: u8,
    /// The write-intent bit.
    pub bit: bool,
}

impl Replica {
    /// Whether an engine's session is open.
    #[must_use]
    pub fn serves(&self, engine: usize) -> bool {
        usize::from(self.session) == engine + 1
    }
}

/// How far an engine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Phase {
    /// There is no process.
    #[default]
    Off,
    /// Has read the record and wants the next epoch.
    Raising,
    /// Owns the epoch and promotes replicas.
    Promoting,
    /// Takes members that were not promoted out.
    Deciding,
    /// Serves hosts.
    Serving,
}

/// Why an engine swaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// The next epoch (rule 15).
    Raise,
    /// Members that were not promoted leave (rule 15).
    Decide,
    /// A failed member leaves (rule 6).
    Leave,
    /// A replica starts rebuilding (rule 8).
    Start,
    /// A rebuilt replica joins (rule 10).
    Join,
}

/// The swap that an engine has not settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pending {
    /// Why.
    pub reason: Reason,
    /// What was asked for.
    pub next: Record,
}

/// What holds the block's range lock, if anything (rule 2: one at a time).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Job {
    /// Nothing.
    #[default]
    None,
    /// A host's write.
    Write {
        /// The number written.
        value: u8,
        /// Write-intent bits are durable and the data is out (rule 18).
        sent: bool,
        /// When it began a newer engine served already: it must never be acknowledged.
        replaced: bool,
    },
    /// A copy to a joiner.
    Copy {
        /// What the source had.
        value: u8,
    },
    /// Making members equal after an unclean stop (rule 18).
    Equalise {
        /// What the source had.
        value: u8,
    },
}

/// An engine process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Engine {
    /// Instance; never used twice. 0 when off.
    pub instance: u8,
    /// How far it is.
    pub phase: Phase,
    /// The record as it knows it.
    pub config: Record,
    /// Who owned the epoch before.
    pub previous_owner: u8,
    /// Its swap that is not settled (rule 7).
    pub pending: Option<Pending>,
    /// Replicas promoted while opening.
    pub promoted: Set,
    /// Of those: which had their write-intent bit set, read after the promote.
    pub bits_read: Set,
    /// No older engine can hold a lease any more (rule 16).
    pub waited: bool,
    /// Members may differ (rule 18).
    pub inherited: bool,
    /// Replicas it works with: members, and joiners it has not given up.
    pub legs: Set,
    /// Joiners that are copied.
    pub copied: Set,
    /// Replicas whose session is gone, but that confirmed this engine less than T ago (rule 16).
    pub fresh: Set,
    /// What holds the range lock.
    pub job: Job,
    /// For whom the job is meant.
    pub need: Set,
    /// Who has it.
    pub done: Set,
}

impl Engine {
    /// Members by the committed record and by one that may yet be committed (rules 7 and 10).
    #[must_use]
    pub fn required(&self) -> Set {
        self.pending.map_or(self.config.in_sync, |p| self.config.in_sync.or(p.next.in_sync))
    }

    /// Members that a swap under way takes out. They are sources no longer.
    #[must_use]
    pub fn leaving(&self) -> Set {
        self.pending.map_or(Set::EMPTY, |p| self.config.in_sync.minus(p.next.in_sync))
    }

    /// Joiners that get every write.
    #[must_use]
    pub fn mirrored(&self) -> Set {
        self.config.rebuilding.and(self.legs).minus(self.config.in_sync)
    }

    /// Whether hosts are served.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.phase == Phase::Serving
    }
}

/// What broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Violation {
    /// A read returned an older value than one that was acknowledged or read before it began.
    StaleRead,
    /// A write was acknowledged by an engine that had been replaced before the write began.
    ReplacedEngineAcknowledged,
    /// The engine that owns the epoch read from a replica outside the recorded `S`.
    SourceOutsideInSync,
    /// A record with an empty `S` was accepted.
    EmptyInSync,
    /// `S` shrank below `minInSync`.
    BelowMinimum,
    /// The sets changed and `k` did not rise.
    NumberStays,
}

/// The world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    /// The arbiter's record.
    pub record: Record,
    /// Requests that may still reach the arbiter.
    pub queue: [Option<Request>; QUEUE_MAX],
    /// The engines.
    pub engines: [Engine; ENGINES],
    /// The replicas.
    pub replicas: [Replica; REPLICAS],
    /// The highest value acknowledged.
    pub acknowledged: u8,
    /// The highest value acknowledged or read: no later read may return less.
    pub floor: u8,
    /// The highest value given to a write.
    pub written: u8,
    /// The highest instance given to an engine.
    pub instances: u8,
    /// Set by the step that broke something; nothing follows.
    pub violation: Option<Violation>,
}

/// Eight bytes at a time: field by field, hashing takes a quarter of a check.
impl Hash for State {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        let mut word = |bytes: [u8; 8]| hasher.write_u64(u64::from_le_bytes(bytes));
        let [a, b, c, d, e] = self.record.bytes();
        word([a, b, c, d, e, self.acknowledged, self.floor, self.written]);
        for request in self.queue {
            let Request { expect, next } = request.unwrap_or_default();
            let [a, b, c, d, e] = next.bytes();
            word([a, b, c, d, e, expect.epoch, expect.number, expect.owner]);
        }
        for engine in &self.engines {
            engine.words().into_iter().for_each(&mut word);
        }
        for replica in &self.replicas {
            let Replica { data, disk, ghost, promoted, session, bit } = *replica;
            word([data, disk, ghost, promoted, session, bit.into(), 0, 0]);
        }
        let violation = self.violation.map_or(0, |v| v as u8 + 1);
        word([self.instances, violation, 0, 0, 0, 0, 0, 0]);
    }
}

impl Record {
    fn bytes(&self) -> [u8; 5] {
        let Version { epoch, number, owner } = self.version;
        [epoch, number, owner, self.in_sync.bits(), self.rebuilding.bits()]
    }
}

impl Engine {
    /// All of it, for hashing.
    fn words(&self) -> [[u8; 8]; 4] {
        let [a, b, c, d, e] = self.config.bytes();
        let (reason, next) = self.pending.map_or((0, Record::default()), |p| (p.reason as u8 + 1, p.next));
        let [f, g, h, i, j] = next.bytes();
        let (kind, value, flags) = match self.job {
            Job::None => (0, 0, 0),
            Job::Write { value, sent, replaced } => (1, value, u8::from(sent) | u8::from(replaced) << 1),
            Job::Copy { value } => (2, value, 0),
            Job::Equalise { value } => (3, value, 0),
        };
        let flags = flags | u8::from(self.waited) << 2 | u8::from(self.inherited) << 3;
        [
            [a, b, c, d, e, self.instance, self.phase as u8, self.previous_owner],
            [f, g, h, i, j, reason, kind, value],
            [flags, self.promoted.bits(), self.bits_read.bits(), self.legs.bits(), self.copied.bits(), 0, 0, 0],
            [self.fresh.bits(), self.need.bits(), self.done.bits(), 0, 0, 0, 0, 0],
        ]
    }
}

impl State {
    /// The same state with names in a fixed order and without what nobody can ask for.
    #[must_use]
    pub fn normal(mut self) -> Self {
        self.order_engines();
        self.order_queue();
        self.forget();
        let keys: [_; REPLICAS] = std::array::from_fn(|r| (self.replicas[r], self.memberships(r)));
        let mut order: [usize; REPLICAS] = std::array::from_fn(|r| r);
        order.sort_by_key(|r| std::cmp::Reverse(keys[*r]));
        if order != std::array::from_fn(|r| r) {
            let old = self.replicas;
            self.replicas = std::array::from_fn(|r| old[order[r]]);
            self.each_set(|set| *set = set.renamed(order));
            self.order_queue();
        }
        self
    }

    /// The newer engine comes first. Instances differ, so two engines are equal only when both are off.
    fn order_engines(&mut self) {
        if self.engines[0].instance < self.engines[1].instance {
            self.engines.swap(0, 1);
            for replica in &mut self.replicas {
                replica.session = match replica.session {
                    1 => 2,
                    2 => 1,
                    other => other,
                };
            }
        }
    }

    fn forget(&mut self) {
        let mut asked = self.record.in_sync;
        self.queue.iter().flatten().for_each(|request| asked = asked.or(request.next.in_sync));
        let mut oldest = self.record.version.epoch;
        for engine in self.engines.iter_mut().filter(|e| e.phase != Phase::Off) {
            asked = asked.or(engine.required()).or(engine.copied);
            oldest = oldest.min(engine.config.version.epoch);
            engine.fresh = engine.fresh.and(engine.required());
        }
        for (r, replica) in self.replicas.iter_mut().enumerate() {
            if replica.promoted < oldest {
                replica.promoted = 0;
            }
            if !asked.has(r) {
                replica.data = 0;
                replica.bit = false;
            }
        }
    }

    /// Drops requests whose expected version is gone for ever: versions only rise.
    fn order_queue(&mut self) {
        let current = self.record.version;
        for slot in &mut self.queue {
            *slot = slot.filter(|request| request.expect >= current);
        }
        self.queue.sort_by_key(|slot| std::cmp::Reverse(*slot));
    }

    /// In which of all the sets a replica is, one bit each.
    fn memberships(&mut self, replica: usize) -> u64 {
        let mut bits = 0;
        self.each_set(|set| bits = bits << 1 | u64::from(set.has(replica)));
        bits
    }

    fn each_set(&mut self, mut f: impl FnMut(&mut Set)) {
        let mut record = |record: &mut Record| {
            f(&mut record.in_sync);
            f(&mut record.rebuilding);
        };
        record(&mut self.record);
        self.queue.iter_mut().flatten().for_each(|request| record(&mut request.next));
        for engine in &mut self.engines {
            record(&mut engine.config);
            if let Some(pending) = &mut engine.pending {
                record(&mut pending.next);
            }
        }
        for engine in &mut self.engines {
            let sets = [
                &mut engine.promoted,
                &mut engine.bits_read,
                &mut engine.legs,
                &mut engine.copied,
                &mut engine.fresh,
                &mut engine.need,
                &mut engine.done,
            ];
            sets.into_iter().for_each(&mut f);
        }
    }
}
