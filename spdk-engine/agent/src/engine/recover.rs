//! Puts another record in a volume's place: by force, or rebuilt from what the replicas know (rules 11 and 21).
//!
//! *What it is.* One call, [`Engines::recover`], for a volume that no engine serves. The decisions are
//! [`mirror_core::recover`] and [`mirror_core::force`]; here are the hands, as in `open`:
//! ```text
//! read record ─▶ ask every replica's agent ─▶ CAS of an epoch above all ─▶ promote ─▶ read superblocks ─▶ decide ─▶ conclude
//! ```
//! *Invariants.*
//! - The epoch is raised at the arbiter first (where there is a record), then at the replicas, and only then anything is
//!   read: an engine of before can neither carry a swap to a replica that was read nor have one committed.
//! - The raised record does not say "closed in order" until the replicas were found to say so: whatever happens next, their
//!   bits are looked at.
//! - The record, its account and the list of what was set aside change in one update, and only if the record is still the one
//!   that was decided on. A request is carried out once; one that was answered already is not carried out again.
//! - Where replicas of before were not fenced (those that are set aside, those that are lost), an engine of before that nobody
//!   can reach may still answer reads from them, as long as its lease lasts (rule 16). The new record stands only when
//!   that is over, counted from the last fence: whoever opens by it finds all of its members promoted, and waits for
//!   nothing. After an orderly close there is no such engine.
//! - Nothing is written to a replica, and none is promoted that was never used or that was set aside.
//! - A replica whose lineage an account says to be over knows nothing of the present record.
//!
//! *When things fail.* Every refusal and failure leaves the record as it was, but for the epoch. The caller may ask again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use addax_api::Time;
use addax_api::name;
use addax_api::recovery::{self as api, RecordSummary, RecoveryAccount, RecoveryAction, RecoveryOutcome};
use addax_proto::engine_v1 as pb;
use futures::future::join_all;
use jiff::Timestamp;
use mirror_core::force::{ForceEvidence, ForceRefusal, Forced, Found, force_open};
use mirror_core::meta::{ReplicaState, SUPERBLOCK_SLOTS, Superblock, newest_superblock};
use mirror_core::recover::{AskReason, Evidence, Recovery, ReplicaKnows, Report, recover};
use mirror_core::{
    Config, EngineInstance, Epoch, Lineage, OpenWaits, Options, PromoteError, RecordError, ReplicaId, SwapOutcome,
};
use tokio::time::Instant;
use uuid::Uuid;

use super::build::{self, Identity};
use super::{EngineContext, Engines, invalid, parse_member};
use crate::arbiter::{Concluded, Conclusion, History, config_to_record};
use crate::error::AgentError;
use crate::state::MemberWish;
use crate::supervise::Plane;

/// Deadline of a recovery as a whole, the wait for an old engine's lease included.
const DEADLINE: Duration = Duration::from_secs(55);
/// How often a promote is tried, as draining may take longer than one call.
const PROMOTES: u32 = 4;
/// How often a swap of unknown outcome is sent again.
const SWAPS: u32 = 4;
/// Pause before something is tried again.
const PAUSE: Duration = Duration::from_secs(1);
/// Most replicas of a request: those in use and those set aside.
const REPLICAS_MAX: usize = 40;

/// A request, as it was understood.
#[derive(Clone, Debug)]
struct Request {
    volume: String,
    id: String,
    action: RecoveryAction,
    /// The one that becomes the volume.
    chosen: Option<ReplicaId>,
    /// All that are known; without a place to reach them where there is none.
    replicas: BTreeMap<ReplicaId, Option<MemberWish>>,
    lost: BTreeSet<ReplicaId>,
    requested_by: String,
    generation: u32,
    not_after: Option<Timestamp>,
}

impl Request {
    /// A confirmation is for now: whoever gave it may have gone away.
    fn check_time(&self) -> Result<(), AgentError> {
        match self.not_after.filter(|time| *time < Timestamp::now()) {
            Some(time) => Err(AgentError::Forbidden(format!("the request was meant until {time}: ask again"))),
            None => Ok(()),
        }
    }
}

/// What a recovery works with.
struct Work<'a> {
    context: &'a EngineContext,
    plane: &'a Plane,
    request: &'a Request,
    history: &'a History,
    author: EngineInstance,
    lineage: Lineage,
}

impl Engines {
    /// Puts another record in a volume's place; see the module and the proto file.
    ///
    /// # Errors
    /// [`AgentError::Forbidden`] with the reason when it is not allowed or not needed.
    pub async fn recover(&self, request: pb::RecoverVolumeRequest) -> Result<pb::RecoverVolumeResponse, AgentError> {
        let request = parse(request)?;
        if self.handle(&request.volume).is_some() {
            let text = format!("this node runs an engine of volume '{}': detach the volume first", request.volume);
            return Err(AgentError::Forbidden(text));
        }
        let context = self.context.clone();
        // On its own: whoever asked may go away, and what was connected has to be let go all the same.
        let task = tokio::spawn(async move {
            let late = || AgentError::Unavailable(format!("not done within {DEADLINE:?}"));
            let result = tokio::time::timeout(DEADLINE, run(&context, &request)).await.unwrap_or_else(|_| Err(late()));
            clean_up(&context, &request.volume).await;
            result
        });
        let ended = task.await.map_err(|error| AgentError::Internal(format!("the recovery ended: {error}")))?;
        ended.map(|message| pb::RecoverVolumeResponse { message })
    }
}

/// Lets go whatever is still connected.
async fn clean_up(context: &EngineContext, volume: &str) {
    let plane = context.plane.borrow().plane.clone();
    if let Some(plane) = plane
        && let Err(error) = build::detach_others(&plane.client, volume, |_, _| false).await
    {
        tracing::warn!(volume, %error, "cannot end what a recovery connected; the next opening does");
    }
}

fn parse(request: pb::RecoverVolumeRequest) -> Result<Request, AgentError> {
    name::validate_volume_name(&request.volume).map_err(|error| invalid("volume", &request.volume, error))?;
    let id = |field: &'static str, value: &str| ReplicaId::new(value).map_err(|error| invalid(field, value, error));
    if request.id.is_empty() || request.id.len() > 64 {
        return Err(invalid("id", &request.id, "1 to 64 bytes are allowed"));
    }
    if request.replicas.is_empty() || request.replicas.len() > REPLICAS_MAX {
        return Err(invalid("replicas", request.replicas.len(), format!("1 to {REPLICAS_MAX} are allowed")));
    }
    let (action, chosen) = match request.action() {
        pb::RecoverAction::ForceOpen => (RecoveryAction::ForceOpen, Some(id("replica", &request.replica)?)),
        pb::RecoverAction::Recover => (RecoveryAction::Recover, None),
        pb::RecoverAction::Unspecified => {
            return Err(invalid("action", request.action, "FORCE_OPEN or RECOVER is allowed"));
        }
    };
    let mut replicas = BTreeMap::new();
    for member in request.replicas {
        let replica = id("replicas", &member.replica)?;
        let place = member.address.is_some().then(|| parse_member(member)).transpose()?;
        replicas.insert(replica, place);
    }
    let lost = request.lost.iter().map(|replica| id("lost", replica)).collect::<Result<BTreeSet<_>, _>>()?;
    if let Some(stranger) = lost.iter().find(|replica| !replicas.contains_key(*replica)) {
        let known = replicas.keys().map(ReplicaId::as_str).collect::<Vec<_>>().join(", ");
        return Err(invalid("lost", stranger, format!("the volume's replicas are allowed: {known}")));
    }
    let not_after = match request.not_after_unix_ms {
        0 => None,
        ms => Some(Timestamp::from_millisecond(ms).map_err(|error| invalid("not_after_unix_ms", ms, error))?),
    };
    Ok(Request {
        volume: request.volume,
        id: request.id,
        action,
        chosen,
        replicas,
        lost,
        requested_by: request.requested_by,
        generation: request.generation,
        not_after,
    })
}

async fn run(context: &EngineContext, request: &Request) -> Result<String, AgentError> {
    request.check_time()?;
    let plane = context.plane.borrow().plane.clone();
    let plane = plane.ok_or_else(|| AgentError::Unavailable("the data plane of this node is down".to_owned()))?;
    if !plane.has_mirror() {
        let text = format!("the data plane of this node ({}) cannot read superblocks: addax-engine can", plane.version);
        return Err(AgentError::Forbidden(text));
    }
    let history = context.arbiter.read_history(&request.volume).await.map_err(|error| match error {
        RecordError::NotFound => AgentError::NotFound { kind: "volume", name: request.volume.clone() },
        RecordError::Unavailable => AgentError::Unavailable("the API does not answer".to_owned()),
    })?;
    if let Some(account) = api::find(&history.accounts, &request.id) {
        return match account.outcome {
            RecoveryOutcome::Done => Ok(account.message.clone()),
            RecoveryOutcome::Refused => Err(AgentError::Forbidden(account.message.clone())),
        };
    }
    let text = Uuid::new_v4().to_string();
    let internal = |error: mirror_core::ConfigError| AgentError::Internal(error.to_string());
    let author = EngineInstance::new(&format!("recovery-{text}")).map_err(internal)?;
    let lineage = Lineage::new(&Uuid::new_v4().to_string()).map_err(internal)?;
    let work = Work { context, plane: &plane, request, history: &history, author, lineage };
    match &request.chosen {
        Some(chosen) => work.force(chosen).await,
        None => work.rebuild().await,
    }
}

impl Work<'_> {
    // --- by force ---

    async fn force(&self, chosen: &ReplicaId) -> Result<String, AgentError> {
        let Some(record) = &self.history.record else {
            let text = "status.config is absent: only a volume that has a record can be forced open; recover it first";
            return Err(AgentError::Forbidden(text.to_owned()));
        };
        let refused = |refusal: ForceRefusal| AgentError::Forbidden(refusal.to_string());
        let mut found = self.look().await;
        self.decide_force(record, &found, chosen).map_err(refused)?;
        let epoch = self.epoch_above(&found);
        let raised = self.raise(record, epoch).await?;
        let knows = self
            .fence_and_read(chosen, epoch)
            .await
            .map_err(|reason| AgentError::Unavailable(format!("replica {chosen} cannot be taken: {reason}")))?;
        let incomplete = knows.as_ref().is_some_and(|s| s.state == ReplicaState::Rebuilding);
        found.insert(chosen.clone(), Found::Used { promoted: epoch, incomplete });
        let fenced = Instant::now();
        let forced = self.decide_force(&raised, &found, chosen).map_err(refused)?;
        let message = told_by_force(chosen, record, knows.as_ref(), &forced);
        let discarded = forced.discarded.iter().map(|replica| replica.as_str().to_owned()).collect();
        let account = self.account(message, Some(record), &forced.config, discarded);
        if !record.clean {
            self.outlast_lease(fenced).await;
        }
        self.conclude(Some(&raised), forced.config, account).await
    }

    /// Waits until an engine of before answers no read any more that an acknowledged write of the new record could contradict.
    async fn outlast_lease(&self, fenced: Instant) {
        let (lease, margin) = (Options::default().lease_ns, OpenWaits::default().lease_margin_ns);
        let over = fenced + Duration::from_nanos(lease.saturating_add(margin));
        tracing::info!(volume = self.request.volume, "waiting until the lease of an engine of before is over");
        tokio::time::sleep_until(over).await;
    }

    fn decide_force(
        &self,
        record: &Config,
        found: &BTreeMap<ReplicaId, Found>,
        chosen: &ReplicaId,
    ) -> Result<Forced, ForceRefusal> {
        force_open(&ForceEvidence {
            record: record.clone(),
            replicas: found.clone(),
            chosen: chosen.clone(),
            new_lineage: self.lineage.clone(),
            author: self.author.clone(),
        })
    }

    // --- by what the replicas know ---

    async fn rebuild(&self) -> Result<String, AgentError> {
        let found = self.look().await;
        self.check_all_there(&found)?;
        if let Some(record) = self.unused(&found) {
            let message = "the record is right: no copy was ever used".to_owned();
            let account = self.account(message, Some(record), record, Vec::new());
            return self.conclude(Some(record), record.clone(), account).await;
        }
        let epoch = self.epoch_above(&found);
        let raised = match &self.history.record {
            Some(record) => Some(self.raise(record, epoch).await?),
            None => None,
        };
        let (reports, reasons) = self.read_all(&found, epoch).await;
        let fenced = Instant::now();
        let lost: Vec<String> = self.request.lost.iter().map(|replica| replica.as_str().to_owned()).collect();
        let keep = |raised: &Config| Config { clean: self.is_clean(&reports), ..raised.clone() };
        let (next, message) = match (&raised, self.decide(raised.as_ref(), &reports)) {
            (Some(raised), Recovery::Keep) => (keep(raised), "the record is right: no copy knows more".to_owned()),
            // Nothing contradicts it: what there is is of before, or the operator does without its word.
            (Some(raised), Recovery::Ask(AskReason::NoData)) if self.is_ahead(raised, &found, &reports) => {
                (keep(raised), "the record stays: no copy that was read contradicts it".to_owned())
            }
            // Somebody has promoted a replica beyond the fence meanwhile.
            (_, Recovery::Raise(config)) => (*config, "the record is right: no copy knows more".to_owned()),
            (_, Recovery::Keep) => return Err(AgentError::Internal("kept a record that is not there".to_owned())),
            (_, Recovery::Rebuild(config)) => {
                let message = format!(
                    "the record was rebuilt from the copies: in sync {}, configuration {}",
                    names(&config.in_sync),
                    config.config_number
                );
                (*config, message)
            }
            (_, Recovery::Wait(unread)) => return Err(AgentError::Forbidden(unread_text(&unread, &reasons))),
            (_, Recovery::Ask(reason)) => return Err(AgentError::Forbidden(ask_text(&reason, &reports))),
        };
        let mut account = self.account(message, self.history.record.as_ref(), &next, lost);
        if account.from.is_none() {
            // What is gone is what the copies remember.
            account.from = newest_known(&reports);
        }
        // Those that were all read were all fenced.
        if !self.request.lost.is_empty() && !self.is_clean(&reports) {
            self.outlast_lease(fenced).await;
        }
        self.conclude(raised.as_ref(), next, account).await
    }

    /// Refuses before anything is changed when a replica cannot be read anyway.
    fn check_all_there(&self, found: &BTreeMap<ReplicaId, Found>) -> Result<(), AgentError> {
        let missing = found.iter().filter(|(replica, _)| self.counts(replica)).filter_map(|(replica, found)| {
            let reason = missing_text(*found)?;
            Some((replica.clone(), reason.to_owned()))
        });
        let reasons: BTreeMap<ReplicaId, String> = missing.collect();
        let unread: BTreeSet<ReplicaId> = reasons.keys().cloned().collect();
        if unread.is_empty() { Ok(()) } else { Err(AgentError::Forbidden(unread_text(&unread, &reasons))) }
    }

    /// Whether the replica has to be read: it was not set aside, and is not done without.
    fn counts(&self, replica: &ReplicaId) -> bool {
        let aside = self.history.discarded.iter().any(|old| old.replica == replica.as_str());
        !aside && !self.request.lost.contains(replica)
    }

    /// The record of a volume that was never opened, when all its replicas say so.
    fn unused(&self, found: &BTreeMap<ReplicaId, Found>) -> Option<&Config> {
        let record = self.history.record.as_ref().filter(|record| record.epoch == Epoch(0))?;
        let fresh = |member: &ReplicaId| found.get(member) == Some(&Found::Fresh);
        record.in_sync.iter().all(fresh).then_some(record)
    }

    fn decide(&self, raised: Option<&Config>, reports: &BTreeMap<ReplicaId, Report>) -> Recovery {
        recover(&Evidence {
            record: raised.cloned(),
            replicas: reports.clone(),
            new_lineage: self.lineage.clone(),
            author: self.author.clone(),
        })
    }

    /// Whether nothing that was read is of the record's time or later, while a member is there: the record was made by a
    /// recovery and not used yet, or the copies without superblocks (a stock engine writes none) were named as lost.
    fn is_ahead(
        &self,
        record: &Config,
        found: &BTreeMap<ReplicaId, Found>,
        reports: &BTreeMap<ReplicaId, Report>,
    ) -> bool {
        let is_there = |member: &ReplicaId| matches!(found.get(member), Some(Found::Used { .. }));
        reports.values().all(|report| *report == Report::Empty) && record.in_sync.iter().any(is_there)
    }

    /// Whether the record says "closed in order", and all its members do.
    fn is_clean(&self, reports: &BTreeMap<ReplicaId, Report>) -> bool {
        let Some(record) = &self.history.record else { return false };
        let says_so = |member: &ReplicaId| {
            let knows = match reports.get(member) {
                Some(Report::Knows(knows)) => knows,
                _ => return false,
            };
            let knows = &knows.record;
            knows.clean && knows.config_number == record.config_number && knows.lineage == record.lineage
        };
        record.clean && record.in_sync.iter().all(says_so)
    }

    /// Fences and reads every replica that counts; what it knows, and why it could not be read.
    async fn read_all(
        &self,
        found: &BTreeMap<ReplicaId, Found>,
        epoch: Epoch,
    ) -> (BTreeMap<ReplicaId, Report>, BTreeMap<ReplicaId, String>) {
        let aside = |replica: &ReplicaId| self.history.discarded.iter().any(|old| old.replica == replica.as_str());
        let asked = found.iter().filter(|(replica, _)| !aside(replica));
        let reads = asked.map(|(replica, found)| async move {
            let report = match found {
                _ if self.request.lost.contains(replica) => Ok(Report::Empty),
                Found::Fresh => Ok(Report::Empty),
                Found::Used { .. } => self.report(replica, epoch).await,
                missing => Err(missing_text(*missing).unwrap_or_default().to_owned()),
            };
            (replica.clone(), report)
        });
        let (mut reports, mut reasons) = (BTreeMap::new(), BTreeMap::new());
        for (replica, report) in join_all(reads).await {
            let report = report.unwrap_or_else(|reason| {
                reasons.insert(replica.clone(), reason);
                Report::Unread
            });
            reports.insert(replica, report);
        }
        (reports, reasons)
    }

    async fn report(&self, replica: &ReplicaId, epoch: Epoch) -> Result<Report, String> {
        let superblock = self.fence_and_read(replica, epoch).await?;
        let superblock = superblock.ok_or_else(|| "it has no superblock".to_owned())?;
        let present = self.history.record.as_ref().map(|record| record.lineage.as_str());
        let found = superblock.record.lineage.as_str();
        let is_over = |account: &RecoveryAccount| account.from.as_ref().is_some_and(|from| from.lineage == found);
        if present.is_some_and(|present| present != found) && self.history.accounts.iter().any(is_over) {
            return Ok(Report::Empty);
        }
        Ok(Report::Knows(Box::new(ReplicaKnows::of(&superblock, epoch))))
    }

    // --- the hands ---

    /// What every replica's agent says, without changing anything.
    async fn look(&self) -> BTreeMap<ReplicaId, Found> {
        let asks = self.request.replicas.iter().map(|(replica, place)| async move {
            let found = match place {
                Some(member) => self.context.peers.replica(member).await,
                None => Err(PromoteError::Unreachable),
            };
            let found = match found {
                Ok(Some(found)) if found.volume != self.request.volume => Found::Gone,
                Ok(Some(found)) if found.fresh => Found::Fresh,
                Ok(Some(found)) if found.state() == pb::State::Running => {
                    Found::Used { promoted: Epoch(found.promoted_epoch), incomplete: false }
                }
                Ok(None) => Found::Gone,
                Ok(Some(_)) | Err(_) => Found::Unreachable,
            };
            (replica.clone(), found)
        });
        join_all(asks).await.into_iter().collect()
    }

    fn epoch_above(&self, found: &BTreeMap<ReplicaId, Found>) -> Epoch {
        let promoted = found.values().filter_map(|found| match found {
            Found::Used { promoted, .. } => Some(*promoted),
            _ => None,
        });
        let recorded = self.history.record.as_ref().map(|record| record.epoch);
        promoted.chain(recorded).max().unwrap_or_default().next()
    }

    /// Makes the epoch the recovery's own, so that whatever engine there is or comes meanwhile loses.
    async fn raise(&self, record: &Config, epoch: Epoch) -> Result<Config, AgentError> {
        let next = Config { epoch, engine_instance: self.author.clone(), clean: false, ..record.clone() };
        for _ in 0..SWAPS {
            match self.context.arbiter.swap(&self.request.volume, &record.version(), &next).await {
                SwapOutcome::Committed => return Ok(next),
                SwapOutcome::Refused { .. } => {
                    return Err(AgentError::Superseded("the record has changed meanwhile: ask again".to_owned()));
                }
                SwapOutcome::Unknown => tokio::time::sleep(PAUSE).await,
            }
        }
        Err(AgentError::Unavailable("the API does not say whether the epoch was raised: ask again".to_owned()))
    }

    /// Promotes a replica and reads its superblock over the new session; `None` when there is none.
    async fn fence_and_read(&self, replica: &ReplicaId, epoch: Epoch) -> Result<Option<Superblock>, String> {
        let Some(Some(member)) = self.request.replicas.get(replica) else {
            return Err("it cannot be reached".to_owned());
        };
        let identity = Identity {
            volume: self.request.volume.clone(),
            epoch: epoch.0,
            instance: self.author.as_str().to_owned(),
            lineage: self.lineage.as_str().to_owned(),
        };
        let promoted = self.promote(member, &identity).await.map_err(|error| format!("not fenced: {error}"))?;
        let attached = build::attach(self.plane, &identity, member, &promoted.data_plane_instance).await;
        if !attached.map_err(|error| format!("not connected: {error}"))? {
            return Ok(None);
        }
        let (client, device) = (&self.plane.client, build::meta_bdev(&identity, replica.as_str()));
        let slots = u32::try_from(SUPERBLOCK_SLOTS).unwrap_or(u32::MAX);
        let bytes = client.addax_mirror_read_meta(&device, 0, slots).await;
        if let Err(error) = build::detach(client, &identity, replica.as_str()).await {
            tracing::warn!(volume = %identity.volume, %replica, %error, "not detached yet");
        }
        let superblock = newest_superblock(&bytes.map_err(|error| format!("its superblock cannot be read: {error}"))?);
        let own = |s: &Superblock| s.volume.as_str() == identity.volume && s.replica == *replica;
        match superblock {
            Some(superblock) if !own(&superblock) => {
                let (volume, other) = (superblock.volume, superblock.replica);
                Err(format!("its superblock is that of replica {other} of volume {volume}"))
            }
            other => Ok(other),
        }
    }

    async fn promote(&self, member: &MemberWish, identity: &Identity) -> Result<pb::Replica, PromoteError> {
        let mut left = PROMOTES;
        loop {
            left -= 1;
            match self.context.peers.promote(member, identity.promotion()).await {
                // Its sessions may still be draining.
                Err(PromoteError::Unreachable) if left > 0 => tokio::time::sleep(PAUSE).await,
                outcome => return outcome,
            }
        }
    }

    fn account(&self, message: String, from: Option<&Config>, to: &Config, discarded: Vec<String>) -> RecoveryAccount {
        let summary = |config: &Config| RecordSummary::from(&config_to_record(config));
        RecoveryAccount {
            id: self.request.id.clone(),
            action: self.request.action,
            outcome: RecoveryOutcome::Done,
            message,
            requested_by: self.request.requested_by.clone(),
            at: Time(Timestamp::now()),
            from: from.map(summary),
            to: Some(summary(to)),
            discarded,
            told: false,
        }
    }

    async fn conclude(
        &self,
        expect: Option<&Config>,
        config: Config,
        account: RecoveryAccount,
    ) -> Result<String, AgentError> {
        self.request.check_time()?;
        let (volume, message) = (self.request.volume.as_str(), account.message.clone());
        tracing::warn!(volume, request = %account.id, by = %account.requested_by, action = account.action.as_str(),
            lineage = %config.lineage, epoch = config.epoch.0, config_number = config.config_number.0,
            in_sync = ?config.in_sync, discarded = ?account.discarded, "the record is put in place: {message}");
        let conclusion = Conclusion { config, account, generation: self.request.generation };
        let expect = expect.map(Config::version);
        for _ in 0..SWAPS {
            match self.context.arbiter.conclude(volume, expect.as_ref(), &conclusion).await {
                Concluded::Done => return Ok(message),
                Concluded::Refused => {
                    let text = "the record has changed meanwhile, or the request was answered: ask again";
                    return Err(AgentError::Superseded(text.to_owned()));
                }
                Concluded::Unknown => tokio::time::sleep(PAUSE).await,
            }
        }
        Err(AgentError::Unavailable("the API does not say whether the record was written: look at it".to_owned()))
    }
}

// --- words ---

/// The latest record that a replica remembers.
fn newest_known(reports: &BTreeMap<ReplicaId, Report>) -> Option<RecordSummary> {
    let known = reports.values().filter_map(|report| match report {
        Report::Knows(knows) => Some(knows),
        Report::Unread | Report::Empty => None,
    });
    let names = |set: &BTreeSet<ReplicaId>| set.iter().map(|replica| replica.as_str().to_owned()).collect();
    known.max_by_key(|knows| knows.record.config_number).map(|knows| RecordSummary {
        lineage: knows.record.lineage.as_str().to_owned(),
        epoch: knows.promoted.0,
        config_number: knows.record.config_number.0,
        in_sync: names(&knows.record.in_sync),
        rebuilding: names(&knows.record.rebuilding),
    })
}

/// Why a replica cannot be read, if that is so.
fn missing_text(found: Found) -> Option<&'static str> {
    match found {
        Found::Gone => Some("its node does not have it"),
        Found::Unreachable => Some("it cannot be reached"),
        Found::Fresh | Found::Used { .. } => None,
    }
}

fn names(replicas: &BTreeSet<ReplicaId>) -> String {
    match replicas.is_empty() {
        true => "none".to_owned(),
        false => replicas.iter().map(ReplicaId::as_str).collect::<Vec<_>>().join(", "),
    }
}

fn told_by_force(chosen: &ReplicaId, record: &Config, knows: Option<&Superblock>, forced: &Forced) -> String {
    let knew = match knows {
        Some(s) => format!("it knew configuration {} of lineage {}", s.record.config_number, s.record.lineage),
        None => "it has no superblock".to_owned(),
    };
    let loss = match forced.lossless {
        true => "it was in sync, nothing is lost",
        false => "acknowledged writes that it missed are lost",
    };
    format!(
        "replica {chosen} is the volume now: {knew}, the record was at {} of {}; {loss}; set aside: {}",
        record.config_number,
        record.lineage,
        names(&forced.discarded)
    )
}

fn unread_text(unread: &BTreeSet<ReplicaId>, reasons: &BTreeMap<ReplicaId, String>) -> String {
    let why = |replica: &ReplicaId| format!("{replica}: {}", reasons.get(replica).map_or("not read", String::as_str));
    let why: Vec<String> = unread.iter().map(why).collect();
    format!("every known replica has to be read, or named as lost; not read are {}", why.join("; "))
}

fn ask_text(reason: &AskReason, reports: &BTreeMap<ReplicaId, Report>) -> String {
    let knows = reports.iter().map(|(replica, report)| match report {
        Report::Unread => format!("{replica} was not read"),
        Report::Empty => format!("{replica} counts as empty"),
        Report::Knows(knows) => {
            let record = &knows.record;
            format!("{replica} knows configuration {} of lineage {}", record.config_number, record.lineage)
        }
    });
    let knows: Vec<String> = knows.collect();
    format!("{reason}: {}; name those as lost that are to be done without", knows.join(", "))
}
