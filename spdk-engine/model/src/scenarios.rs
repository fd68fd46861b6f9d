//! Named bounds: what `cargo test` looks at, and what `make model` does on top.
//!
//! *How they are chosen.* The number of states grows by about ten with every engine, swap or write more. So instead of
//! one large check there are several, each wide in one direction: connections that break, a leave, a whole rebuild,
//! the strict mode, write-intent bits, a chain of takeovers. What a scenario must see is part of it, so that a change
//! that makes steps impossible does not pass for a proof.

use crate::model::{Bounds, Seen};
use crate::set::Set;

/// Named bounds.
#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    /// Its name.
    pub name: &'static str,
    /// Looked at by `cargo test`, too.
    pub quick: bool,
    /// How far it goes.
    pub bounds: Bounds,
    /// What cannot happen within these bounds; everything else must.
    pub unseen: &'static [Seen],
}

const TWO: Set = Set::from_bits(0b011);
const ONE: Set = Set::from_bits(0b001);
const SECOND: Set = Set::from_bits(0b010);
const BOTH_OTHERS: Set = Set::from_bits(0b110);

const BASE: Bounds = Bounds::new();

/// All of them, the quick ones first.
pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "three members, a takeover, connections break",
        quick: true,
        bounds: Bounds { breaks: true, ..BASE },
        unseen: &[Seen::Joined, Seen::BitCleared],
    },
    Scenario {
        name: "three members, one leaves, a takeover",
        quick: true,
        bounds: Bounds { number: 3, ..BASE },
        unseen: &[Seen::Joined, Seen::Replayed, Seen::BitCleared],
    },
    Scenario {
        name: "two members, one rebuilt, a takeover",
        quick: true,
        bounds: Bounds { in_sync: TWO, number: 4, ..BASE },
        unseen: &[Seen::Replayed, Seen::BitCleared],
    },
    Scenario {
        name: "strict mode, three members, one leaves, a takeover",
        quick: true,
        bounds: Bounds { members_min: 2, number: 3, ..BASE },
        unseen: &[Seen::AcknowledgedByOne, Seen::Joined, Seen::Replayed, Seen::BitCleared],
    },
    Scenario {
        name: "strict mode, two members, one rebuilt, a takeover, connections break",
        quick: true,
        bounds: Bounds { in_sync: TWO, members_min: 2, number: 3, breaks: true, ..BASE },
        unseen: &[Seen::AcknowledgedByOne, Seen::Left, Seen::OpenedWithoutAll, Seen::BitCleared],
    },
    Scenario {
        name: "bits, three members, a takeover",
        quick: true,
        bounds: Bounds { bits: true, ..BASE },
        unseen: &[Seen::Joined, Seen::Replayed],
    },
    Scenario {
        name: "bits, one member, a joiner, a takeover",
        quick: true,
        bounds: Bounds { in_sync: ONE, rebuilding: SECOND, number: 3, bits: true, ..BASE },
        unseen: &[Seen::Replayed],
    },
    Scenario {
        name: "two members, two takeovers",
        quick: true,
        bounds: Bounds { in_sync: TWO, instances: 3, ..BASE },
        unseen: &[Seen::Joined, Seen::Replayed, Seen::BitCleared],
    },
    Scenario {
        name: "three members, two writes, one leaves, a takeover, connections break",
        quick: false,
        bounds: Bounds { written: 3, number: 3, breaks: true, ..BASE },
        unseen: &[Seen::Joined, Seen::BitCleared],
    },
    Scenario {
        name: "three members, one leaves, two takeovers",
        quick: false,
        bounds: Bounds { number: 3, instances: 3, ..BASE },
        unseen: &[Seen::Joined, Seen::Replayed, Seen::BitCleared],
    },
    Scenario {
        name: "two members, one rebuilt, two takeovers",
        quick: false,
        bounds: Bounds { in_sync: TWO, number: 4, instances: 3, ..BASE },
        unseen: &[Seen::Replayed, Seen::BitCleared],
    },
    Scenario {
        name: "one member, a joiner, a takeover, connections break",
        quick: false,
        bounds: Bounds { in_sync: ONE, rebuilding: SECOND, number: 3, breaks: true, ..BASE },
        unseen: &[Seen::BitCleared],
    },
    Scenario {
        name: "strict mode, two members, two writes, one rebuilt, one leaves, a takeover, connections break",
        quick: false,
        bounds: Bounds { in_sync: TWO, members_min: 2, number: 4, written: 3, breaks: true, ..BASE },
        unseen: &[Seen::AcknowledgedByOne, Seen::BitCleared],
    },
    Scenario {
        name: "strict mode, three members, one leaves, two takeovers",
        quick: false,
        bounds: Bounds { members_min: 2, number: 3, instances: 3, ..BASE },
        unseen: &[Seen::AcknowledgedByOne, Seen::Joined, Seen::Replayed, Seen::BitCleared],
    },
    Scenario {
        name: "bits, two members, two writes, one leaves, a takeover",
        quick: false,
        bounds: Bounds { in_sync: TWO, written: 3, number: 3, bits: true, ..BASE },
        unseen: &[Seen::Replayed],
    },
    Scenario {
        name: "bits, one member, two joiners, a takeover",
        quick: false,
        bounds: Bounds { in_sync: ONE, rebuilding: BOTH_OTHERS, number: 4, bits: true, ..BASE },
        unseen: &[Seen::Replayed],
    },
    Scenario {
        name: "bits, one member, a joiner, a takeover, connections break",
        quick: false,
        bounds: Bounds { in_sync: ONE, rebuilding: SECOND, number: 3, bits: true, breaks: true, ..BASE },
        unseen: &[],
    },
];

impl Scenario {
    /// The scenario of a name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        SCENARIOS.iter().find(|s| s.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::SEEN;

    #[test]
    fn everything_is_seen_in_some_quick_scenario() {
        for seen in SEEN {
            let somewhere = SCENARIOS.iter().any(|s| s.quick && !s.unseen.contains(&seen));
            assert!(somewhere, "{seen:?} is seen in no quick scenario");
        }
    }
}
