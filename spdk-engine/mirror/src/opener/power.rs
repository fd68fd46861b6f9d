//! The opener's part about volatile caches (rule 1): which promoted members still hold every acknowledged write.
//!
//! *What it is.* A replica on a disk with a volatile cache names its *instance*: a text that changes whenever what was
//! not flushed may be gone (its machine lost power; for devices that live in a process, that process ended). Its
//! superblock names the instance of a time when it was certain to hold everything acknowledged. Equal: *unchanged*, it
//! still does, whatever engines came since: as a member it got all that was acknowledged, and it lost nothing.
//! Different: *changed*, writes that were acknowledged and not flushed may be missing.
//!
//! | promoted members of `S` | sources | hosts |
//! |---|---|---|
//! | some unchanged | those; the changed ones are copied in full before they count again | served |
//! | all changed | any | those that were attached must detach first: they may hold acknowledged writes that no copy has |
//!
//! A member whose superblock says that the engine closed in order was flushed then, and got nothing since that was
//! acknowledged: it is unchanged whatever it is named. That matters when an opening after the close failed half-way.
//!
//! A member that was not promoted is no help in either case. It was waited for as long as the others allow. When no
//! member is known to be unchanged and one that was promoted could not be asked, opening fails and is tried again.
//!
//! *When things fail.* A superblock that cannot be read, or that is another replica's, names no instance: changed. A
//! replica without a meta area cannot name one at all: nothing is known of it, and it counts as unchanged as it always did.

use std::collections::{BTreeMap, BTreeSet};

use super::ReplicaFacts;
use crate::config::ReplicaId;

/// Which members may be sources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sources {
    /// These.
    pub(super) usable: BTreeSet<ReplicaId>,
    /// None is unchanged: hosts that were attached are refused until they have detached.
    pub(super) hosts_must_detach: bool,
}

/// What a superblock says of the replica's cache.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Recorded {
    /// The instance that it names.
    pub(super) instance: String,
    /// The engine that wrote it had flushed everything, and has closed.
    pub(super) closed: bool,
}

/// Whether a member may lack acknowledged writes; `recorded` is `None` when it has no meta area.
pub(super) fn is_changed(facts: &ReplicaFacts, recorded: Option<&Recorded>) -> bool {
    let unchanged = |r: &Recorded| r.closed || (!r.instance.is_empty() && r.instance == facts.instance);
    facts.volatile && recorded.is_some_and(|r| !unchanged(r))
}

/// Chooses the sources among the promoted members; each with whether it is changed.
pub(super) fn sources(members: &BTreeMap<ReplicaId, bool>) -> Sources {
    let unchanged: BTreeSet<ReplicaId> =
        members.iter().filter(|(_, changed)| !**changed).map(|(replica, _)| replica.clone()).collect();
    if unchanged.is_empty() {
        return Sources { usable: members.keys().cloned().collect(), hosts_must_detach: !members.is_empty() };
    }
    Sources { usable: unchanged, hosts_must_detach: false }
}
