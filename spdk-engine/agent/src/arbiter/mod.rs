//! The arbiter: where the configuration record of a volume is kept and swapped (rules 6, 7, 21 and 23).
//!
//! *What it is.* A trait with two calls, in the words of the mirror core. [`KubeArbiter`] is the Volume object's
//! `status.config`; [`MemoryArbiter`] is for tests and can misbehave.
//!
//! *Invariants.* `Committed` is said only when the record is what was proposed by this very proposal or by an earlier
//! sending of it; `Refused` only together with the record that was read *and* when nothing that was sent for this call
//! can still be committed; everything else is `Unknown`. No call takes longer than [`SWAP_DEADLINE`].
//!
//! *Beside swaps* there is [`Arbiter::conclude`], by which a recovery puts a record where there is none, or one of a new lineage
//! in the place of another, together with its account and the list of replicas that were set aside: all of it or nothing.
//!
//! *When things fail.* An arbiter that is away is `Unavailable` or `Unknown`; the callers wait and ask again, and no
//! acknowledgement goes out meanwhile.

mod kube;
mod memory;
mod record;

pub use self::kube::KubeArbiter;
pub use memory::{Fault, MemoryArbiter};
pub use record::{
    RecordParseError, block_size, config_to_mirror, config_to_record, mirror_to_config, record_to_config,
};

use std::time::Duration;

use addax_api::recovery::{DiscardedReplica, RecoveryAccount};
use futures::future::BoxFuture;
use mirror_core::{Config, ConfigVersion, RecordError, SwapOutcome};

/// Deadline of a swap as a whole: after it the outcome is unknown.
pub const SWAP_DEADLINE: Duration = Duration::from_secs(5);
/// Deadline of a read.
pub const READ_DEADLINE: Duration = Duration::from_secs(5);

/// Where records are kept.
pub trait Arbiter: Send + Sync + std::fmt::Debug {
    /// Reads a volume's record.
    fn read<'a>(&'a self, volume: &'a str) -> BoxFuture<'a, Result<Config, RecordError>>;

    /// Replaces a volume's record by `next` if it has the version `expect`.
    fn swap<'a>(&'a self, volume: &'a str, expect: &'a ConfigVersion, next: &'a Config) -> BoxFuture<'a, SwapOutcome>;

    /// Reads a volume's record, which may be absent, with what operators did to it; `NotFound` without the volume.
    fn read_history<'a>(&'a self, volume: &'a str) -> BoxFuture<'a, Result<History, RecordError>>;

    /// Puts the outcome of a recovery in the place of the record of version `expect`, `None` for no record. An account that
    /// is there already is not written again.
    fn conclude<'a>(
        &'a self,
        volume: &'a str,
        expect: Option<&'a ConfigVersion>,
        conclusion: &'a Conclusion,
    ) -> BoxFuture<'a, Concluded>;
}

/// A volume's record, and what operators did to it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct History {
    /// The record.
    pub record: Option<Config>,
    /// Accounts of what operators did, the newest last.
    pub accounts: Vec<RecoveryAccount>,
    /// Replicas that were set aside.
    pub discarded: Vec<DiscardedReplica>,
}

/// What a recovery has come to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conclusion {
    /// The record from now on.
    pub config: Config,
    /// Its account.
    pub account: RecoveryAccount,
    /// Of the hold that ends by it.
    pub generation: u32,
}

/// What became of a conclusion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Concluded {
    /// It stands.
    Done,
    /// Not written: the record has changed meanwhile, or the request was answered already.
    Refused,
    /// Nobody knows yet; the same one may be sent again.
    Unknown,
}

impl Conclusion {
    /// Who is set aside afterwards: those that were and those that are now, without the members.
    fn set_aside(&self, before: &[DiscardedReplica]) -> Vec<DiscardedReplica> {
        let named = |replica: &str| {
            let sets = self.config.in_sync.iter().chain(&self.config.rebuilding);
            sets.into_iter().any(|name| name.as_str() == replica)
        };
        let mut all: Vec<DiscardedReplica> = before.iter().filter(|old| !named(&old.replica)).cloned().collect();
        for replica in self.account.discarded.iter().filter(|replica| !named(replica)) {
            if !all.iter().any(|old| old.replica == *replica) {
                let (at, by) = (self.account.at.clone(), self.account.id.clone());
                all.push(DiscardedReplica { replica: replica.clone(), at, by, purging: false });
            }
        }
        all
    }
}

/// What to do with a record that was read, on the way to `next`.
#[derive(Debug, PartialEq, Eq)]
enum Judgement {
    /// It is what was expected: write.
    Write,
    /// It is `next` already: an earlier sending of this proposal was committed.
    Done,
    /// It is something else.
    Refuse,
}

/// Compares the record with what a swap expects. Only one engine instance writes within an epoch, and its agent sends
/// one proposal at a time, so a record equal to `next` was written by an earlier sending of the same proposal.
fn judge(current: &Config, expect: &ConfigVersion, next: &Config) -> Judgement {
    if current == next {
        Judgement::Done
    } else if current.version() == *expect {
        Judgement::Write
    } else {
        Judgement::Refuse
    }
}
