//! An association with a controller: admin queue, bring-up, keep-alive, events, I/O queues.
//!
//! *Flow.* [`Controller::connect`]: socket → initialisation → Connect → properties (disable, enable, wait for ready) →
//! Identify → features (queues, events, keep-alive). Then [`Controller::watch`] starts keep-alives and event requests,
//! [`Controller::namespaces`] reads the namespaces, and [`Controller::queue`] describes an I/O queue, which
//! [`open_queue`] connects on any core.
//!
//! *Invariants.* Every step has a deadline. Keep-alives go out at half the timeout agreed on, since the controller is
//! free to count them late.
//!
//! *When things fail.* Bring-up says which step failed and leaves no socket behind. After it, the loss of the admin
//! queue is told once to [`ControllerEvents::lost`].

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;

use addax_hugepages::Buf;
use nvme_wire::admin::{AdminCommand, cns, csi};
use nvme_wire::ana::AnaState;
use nvme_wire::fabrics::{CNTLID_DYNAMIC, Connect, ConnectData, ConnectResponse, FabricsCommand, PropertySize, cattr};
use nvme_wire::features::AsyncEvent;
use nvme_wire::identify::{ControllerData, IDENTIFY_SIZE, NvmControllerData};
use nvme_wire::namespace::{NamespaceData, NamespaceIds, parse_namespace_list};
use nvme_wire::property::{Capabilities, Configuration, offset};
use nvme_wire::{Cqe, NulPadded, Sgl, Status};

use super::admin::{Admin, parse};
use super::connection::{Conn, Owner};
use super::data::Data;
use super::identify::NamespaceInfo;
use super::qpair::{ADMIN_IN_CAPSULE_BYTES, Command, Params};
use super::slots::MAX_SLOTS;
use super::{HostError, Loss};
use crate::reactor::Core;
use crate::reactor::driver::{NANOS_PER_MS, Nanos};
use crate::reactor::net::{Net, Stream};

/// Entries of the admin queue, as SPDK's and Linux' hosts ask for.
const ADMIN_ENTRIES: u16 = 32;
/// Event requests kept outstanding, if the controller takes as many.
const EVENT_REQUESTS: u8 = 4;

/// Whom to connect to, as whom, and how.
#[derive(Debug, Clone)]
pub struct ControllerParams {
    pub address: SocketAddr,
    /// This end; none to let the system choose.
    pub from: Option<SocketAddr>,
    pub subnqn: String,
    pub hostnqn: String,
    pub hostid: [u8; 16],
    pub header_digest: bool,
    pub data_digest: bool,
    /// Keep-alive timeout in milliseconds; 0 for none.
    pub keep_alive_ms: u32,
    /// Ask the controller to do without submission queue flow control, which allows it to leave out responses to reads.
    pub disable_sq_flow_control: bool,
    /// I/O queues to ask for, 1 to 65535.
    pub io_queues: u32,
    /// Entries of an I/O queue; one less commands are in flight.
    pub queue_entries: u16,
    /// Deadline of the socket and of the initialisation, each.
    pub socket_ns: Nanos,
    /// Deadline of a Fabrics Connect.
    pub connect_ns: Nanos,
    /// Deadline of other admin commands.
    pub admin_ns: Nanos,
    /// Deadline of I/O commands.
    pub io_ns: Nanos,
}

/// An I/O queue to be connected, on any core.
#[derive(Debug, Clone)]
pub struct QueueSpec {
    pub params: ControllerParams,
    pub cntlid: u16,
    pub qid: u16,
    /// Entries; at most one less commands are in flight.
    pub entries: u16,
    /// In-capsule data in bytes.
    pub in_capsule: u32,
}

/// Who hears of a controller after its bring-up.
pub trait ControllerEvents {
    /// An event came in; its log page was read, so that the next of its kind will come, too.
    fn event(self: Rc<Self>, core: &Core, event: AsyncEvent);
    /// The admin queue is lost.
    fn lost(self: Rc<Self>, core: &Core, loss: &Loss);
}

/// An association; see the module.
pub struct Controller {
    conn: Rc<Conn>,
    params: ControllerParams,
    cntlid: u16,
    version: u32,
    capabilities: Capabilities,
    data: ControllerData,
    nvm: NvmControllerData,
    io_queues: u32,
    /// Keep-alive timeout that was agreed on, in milliseconds.
    keep_alive_ms: u32,
    /// It was asked for a sign of life and has not answered yet.
    asked: Cell<bool>,
    events: RefCell<Option<Rc<dyn ControllerEvents>>>,
}

impl std::fmt::Debug for Controller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Controller").field("cntlid", &self.cntlid).field("subnqn", &self.params.subnqn).finish()
    }
}

/// The admin queue during bring-up; closes it unless bring-up succeeds.
struct Bringup<'a> {
    core: &'a Core,
    conn: Option<Rc<Conn>>,
}

impl Drop for Bringup<'_> {
    fn drop(&mut self) {
        if let Some(conn) = self.conn.take() {
            conn.close(self.core);
        }
    }
}

impl Controller {
    /// Connects to a controller and enables it.
    ///
    /// # Errors
    /// The first step that failed; see [`HostError`].
    pub async fn connect(core: &Core, net: &dyn Net, params: ControllerParams) -> Result<Rc<Self>, HostError> {
        let stream = connect_socket(net, &params)?;
        let queue = Params {
            depth: ADMIN_ENTRIES - 1,
            in_capsule: ADMIN_IN_CAPSULE_BYTES,
            header_digest: params.header_digest,
            data_digest: params.data_digest,
        };
        let conn = Conn::open(core, stream, queue, params.socket_ns).await?;
        let mut guard = Bringup { core, conn: Some(Rc::clone(&conn)) };
        let connect = Connect {
            sqsize: ADMIN_ENTRIES - 1,
            cattr: flow_control(&params),
            kato_ms: params.keep_alive_ms,
            ..Connect::default()
        };
        let response = fabrics_connect(core, &conn, &params, connect, CNTLID_DYNAMIC).await?;
        let admin = Admin { core, conn: &conn, limit_ns: params.admin_ns };
        let capabilities = Capabilities::from_raw(admin.property(offset::CAP, PropertySize::Eight).await?);
        admin.enable(&capabilities).await?;
        let version = admin.property(offset::VS, PropertySize::Four).await? as u32;
        let data = parse(&admin.identify(0, cns::CONTROLLER).await?, ControllerData::parse)?;
        let nvm = admin.nvm_limits(version).await?;
        let io_queues = admin.io_queues(params.io_queues).await?;
        admin.request_events(&data).await?;
        let keep_alive_ms = admin.keep_alive_timeout(params.keep_alive_ms).await?;
        guard.conn = None;
        Ok(Rc::new(Self {
            conn,
            cntlid: response.cntlid,
            version,
            capabilities,
            data,
            nvm,
            io_queues,
            keep_alive_ms,
            asked: Cell::new(false),
            params,
            events: RefCell::new(None),
        }))
    }

    /// Controller identifier.
    #[must_use]
    pub fn cntlid(&self) -> u16 {
        self.cntlid
    }

    /// Version, as property VS.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Identify Controller.
    #[must_use]
    pub fn data(&self) -> &ControllerData {
        &self.data
    }

    /// I/O queues that may be connected: identifiers from 1 to this.
    #[must_use]
    pub fn io_queues(&self) -> u32 {
        self.io_queues
    }

    /// What it was connected with.
    #[must_use]
    pub fn params(&self) -> &ControllerParams {
        &self.params
    }

    fn admin<'a>(&'a self, core: &'a Core) -> Admin<'a> {
        Admin { core, conn: &self.conn, limit_ns: self.params.admin_ns }
    }

    /// Starts keep-alives and event requests.
    pub fn watch(self: &Rc<Self>, core: &Core, events: Rc<dyn ControllerEvents>) {
        *self.events.borrow_mut() = Some(events);
        self.conn.set_owner(Rc::new(AdminOwner(Rc::downgrade(self))));
        if self.keep_alive_ms > 0 {
            core.spawn(keep_alive(core.clone(), Rc::downgrade(self), self.keep_alive_ms));
        }
        for _ in 0..EVENT_REQUESTS.min(self.data.aerl.saturating_add(1)) {
            core.spawn(event_requests(core.clone(), Rc::downgrade(self)));
        }
    }

    /// Reads all namespaces that can be used as block devices.
    ///
    /// # Errors
    /// When a command fails; a namespace that went away in between is left out.
    pub async fn namespaces(&self, core: &Core) -> Result<Vec<NamespaceInfo>, HostError> {
        let admin = self.admin(core);
        let ana = if self.data.has_ana() { Some(admin.ana(&self.data).await?) } else { None };
        let mut found = Vec::new();
        let mut after = 0;
        loop {
            let list: Vec<u32> = parse_namespace_list(&admin.identify(after, cns::ACTIVE_NAMESPACES).await?).collect();
            for nsid in &list {
                if let Some(mut info) = self.namespace(&admin, *nsid).await? {
                    info.ana_state = ana.as_ref().and_then(|log| log.state_of(*nsid)).map(ana_word);
                    found.push(info);
                }
            }
            match list.last() {
                Some(last) if list.len() == IDENTIFY_SIZE / 4 => after = *last,
                _ => return Ok(found),
            }
        }
    }

    async fn namespace(&self, admin: &Admin<'_>, nsid: u32) -> Result<Option<NamespaceInfo>, HostError> {
        let gone = |error: &HostError| matches!(error, HostError::Command { .. });
        let data = match admin.identify(nsid, cns::NAMESPACE).await {
            Ok(bytes) => parse(&bytes, NamespaceData::parse)?,
            Err(error) if gone(&error) => return Ok(None),
            Err(error) => return Err(error),
        };
        let ids = match admin.identify(nsid, cns::NAMESPACE_DESCRIPTORS).await {
            Ok(bytes) => NamespaceIds::parse(&bytes),
            Err(error) if gone(&error) => NamespaceIds::default(),
            Err(error) => return Err(error),
        };
        if ids.csi.is_some_and(|set| set != csi::NVM) {
            tracing::warn!(nsid, csi = ids.csi, "namespace of another command set is left out");
            return Ok(None);
        }
        let info = NamespaceInfo::new(nsid, &data, &ids, &self.data, &self.nvm);
        if info.is_none() && data.nsze > 0 {
            tracing::warn!(nsid, "namespace with metadata or an odd block size is left out");
        }
        Ok(info)
    }

    /// Describes the I/O queue `qid`, 1 to [`Self::io_queues`].
    #[must_use]
    pub fn queue(&self, qid: u16) -> QueueSpec {
        let most = self.capabilities.max_queue_entries.min(u32::from(MAX_SLOTS)) as u16;
        // MAXCMD counts commands, not entries, and 0 says nothing.
        let most = if self.data.maxcmd == 0 { most } else { most.min(self.data.maxcmd) };
        QueueSpec {
            params: self.params.clone(),
            cntlid: self.cntlid,
            qid,
            entries: self.params.queue_entries.min(most).max(2),
            // An offset of in-capsule data is not done here: such data then goes by data PDUs.
            in_capsule: if self.data.icdoff == 0 { self.data.in_capsule_data() } else { 0 },
        }
    }

    /// Tells the controller to shut down and closes the admin queue. I/O queues are to be closed before.
    pub async fn shutdown(&self, core: &Core) {
        drop(self.events.borrow_mut().take());
        let shutdown = Configuration { shutdown: 1, ..Configuration::enabled() };
        if let Err(error) = self.admin(core).set_property(offset::CC, shutdown.raw()).await {
            tracing::debug!(%error, subnqn = self.params.subnqn, "shutdown notification");
        }
        self.close(core);
    }

    /// Asks for a sign of life, unless that was done and is open; the admin queue is lost when there is none in time.
    pub fn ask(self: &Rc<Self>, core: &Core, limit_ns: Nanos) {
        if self.asked.replace(true) {
            return;
        }
        let (controller, core) = (Rc::clone(self), core.clone());
        core.clone().spawn(async move {
            let command = Command::plain(AdminCommand::KeepAlive.to_sqe(0, 0, Sgl::NONE));
            if let Err(error) = controller.conn.call(&core, "sign of life", command, Some(limit_ns)).await {
                tracing::warn!(%error, subnqn = controller.params.subnqn, "I/O makes no progress");
            }
            controller.asked.set(false);
        });
    }

    /// Closes the admin queue without a word.
    pub fn close(&self, core: &Core) {
        drop(self.events.borrow_mut().take());
        self.conn.close(core);
    }

    fn lost(&self, core: &Core, loss: &Loss) {
        let events = self.events.borrow_mut().take();
        if let Some(events) = events {
            events.lost(core, loss);
        }
    }
}

/// SPDK's word for an ANA state.
fn ana_word(state: AnaState) -> &'static str {
    match state {
        AnaState::Optimized => "optimized",
        AnaState::NonOptimized => "non_optimized",
        AnaState::Inaccessible => "inaccessible",
        AnaState::PersistentLoss => "persistent_loss",
        _ => "change",
    }
}

struct AdminOwner(std::rc::Weak<Controller>);

impl Owner for AdminOwner {
    fn completed(self: Rc<Self>, _core: &Core, _tag: u64, _cqe: &Cqe) {}
    fn lost(self: Rc<Self>, core: &Core, loss: &Loss) {
        if let Some(controller) = self.0.upgrade() {
            controller.lost(core, loss);
        }
    }
}

async fn keep_alive(core: Core, controller: std::rc::Weak<Controller>, timeout_ms: u32) {
    let timeout_ns = Nanos::from(timeout_ms) * NANOS_PER_MS;
    loop {
        core.sleep(timeout_ns / 2).await;
        let Some(conn) = controller.upgrade().filter(|c| c.conn.is_open()).map(|c| Rc::clone(&c.conn)) else { return };
        let command = Command::plain(AdminCommand::KeepAlive.to_sqe(0, 0, Sgl::NONE));
        // Answered after the other half at the latest, or the controller is as good as gone.
        match conn.call(&core, "keep alive", command, Some(timeout_ns / 2)).await {
            Ok(cqe) if cqe.status().is_success() => {}
            Ok(cqe) => tracing::warn!(status = %cqe.status(), "keep alive refused"),
            Err(_) => return,
        }
    }
}

async fn event_requests(core: Core, controller: std::rc::Weak<Controller>) {
    loop {
        let Some(conn) = controller.upgrade().map(|c| Rc::clone(&c.conn)) else { return };
        let command = Command::plain(AdminCommand::AsyncEventRequest.to_sqe(0, 0, Sgl::NONE));
        let Ok(cqe) = conn.call(&core, "event request", command, None).await else { return };
        if !cqe.status().is_success() {
            tracing::debug!(status = %cqe.status(), "event request refused");
            return;
        }
        let event = AsyncEvent::from_dw0(cqe.dw0.get());
        let Some(controller) = controller.upgrade() else { return };
        let read = controller.admin(&core).log_page(event.log_page(), IDENTIFY_SIZE).await;
        if let Err(error) = read {
            tracing::warn!(%error, ?event, "log page of an event");
        }
        let events = controller.events.borrow().clone();
        if let Some(events) = events {
            events.event(&core, event);
        }
    }
}

/// Begins to connect a socket to the controller.
///
/// # Errors
/// [`HostError::Socket`].
pub fn connect_socket(net: &dyn Net, params: &ControllerParams) -> Result<Box<dyn Stream>, HostError> {
    net.connect(params.address, params.from)
        .map_err(|error| HostError::Socket { address: params.address.to_string(), source_text: error.to_string() })
}

/// Connects an I/O queue over a fresh socket (see [`connect_socket`]), on this core.
///
/// # Errors
/// As [`Controller::connect`].
pub async fn open_queue(core: &Core, stream: Box<dyn Stream>, spec: &QueueSpec) -> Result<Rc<Conn>, HostError> {
    let queue = Params {
        depth: spec.entries - 1,
        in_capsule: spec.in_capsule,
        header_digest: spec.params.header_digest,
        data_digest: spec.params.data_digest,
    };
    let conn = Conn::open(core, stream, queue, spec.params.socket_ns).await?;
    let mut guard = Bringup { core, conn: Some(Rc::clone(&conn)) };
    let connect =
        Connect { qid: spec.qid, sqsize: spec.entries - 1, cattr: flow_control(&spec.params), ..Connect::default() };
    fabrics_connect(core, &conn, &spec.params, connect, spec.cntlid).await?;
    guard.conn = None;
    Ok(conn)
}

fn flow_control(params: &ControllerParams) -> u8 {
    if params.disable_sq_flow_control { cattr::DISABLE_FLOW_CONTROL } else { 0 }
}

fn name_field(field: &'static str, name: &str) -> Result<NulPadded<256>, HostError> {
    let allowed = "at most 223 bytes are allowed";
    let invalid = || HostError::Invalid { field, value: name.to_owned(), allowed };
    if name.len() > 223 {
        return Err(invalid());
    }
    NulPadded::new(name).map_err(|_| invalid())
}

async fn fabrics_connect(
    core: &Core,
    conn: &Rc<Conn>,
    params: &ControllerParams,
    connect: Connect,
    cntlid: u16,
) -> Result<ConnectResponse, HostError> {
    let data = ConnectData {
        hostid: params.hostid,
        cntlid,
        subnqn: name_field("subnqn", &params.subnqn)?,
        hostnqn: name_field("hostnqn", &params.hostnqn)?,
    };
    let sqe = FabricsCommand::Connect(connect).to_sqe(0, Sgl::NONE);
    let data = Data::Send([Buf::copy_of(&data.encode()).into_slice()].into_iter().collect());
    let cqe = conn.call(core, "Connect", Command { sqe, data }, Some(params.connect_ns)).await?;
    if !cqe.status().is_success() {
        return Err(HostError::Refused { status: cqe.status(), dw0: cqe.dw0.get() });
    }
    let response = ConnectResponse::from_dw0(cqe.dw0.get());
    if response.auth_required || response.secure_channel_required {
        return Err(HostError::Refused { status: Status::AUTHENTICATION_REQUIRED, dw0: 0 });
    }
    Ok(response)
}
