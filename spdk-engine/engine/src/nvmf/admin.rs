//! Commands of admin queues.
//!
//! *Invariants.* Buffers that go to the host are zeroed before anything is put into them. Every command is answered
//! once; only Abort of an I/O command and asynchronous event requests are answered later than at once.

use std::rc::Rc;

use nvme_wire::admin::AdminCommand;
use nvme_wire::command::{Direction, Fuse, opcode};
use nvme_wire::fabrics::{FabricsCommand, PropertySize};
use nvme_wire::{Sqe, Status};

use super::controller::Controller;
use super::session::Completion;
use super::{features, identify, logs, poll_group};
use crate::reactor::Core;

/// What a command comes to.
#[derive(Debug)]
pub enum Answer {
    Done(Completion),
    /// Success with data for the host.
    Data(Vec<u8>, Completion),
    /// The command is answered later.
    Later,
}

impl Answer {
    /// Data and no result.
    pub fn data(bytes: impl Into<Vec<u8>>) -> Self {
        Self::Data(bytes.into(), Completion::dw0(0))
    }
}

/// Executes the admin command in `slot`.
pub fn execute(controller: &Rc<Controller>, core: &Core, slot: u16) {
    let (sqe, data) = {
        let session = controller.conn().session();
        (*session.sqe(slot), session.data(slot).cloned())
    };
    let to_host = sqe.direction() == Direction::ControllerToHost;
    if to_host && let Some(data) = &data {
        data.fill(0);
    }
    let room = data.as_ref().map_or(0, |d| d.len());
    let sent = data.as_ref().filter(|_| !to_host).map(|d| d.to_vec()).unwrap_or_default();
    let completion = match dispatch(controller, core, slot, &sqe, room, &sent) {
        Ok(Answer::Later) => return,
        Ok(Answer::Done(completion)) => completion,
        Ok(Answer::Data(bytes, completion)) => {
            if let Some(data) = &data {
                data.copy_from(&bytes[..bytes.len().min(room)], 0);
            }
            completion
        }
        Err(status) => status.into(),
    };
    controller.conn().complete(core, slot, completion);
}

fn dispatch(
    controller: &Rc<Controller>,
    core: &Core,
    slot: u16,
    sqe: &Sqe,
    room: usize,
    sent: &[u8],
) -> Result<Answer, Status> {
    if sqe.opcode == opcode::FABRICS {
        return fabrics(controller, core, sqe);
    }
    if sqe.fuse() != Fuse::Normal {
        return Err(Status::INVALID_FIELD);
    }
    if !controller.is_enabled() {
        return Err(Status::COMMAND_SEQUENCE_ERROR);
    }
    let nsid = sqe.nsid.get();
    match AdminCommand::parse(sqe)? {
        AdminCommand::Identify(identify) => identify::answer(controller, nsid, &identify, room),
        AdminCommand::GetLogPage(page) => logs::answer(controller, nsid, &page, room),
        AdminCommand::GetFeatures(get) => features::get(controller, &get),
        AdminCommand::SetFeatures(set) => features::set(controller, core, sqe, &set, sent),
        AdminCommand::Abort { .. } | AdminCommand::AsyncEventRequest | AdminCommand::KeepAlive if nsid != 0 => {
            Err(Status::INVALID_FIELD)
        }
        AdminCommand::Abort { .. } if controller.is_discovery() => Err(Status::INVALID_OPCODE),
        AdminCommand::Abort { sqid, cid } => abort(controller, core, slot, sqid, cid),
        AdminCommand::AsyncEventRequest => Ok(controller.events.request(slot, sqe).map_or(Answer::Later, Answer::Done)),
        AdminCommand::KeepAlive => {
            controller.kept_alive(core);
            Ok(Answer::Done(Completion::dw0(0)))
        }
        _ => Err(Status::INVALID_OPCODE),
    }
}

fn fabrics(controller: &Rc<Controller>, core: &Core, sqe: &Sqe) -> Result<Answer, Status> {
    match FabricsCommand::parse(sqe)? {
        FabricsCommand::PropertyGet { size, offset } => {
            let value = controller.property(offset, size == PropertySize::Eight)?;
            let (dw0, dw1) = (value as u32, (value >> 32) as u32);
            Ok(Answer::Done(Completion { status: Status::SUCCESS, dw0, dw1 }))
        }
        FabricsCommand::PropertySet { size, offset, value } => {
            controller.set_property(core, offset, size == PropertySize::Eight, value)?;
            Ok(Answer::Done(Completion::dw0(0)))
        }
        // A second Connect, Disconnect, and authentication that was not asked for.
        _ => Err(Status::INVALID_OPCODE),
    }
}

/// Dword 0 of an Abort whose command was not aborted.
const NOT_ABORTED: u32 = 1;

fn abort(controller: &Rc<Controller>, core: &Core, slot: u16, sqid: u16, cid: u16) -> Result<Answer, Status> {
    if sqid == 0 {
        let Some(event_slot) = controller.events.abort(cid) else {
            return Ok(Answer::Done(Completion::dw0(NOT_ABORTED)));
        };
        controller.conn().complete(core, event_slot, Status::ABORTED_BY_REQUEST);
        return Ok(Answer::Done(Completion::dw0(0)));
    }
    let queue = controller.queues().into_iter().find(|(qid, _)| *qid == sqid);
    let Some((_, queue)) = queue else { return Ok(Answer::Done(Completion::dw0(NOT_ABORTED))) };
    let (controller, core) = (Rc::clone(controller), core.clone());
    core.clone().spawn(async move {
        let aborted = core.call(queue.core, move |core| poll_group::abort(core, queue.key, cid)).await;
        let dw0 = if aborted == Some(true) { 0 } else { NOT_ABORTED };
        controller.conn().complete(&core, slot, Completion::dw0(dw0));
    });
    Ok(Answer::Later)
}
