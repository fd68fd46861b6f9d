//! The record in doubt, and what operators do about it: requests in `spec.recovery`, the recovery hold, copies set aside.
//!
//! *Flow of one pass.* Accounts that nobody was told of become events. Copies that are to be purged go. Then the request, if
//! it has not been answered: it is refused here, or handed to the agent of this node, which carries it out and writes record
//! and account in one update. Then the hold: while the record is in doubt nothing is opened and nothing initialised.
//!
//! | hold | because | ends when |
//! |---|---|---|
//! | `RecordMissing` | there is no record, but a copy that was used | an operator recovers the record (rule 21) |
//! | `ClusterRestored` | the setting `recovery-generation` was raised since the record was compared with its copies | all known copies were read, which happens by itself, or an operator names those that are lost |
//! | `RecordOld` | an engine found a copy that knows more than the record | as above |
//!
//! *Invariants.* A request is asked of the agent only while there is no Engine object, and in its pass no engine is made: so
//! nothing serves the volume meanwhile, and what runs on a dead node is fenced by the agent. A request is answered once: what
//! the agent refused is recorded as refused. No copy that was set aside is used, and none is removed unless an operator has
//! asked for just that, or the volume itself goes.
//!
//! *When things fail.* An operator's request that fails is refused with the reason; a comparison that is made by itself is
//! tried again, and the hold says why it did not succeed.

use addax_api::recovery::{self as api, RecoveryAccount, RecoveryAction, RecoveryOutcome, RecoveryRequest};
use addax_api::volume::{CONDITION_INITIALISED, CONDITION_RECOVERY_HOLD, Robustness, VolumeState, VolumeStatus};
use addax_api::{Replica, ReplicaAddress, Time, Volume, condition};

use super::{Pass, attach};
use crate::action::{Action, AgentCall, CallTarget, Recovery, Severity};
use crate::observed::{CallFailure, Tabled};
use crate::write;

/// How long to wait for the agent of this node before looking again, in seconds.
const LOOK_AGAIN_SECONDS: i64 = 1;

/// How a pass goes on.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Course {
    /// As if nothing were.
    Go,
    /// No further: the record is in doubt, or being replaced.
    Held,
}

/// Why the record is in doubt.
#[derive(Debug, PartialEq, Eq)]
enum Hold {
    Missing(Vec<String>),
    Restored,
    Old,
}

/// What becomes of a request now.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Refuse(String),
    Wait,
    Ask(Recovery),
}

/// Why the volume is held, for others who have to wait for it.
pub(crate) fn held(volume: &Volume) -> Option<&str> {
    let conditions = volume.status.as_ref().map_or(&[][..], |status| &status.conditions);
    let hold = condition::get(conditions, CONDITION_RECOVERY_HOLD)?;
    condition::is_true(conditions, CONDITION_RECOVERY_HOLD).then_some(hold.message.as_str())
}

/// See the module.
pub(super) fn step(pass: &mut Pass<'_>) -> Course {
    tell(pass);
    purge(pass);
    let hold = hold(pass);
    show(pass, hold.as_ref());
    let mut course = if hold.is_some() { Course::Held } else { Course::Go };
    match unanswered(pass) {
        Some(request) if request.action == RecoveryAction::Purge => begin_purge(pass, &request),
        Some(request) => match judge(pass, &request) {
            Verdict::Refuse(why) => refuse(pass, &request, why),
            Verdict::Wait => {
                look_again(pass);
                course = Course::Held;
            }
            Verdict::Ask(recovery) => {
                ask(pass, recovery);
                course = Course::Held;
            }
        },
        None if matches!(hold, Some(Hold::Restored | Hold::Old)) => compare(pass),
        None => {}
    }
    if course == Course::Held {
        hold_still(pass);
    }
    course
}

// --- requests ---

/// The operator's request, if it is about the record and has no answer yet.
fn unanswered(pass: &Pass<'_>) -> Option<RecoveryRequest> {
    let request = pass.old.spec.recovery.as_ref().filter(|request| !is_answered(pass, &request.id))?;
    Some(request.clone())
}

fn is_answered(pass: &Pass<'_>, id: &str) -> bool {
    let status = pass.new.status.as_ref();
    status.is_some_and(|status| api::find(&status.recoveries, id).is_some())
}

fn judge(pass: &Pass<'_>, request: &RecoveryRequest) -> Verdict {
    if let Err(why) = check_confirmed(pass, request).and_then(|()| check(pass, request)) {
        return Verdict::Refuse(why);
    }
    if let Some(failure) = failure(pass, &request.id) {
        return Verdict::Refuse(failure.message.clone());
    }
    match pass.observed.agent(&pass.observed.this_node.name) {
        Some(_) => Verdict::Ask(recovery(pass, request)),
        None => Verdict::Wait,
    }
}

/// Whether the request is meant, and now.
fn check_confirmed(pass: &Pass<'_>, request: &RecoveryRequest) -> Result<(), String> {
    if request.not_after.0 < pass.now {
        return Err(format!("notAfter is {}: the request was meant until then, ask again", request.not_after.0));
    }
    if request.confirm != pass.name {
        return Err(format!("confirm is {:?}: the volume's name, {:?}, is required", request.confirm, pass.name));
    }
    if pass.old.is_deleting() {
        return Err("the volume is being removed".to_owned());
    }
    Ok(())
}

/// What can be said without asking anybody.
fn check(pass: &Pass<'_>, request: &RecoveryRequest) -> Result<(), String> {
    let known: Vec<&str> = pass.replicas.keys().map(String::as_str).collect();
    let is_known = |name: &str| known.contains(&name);
    let allowed = if known.is_empty() { "none is known".to_owned() } else { format!("of {}", known.join(", ")) };
    if request.action == RecoveryAction::ForceOpen {
        if !is_known(&request.replica) {
            return Err(format!("replica is {:?}: a copy of the volume is required, {allowed}", request.replica));
        }
        if pass.config().is_none() {
            let why = "status.config is absent: only a volume that has a record can be forced open; recover it first";
            return Err(why.to_owned());
        }
    }
    if let Some(name) = request.lost.iter().find(|name| !is_known(name)) {
        return Err(format!("lost names {name:?}: copies of the volume are allowed, {allowed}"));
    }
    if known.is_empty() {
        return Err("no copy of the volume is known: there is nothing to recover from".to_owned());
    }
    match pass.engine {
        Some(engine) => {
            let node = &engine.spec.node_id;
            Err(format!("the volume is attached to node {node}, or on its way there or back: detach it first"))
        }
        None => Ok(()),
    }
}

fn recovery(pass: &Pass<'_>, request: &RecoveryRequest) -> Recovery {
    Recovery {
        volume: pass.name.to_owned(),
        id: request.id.clone(),
        action: request.action,
        replica: request.replica.clone(),
        replicas: places(pass),
        lost: request.lost.clone(),
        requested_by: request.requested_by.clone(),
        generation: pass.settings.recovery_generation,
        not_after: Some(request.not_after.0),
    }
}

/// All copies with where they were last. Also those of nodes that give no sign of life are asked: only their managers are
/// known to be away.
fn places(pass: &Pass<'_>) -> Vec<(String, Option<ReplicaAddress>)> {
    pass.replicas.keys().map(|name| (name.clone(), attach::address_of(pass, name))).collect()
}

fn ask(pass: &mut Pass<'_>, recovery: Recovery) {
    let node = pass.observed.this_node.name.clone();
    pass.actions.push(Action::Agent { node, call: AgentCall::RecoverVolume(recovery) });
}

fn look_again(pass: &mut Pass<'_>) {
    let due = write::after(pass.now, LOOK_AGAIN_SECONDS);
    pass.actions.push(Action::RequeueAt(due));
}

fn failure<'a>(pass: &Pass<'a>, id: &str) -> Option<&'a CallFailure> {
    let agent = pass.observed.agents.get(&pass.observed.this_node.name)?;
    agent.failures.get(&CallTarget::Recovery(pass.name.to_owned(), id.to_owned()))
}

fn refuse(pass: &mut Pass<'_>, request: &RecoveryRequest, message: String) {
    answer(pass, request, RecoveryOutcome::Refused, message, Vec::new());
}

fn answer(
    pass: &mut Pass<'_>,
    request: &RecoveryRequest,
    outcome: RecoveryOutcome,
    mut message: String,
    discarded: Vec<String>,
) {
    message.truncate(message.floor_char_boundary(2048));
    let account = RecoveryAccount {
        id: request.id.clone(),
        action: request.action,
        outcome,
        message,
        requested_by: request.requested_by.clone(),
        at: Time(pass.now),
        from: None,
        to: None,
        discarded,
        told: false,
    };
    api::append(&mut pass.status().recoveries, account);
    tell(pass);
}

/// Makes events of the accounts that nobody was told of.
fn tell(pass: &mut Pass<'_>) {
    let (volume, mut events) = (pass.old, Vec::new());
    for account in pass.status().recoveries.iter_mut().filter(|account| !account.told) {
        account.told = true;
        let (severity, reason) = match (account.outcome, account.action) {
            (RecoveryOutcome::Refused, _) => (Severity::Warning, "RecoveryRefused"),
            (_, RecoveryAction::ForceOpen) => (Severity::Warning, "ForcedOpen"),
            (_, RecoveryAction::Recover) => (Severity::Normal, "RecordRecovered"),
            (_, RecoveryAction::Purge) => (Severity::Normal, "ReplicaPurged"),
        };
        let message =
            format!("{} ({}, asked for by {})", account.message, account.action.as_str(), account.requested_by);
        events.push(write::event(volume, severity, reason, message));
    }
    pass.actions.append(&mut events);
}

// --- copies that were set aside ---

/// Notes that a copy is to go. The removal itself is [`purge`]'s, in the passes that see the note.
fn begin_purge(pass: &mut Pass<'_>, request: &RecoveryRequest) {
    if let Err(why) = check_confirmed(pass, request) {
        return refuse(pass, request, why);
    }
    let name = request.replica.clone();
    let aside: Vec<String> = pass.status().discarded.iter().map(|discarded| discarded.replica.clone()).collect();
    let Some(discarded) = pass.status().discarded.iter_mut().find(|discarded| discarded.replica == name) else {
        let allowed = if aside.is_empty() { "there is none".to_owned() } else { format!("of {}", aside.join(", ")) };
        let why = format!("replica is {name:?}: a copy that was set aside is required, {allowed}");
        return refuse(pass, request, why);
    };
    discarded.purging = true;
    let message = format!("the copy {name}, which request {} set aside, goes with its data", discarded.by);
    answer(pass, request, RecoveryOutcome::Done, message, vec![name]);
}

/// Removes the copies that a note of before lets go, and forgets those that are gone.
fn purge(pass: &mut Pass<'_>) {
    let going: Vec<String> =
        pass.status().discarded.iter().filter(|aside| aside.purging).map(|aside| aside.replica.clone()).collect();
    for name in going {
        match pass.replicas.get(&name).map(Tabled::is_deleting) {
            None => pass.status().discarded.retain(|aside| aside.replica != name),
            Some(false) => pass.delete_replica(&name),
            Some(true) => {}
        }
    }
}

/// Whether an operator has asked for the removal of a copy that was set aside.
pub(crate) fn is_purging(status: &VolumeStatus, replica: &str) -> bool {
    status.discarded.iter().any(|discarded| discarded.replica == replica && discarded.purging)
}

// --- the hold ---

fn hold(pass: &mut Pass<'_>) -> Option<Hold> {
    if pass.config().is_none() {
        let fresh = |replica: &Replica| replica.status.as_ref().and_then(|status| status.fresh);
        let used = pass.replicas.iter().filter(|(_, replica)| fresh(replica) == Some(false));
        let used: Vec<String> = used.map(|(name, _)| name.clone()).collect();
        return (!used.is_empty()).then_some(Hold::Missing(used));
    }
    let found_old = pass.engine.and_then(|engine| engine.status.as_ref()).is_some_and(|status| status.record_old);
    let generation = pass.settings.recovery_generation;
    let status = pass.status();
    status.record_in_doubt |= found_old;
    match status.recovery_generation < generation {
        true => Some(Hold::Restored),
        false => status.record_in_doubt.then_some(Hold::Old),
    }
}

/// Names the comparison that ends this hold.
fn id_of_hold(pass: &Pass<'_>) -> String {
    let since = pass.since(CONDITION_RECOVERY_HOLD).as_second();
    format!("hold-{}-{since}", pass.settings.recovery_generation)
}

/// The comparison of the record with all copies that ends a hold; made without being asked.
fn compare(pass: &mut Pass<'_>) {
    if pass.engine.is_some() {
        return;
    }
    let id = id_of_hold(pass);
    if let Some(failure) = failure(pass, &id).filter(|failure| pass.now < failure.retry_at) {
        pass.actions.push(Action::RequeueAt(failure.retry_at));
        return;
    }
    if pass.observed.agent(&pass.observed.this_node.name).is_none() {
        return look_again(pass);
    }
    let recovery = Recovery {
        volume: pass.name.to_owned(),
        id,
        action: RecoveryAction::Recover,
        replica: String::new(),
        replicas: places(pass),
        lost: Vec::new(),
        requested_by: "the recovery hold".to_owned(),
        generation: pass.settings.recovery_generation,
        not_after: None,
    };
    ask(pass, recovery);
}

fn show(pass: &mut Pass<'_>, hold: Option<&Hold>) {
    let Some(hold) = hold else {
        condition::remove(&mut pass.status().conditions, CONDITION_RECOVERY_HOLD);
        return;
    };
    let verb = format!("addax volume recover {}", pass.name);
    let id = id_of_hold(pass);
    let tried = failure(pass, &id).map(|failure| format!(" ({})", failure.message)).unwrap_or_default();
    let compared = format!(
        "the volume is opened when its record was compared with all its copies, which is tried again and again{tried}; \
         `{verb} --lost REPLICA` does without those that will not come back"
    );
    let (reason, message) = match hold {
        Hold::Missing(used) => (
            "RecordMissing",
            format!(
                "the volume has no record of which copies are good, but {} in use before, so it is not made anew: \
                 `{verb}` rebuilds the record from what the copies know",
                were(used)
            ),
        ),
        Hold::Restored => ("ClusterRestored", format!("the cluster was restored from a backup: {compared}")),
        Hold::Old => ("RecordOld", format!("a copy knows more than the record: {compared}")),
    };
    pass.set_condition(CONDITION_RECOVERY_HOLD, true, reason, &message);
    if matches!(hold, Hold::Missing(_)) {
        pass.set_condition(CONDITION_INITIALISED, false, reason, &message);
        pass.status().robustness = Robustness::Unknown;
    }
}

fn were(used: &[String]) -> String {
    match used {
        [one] => format!("the copy {one} was"),
        several => format!("the copies {} were", several.join(", ")),
    }
}

/// What the volume is while it is held: an engine that is there is closed, and none is made.
fn hold_still(pass: &mut Pass<'_>) {
    if let Some(engine) = pass.engine {
        return attach::detach(pass, engine);
    }
    let (recorded, wanted) = (pass.config().is_some(), !pass.new.spec.node_id.is_empty());
    let status = pass.status();
    status.endpoint = None;
    status.consistency = None;
    status.current_node_id = String::new();
    status.state = match (recorded, wanted) {
        (false, _) => VolumeState::Creating,
        (true, false) => VolumeState::Detached,
        (true, true) => VolumeState::Attaching,
    };
}
