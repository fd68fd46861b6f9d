//! What all cores know of one attached controller.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use nvme_wire::identify::ControllerData;
use serde_json::{Map, Value, json};

use super::host::Controller;

/// One attached controller.
#[derive(Debug)]
pub struct Shared {
    /// Never used again for another controller in the life of the process.
    pub id: u64,
    pub name: String,
    /// I/O of a lost session fails at once, see [`super::options::Attach::addax_no_replay`].
    pub no_replay: bool,
    /// How often an I/O is tried again after a passing failure; below 0 for always.
    pub retries: i32,
    /// The controller's three retry delays in units of 100 ms, 16 bits each.
    retry_delays: AtomicU64,
    /// What RPC tells of the controller. Control path only.
    facts: Mutex<Value>,
}

impl Shared {
    #[must_use]
    pub fn new(id: u64, name: String, no_replay: bool, retries: i32) -> Self {
        Self { id, name, no_replay, retries, retry_delays: AtomicU64::new(0), facts: Mutex::new(Value::Null) }
    }

    /// The controller's retry delay `which` (1 to 3) in units of 100 ms, at least 1.
    #[must_use]
    pub fn retry_delay(&self, which: u8) -> u16 {
        let all = self.retry_delays.load(Ordering::Relaxed);
        let shift = u32::from(which.clamp(1, 3) - 1) * 16;
        ((all >> shift) as u16).max(1)
    }

    /// Takes up what a new session says of the controller.
    pub fn learn(&self, controller: &Controller, trid: &Value) {
        let [one, two, three] = controller.data().crdt;
        let delays = u64::from(one) | u64::from(two) << 16 | u64::from(three) << 32;
        self.retry_delays.store(delays, Ordering::Relaxed);
        let facts = describe(controller, trid);
        match self.facts.lock() {
            Ok(mut guard) => *guard = facts,
            Err(poisoned) => *poisoned.into_inner() = facts,
        }
    }

    /// Members `trid`, `ctrlr_data` and `vs` of a device's `driver_specific`.
    #[must_use]
    pub fn facts(&self) -> Map<String, Value> {
        let guard = self.facts.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        guard.as_object().cloned().unwrap_or_default()
    }
}

fn describe(controller: &Controller, trid: &Value) -> Value {
    let data: &ControllerData = controller.data();
    let oacs = |bit: u16| data.oacs >> bit & 1;
    let version = controller.version();
    json!({
        "trid": trid,
        "ctrlr_data": {
            "cntlid": controller.cntlid(),
            "vendor_id": format!("0x{:04x}", data.vid),
            "model_number": data.mn.as_str(),
            "serial_number": data.sn.as_str(),
            "firmware_revision": data.fr.as_str(),
            "subnqn": data.subnqn.as_str(),
            "oacs": { "security": oacs(0), "format": oacs(1), "firmware": oacs(2), "ns_manage": oacs(3) },
            "multi_ctrlr": data.cmic & nvme_wire::identify::cmic::MULTI_CONTROLLER != 0,
            "ana_reporting": data.has_ana(),
        },
        "vs": { "nvme_version": format!("{}.{}", version >> 16, version >> 8 & 0xff) },
    })
}
