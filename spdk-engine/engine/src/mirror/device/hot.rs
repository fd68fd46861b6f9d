//! Data on its way to the legs and back: what happens for every I/O.
//!
//! *What it is.* A [`Port`] is a leg's channel and whom to tell of its answers; the tag of an I/O there is the core's own
//! number, so there is no table in between. The usual I/O takes the core's quick way (`mirror_core::Core::quick_host`):
//! it is sent to all its legs in one go, and answers are counted without a list of actions. What is not usual goes through
//! [`Device::input_at`].
//!
//! *Invariants.* A port lives as long as its leg, and as long as anything is in flight on it. Nothing that is submitted
//! ends before the submit returns, so the tables may be looked at meanwhile.
//!
//! *When things fail.* See [`super`]: an answer that is late or no success is judged there.

use std::rc::Rc;

use mirror_core::{Answered, HostId, Input, IoId, LegError, LegId, Op, Sent};
use nvme_wire::Status;

use super::{Device, LATE_NS, LegRun, Part};
use crate::bdev::{Bufs, Chan, Io, IoOp, IoSink, IoStatus, share};
use crate::reactor::Core;

/// A leg's channel for data.
pub(super) struct Port {
    device: Rc<Device>,
    leg: LegId,
    chan: Chan,
}

/// What a leg is told. Holes read as zeroes on every replica (rule 5): an unmap is told as zeroes, which frees space too.
pub(super) fn leg_op(op: Op) -> IoOp {
    match op {
        Op::Read => IoOp::Read,
        Op::Write { fua } => IoOp::Write { fua },
        Op::Flush => IoOp::Flush,
        Op::Unmap | Op::WriteZeroes => IoOp::WriteZeroes,
    }
}

impl Device {
    pub(super) fn open_port(self: &Rc<Self>, leg: LegId, chan: &Chan) {
        let port = Rc::new(Port { device: Rc::clone(self), leg, chan: chan.clone() });
        let mut ports = self.ports.borrow_mut();
        let at = leg.0 as usize;
        if ports.len() <= at {
            ports.resize_with(at + 1, || None);
        }
        ports[at] = Some(port);
    }

    pub(super) fn close_port(&self, leg: LegId) {
        if let Some(port) = self.ports.borrow_mut().get_mut(leg.0 as usize) {
            *port = None;
        }
    }

    /// Takes an I/O of a host that has its place in `hosts`.
    pub(super) fn begin(self: &Rc<Self>, core: &Core, id: HostId, op: Op, (lba, blocks): (u64, u32)) {
        let now = self.advance(core.now());
        let sent = self.machine.borrow_mut().quick_host(now, id, op, lba, blocks);
        match sent {
            Some(sent) => self.send_host(core, id, op, sent),
            None => self.input_at(core, now, Input::Host { id, op, lba, blocks }),
        }
    }

    /// Sends a host's I/O to several legs.
    fn send_host(self: &Rc<Self>, core: &Core, id: HostId, op: Op, sent: Sent) {
        let (hosts, ports) = (self.hosts.borrow(), self.ports.borrow());
        let Some(host) = hosts.get(id.0 as usize) else { return };
        let op = leg_op(op);
        let has_data = matches!(op, IoOp::Read | IoOp::Write { .. });
        for (leg, io) in sent.ios() {
            let Some(port) = ports.get(leg.0 as usize).and_then(Option::as_ref) else {
                self.refuse(core, (leg, io), LegError::Gone);
                continue;
            };
            let bufs = if has_data { share(&host.bufs) } else { Bufs::new() };
            let sink = Rc::clone(port) as Rc<dyn IoSink>;
            port.chan.submit(core, Io::new(op, host.lba, host.blocks, bufs, sink, io.0));
        }
    }

    /// Sends an I/O to one leg.
    pub(super) fn send_data(
        self: &Rc<Self>,
        core: &Core,
        (leg, io): (LegId, IoId),
        op: IoOp,
        (lba, blocks): (u64, u64),
        bufs: Bufs,
    ) {
        let ports = self.ports.borrow();
        match ports.get(leg.0 as usize).and_then(Option::as_ref) {
            Some(port) => {
                let sink = Rc::clone(port) as Rc<dyn IoSink>;
                port.chan.submit(core, Io::new(op, lba, blocks, bufs, sink, io.0));
            }
            None => self.refuse(core, (leg, io), LegError::Gone),
        }
    }

    fn answer(self: &Rc<Self>, core: &Core, id: HostId) {
        let io = self.hosts.borrow_mut().try_remove(id.0 as usize);
        if let Some(io) = io {
            core.complete(io, Status::SUCCESS);
        }
        self.admit_waiting(core);
    }

    /// An answer that is not a usual one.
    fn data_done(self: &Rc<Self>, core: &Core, leg: LegId, io: IoId, status: IoStatus) {
        // Of an I/O that the core does not know any more nobody asks when it was sent.
        let known = self.machine.borrow().sent_at(leg, io);
        let sent = known.unwrap_or_else(|| core.now());
        self.run_done(core, LegRun { leg, io, part: Part::Data, sent, asked: 0 }, status);
    }
}

impl IoSink for Port {
    fn io_done(self: Rc<Self>, core: &Core, tag: u64, status: IoStatus) {
        let (device, io) = (&self.device, IoId(tag));
        if status.is_success() {
            let now = device.advance(core.completion_clock());
            let answered = device.machine.borrow_mut().quick_done(now, self.leg, io, LATE_NS);
            match answered {
                Some(Answered::Waits) => return,
                Some(Answered::Host(id)) => return device.answer(core, id),
                None => {}
            }
        }
        device.data_done(core, self.leg, io, status);
    }
}
