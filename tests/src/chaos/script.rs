//! What a round of chaos does and when: a pure function of a seed.
//!
//! *Invariants.* Faults come in the order of their begin, and all have ended when the round does. Two at most are in effect
//! at once, never two on one node; a power cut is alone. So every fault can be undone by itself.

use std::fmt;
use std::time::Duration;

use crate::cluster::Random;

/// Faults in effect at once, at most.
const AT_ONCE: usize = 2;
/// Shortest and longest time between the begins of two faults, in milliseconds.
const GAP_MS: (u64, u64) = (200, 4000);
/// Tries to find a fault that fits beside those in effect, before the next moment is looked at.
const TRIES: usize = 8;

/// What goes wrong. Nodes have numbers from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The data plane is killed; its agent starts it again.
    KillEngine(u32),
    /// The agent is killed.
    KillAgent(u32),
    /// The manager is killed.
    KillManager(u32),
    /// All processes of a node are killed.
    KillNode(u32),
    /// The data plane is stopped and goes on.
    StopEngine(u32),
    /// All processes of a node are stopped and go on.
    StopNode(u32),
    /// The API server is killed.
    KillApi,
    /// What a node sends to the API server waits, and the answers too.
    HoldApi(u32),
    /// Two nodes do not reach each other.
    Part(u32, u32),
    /// What one node sends to another vanishes.
    Cut(u32, u32),
    /// The data plane has a fifth of its time only.
    Slow(u32),
    /// The network of a node is slow.
    Narrow(u32),
    /// The disk of a node is full.
    Fill(u32),
    /// Everything is killed.
    PowerCut,
}

impl Kind {
    /// Number of kinds.
    pub const COUNT: u64 = 14;

    /// The kind of a number, on a node and where two are concerned another one.
    fn of(number: u64, node: u32, other: u32) -> Self {
        match number {
            0 => Self::KillEngine(node),
            1 => Self::KillAgent(node),
            2 => Self::KillManager(node),
            3 => Self::KillNode(node),
            4 => Self::StopEngine(node),
            5 => Self::StopNode(node),
            6 => Self::KillApi,
            7 => Self::HoldApi(node),
            8 => Self::Part(node, other),
            9 => Self::Cut(node, other),
            10 => Self::Slow(node),
            11 => Self::Narrow(node),
            12 => Self::Fill(node),
            _ => Self::PowerCut,
        }
    }

    /// Its name without the nodes.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::KillEngine(_) => "kill the data plane",
            Self::KillAgent(_) => "kill the agent",
            Self::KillManager(_) => "kill the manager",
            Self::KillNode(_) => "kill everything",
            Self::StopEngine(_) => "stop the data plane",
            Self::StopNode(_) => "stop everything",
            Self::KillApi => "kill the API server",
            Self::HoldApi(_) => "hold requests to the API server",
            Self::Part(..) => "part",
            Self::Cut(..) => "cut one way",
            Self::Slow(_) => "slow the data plane",
            Self::Narrow(_) => "slow the network",
            Self::Fill(_) => "fill the disk",
            Self::PowerCut => "power cut",
        }
    }

    fn nodes(self) -> [Option<u32>; 2] {
        match self {
            Self::KillEngine(node)
            | Self::KillAgent(node)
            | Self::KillManager(node)
            | Self::KillNode(node)
            | Self::StopEngine(node)
            | Self::StopNode(node)
            | Self::HoldApi(node)
            | Self::Slow(node)
            | Self::Narrow(node)
            | Self::Fill(node) => [Some(node), None],
            Self::Part(node, other) | Self::Cut(node, other) => [Some(node), Some(other)],
            Self::KillApi | Self::PowerCut => [None, None],
        }
    }

    /// Whether both can be in effect at once.
    fn fits(self, other: Self) -> bool {
        let alone = |kind: Self| kind == Self::PowerCut;
        let shared = self.nodes().into_iter().flatten().any(|node| other.nodes().contains(&Some(node)));
        !(alone(self) || alone(other) || shared || self == other)
    }

    /// Longest time that it is in effect, in milliseconds. Some are over in a second, some outlast every time limit.
    const fn longest_ms(self) -> u64 {
        match self {
            Self::PowerCut => 2_000,
            Self::Slow(_) | Self::Narrow(_) | Self::Fill(_) => 12_000,
            _ => 20_000,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self.nodes() {
            [Some(node), Some(other)] => write!(f, ", node-{node} and node-{other}"),
            [Some(node), None] => write!(f, ", node-{node}"),
            _ => Ok(()),
        }
    }
}

/// Something that goes wrong for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// After the begin of the round.
    pub begin: Duration,
    /// When it is undone.
    pub end: Duration,
    /// What it is.
    pub kind: Kind,
}

/// The faults of a round of some length on so many nodes.
#[must_use]
pub fn script(random: &mut Random, nodes: u32, length: Duration) -> Vec<Fault> {
    let mut faults: Vec<Fault> = Vec::new();
    let mut begin = Duration::ZERO;
    loop {
        begin += between(random, GAP_MS.0, GAP_MS.1);
        if begin >= length {
            return faults;
        }
        let now: Vec<Kind> = faults.iter().filter(|fault| fault.end > begin).map(|fault| fault.kind).collect();
        if now.len() >= AT_ONCE {
            continue;
        }
        let fits = |kind: &Kind| now.iter().all(|other| kind.fits(*other));
        if let Some(kind) = (0..TRIES).map(|_| any(random, nodes)).find(fits) {
            // Mostly short, sometimes long.
            let most = 1 + random.below(kind.longest_ms());
            let end = (begin + between(random, 50, 50 + most)).min(length);
            faults.push(Fault { begin, end, kind });
        }
    }
}

fn any(random: &mut Random, nodes: u32) -> Kind {
    let nodes = u64::from(nodes);
    let node = random.below(nodes);
    let other = (node + 1 + random.below(nodes - 1)) % nodes;
    let number = |node: u64| u32::try_from(node).map_or(1, |node| node + 1);
    Kind::of(random.below(Kind::COUNT), number(node), number(other))
}

fn between(random: &mut Random, least_ms: u64, most_ms: u64) -> Duration {
    Duration::from_millis(least_ms + random.below(most_ms - least_ms + 1))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const LENGTH: Duration = Duration::from_secs(60);

    #[test]
    fn a_seed_gives_the_same_script_and_another_another() {
        let of = |seed| script(&mut Random::new(seed), 3, LENGTH);
        assert_eq!(of(7), of(7));
        assert_ne!(of(7), of(8));
    }

    #[test]
    fn what_is_in_effect_at_once_can_be_undone_by_itself() {
        let mut seen = BTreeSet::new();
        for seed in 0..300 {
            let faults = script(&mut Random::new(seed), 3, LENGTH);
            assert!(faults.len() > 3, "seed {seed}: {faults:?}");
            assert!(faults.is_sorted_by_key(|fault| fault.begin));
            for (index, fault) in faults.iter().enumerate() {
                seen.insert(fault.kind.name());
                assert!(fault.begin < fault.end && fault.end <= LENGTH, "seed {seed}: {fault:?}");
                let before: Vec<_> = faults[..index].iter().filter(|other| other.end > fault.begin).collect();
                assert!(before.len() < AT_ONCE, "seed {seed}: {fault:?} beside {before:?}");
                assert!(before.iter().all(|other| fault.kind.fits(other.kind)), "seed {seed}: {fault:?}, {before:?}");
                let nodes: BTreeSet<_> = fault.kind.nodes().into_iter().flatten().collect();
                assert!(nodes.iter().all(|node| (1..=3).contains(node)));
                assert_eq!(nodes.len(), fault.kind.nodes().iter().flatten().count(), "the same node twice");
            }
        }
        assert_eq!(seen.len() as u64, Kind::COUNT, "{seen:?}");
    }

    #[test]
    fn nodes_are_named() {
        assert_eq!(Kind::Part(1, 3).to_string(), "part, node-1 and node-3");
        assert_eq!(Kind::Fill(2).to_string(), "fill the disk, node-2");
        assert_eq!(Kind::PowerCut.to_string(), "power cut");
    }
}
