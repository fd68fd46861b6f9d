//! Get and Set Features of one controller.
//!
//! *Invariants.* A refused Set changes nothing, but for the keep alive and persistence rules of SPDK.

use std::cell::Cell;
use std::rc::Rc;

use nvme_wire::admin::{GetFeatures, NSID_ALL, SetFeatures};
use nvme_wire::features::{AsyncEventConfig, HOST_BEHAVIOR_SIZE, HOST_ID_EXTENDED, HostBehavior, NumberOfQueues, fid};
use nvme_wire::{Sqe, Status};

use super::admin::Answer;
use super::controller::Controller;
use super::session::Completion;
use crate::reactor::Core;

/// Values that hosts set and read back.
#[derive(Debug)]
pub struct Features {
    hostid: [u8; 16],
    arbitration: Cell<u32>,
    error_recovery: Cell<u32>,
    write_atomicity: Cell<u32>,
    power: Cell<u32>,
    acre: Cell<bool>,
    lbafee: Cell<bool>,
}

/// DULBE of error recovery: errors for deallocated blocks, which are not reported.
const DULBE: u32 = 1 << 16;
/// Interrupt vector configuration with coalescing disabled.
const VECTOR_NO_COALESCING: u32 = 1 << 16;

impl Features {
    pub fn new(hostid: [u8; 16]) -> Self {
        Self {
            hostid,
            arbitration: Cell::new(0),
            error_recovery: Cell::new(0),
            write_atomicity: Cell::new(0),
            power: Cell::new(0),
            acre: Cell::new(false),
            lbafee: Cell::new(false),
        }
    }
}

/// Get Features.
pub fn get(controller: &Controller, get: &GetFeatures) -> Result<Answer, Status> {
    let features = &controller.features;
    if controller.is_discovery() && !matches!(get.fid, fid::ASYNC_EVENT_CONFIG | fid::KEEP_ALIVE_TIMER) {
        return Err(Status::INVALID_FIELD);
    }
    let dw0 = match get.fid {
        fid::ARBITRATION => features.arbitration.get(),
        fid::POWER_MANAGEMENT => features.power.get(),
        fid::TEMPERATURE_THRESHOLD | fid::INTERRUPT_COALESCING => 0,
        fid::ERROR_RECOVERY => features.error_recovery.get(),
        fid::WRITE_CACHE => u32::from(has_write_cache(controller)),
        fid::NUMBER_OF_QUEUES => NumberOfQueues::both(controller.options.io_queues().into()).raw(),
        fid::INTERRUPT_VECTOR => VECTOR_NO_COALESCING,
        fid::WRITE_ATOMICITY => features.write_atomicity.get(),
        fid::ASYNC_EVENT_CONFIG => controller.events.config().0,
        fid::KEEP_ALIVE_TIMER => controller.keep_alive_ms(),
        fid::HOST_BEHAVIOR => {
            let (acre, lbafee) = (features.acre.get().into(), features.lbafee.get().into());
            let behavior = HostBehavior { acre, lbafee, ..HostBehavior::default() };
            return Ok(Answer::Data(behavior.encode().to_vec(), Completion::dw0(0)));
        }
        fid::HOST_ID if get.cdw11 & HOST_ID_EXTENDED != 0 => {
            return Ok(Answer::Data(features.hostid.to_vec(), Completion::dw0(0)));
        }
        _ => return Err(Status::INVALID_FIELD),
    };
    Ok(Answer::Done(Completion::dw0(dw0)))
}

/// Whether some namespace has a volatile write cache; a subsystem without namespaces counts as if it had one.
pub fn has_write_cache(controller: &Controller) -> bool {
    controller.subsystem.with_namespaces(|all| all.is_empty() || all.values().any(|n| n.info().write_cache))
}

/// Set Features; `data` is what the host sent with it.
pub fn set(
    controller: &Rc<Controller>,
    core: &Core,
    sqe: &Sqe,
    set: &SetFeatures,
    data: &[u8],
) -> Result<Answer, Status> {
    if set.save {
        return Err(Status::FEATURE_NOT_SAVEABLE);
    }
    if controller.is_discovery() && !matches!(set.fid, fid::ASYNC_EVENT_CONFIG | fid::KEEP_ALIVE_TIMER) {
        return Err(Status::INVALID_FIELD);
    }
    check_nsid(controller, sqe.nsid.get())?;
    let (features, value) = (&controller.features, set.cdw11);
    match set.fid {
        fid::ARBITRATION => features.arbitration.set(value),
        fid::WRITE_ATOMICITY => features.write_atomicity.set(value),
        fid::ERROR_RECOVERY if value & DULBE == 0 => features.error_recovery.set(value),
        fid::POWER_MANAGEMENT if value & 0x1F == 0 => features.power.set(value),
        fid::TEMPERATURE_THRESHOLD if value >> 16 & 0xF <= 8 || value >> 16 & 0xF == 0xF => {}
        fid::WRITE_CACHE if !has_write_cache(controller) => return Err(Status::INVALID_FIELD),
        fid::WRITE_CACHE if value & 1 == 1 => {}
        fid::WRITE_CACHE | fid::INTERRUPT_COALESCING => return Err(Status::FEATURE_NOT_CHANGEABLE),
        fid::NUMBER_OF_QUEUES => return set_queues(controller, value),
        fid::ASYNC_EVENT_CONFIG => controller.events.set_config(AsyncEventConfig(value)),
        fid::KEEP_ALIVE_TIMER if value == 0 && !controller.is_discovery() => return Err(Status::KEEP_ALIVE_INVALID),
        fid::KEEP_ALIVE_TIMER => controller.set_keep_alive(core, value),
        fid::HOST_BEHAVIOR => set_behavior(features, data)?,
        fid::HOST_ID => return Err(Status::COMMAND_SEQUENCE_ERROR),
        _ => return Err(Status::INVALID_FIELD),
    }
    Ok(Answer::Done(Completion::dw0(0)))
}

fn check_nsid(controller: &Controller, nsid: u32) -> Result<(), Status> {
    let max = controller.subsystem.config.max_namespaces;
    match nsid {
        0 | NSID_ALL => Ok(()),
        nsid if nsid > max => Err(Status::INVALID_NAMESPACE),
        _ => Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC),
    }
}

fn set_queues(controller: &Controller, value: u32) -> Result<Answer, Status> {
    if !controller.queues().is_empty() {
        return Err(Status::COMMAND_SEQUENCE_ERROR);
    }
    NumberOfQueues::from_raw(value)?;
    let granted = NumberOfQueues::both(controller.options.io_queues().into());
    Ok(Answer::Done(Completion::dw0(granted.raw())))
}

fn set_behavior(features: &Features, data: &[u8]) -> Result<(), Status> {
    if data.len() < HOST_BEHAVIOR_SIZE {
        return Err(Status::INVALID_FIELD);
    }
    let behavior = HostBehavior::parse(data).map_err(|_| Status::INVALID_FIELD)?;
    if behavior.acre > 1 || behavior.lbafee > 1 {
        return Err(Status::INVALID_FIELD);
    }
    features.acre.set(behavior.acre == 1);
    features.lbafee.set(behavior.lbafee == 1);
    Ok(())
}
