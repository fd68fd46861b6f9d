//! Which engines this node holds, so that they are put back after a restart of the agent.
//!
//! *What it is.* `engines` (two slots, see [`super::slots`]) in the runtime folder: the wishes as managers gave them, and
//! the instances that this agent used last for each volume.
//!
//! *Invariants.* An engine instance is in the file before the arbiter hears of it. So an agent knows after a crash
//! whether the record at the arbiter is its own: only then does it open the volume again without being asked.
//!
//! *When things fail.* A file that cannot be read stops the agent's start: without it an engine might be forgotten.
//! Engines that managers still want are asked for again.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::slots::{Slots, SlotsError};

/// Instances remembered per volume; older ones cannot be at the arbiter any more, as each opens on top of the last.
const INSTANCES_MAX: usize = 8;

/// A replica that an engine may use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemberWish {
    /// Its name.
    pub replica: String,
    /// `host:port` of the agent that holds it.
    pub agent: String,
    /// IP address of its listener.
    pub traddr: String,
    /// Port of its listener.
    pub trsvcid: u16,
    /// Its subsystem.
    pub nqn: String,
}

/// An engine that a manager asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EngineWish {
    /// The volume.
    pub volume: String,
    /// Its size in bytes.
    pub size: u64,
    /// UUID of its namespace.
    pub uuid: uuid::Uuid,
    /// Its replicas by name.
    pub members: BTreeMap<String, MemberWish>,
    /// Hosts that may connect.
    pub allowed_hosts: Vec<String>,
    /// Engine instances that this agent used for it, newest last.
    #[serde(default)]
    pub instances: Vec<String>,
    /// The last one of them that served.
    #[serde(default)]
    pub served: Option<Served>,
    /// Hosts that may hold acknowledged writes which no copy has (consistency rule 1): refused until they have detached.
    #[serde(default)]
    pub must_detach: BTreeSet<String>,
}

/// An engine that served here, and when: see [`crate::machine::Machine`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Served {
    /// Its instance.
    pub instance: String,
    /// Identity of the machine.
    pub machine: String,
    /// Boot of the machine.
    pub boot: String,
}

impl EngineWish {
    /// Hosts that are let in.
    pub fn admitted_hosts(&self) -> Vec<String> {
        self.allowed_hosts.iter().filter(|host| !self.must_detach.contains(*host)).cloned().collect()
    }

    /// Hosts that are not wanted any more have detached.
    pub fn forget_detached(&mut self) {
        let allowed = &self.allowed_hosts;
        self.must_detach.retain(|host| allowed.contains(host));
    }

    /// Remembers an instance.
    pub fn remember(&mut self, instance: &str) {
        self.instances.push(instance.to_owned());
        let surplus = self.instances.len().saturating_sub(INSTANCES_MAX);
        self.instances.drain(..surplus);
    }
}

/// The file of wishes.
#[derive(Debug)]
pub struct EngineStore {
    slots: Slots,
    wishes: BTreeMap<String, EngineWish>,
}

impl EngineStore {
    /// Opens the file in the runtime folder.
    ///
    /// # Errors
    /// See [`SlotsError`].
    pub fn open(runtime_dir: &Path) -> Result<Self, SlotsError> {
        let (slots, payload) = Slots::open(runtime_dir, "engines")?;
        let wishes = match payload {
            None => BTreeMap::new(),
            Some(payload) => serde_json::from_slice(&payload).map_err(|error| SlotsError::Corrupt {
                path: runtime_dir.join("engines"),
                detail: error.to_string(),
            })?,
        };
        Ok(Self { slots, wishes })
    }

    /// All wishes.
    pub fn all(&self) -> impl Iterator<Item = &EngineWish> {
        self.wishes.values()
    }

    /// Makes a wish durable.
    ///
    /// # Errors
    /// See [`SlotsError`].
    pub fn put(&mut self, wish: &EngineWish) -> Result<(), SlotsError> {
        if self.wishes.get(&wish.volume) == Some(wish) {
            return Ok(());
        }
        self.wishes.insert(wish.volume.clone(), wish.clone());
        self.write()
    }

    /// Forgets a volume durably.
    ///
    /// # Errors
    /// See [`SlotsError`].
    pub fn remove(&mut self, volume: &str) -> Result<(), SlotsError> {
        match self.wishes.remove(volume) {
            Some(_) => self.write(),
            None => Ok(()),
        }
    }

    fn write(&mut self) -> Result<(), SlotsError> {
        // Plain maps of strings and numbers always serialise.
        let payload = serde_json::to_vec(&self.wishes).unwrap_or_default();
        self.slots.write(&payload)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn rule_01_a_host_that_must_detach_is_let_in_again_once_it_was_not_wanted() {
        let mut wish = EngineWish {
            volume: "v".to_owned(),
            size: 1,
            uuid: uuid::Uuid::nil(),
            members: BTreeMap::new(),
            allowed_hosts: vec!["h1".to_owned(), "h2".to_owned()],
            instances: Vec::new(),
            served: None,
            must_detach: ["h1".to_owned(), "h2".to_owned()].into(),
        };
        wish.allowed_hosts = vec!["h2".to_owned(), "h3".to_owned()];
        wish.forget_detached();
        assert_eq!(wish.admitted_hosts(), ["h3"]);
        wish.allowed_hosts = vec!["h1".to_owned()];
        wish.forget_detached();
        assert!(wish.must_detach.is_empty() && wish.admitted_hosts() == ["h1"]);
    }

    #[test]
    fn wishes_survive_and_go() {
        let dir = tempfile::tempdir().unwrap();
        let mut wish = EngineWish {
            volume: "v".to_owned(),
            size: 1,
            uuid: uuid::Uuid::new_v4(),
            members: BTreeMap::new(),
            allowed_hosts: vec!["h".to_owned()],
            instances: Vec::new(),
            served: None,
            must_detach: BTreeSet::new(),
        };
        (0..20).for_each(|n| wish.remember(&n.to_string()));
        assert_eq!(wish.instances.len(), INSTANCES_MAX);
        assert_eq!(wish.instances.last().unwrap(), "19");
        let mut store = EngineStore::open(dir.path()).unwrap();
        store.put(&wish).unwrap();
        assert_eq!(EngineStore::open(dir.path()).unwrap().all().collect::<Vec<_>>(), [&wish]);
        store.remove("v").unwrap();
        store.remove("v").unwrap();
        assert_eq!(EngineStore::open(dir.path()).unwrap().all().count(), 0);
    }
}
