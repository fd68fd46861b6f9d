//! Calls of the agent about a snapshot, and what the core answers to them (rule 19).
//!
//! *What it is.* The agent begins a snapshot, has replicas take it once it is held, and then says who has it. Both calls are
//! answered when the core has come so far.
//!
//! *Invariants.* Each call is answered once. At most one call waits per snapshot.
//!
//! *When things fail.* A call whose mirror goes away ends without an answer, which its caller takes for one of unknown
//! outcome: the record tells whether the snapshot counts. An agent that says nothing more is not waited for: the hold ends
//! by itself.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use futures::channel::oneshot;
use mirror_core::{Input, ReplicaId, SnapshotError, SnapshotId, TreeVersion};

use super::Device;
use crate::reactor::Core;
use crate::reactor::driver::Nanos;

/// The answer to a call.
type Answer<T> = Result<T, SnapshotError>;

/// What waits for the core.
enum Waiter {
    Begin(oneshot::Sender<Answer<Vec<ReplicaId>>>),
    Commit(oneshot::Sender<Answer<TreeVersion>>),
}

/// The calls that wait.
#[derive(Default)]
pub(super) struct Snapshots(BTreeMap<SnapshotId, Waiter>);

impl Snapshots {
    /// Ends all calls without an answer.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn held(&mut self, id: &SnapshotId, members: Vec<ReplicaId>) {
        if let Some(Waiter::Begin(sender)) = self.0.remove(id) {
            let _ = sender.send(Ok(members));
        }
    }

    pub(super) fn done(&mut self, id: &SnapshotId, result: Answer<TreeVersion>) {
        match (self.0.remove(id), result) {
            (Some(Waiter::Begin(sender)), Err(error)) => drop(sender.send(Err(error))),
            (Some(Waiter::Commit(sender)), result) => drop(sender.send(result)),
            // The hold ended while the agent was busy with the replicas.
            (_, Err(error)) => tracing::warn!(snapshot = %id, %error, "there will be no such snapshot"),
            (_, Ok(version)) => tracing::info!(snapshot = %id, %version, "recorded"),
        }
    }
}

impl Device {
    /// Holds changes back; the answer is who is to take the snapshot now.
    pub fn snapshot_begin(
        self: &Rc<Self>,
        core: &Core,
        id: SnapshotId,
        hold_ns: Nanos,
    ) -> oneshot::Receiver<Answer<Vec<ReplicaId>>> {
        let (sender, receiver) = oneshot::channel();
        self.snapshots.borrow_mut().0.insert(id.clone(), Waiter::Begin(sender));
        self.input(core, Input::SnapshotBegin { id, hold_ns });
        receiver
    }

    /// These replicas have it; the answer is the version of the tree that names it.
    pub fn snapshot_commit(
        self: &Rc<Self>,
        core: &Core,
        id: SnapshotId,
        replicas: BTreeSet<ReplicaId>,
    ) -> oneshot::Receiver<Answer<TreeVersion>> {
        let (sender, receiver) = oneshot::channel();
        self.snapshots.borrow_mut().0.insert(id.clone(), Waiter::Commit(sender));
        self.input(core, Input::SnapshotTaken { id, replicas });
        receiver
    }

    /// There will be no such snapshot.
    pub fn snapshot_abort(self: &Rc<Self>, core: &Core, id: SnapshotId) {
        self.input(core, Input::SnapshotAbort { id });
    }
}
