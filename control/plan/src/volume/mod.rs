//! Volume: from a wish to scheduled replicas, a record, an engine, and back.
//!
//! *States.*
//! ```text
//!            all replicas running and fresh          spec.nodeID set, replicas ready
//! creating ───────────────────────────────▶ detached ───────────────────────▶ attaching
//!                                              ▲                                  │ engine running
//!                       engine object is gone  │                                  ▼
//!                                           detaching ◀─────────────────────── attached
//!                                                     spec.nodeID empty or another
//! detached ──▶ deleting   when the object is deleted and nobody wants it attached; there is no way back
//! ```
//!
//! *Flow of one pass.* Drafts of the volume, its replicas and its engine are edited by the steps below; what differs in
//! the end is written, replicas first, then the engine, then the volume, then the events. `recovery` looks whether the record
//! is in doubt or being replaced: then nothing else is done. `create` until there is a record; then `members` (which replicas failed, which are used), `attach` (the engine), `replenish` (new copies,
//! surplus ones); `delete` when asked.
//!
//! *Invariants.* The record is initialised here once, when all wanted replicas run and are fresh; afterwards only the
//! agent of the engine's node changes it (consistency rule 23). No step removes a replica that the record names while
//! the volume would be left without as many as it wants.
//!
//! *When things fail.* A pass may end anywhere; every step looks at what is there, so the next one goes on from it.

mod attach;
mod create;
mod delete;
mod members;
mod recovery;

use std::collections::BTreeMap;

use addax_api::setting::Settings;
use addax_api::volume::{
    CONDITION_EXPANDED, CONDITION_INITIALISED, CONDITION_REDUNDANT, CONDITION_SCHEDULED, Robustness, VolumeConfig,
    VolumeState,
};
use addax_api::{
    ConditionStatus, Engine, InstanceState, LABEL_VOLUME, NAMESPACE, ObjectMeta, Replica, ResourceExt, Volume,
    VolumeAttachment, VolumeAttachmentSpec, VolumeStatus, condition,
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use crate::action::{Action, Object, Severity};
use crate::observed::{Observed, Tabled};
use crate::{evict, replenish, write};

pub(crate) use attach::address_of;
pub(crate) use members::serving;
pub(crate) use recovery::{held, is_purging};

/// What is to be done for a volume now.
pub fn plan(observed: &Observed, name: &str, now: Timestamp) -> Vec<Action> {
    let Some(volume) = observed.volumes.get(name) else {
        return Vec::new();
    };
    let mut pass = Pass::new(observed, name, volume, now);
    pass.run();
    pass.finish()
}

/// One look at one volume: what is there, and drafts of what should be.
pub(crate) struct Pass<'a> {
    pub(crate) observed: &'a Observed,
    pub(crate) settings: Settings,
    pub(crate) now: Timestamp,
    pub(crate) name: &'a str,
    pub(crate) old: &'a Volume,
    /// The volume's draft.
    pub(crate) new: Volume,
    /// Drafts of all its replicas.
    pub(crate) replicas: BTreeMap<String, Replica>,
    /// Its engine as it is.
    pub(crate) engine: Option<&'a Engine>,
    /// The engine's draft.
    pub(crate) engine_new: Option<Engine>,
    /// What is asked beside the drafts: creations, deletions, times.
    pub(crate) actions: Vec<Action>,
}

impl<'a> Pass<'a> {
    fn new(observed: &'a Observed, name: &'a str, old: &'a Volume, now: Timestamp) -> Self {
        let engine = observed.engine_of(name);
        let replicas = observed.replicas.of_volume(name).map(|replica| (replica.name_any(), replica.clone()));
        Self {
            observed,
            settings: observed.settings_in_force(),
            now,
            name,
            old,
            new: old.clone(),
            replicas: replicas.collect(),
            engine,
            engine_new: engine.cloned(),
            actions: Vec::new(),
        }
    }

    fn run(&mut self) {
        self.status();
        if self.old.is_deleting() && delete::step(self) {
            return;
        }
        if !self.old.is_deleting() {
            write::hold(&mut self.new.metadata);
            self.attachment();
        }
        if recovery::step(self) == recovery::Course::Held {
            return;
        }
        match self.config().cloned() {
            None if self.old.is_deleting() => {}
            None => create::step(self),
            Some(config) => {
                self.set_condition(CONDITION_INITIALISED, true, "Recorded", "");
                self.expansion(&config);
                members::step(self, &config);
                attach::step(self, &config);
                self.judge(&config);
                if !self.old.is_deleting() {
                    replenish::step(self, &config);
                }
                evict::step(self, &config);
            }
        }
    }

    /// The drafts as patches, in the order that the contract above gives.
    fn finish(mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        for (name, draft) in &self.replicas {
            if let Some(old) = self.observed.replicas.get(name) {
                actions.extend(write::patches(old, draft));
            }
        }
        if let (Some(old), Some(draft)) = (self.engine, &self.engine_new) {
            actions.extend(write::patches(old, draft));
        }
        actions.extend(write::patches(self.old, &self.new));
        actions.append(&mut self.actions);
        actions.extend(self.events());
        actions
    }

    /// What people want to hear of: changes of state and of robustness.
    fn events(&self) -> Vec<Action> {
        let (Some(before), Some(after)) = (&self.old.status, &self.new.status) else {
            return Vec::new();
        };
        let mut events = Vec::new();
        if before.state != after.state {
            let place = match after.current_node_id.as_str() {
                "" => String::new(),
                node => format!(" (node {node})"),
            };
            let message = format!("{} → {}{place}", before.state.as_str(), after.state.as_str());
            events.push(write::event(self.old, Severity::Normal, "StateChanged", message));
        }
        let unscheduled = |status: &VolumeStatus| {
            let condition = condition::get(&status.conditions, CONDITION_SCHEDULED).cloned();
            condition.filter(|condition| condition.status == ConditionStatus::False).map(|condition| condition.message)
        };
        if let (None, Some(why)) = (unscheduled(before), unscheduled(after)) {
            events.push(write::event(self.old, Severity::Warning, "NoPlace", why));
        }
        if before.robustness != after.robustness && before.robustness != Robustness::Unknown {
            let severity = match after.robustness {
                Robustness::Healthy | Robustness::Unknown => Severity::Normal,
                Robustness::Degraded | Robustness::Faulted => Severity::Warning,
            };
            let in_sync = after.config.as_ref().map_or(0, |config| config.in_sync.len());
            let message = format!(
                "{} → {}: {in_sync} of {} copies in sync",
                before.robustness.as_str(),
                after.robustness.as_str(),
                self.new.spec.number_of_replicas
            );
            events.push(write::event(self.old, severity, "RobustnessChanged", message));
        }
        events
    }

    /// The volume's attachment is made with it, so that requesters only add tickets.
    fn attachment(&mut self) {
        if self.observed.attachments.get(self.name).is_some() {
            return;
        }
        let spec = VolumeAttachmentSpec { volume: self.name.to_owned(), ..VolumeAttachmentSpec::default() };
        let mut object = VolumeAttachment::new(self.name, spec);
        object.metadata = self.meta(self.name, false);
        self.actions.push(Action::Create(Box::new(Object::VolumeAttachment(object))));
    }

    /// A larger size is a wish until the copies can grow; nothing uses it before.
    fn expansion(&mut self, config: &VolumeConfig) {
        if self.new.spec.size == config.size {
            condition::remove(&mut self.status().conditions, CONDITION_EXPANDED);
            return;
        }
        let message = format!("the volume keeps its {} bytes: this version cannot grow a volume", config.size);
        self.set_condition(CONDITION_EXPANDED, false, "NotSupported", &message);
    }

    /// Robustness by the record, and by whether anybody can serve it.
    fn judge(&mut self, config: &VolumeConfig) {
        let wanted = self.new.spec.number_of_replicas as usize;
        let in_sync = config.in_sync.len();
        let usable = config.in_sync.iter().filter(|name| self.is_usable(name)).count();
        let engine = self.engine.and_then(|engine| engine.status.as_ref()).map(|status| status.current_state);
        let serving = engine == Some(InstanceState::Running);
        let robustness = if engine == Some(InstanceState::Unknown) {
            Robustness::Unknown
        } else if !serving && usable == 0 {
            Robustness::Faulted
        } else if in_sync < wanted {
            Robustness::Degraded
        } else {
            Robustness::Healthy
        };
        self.status().robustness = robustness;
        let message = format!("{in_sync} of {wanted} copies in sync");
        let reason = if in_sync < wanted { "Degraded" } else { "Complete" };
        self.set_condition(CONDITION_REDUNDANT, in_sync >= wanted, reason, &message);
    }

    /// Whether the copy was set aside: it is neither used nor removed.
    pub(crate) fn is_discarded(&self, replica: &str) -> bool {
        self.new.status.as_ref().is_some_and(|status| status.is_discarded(replica))
    }

    /// Whether an engine could use the replica now, or soon.
    fn is_usable(&self, replica: &str) -> bool {
        let state = self.replicas.get(replica).map(state_of);
        matches!(state, Some(InstanceState::Running | InstanceState::Starting))
    }

    pub(crate) fn status(&mut self) -> &mut VolumeStatus {
        self.new.status.get_or_insert_default()
    }

    pub(crate) fn config(&self) -> Option<&'a VolumeConfig> {
        self.old.status.as_ref()?.config.as_ref()
    }

    pub(crate) fn state(&self) -> VolumeState {
        self.old.status.as_ref().map_or(VolumeState::Creating, |status| status.state)
    }

    pub(crate) fn set_condition(&mut self, type_: &str, holds: bool, reason: &str, message: &str) {
        let now = self.now;
        condition::set(&mut self.status().conditions, type_, holds, reason, message, now);
    }

    /// Since when the condition has been as the draft has it.
    pub(crate) fn since(&self, type_: &str) -> Timestamp {
        let conditions = self.new.status.as_ref().map_or(&[][..], |status| &status.conditions);
        condition::get(conditions, type_).map_or(self.now, |condition| condition.last_transition_time.0)
    }

    pub(crate) fn scheduled(&mut self, outcome: Result<(), String>) {
        match outcome {
            Ok(()) => self.set_condition(CONDITION_SCHEDULED, true, "Scheduled", ""),
            Err(why) => self.set_condition(CONDITION_SCHEDULED, false, "NoPlace", &why),
        }
    }

    /// Metadata of an object that belongs to the volume and goes with it.
    pub(crate) fn meta(&self, name: &str, held: bool) -> ObjectMeta {
        let mut meta = ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some(NAMESPACE.to_owned()),
            labels: Some([(LABEL_VOLUME.to_owned(), self.name.to_owned())].into()),
            owner_references: Some(vec![OwnerReference {
                api_version: format!("{}/{}", addax_api::GROUP, addax_api::VERSION),
                kind: "Volume".to_owned(),
                name: self.name.to_owned(),
                uid: self.old.uid().unwrap_or_default(),
                controller: Some(true),
                block_owner_deletion: Some(true),
            }]),
            ..ObjectMeta::default()
        };
        if held {
            write::hold(&mut meta);
        }
        meta
    }

    pub(crate) fn delete_replica(&mut self, name: &str) {
        if let Some(replica) = self.observed.replicas.get(name) {
            self.actions.push(Action::Delete { object: replica.reference() });
        }
    }

    /// Whether the node's object is there and its lease holds.
    pub(crate) fn is_node_up(&self, node: &str) -> bool {
        self.observed.nodes.get(node).is_some() && self.observed.is_alive(node, self.now)
    }
}

/// What is known of a replica.
pub(crate) fn state_of(replica: &Replica) -> InstanceState {
    replica.status.as_ref().map_or(InstanceState::Stopped, |status| status.current_state)
}

#[cfg(test)]
mod tests;
