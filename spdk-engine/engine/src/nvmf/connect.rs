//! Connections before they belong to a controller, and the Connect command that decides where they belong.
//!
//! *Flow.* accepted → ICReq → Connect → admin queue: a new [`Controller`] here; I/O queue: moved to a data core.
//!
//! *Invariants.* A connection that has not connected within [`CONNECT_NS`] is closed. A host's Connect to an admin queue
//! is answered only after everything has completed that its older connections to the subsystem had brought in, so that
//! a retry of a write cannot be overtaken by the write itself.
//!
//! *When things fail.* A refused Connect leaves the connection as it was; the host may try again until the deadline.

use std::cell::Cell;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use futures::future::join_all;
use nvme_wire::command::opcode;
use nvme_wire::fabrics::{CNTLID_DYNAMIC, Connect, ConnectData, ConnectError, ConnectResponse, FabricsCommand};
use nvme_wire::{Nqn, Sqe, Status};

use super::address::Address;
use super::conn::{Conn, Owner};
use super::controller::{Association, Controller};
use super::poll_group::{self, Adoption};
use super::queues::{self, QueueRef};
use super::session::{Completion, Session};
use super::subsystem::Subsystem;
use super::target::Target;
use crate::reactor::Core;
use crate::reactor::driver::{NANOS_PER_MS, Nanos};
use crate::reactor::net::Stream;
use crate::reactor::timer::TimerId;

/// How long a connection may be without a controller.
pub const CONNECT_NS: Nanos = 10_000 * NANOS_PER_MS;
/// How long a Connect waits for what older connections of the host still execute.
const SETTLE_NS: Nanos = 8_000 * NANOS_PER_MS;
/// How host names of engines begin.
const ENGINE_HOST_PREFIX: &str = "nqn.2026-11.io.addax:engine:";
/// After what time a queue number that is in use is looked at again.
const DUPLICATE_RETRY_NS: Nanos = NANOS_PER_MS;

/// Owner of a connection without a controller.
pub struct Greeter {
    target: Weak<Target>,
    listen: Address,
    deadline: Cell<Option<TimerId>>,
    /// A Connect is being worked on.
    busy: Cell<bool>,
    ended: Cell<bool>,
}

impl Greeter {
    /// Takes an accepted connection.
    pub fn start(core: &Core, target: &Rc<Target>, listen: Address, stream: Box<dyn Stream>) {
        let Some(options) = target.transport() else { return };
        let conn = Conn::new(stream, Session::new(options.limits(), core.pool().clone()));
        let greeter = Rc::new(Self {
            target: Rc::downgrade(target),
            listen,
            deadline: Cell::new(None),
            busy: Cell::new(false),
            ended: Cell::new(false),
        });
        let (weak_conn, weak) = (Rc::downgrade(&conn), Rc::downgrade(&greeter));
        let expire = move |core: &Core| {
            if let (Some(greeter), Some(conn)) = (weak.upgrade(), weak_conn.upgrade()) {
                tracing::info!(peer = ?conn.peer, "connection closed: it did not connect to a controller in time");
                greeter.drop_conn(core, &conn);
            }
        };
        greeter.deadline.set(Some(core.after(CONNECT_NS, Rc::new(expire))));
        target.count_unassociated(1);
        conn.start(core, greeter);
    }

    /// The connection leaves this state, one way or another.
    fn leave(&self, core: &Core) {
        if self.ended.replace(true) {
            return;
        }
        if let Some(timer) = self.deadline.take() {
            core.cancel(timer);
        }
        if let Some(target) = self.target.upgrade() {
            target.count_unassociated(-1);
        }
    }

    fn drop_conn(&self, core: &Core, conn: &Conn) {
        if !self.ended.get() {
            self.leave(core);
            conn.close(core);
        }
    }

    fn may_log(&self, core: &Core) -> Option<u64> {
        self.target.upgrade()?.refusals.allow(core.now())
    }

    async fn connect(self: Rc<Self>, core: Core, conn: Rc<Conn>, slot: u16, request: Request) {
        let outcome = self.decide(&core, &conn, slot, &request).await;
        self.busy.set(false);
        if let Err(refusal) = outcome
            && !self.ended.get()
        {
            if let Some(left_out) = self.may_log(&core) {
                let (host, subsystem, qid) = (&request.host, &request.subnqn, request.command.qid);
                let status = refusal.status;
                tracing::warn!(%host, %subsystem, qid, %status, left_out, "Connect refused");
            }
            conn.complete(&core, slot, refusal);
        }
    }

    async fn decide(&self, core: &Core, conn: &Rc<Conn>, slot: u16, request: &Request) -> Result<(), Completion> {
        let target = self.target.upgrade().ok_or(Status::INTERNAL_ERROR)?;
        let subsystem = admit(&target, self.listen, request)?;
        if request.command.qid == 0 {
            settle_older(core, &subsystem, request).await?;
            // Things may have changed meanwhile.
            let subsystem = admit(&target, self.listen, request)?;
            return self.connect_admin(core, &target, &subsystem, conn, slot, request);
        }
        let duplicate = |c: Rc<Controller>| c.has_qid(request.command.qid);
        if subsystem.controller(request.data.cntlid).is_some_and(duplicate) {
            core.sleep(DUPLICATE_RETRY_NS).await;
        }
        let subsystem = admit(&target, self.listen, request)?;
        self.connect_io(core, &target, &subsystem, conn, slot, request)
    }

    fn connect_admin(
        &self,
        core: &Core,
        target: &Rc<Target>,
        subsystem: &Rc<Subsystem>,
        conn: &Rc<Conn>,
        slot: u16,
        request: &Request,
    ) -> Result<(), Completion> {
        if self.ended.get() || !conn.is_open() {
            return Ok(());
        }
        let options = target.transport().ok_or(Status::INTERNAL_ERROR)?;
        check_sqsize(request, options.max_aq_depth)?;
        if request.data.cntlid != CNTLID_DYNAMIC {
            return Err(invalid(ConnectError::CNTLID));
        }
        let cntlid = subsystem.next_cntlid().ok_or(Status::INTERNAL_ERROR)?;
        let listener = subsystem.listener(self.listen);
        let ana =
            listener.map(|l| l.ana).unwrap_or_else(|| Arc::new(super::ana::AnaStates::new(0, Default::default())));
        let association = Association {
            host: Rc::clone(&request.host),
            hostid: request.data.hostid,
            cntlid,
            listen: self.listen,
            ana,
            kato_ms: request.command.kato_ms,
        };
        let (of, with) = (Rc::clone(target), Rc::clone(subsystem));
        let controller = Controller::new(core, of, with, options, association, Rc::clone(conn));
        subsystem.insert_controller(Rc::clone(&controller));
        self.leave(core);
        target.count_admin_queue();
        conn.set_owner(controller);
        let dw0 = ConnectResponse { cntlid, ..Default::default() }.dw0();
        let flow_control = !request.command.disables_flow_control();
        conn.session().complete_connect(slot, true, request.command.sqsize, flow_control, dw0);
        conn.queue_flush(core);
        let (host, subsystem) = (&request.host, &request.subnqn);
        tracing::info!(%host, %subsystem, cntlid, peer = ?conn.peer, "controller connected");
        Ok(())
    }

    fn connect_io(
        &self,
        core: &Core,
        target: &Rc<Target>,
        subsystem: &Rc<Subsystem>,
        conn: &Rc<Conn>,
        slot: u16,
        request: &Request,
    ) -> Result<(), Completion> {
        if self.ended.get() || !conn.is_open() {
            return Ok(());
        }
        let qid = request.command.qid;
        let controller = subsystem.controller(request.data.cntlid).ok_or(invalid(ConnectError::CNTLID))?;
        check_sqsize(request, controller.options.max_queue_depth)?;
        if controller.host() != &*request.host {
            return Err(invalid(ConnectError::HOSTNQN));
        }
        let other_listener = subsystem.config.ana_reporting && controller.listen() != self.listen;
        if !controller.takes_queues() || other_listener {
            return Err(invalid(ConnectError::QID));
        }
        if qid > controller.options.io_queues() || controller.has_qid(qid) {
            return Err(Status::INVALID_QUEUE_ID.into());
        }
        let peer = conn.peer;
        let Some((stream, session)) = conn.detach(core) else { return Ok(()) };
        self.leave(core);
        let queue =
            QueueRef { key: target.next_queue_key(), core: target.place_queue(subsystem), listen: self.listen.0, peer };
        let adoption = Adoption {
            key: queue.key,
            subsystem: subsystem.id,
            namespaces: subsystem.namespace_uses(),
            ana: subsystem.config.ana_reporting.then(|| Arc::clone(controller.ana())),
            stream,
            session,
            connect: slot,
            cntlid: controller.cntlid(),
            sqsize: request.command.sqsize,
            flow_control: !request.command.disables_flow_control(),
        };
        controller.queue_sent(qid, queue);
        queues::sent(core, queue.key, &controller, qid);
        core.post(queue.core, move |core| poll_group::adopt(core, adoption));
        Ok(())
    }
}

impl Owner for Greeter {
    fn execute(self: Rc<Self>, core: &Core, conn: &Rc<Conn>, slot: u16) {
        let parsed = {
            let session = conn.session();
            let data = session.data(slot).map(|d| d.to_vec()).unwrap_or_default();
            Request::parse(session.sqe(slot), &data)
        };
        match parsed {
            Ok(request) if !self.busy.replace(true) => {
                let (task_core, conn) = (core.clone(), Rc::clone(conn));
                core.spawn(async move { self.connect(task_core, conn, slot, request).await });
            }
            Ok(_) => conn.complete(core, slot, Status::COMMAND_SEQUENCE_ERROR),
            Err(refusal) => {
                if let Some(left_out) = self.may_log(core) {
                    let (peer, status, dw0) = (conn.peer, refusal.status, refusal.dw0);
                    tracing::warn!(?peer, %status, dw0, left_out, "command refused before a Connect");
                }
                conn.complete(core, slot, refusal);
            }
        }
    }

    fn lost(self: Rc<Self>, core: &Core, conn: &Rc<Conn>) {
        self.drop_conn(core, conn);
    }
}

/// A Connect.
#[derive(Debug)]
struct Request {
    command: Connect,
    data: ConnectData,
    subnqn: Nqn,
    host: Rc<str>,
}

fn invalid(error: ConnectError) -> Completion {
    Completion { status: Status::CONNECT_INVALID_PARAMETERS, dw0: error.dw0(), dw1: 0 }
}

impl Request {
    fn parse(sqe: &Sqe, data: &[u8]) -> Result<Self, Completion> {
        if sqe.opcode != opcode::FABRICS {
            return Err(Status::COMMAND_SEQUENCE_ERROR.into());
        }
        let Ok(FabricsCommand::Connect(command)) = FabricsCommand::parse(sqe) else {
            return Err(Status::COMMAND_SEQUENCE_ERROR.into());
        };
        let data = ConnectData::parse(data).map_err(|_| Status::INVALID_FIELD)?;
        if command.recfmt != 0 {
            return Err(Status::CONNECT_INCOMPATIBLE_FORMAT.into());
        }
        let subnqn = Nqn::from_field(data.subnqn.as_bytes()).map_err(|_| invalid(ConnectError::SUBNQN))?;
        let host = host_name(data.hostnqn.as_bytes()).ok_or(invalid(ConnectError::HOSTNQN))?;
        Ok(Self { command, data, subnqn, host })
    }
}

/// The name a host gives itself: any text, even none, as SPDK takes it. Only an allow-list asks for more.
fn host_name(field: &[u8]) -> Option<Rc<str>> {
    let end = field.iter().position(|b| *b == 0).filter(|end| *end <= nvme_wire::nqn::MAX_LEN)?;
    std::str::from_utf8(&field[..end]).ok().map(Into::into)
}

/// The subsystem that the host asks for, if it may have it.
fn admit(target: &Target, listen: Address, request: &Request) -> Result<Rc<Subsystem>, Completion> {
    let subsystem = target.subsystem(request.subnqn.as_str()).filter(|s| !s.is_deleting());
    let subsystem = subsystem.ok_or(invalid(ConnectError::SUBNQN))?;
    // The discovery subsystem answers on every listener of the target.
    let listens = subsystem.is_discovery() || subsystem.listener(listen).is_some();
    if !subsystem.allows(&request.host) || !listens {
        return Err(Status::CONNECT_INVALID_HOST.into());
    }
    if subsystem.has_moved_away() {
        return Err(Status::CONNECT_CONTROLLER_BUSY.into());
    }
    Ok(subsystem)
}

fn check_sqsize(request: &Request, depth: u16) -> Result<(), Completion> {
    let sqsize = request.command.sqsize;
    if sqsize == 0 || sqsize >= depth { Err(invalid(ConnectError::SQSIZE)) } else { Ok(()) }
}

/// Waits until everything has completed that older connections of the same host to the subsystem had brought in.
async fn settle_older(core: &Core, subsystem: &Subsystem, request: &Request) -> Result<(), Completion> {
    if request.host.starts_with(ENGINE_HOST_PREFIX) {
        // An engine has one session per replica (rule 13): what its older ones still have on the way, in the network too,
        // must not arrive after a write of the new one.
        let same = |c: &Controller| c.host() == &*request.host;
        let ended = subsystem.end_controllers(core, SETTLE_NS, same).await;
        return ended.map_err(|_| Status::CONNECT_CONTROLLER_BUSY.into());
    }
    let same_host = |c: &Rc<Controller>| c.host() == &*request.host && c.hostid() == request.data.hostid;
    let older: Vec<Rc<Controller>> = subsystem.controllers().into_iter().filter(same_host).collect();
    let settle = |queue: QueueRef| core.call_async(queue.core, move |core| poll_group::settle(core, queue.key));
    let waits: Vec<_> = older.iter().flat_map(|c| c.queues()).map(|(_, queue)| settle(queue)).collect();
    if waits.is_empty() {
        return Ok(());
    }
    match core.timeout(SETTLE_NS, join_all(waits)).await {
        Some(_) => Ok(()),
        None => Err(Status::CONNECT_CONTROLLER_BUSY.into()),
    }
}
