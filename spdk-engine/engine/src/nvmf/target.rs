//! The target: transport, subsystems, listening sockets, referrals. Control core only.
//!
//! *Invariants.* One socket per address, shared by all subsystems that listen there, closed with the last of them.
//! Connections that are not part of a controller yet are bounded ([`UNASSOCIATED_MAX`]). The discovery subsystem always
//! exists.
//!
//! *When things fail.* When the process is out of descriptors, accepting goes on after [`ACCEPT_RETRY_NS`].

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::io::ErrorKind;
use std::rc::{Rc, Weak};

use nvme_wire::Nqn;
use nvme_wire::ana::AnaState;
use nvme_wire::features::AsyncEvent;
use serde_json::Value;

use super::address::Address;
use super::connect::Greeter;
use super::log_limit::LogLimit;
use super::options::TransportOptions;
use super::queues::QueueKey;
use super::subsystem::{DRAIN_NS, Host, Subsystem, SubsystemConfig, SubsystemError};
use crate::app::App;
use crate::bdev::registry::Registry;
use crate::reactor::driver::{NANOS_PER_MS, Nanos};
use crate::reactor::net::{Listener, Net};
use crate::reactor::{Core, CoreId, OnReady, WatchId};

/// Connections that may be without a controller at once.
pub const UNASSOCIATED_MAX: usize = 1024;
/// Connections accepted per readiness event.
const ACCEPTS_MAX: usize = 16;
/// When to accept again after an error.
const ACCEPT_RETRY_NS: Nanos = 100 * NANOS_PER_MS;
/// Subsystems by default, the discovery subsystem not counted.
const SUBSYSTEMS_MAX: u32 = 1024;

/// Another discovery service that hosts are referred to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Referral {
    pub address: Address,
    pub subnqn: Nqn,
    pub secure_channel: bool,
}

/// Counters of the control core's queues.
#[derive(Debug, Clone, Copy, Default)]
pub struct AdminStats {
    pub admin_qpairs: u64,
    pub unassociated: usize,
}

/// The target; see the module.
pub struct Target {
    core: Core,
    registry: Rc<Registry>,
    net: Rc<dyn Net>,
    transport: RefCell<Option<TransportOptions>>,
    subsystems: RefCell<BTreeMap<Nqn, Rc<Subsystem>>>,
    discovery: Rc<Subsystem>,
    sockets: RefCell<HashMap<Address, Rc<ListenSocket>>>,
    referrals: RefCell<Vec<Referral>>,
    generation: Cell<u64>,
    next_id: Cell<u64>,
    next_core: Cell<usize>,
    max_subsystems: Cell<Option<u32>>,
    retry_delays: Cell<[u16; 3]>,
    config: RefCell<Option<Value>>,
    stats: Cell<AdminStats>,
    /// Bounds what refused hosts write to the log.
    pub refusals: LogLimit,
}

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.subsystems.borrow().keys()).finish()
    }
}

/// The application's target.
#[must_use]
pub fn target(app: &App) -> Rc<Target> {
    app.module(|| Target::make(app)).0.clone()
}

/// What [`App::module`] keeps.
struct Handle(Rc<Target>);

impl Target {
    fn make(app: &App) -> Handle {
        let discovery = SubsystemConfig {
            nqn: Nqn::discovery(),
            serial_number: String::new(),
            model_number: String::new(),
            admin_label: None,
            max_namespaces: 0,
            ana_reporting: false,
            min_cntlid: 1,
            max_cntlid: nvme_wire::fabrics::CNTLID_MAX,
            dmrsl: 0,
            wzsl: 0,
        };
        Handle(Rc::new(Self {
            core: app.core().clone(),
            registry: Rc::clone(app.registry()),
            net: Rc::clone(app.net()),
            transport: RefCell::new(None),
            subsystems: RefCell::default(),
            discovery: Subsystem::new(0, discovery, true),
            sockets: RefCell::default(),
            referrals: RefCell::default(),
            generation: Cell::new(0),
            next_id: Cell::new(1),
            next_core: Cell::new(0),
            max_subsystems: Cell::new(None),
            retry_delays: Cell::new([0; 3]),
            config: RefCell::new(None),
            stats: Cell::default(),
            refusals: LogLimit::default(),
        }))
    }

    pub fn core(&self) -> &Core {
        &self.core
    }

    pub fn registry(&self) -> &Rc<Registry> {
        &self.registry
    }

    // Options.

    /// The transport's options, once it was created.
    pub fn transport(&self) -> Option<TransportOptions> {
        self.transport.borrow().clone()
    }

    pub fn set_transport(&self, options: TransportOptions) {
        *self.transport.borrow_mut() = Some(options);
    }

    /// Sets how many subsystems there may be; false when that was set before.
    pub fn set_max_subsystems(&self, max: u32) -> bool {
        self.max_subsystems.replace(Some(max)).is_none_or(|old| {
            self.max_subsystems.set(Some(old));
            false
        })
    }

    /// How many subsystems there may be, if that was set.
    pub fn max_subsystems(&self) -> Option<u32> {
        self.max_subsystems.get()
    }

    /// Command retry delays in units of 100 ms.
    pub fn retry_delays(&self) -> [u16; 3] {
        self.retry_delays.get()
    }

    pub fn set_retry_delays(&self, delays: [u16; 3]) {
        self.retry_delays.set(delays);
    }

    /// Parameters of `nvmf_set_config`, kept for `save_config`.
    pub fn config(&self) -> Option<Value> {
        self.config.borrow().clone()
    }

    pub fn set_config(&self, config: Value) {
        *self.config.borrow_mut() = Some(config);
    }

    /// A number that was not given out before: for queues and subsystems.
    fn next_id(&self) -> u64 {
        let id = self.next_id.get();
        self.next_id.set(id + 1);
        id
    }

    /// A name for a new queue.
    pub fn next_queue_key(&self) -> QueueKey {
        QueueKey(self.next_id())
    }

    // Subsystems.

    /// Makes a subsystem; none when the name is taken or there are too many.
    pub fn create_subsystem(&self, config: SubsystemConfig, allow_any_host: bool) -> Option<Rc<Subsystem>> {
        let max = self.max_subsystems.get().unwrap_or(SUBSYSTEMS_MAX) as usize;
        let mut subsystems = self.subsystems.borrow_mut();
        if config.nqn.is_discovery() || subsystems.contains_key(&config.nqn) || subsystems.len() >= max {
            return None;
        }
        let nqn = config.nqn.clone();
        let subsystem = Subsystem::new(self.next_id(), config, allow_any_host);
        subsystems.insert(nqn, Rc::clone(&subsystem));
        Some(subsystem)
    }

    /// All subsystems, the discovery subsystem first.
    pub fn subsystems(&self) -> Vec<Rc<Subsystem>> {
        let subsystems = self.subsystems.borrow();
        let mut all = vec![Rc::clone(&self.discovery)];
        let mut rest: Vec<_> = subsystems.values().cloned().collect();
        rest.sort_by_key(|s| s.id);
        all.extend(rest);
        all
    }

    /// The subsystem of that name.
    pub fn subsystem(&self, nqn: &str) -> Option<Rc<Subsystem>> {
        if nqn == nvme_wire::DISCOVERY_NQN {
            return Some(Rc::clone(&self.discovery));
        }
        self.subsystems.borrow().get(nqn).cloned()
    }

    /// Ends a subsystem: its connections are closed and its I/O drained, then its devices are closed.
    pub async fn delete_subsystem(&self, subsystem: &Rc<Subsystem>) -> Result<(), SubsystemError> {
        if !subsystem.begin_delete() {
            return Err(SubsystemError::Deleting(subsystem.nqn().clone()));
        }
        let listeners = subsystem.listeners();
        for listener in &listeners {
            self.release_socket(listener.address);
            let _ = subsystem.remove_listener(listener.address);
        }
        if !listeners.is_empty() {
            self.discovery_changed(|_| true);
        }
        let mut result = subsystem.end_controllers(&self.core, DRAIN_NS, |_| true).await;
        let nsids: Vec<u32> = subsystem.with_namespaces(|all| all.keys().copied().collect());
        for nsid in nsids {
            let removed = subsystem.remove_namespace(&self.core, nsid).await;
            result = result.and(removed);
        }
        self.subsystems.borrow_mut().remove(subsystem.nqn());
        result
    }

    /// Where the next I/O queue of a subsystem is to live.
    pub fn place_queue(&self, subsystem: &Subsystem) -> CoreId {
        let cores = self.core.data_cores();
        let home = subsystem.with_namespaces(|all| all.values().find_map(|n| n.desc.entry().bdev.home()));
        if let Some(home) = home.filter(|h| cores.contains(h)) {
            return home;
        }
        let index = self.next_core.get();
        self.next_core.set(index.wrapping_add(1));
        cores[index % cores.len()]
    }

    // Hosts.

    /// Puts a host on a subsystem's list.
    pub fn add_host(&self, subsystem: &Subsystem, nqn: Nqn) -> Result<(), SubsystemError> {
        subsystem.add_host(nqn.clone())?;
        self.hosts_changed(subsystem, &[nqn]);
        Ok(())
    }

    /// Takes a host off; ready when its sessions are ended and drained.
    pub async fn remove_host(&self, subsystem: &Subsystem, nqn: &Nqn, limit: Nanos) -> Result<(), SubsystemError> {
        let result = subsystem.remove_host(&self.core, nqn, limit).await;
        if !matches!(result, Err(SubsystemError::NoHost(_))) {
            self.hosts_changed(subsystem, std::slice::from_ref(nqn));
        }
        result
    }

    /// Lets any host in or only those on the list. Connected hosts stay.
    pub fn set_allow_any_host(&self, subsystem: &Subsystem, allow: bool) {
        if subsystem.allow_any_host.replace(allow) != allow && !subsystem.listeners().is_empty() {
            self.discovery_changed(|_| true);
        }
    }

    fn hosts_changed(&self, subsystem: &Subsystem, hosts: &[Nqn]) {
        if !subsystem.listeners().is_empty() {
            self.discovery_changed(|host| hosts.iter().any(|h| h.as_str() == host));
        }
    }

    // Listeners.

    /// Listens on an address for a subsystem.
    pub fn add_listener(
        self: &Rc<Self>,
        subsystem: &Subsystem,
        address: Address,
        state: AnaState,
    ) -> Result<(), SubsystemError> {
        subsystem.add_listener(address, state)?;
        if let Err(error) = self.take_socket(address) {
            let _ = subsystem.remove_listener(address);
            return Err(SubsystemError::Listen { address, error: error.to_string() });
        }
        self.discovery_changed(|host| subsystem.allows(host));
        Ok(())
    }

    /// Stops to listen on an address for a subsystem; its connections of that listener are closed and drained.
    pub async fn remove_listener(&self, subsystem: &Subsystem, address: Address) -> Result<(), SubsystemError> {
        subsystem.remove_listener(address)?;
        self.release_socket(address);
        self.discovery_changed(|host| subsystem.allows(host));
        let ended = subsystem.end_controllers(&self.core, DRAIN_NS, |c| c.listen() == address).await;
        let closed = subsystem.close_queues(&self.core, address).await;
        ended.and(closed)
    }

    fn take_socket(self: &Rc<Self>, address: Address) -> std::io::Result<()> {
        let mut sockets = self.sockets.borrow_mut();
        if let Some(socket) = sockets.get(&address) {
            socket.users.set(socket.users.get() + 1);
            return Ok(());
        }
        let listener = self.net.listen(address.0)?;
        let raw = listener.raw();
        let socket = Rc::new(ListenSocket {
            address,
            listener: RefCell::new(Some(listener)),
            watch: Cell::new(None),
            users: Cell::new(1),
            target: Rc::downgrade(self),
        });
        socket.watch.set(Some(self.core.watch(raw, Rc::clone(&socket) as Rc<dyn OnReady>)));
        sockets.insert(address, socket);
        Ok(())
    }

    fn release_socket(&self, address: Address) {
        let mut sockets = self.sockets.borrow_mut();
        let Some(socket) = sockets.get(&address) else { return };
        socket.users.set(socket.users.get() - 1);
        if socket.users.get() == 0
            && let Some(socket) = sockets.remove(&address)
        {
            socket.close(&self.core);
        }
    }

    // Discovery.

    /// Generation of the discovery log page.
    pub fn generation(&self) -> u64 {
        self.generation.get()
    }

    /// The discovery log page of the hosts that `concerns` picks has changed.
    pub fn discovery_changed(&self, concerns: impl Fn(&str) -> bool) {
        self.generation.set(self.generation.get() + 1);
        for controller in self.discovery.controllers() {
            if concerns(controller.host()) {
                controller.raise(&self.core, AsyncEvent::DiscoveryChange);
            }
        }
    }

    pub fn referrals(&self) -> Vec<Referral> {
        self.referrals.borrow().clone()
    }

    /// Adds a referral; harmless when it is there already.
    pub fn add_referral(&self, referral: Referral) {
        if !self.referrals.borrow().contains(&referral) {
            self.referrals.borrow_mut().push(referral);
            self.discovery_changed(|_| true);
        }
    }

    /// Removes a referral; false when there is none.
    pub fn remove_referral(&self, address: Address, subnqn: &Nqn) -> bool {
        let mut referrals = self.referrals.borrow_mut();
        let before = referrals.len();
        referrals.retain(|r| r.address != address || r.subnqn != *subnqn);
        let removed = referrals.len() != before;
        drop(referrals);
        if removed {
            self.discovery_changed(|_| true);
        }
        removed
    }

    // Counters.

    pub fn stats(&self) -> AdminStats {
        self.stats.get()
    }

    /// An admin queue was connected.
    pub fn count_admin_queue(&self) {
        let mut stats = self.stats.get();
        stats.admin_qpairs += 1;
        self.stats.set(stats);
    }

    /// A connection without a controller came (1) or went (-1).
    pub fn count_unassociated(&self, change: isize) {
        let mut stats = self.stats.get();
        stats.unassociated = stats.unassociated.saturating_add_signed(change);
        self.stats.set(stats);
    }

    /// Hosts of a subsystem, oldest first, as configuration replays them.
    pub fn hosts_in_order(subsystem: &Subsystem) -> Vec<Host> {
        let mut hosts = subsystem.hosts();
        hosts.reverse();
        hosts
    }
}

/// A listening socket.
struct ListenSocket {
    address: Address,
    listener: RefCell<Option<Box<dyn Listener>>>,
    watch: Cell<Option<WatchId>>,
    users: Cell<usize>,
    target: Weak<Target>,
}

impl ListenSocket {
    fn close(&self, core: &Core) {
        if let Some(watch) = self.watch.take() {
            core.unwatch(watch);
        }
        drop(self.listener.borrow_mut().take());
    }

    fn accept(self: &Rc<Self>, core: &Core) {
        let Some(target) = self.target.upgrade() else { return };
        for _ in 0..ACCEPTS_MAX {
            let accepted = match self.listener.borrow_mut().as_mut() {
                Some(listener) => listener.accept(),
                None => return,
            };
            match accepted {
                Ok(stream) if target.stats().unassociated >= UNASSOCIATED_MAX => {
                    tracing::warn!(peer = ?stream.peer_addr().ok(), "too many connections without a controller");
                    drop(stream);
                }
                Ok(stream) => Greeter::start(core, &target, self.address, stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::warn!(address = ?self.address, %error, "cannot accept a connection");
                    let socket = Rc::clone(self);
                    core.after(ACCEPT_RETRY_NS, Rc::new(move |core| socket.accept(core)));
                    return;
                }
            }
        }
        let socket = Rc::clone(self);
        core.defer(move |core| socket.accept(core));
    }
}

impl OnReady for ListenSocket {
    fn readable(self: Rc<Self>, core: &Core) {
        self.accept(core);
    }

    fn writable(self: Rc<Self>, _core: &Core) {}
}
