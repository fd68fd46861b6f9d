//! The namespaces of an attached controller and their devices.
//!
//! *Invariants.* A namespace has at most one device. A namespace that is another medium than before (identifier or
//! format) gets a new device; one that only changed its size keeps its own. Scans of one controller run one at a time,
//! and a change that is told during a scan causes another.
//!
//! *When things fail.* A namespace whose device cannot be registered is left out, with a message. With
//! `addax_no_replay`, one whose identifier is taken (by the very device it exports, in the same process) is registered
//! under a derived one instead of being left out.

use std::rc::Rc;
use std::sync::Arc;

use uuid::Uuid;

use super::ctrl::{Ctrl, State};
use super::device::NvmeBdev;
use super::host::{Controller, HostError, NamespaceInfo};

/// Namespace of derived identifiers.
const DERIVED: Uuid = Uuid::from_u128(0x6a1f_7f0c_8d0b_4a55_9b1e_3f5d_2c70_9e41);

impl Ctrl {
    /// Scans because the controller said that something has changed.
    pub(super) async fn scan_after_event(self: &Rc<Self>) {
        let controller = self.controller().filter(|_| self.state.get() == State::Enabled);
        let Some(controller) = controller else { return };
        if let Err(error) = self.scan(&controller).await {
            // A lost connection is told of elsewhere; other failures leave what there was.
            tracing::warn!(controller = self.shared.name, %error, "namespaces could not be read");
        }
    }

    /// Reads the namespaces and brings the devices in line with them.
    pub(super) async fn scan(self: &Rc<Self>, controller: &Rc<Controller>) -> Result<(), HostError> {
        while let Some(session) = self.begin_scan() {
            let outcome = controller.namespaces(self.core()).await;
            let Some(again) = self.end_scan(session) else { return Ok(()) };
            let found = outcome?;
            if self.state.get() == State::Deleting {
                return Ok(());
            }
            self.apply(controller, found);
            if !again {
                return Ok(());
            }
        }
        Ok(())
    }

    fn apply(self: &Rc<Self>, controller: &Rc<Controller>, found: Vec<NamespaceInfo>) {
        let present: Vec<(u32, Arc<NvmeBdev>)> =
            self.bdevs.borrow().iter().map(|(nsid, device)| (*nsid, Arc::clone(device))).collect();
        for (nsid, device) in present {
            match found.iter().find(|info| info.nsid == nsid) {
                Some(info) if info.is_same_medium(device.namespace()) => {
                    if device.resize(info.blocks) {
                        tracing::info!(bdev = device.name(), blocks = info.blocks, "resized");
                        self.app().registry().resized(device.name());
                    }
                }
                other => self.replace(controller, nsid, &device, other.cloned()),
            }
        }
        for info in found {
            if !self.bdevs.borrow().contains_key(&info.nsid) {
                self.add(controller, info);
            }
        }
    }

    /// Takes a device out and puts another in its place, if there is one. Not awaited: whoever holds the device may
    /// have I/O that only ends once the session serves it.
    fn replace(
        self: &Rc<Self>,
        controller: &Rc<Controller>,
        nsid: u32,
        old: &Arc<NvmeBdev>,
        next: Option<NamespaceInfo>,
    ) {
        tracing::info!(bdev = old.name(), replaced = next.is_some(), "namespace is gone");
        let (ctrl, controller, old) = (Rc::clone(self), Rc::clone(controller), Arc::clone(old));
        self.core().spawn(async move {
            let core = ctrl.core().clone();
            if let Err(error) = ctrl.app().registry().unregister(&core, old.name()).await {
                tracing::debug!(%error, "device is gone already");
            }
            let ours = ctrl.bdevs.borrow().get(&nsid).is_some_and(|now| Arc::ptr_eq(now, &old));
            if ours {
                ctrl.bdevs.borrow_mut().remove(&nsid);
                if let Some(info) = next.filter(|_| ctrl.state.get() != State::Deleting) {
                    ctrl.add(&controller, info);
                }
            }
        });
    }

    fn add(&self, controller: &Controller, info: NamespaceInfo) {
        let count = self.bdevs.borrow().len();
        if count >= self.attach.max_bdevs as usize {
            tracing::warn!(controller = self.shared.name, nsid = info.nsid, "more namespaces than max_bdevs");
            return;
        }
        let nsid = info.nsid;
        let identity = format!("{}:{}:{nsid}", controller.data().subnqn.as_str(), controller.data().sn.as_str());
        let stable = || Uuid::new_v5(&DERIVED, identity.as_bytes());
        let uuid = info.uuid.unwrap_or_else(|| if self.generates_uuids() { stable() } else { Uuid::new_v4() });
        let taken = self.app().registry().find(&uuid.to_string()).is_some();
        let uuid = if taken && self.shared.no_replay {
            Uuid::new_v5(&DERIVED, format!("{}:{uuid}", self.shared.name).as_bytes())
        } else {
            uuid
        };
        let write_cache = controller.data().has_write_cache();
        let device = Arc::new(NvmeBdev::new(Arc::clone(&self.shared), info, uuid, write_cache));
        match self.app().registry().register(Arc::clone(&device) as Arc<_>, Vec::new(), "nvme") {
            Ok(_) => {
                self.bdevs.borrow_mut().insert(nsid, device);
            }
            Err(error) => {
                tracing::warn!(controller = self.shared.name, nsid, %error, "namespace is left out");
            }
        }
    }
}
