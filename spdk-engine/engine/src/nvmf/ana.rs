//! ANA states of one listener of a subsystem, shared with the cores that serve its I/O queues, and what changes them.
//!
//! *Invariants.* Every group from 1 to the subsystem's `max_namespaces` has a state. A core may serve an I/O that
//! arrived while the state was changing by the old or by the new one.

use std::sync::atomic::{AtomicU8, Ordering};

use futures::future::join_all;
use nvme_wire::ana::AnaState;
use nvme_wire::features::AsyncEvent;

use super::address::Address;
use super::poll_group;
use super::subsystem::{Subsystem, SubsystemError};
use crate::reactor::Core;

/// The states by group.
#[derive(Debug)]
pub struct AnaStates(Box<[AtomicU8]>);

impl AnaStates {
    /// All groups in one state.
    #[must_use]
    pub fn new(groups: u32, state: AnaState) -> Self {
        Self((0..groups).map(|_| AtomicU8::new(state.raw())).collect())
    }

    /// The state of a group; optimized for one that does not exist.
    #[must_use]
    pub fn get(&self, group: u32) -> AnaState {
        let found = group.checked_sub(1).and_then(|index| self.0.get(index as usize));
        found.map_or(AnaState::Optimized, |state| AnaState::from_raw(state.load(Ordering::Relaxed)))
    }

    /// Sets one group, or all for 0; false when there is no such group.
    pub fn set(&self, group: u32, state: AnaState) -> bool {
        let range = match group {
            0 => 0..self.0.len(),
            group if group as usize <= self.0.len() => group as usize - 1..group as usize,
            _ => return false,
        };
        for slot in &self.0[range] {
            slot.store(state.raw(), Ordering::Relaxed);
        }
        true
    }

    /// Groups and their states.
    pub fn iter(&self) -> impl Iterator<Item = (u32, AnaState)> {
        (1..).zip(self.0.iter().map(|s| AnaState::from_raw(s.load(Ordering::Relaxed))))
    }
}

/// SPDK's name of a state.
#[must_use]
pub fn state_name(state: AnaState) -> &'static str {
    match state {
        AnaState::Optimized => "optimized",
        AnaState::NonOptimized => "non_optimized",
        AnaState::Inaccessible => "inaccessible",
        AnaState::PersistentLoss => "persistent_loss",
        AnaState::Change | AnaState::Other(_) => "change",
    }
}

impl Subsystem {
    /// Sets the ANA state of a group (0: of all groups) on a listener, and tells the controllers there.
    pub fn set_ana_state(
        &self,
        core: &Core,
        address: Address,
        group: u32,
        state: AnaState,
    ) -> Result<(), SubsystemError> {
        if !self.config.ana_reporting {
            return Err(SubsystemError::NoAna);
        }
        let listener = self.listener(address).ok_or(SubsystemError::NoListener(address))?;
        if !listener.ana.set(group, state) {
            return Err(SubsystemError::AnaGroup { group, max: self.config.max_namespaces });
        }
        for controller in self.controllers().iter().filter(|c| c.listen() == address) {
            controller.raise(core, AsyncEvent::AnaChange);
        }
        Ok(())
    }

    /// Puts a namespace into an ANA group; ready when every core serves it by that.
    pub async fn set_ana_group(&self, core: &Core, nsid: u32, group: u32) -> Result<(), SubsystemError> {
        let max = self.config.max_namespaces;
        if !self.config.ana_reporting {
            return Err(SubsystemError::NoAna);
        }
        if group == 0 || group > max {
            return Err(SubsystemError::AnaGroup { group, max });
        }
        match self.namespaces.borrow_mut().get_mut(&nsid) {
            Some(namespace) => namespace.ana_group = group,
            None => return Err(SubsystemError::NoNamespace(nsid)),
        }
        let id = self.id;
        let calls = core
            .data_cores()
            .into_iter()
            .map(|to| core.call(to, move |core| poll_group::set_ana_group(core, id, nsid, group)));
        join_all(calls).await;
        for controller in self.controllers() {
            controller.raise(core, AsyncEvent::AnaChange);
        }
        Ok(())
    }
}
