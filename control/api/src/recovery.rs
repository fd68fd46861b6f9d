//! What operators do to a volume's record by hand, and what is kept of it: requests in `spec.recovery`, the account in
//! `status.recoveries`, and the copies that were set aside in `status.discarded`.
//!
//! *Invariants.* A request is carried out at most once, under its `id`, and not after `notAfter`: a confirmation is for
//! now. It is confirmed by the volume's name (the Volume's own rule). What changes the record writes its account in the
//! same update, so there is never one without the other.
//!
//! *When things fail.* A request that cannot be carried out is answered as `Refused`, with the reason, for good: what was
//! refused once never happens later by itself.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Time;
use crate::types::is_default;
use crate::volume::VolumeConfig;

/// How many accounts a volume keeps; the oldest go first.
pub const RECOVERIES_MAX: usize = 32;

/// What an operator asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum RecoveryAction {
    /// Make one copy the volume although none that has every acknowledged write can be reached: writes are lost.
    ForceOpen,
    /// Rebuild the record from what the copies know of it.
    Recover,
    /// Remove a copy that was set aside, with its data.
    Purge,
}

impl RecoveryAction {
    /// The word that the API uses.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ForceOpen => "forceOpen",
            Self::Recover => "recover",
            Self::Purge => "purge",
        }
    }
}

/// What an operator asks for, once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[x_kube(validation = Rule::new("self.action == 'recover' || (has(self.replica) && self.replica != '')").message("replica must name the copy that forceOpen or purge is about"))]
#[serde(rename_all = "camelCase")]
pub struct RecoveryRequest {
    /// Names the request; another one for every request.
    #[schemars(length(min = 1, max = 64))]
    pub id: String,

    /// What is asked for.
    pub action: RecoveryAction,

    /// The copy that it is about; with forceOpen and purge.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63))]
    pub replica: String,

    /// Copies that will not come back and are done without; with recover.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 40), inner(length(min = 1, max = 63)))]
    pub lost: Vec<String>,

    /// The volume's name once more, typed by the one who answers for what is lost.
    #[schemars(length(min = 1, max = 63))]
    pub confirm: String,

    /// Who asks.
    #[schemars(length(min = 1, max = 256))]
    pub requested_by: String,

    /// When the request is no longer meant.
    pub not_after: Time,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum RecoveryOutcome {
    /// It was carried out.
    Done,
    /// It was not, and will not be.
    Refused,
}

/// The account of one request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RecoveryAccount {
    /// The request's name.
    #[schemars(length(min = 1, max = 64))]
    pub id: String,

    /// What was asked for.
    pub action: RecoveryAction,

    /// What became of it.
    pub outcome: RecoveryOutcome,

    /// One sentence: what was done, or why not.
    #[schemars(length(max = 2048))]
    pub message: String,

    /// Who asked.
    #[schemars(length(min = 1, max = 256))]
    pub requested_by: String,

    /// When it was carried out or refused.
    pub at: Time,

    /// The record before; absent when there was none, or when nothing was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<RecordSummary>,

    /// The record after.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<RecordSummary>,

    /// The copies that were set aside, or that were purged.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 40), inner(length(min = 1, max = 63)))]
    pub discarded: Vec<String>,

    /// Whether an event has told of it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub told: bool,
}

/// A record in an account.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RecordSummary {
    /// Its lineage.
    #[schemars(length(max = 64))]
    pub lineage: String,
    /// Its epoch.
    #[schemars(range(min = 0, max = 9007199254740991_i64))]
    pub epoch: u64,
    /// Its number.
    #[schemars(range(min = 0, max = 9007199254740991_i64))]
    pub config_number: u64,
    /// The copies in sync.
    #[schemars(length(max = 20), inner(length(min = 1, max = 63)))]
    pub in_sync: Vec<String>,
    /// The copies that were being rebuilt.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20), inner(length(min = 1, max = 63)))]
    pub rebuilding: Vec<String>,
}

impl From<&VolumeConfig> for RecordSummary {
    fn from(config: &VolumeConfig) -> Self {
        Self {
            lineage: config.lineage.clone(),
            epoch: config.epoch,
            config_number: config.config_number,
            in_sync: config.in_sync.clone(),
            rebuilding: config.rebuilding.clone(),
        }
    }
}

/// A copy that was set aside: it is neither used nor removed until an operator purges it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DiscardedReplica {
    /// The copy.
    #[schemars(length(min = 1, max = 63))]
    pub replica: String,
    /// When it was set aside.
    pub at: Time,
    /// The request that did it.
    #[schemars(length(min = 1, max = 64))]
    pub by: String,
    /// An operator has asked for its removal.
    #[serde(default, skip_serializing_if = "is_default")]
    pub purging: bool,
}

/// Appends an account; of more than [`RECOVERIES_MAX`] the oldest go.
pub fn append(accounts: &mut Vec<RecoveryAccount>, account: RecoveryAccount) {
    accounts.push(account);
    let surplus = accounts.len().saturating_sub(RECOVERIES_MAX);
    accounts.drain(..surplus);
}

/// The account of a request.
pub fn find<'a>(accounts: &'a [RecoveryAccount], id: &str) -> Option<&'a RecoveryAccount> {
    accounts.iter().find(|account| account.id == id)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn account(id: usize) -> RecoveryAccount {
        RecoveryAccount {
            id: id.to_string(),
            action: RecoveryAction::Recover,
            outcome: RecoveryOutcome::Done,
            message: String::new(),
            requested_by: "me".to_owned(),
            at: Time(jiff::Timestamp::UNIX_EPOCH),
            from: None,
            to: None,
            discarded: Vec::new(),
            told: false,
        }
    }

    #[test]
    fn the_newest_accounts_are_kept() {
        let mut accounts = Vec::new();
        (0..RECOVERIES_MAX + 3).for_each(|id| append(&mut accounts, account(id)));
        assert_eq!(accounts.len(), RECOVERIES_MAX);
        assert!(find(&accounts, "2").is_none() && find(&accounts, "3").is_some());
        assert_eq!(accounts.last().unwrap().id, (RECOVERIES_MAX + 2).to_string());
    }
}
