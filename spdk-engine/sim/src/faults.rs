//! What goes wrong in a run, and when: a list made from the seed, so that a run can be repeated with fewer of them.

use crate::rng::Rng;

/// Nanoseconds of a millisecond.
pub(crate) const MS: u64 = 1_000_000;

/// One thing that goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// When, in nanoseconds.
    pub at: u64,
    /// How long, in nanoseconds, where that means something.
    pub for_ns: u64,
    /// What.
    pub kind: FaultKind,
}

/// Kinds of faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// A replica's process dies and comes back; writes in flight may be half done.
    ReplicaCrash(usize),
    /// A replica is away for long. Meanwhile another one is away for a moment and is rebuilt, and then the third one dies
    /// together with the active engine: so that the first is rebuilt by what the second took over.
    InTurns(usize),
    /// A replica's machine loses power: a disk with a volatile cache loses or tears what was not flushed.
    PowerLoss(usize),
    /// All machines with replicas lose power, and so does that of the active engine.
    Blackout,
    /// An engine cannot talk to a replica.
    Cut(usize, usize),
    /// An engine cannot talk to any replica.
    CutAll(usize),
    /// A host's connection breaks; it comes back on a new one while commands may still be on the way on the old one.
    HostBreak(usize),
    /// The active engine's node and one replica are parted from everything else; the manager opens the volume elsewhere.
    Partition(usize),
    /// The same, and the engine that opens the volume elsewhere dies while it waits.
    PartedOpenerDies(usize),
    /// The same as `Partition`, and the node is suspended for the first half of it.
    SuspendParted(usize),
    /// The connection of the active engine to a replica breaks once.
    Break(usize),
    /// An engine cannot talk to the arbiter.
    CutArbiter(usize),
    /// The arbiter is restored from an old copy, or loses the record.
    ArbiterRestore,
    /// Requests to the arbiter queue for long.
    SlowArbiter,
    /// The active engine's process dies.
    EngineCrash,
    /// The active engine is stopped and later goes on, as by `SIGSTOP`.
    EnginePause,
    /// The manager opens the volume elsewhere although the engine is well.
    Takeover,
    /// The engine is closed in order and the volume opened elsewhere.
    CleanSwitch,
    /// A disk does not answer.
    DiskHang(usize),
    /// A disk cannot write.
    WriteErrors(usize),
    /// A disk cannot read.
    ReadErrors(usize),
    /// A disk is full.
    Full(usize),
    /// The manager does nothing for a while.
    ManagerAway,
    /// An operator removes a member.
    Remove(usize),
    /// An operator removes a member and wants its data deleted.
    Delete(usize),
}

/// Draws the faults of a run.
pub(crate) fn draw(
    rng: &mut Rng,
    count: usize,
    until_ns: u64,
    (engines, replicas, hosts): (usize, usize, usize),
) -> Vec<Fault> {
    let mut faults: Vec<Fault> = (0..count)
        .map(|_| {
            let (engine, replica) = (rng.index(engines), rng.index(replicas));
            let kind = match rng.range(0, 55) {
                0..=5 => FaultKind::ReplicaCrash(replica),
                6..=8 => FaultKind::Cut(engine, replica),
                9 => FaultKind::CutAll(engine),
                10..=12 => FaultKind::Break(replica),
                13..=14 => FaultKind::CutArbiter(engine),
                15..=16 => FaultKind::SlowArbiter,
                17..=19 => FaultKind::EngineCrash,
                20..=21 => FaultKind::EnginePause,
                22..=23 => FaultKind::Takeover,
                24 => FaultKind::CleanSwitch,
                25..=26 => FaultKind::DiskHang(replica),
                27 => FaultKind::WriteErrors(replica),
                28 => FaultKind::ReadErrors(replica),
                29 => FaultKind::Full(replica),
                30 => FaultKind::Remove(replica),
                31..=33 => FaultKind::Partition(replica),
                34 => FaultKind::SuspendParted(replica),
                35..=38 => FaultKind::PowerLoss(replica),
                39 if rng.permille(500) => FaultKind::Blackout,
                40..=42 => FaultKind::ArbiterRestore,
                43 => FaultKind::Delete(replica),
                44..=45 => FaultKind::ManagerAway,
                46..=47 => FaultKind::PartedOpenerDies(replica),
                48..=51 => FaultKind::HostBreak(rng.index(hosts)),
                _ => FaultKind::InTurns(replica),
            };
            let long = rng.permille(300);
            let for_ns = rng.range(2 * MS, if long { 900 * MS } else { 150 * MS });
            Fault { at: rng.range(20 * MS, until_ns), for_ns, kind }
        })
        .collect();
    faults.sort_by_key(|f| f.at);
    faults
}
