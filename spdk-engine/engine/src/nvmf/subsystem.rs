//! Subsystems: namespaces, hosts, listeners, and the controllers that hosts have made. Control core only.
//!
//! *Invariants.* A host that is not on the list has no controller, unless any host is allowed. A namespace or a host is
//! reported removed only after all I/O under it has completed on every core. What is being removed takes no new users.
//!
//! *Other paths.* A host that sees the namespace of a volume go takes the volume for deleted and fails what waits for it.
//! So when a device goes away that others may serve too ([`crate::bdev::Bdev::has_other_paths`]), nobody sees a subsystem
//! without it: controllers end first, and Connects are refused until there is a namespace again.
//!
//! *When things fail.* Waits for draining have a deadline; past it the caller is told, and the removal goes on by itself.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use futures::future::join_all;
use nvme_wire::Nqn;
use nvme_wire::ana::AnaState;
use uuid::Uuid;

use super::address::Address;
use super::ana::AnaStates;
use super::controller::Controller;
use super::poll_group::{self, NamespaceUse};
use super::wait::Waiters;
use crate::bdev::registry::{Access, BdevEvent, Desc, Registry};
use crate::bdev::{BdevError, BdevInfo};
use crate::reactor::Core;
use crate::reactor::driver::{NANOS_PER_MS, Nanos};

/// Who claims the devices of namespaces.
pub const CLAIM: &str = "NVMe-oF Target";
/// How long a removal waits for I/O to drain before it answers with an error.
pub const DRAIN_NS: Nanos = 30_000 * NANOS_PER_MS;
/// Listeners of one subsystem.
pub const LISTENERS_MAX: usize = 16;

/// What a subsystem is made with.
#[derive(Debug, Clone)]
pub struct SubsystemConfig {
    pub nqn: Nqn,
    pub serial_number: String,
    pub model_number: String,
    pub admin_label: Option<String>,
    pub max_namespaces: u32,
    pub ana_reporting: bool,
    pub min_cntlid: u16,
    pub max_cntlid: u16,
    pub dmrsl: u64,
    pub wzsl: u8,
}

/// A host of the allow-list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    pub nqn: Nqn,
}

/// A way to reach the subsystem.
#[derive(Debug, Clone)]
pub struct SubsystemListener {
    pub address: Address,
    /// Port number in the discovery log page.
    pub port: u16,
    pub ana: Arc<AnaStates>,
}

/// A namespace.
#[derive(Debug)]
pub struct Namespace {
    pub nsid: u32,
    pub desc: Desc,
    pub nguid: [u8; 16],
    pub eui64: [u8; 8],
    pub uuid: Uuid,
    pub ana_group: u32,
}

impl Namespace {
    /// The device's description now.
    #[must_use]
    pub fn info(&self) -> BdevInfo {
        self.desc.entry().bdev.info()
    }

    fn to_use(&self) -> NamespaceUse {
        NamespaceUse { nsid: self.nsid, entry: Arc::clone(self.desc.entry()), ana_group: self.ana_group }
    }
}

/// What `nvmf_subsystem_add_ns` asks for.
#[derive(Debug, Clone, Default)]
pub struct NamespaceParams {
    /// 0 for the first free number.
    pub nsid: u32,
    pub bdev_name: String,
    pub nguid: Option<[u8; 16]>,
    pub eui64: Option<[u8; 8]>,
    pub uuid: Option<Uuid>,
    pub ana_group: Option<u32>,
}

/// Why a change of a subsystem was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubsystemError {
    #[error("subsystem {0} is being deleted")]
    Deleting(Nqn),
    #[error("nsid {nsid}: 1 to {max} are allowed")]
    NsidRange { nsid: u32, max: u32 },
    #[error("nsid {0} is in use")]
    NsidUsed(u32),
    #[error("all {0} namespaces are in use")]
    NamespacesFull(u32),
    #[error("no namespace {0}")]
    NoNamespace(u32),
    #[error("anagrpid {group}: 1 to {max} are allowed")]
    AnaGroup { group: u32, max: u32 },
    #[error("ANA is not reported by this subsystem")]
    NoAna,
    #[error("host {0} is on the list already")]
    HostExists(Nqn),
    #[error("host {0} is not on the list")]
    NoHost(Nqn),
    #[error("a listener on {0:?} exists already")]
    ListenerExists(Address),
    #[error("no listener on {0:?}")]
    NoListener(Address),
    #[error("more than {LISTENERS_MAX} listeners")]
    ListenersFull,
    #[error("the discovery subsystem has no {0}")]
    Discovery(&'static str),
    #[error("I/O was not drained within {0} ms; it goes on by itself")]
    DrainTimeout(u64),
    #[error(transparent)]
    Bdev(#[from] BdevError),
    #[error("cannot listen on {address:?}: {error}")]
    Listen { address: Address, error: String },
}

/// A subsystem; see the module.
pub struct Subsystem {
    /// Names it in messages to data cores; never used twice.
    pub id: u64,
    pub config: SubsystemConfig,
    pub allow_any_host: Cell<bool>,
    hosts: RefCell<Vec<Host>>,
    listeners: RefCell<Vec<SubsystemListener>>,
    pub(super) namespaces: RefCell<BTreeMap<u32, Namespace>>,
    controllers: RefCell<BTreeMap<u16, Rc<Controller>>>,
    next_cntlid: Cell<u16>,
    deleting: Cell<bool>,
    /// Its device went away, and may be served elsewhere.
    moved_away: Cell<bool>,
    /// A controller or one of its queues has ended.
    pub changed: Waiters,
}

impl std::fmt::Debug for Subsystem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Subsystem").field("nqn", &self.config.nqn).finish()
    }
}

impl Subsystem {
    /// A subsystem without namespaces, hosts and listeners.
    #[must_use]
    pub fn new(id: u64, config: SubsystemConfig, allow_any_host: bool) -> Rc<Self> {
        let next_cntlid = Cell::new(config.min_cntlid);
        Rc::new(Self {
            id,
            config,
            allow_any_host: Cell::new(allow_any_host),
            hosts: RefCell::default(),
            listeners: RefCell::default(),
            namespaces: RefCell::default(),
            controllers: RefCell::default(),
            next_cntlid,
            deleting: Cell::new(false),
            moved_away: Cell::new(false),
            changed: Waiters::default(),
        })
    }

    /// Its name.
    #[must_use]
    pub fn nqn(&self) -> &Nqn {
        &self.config.nqn
    }

    /// Whether this is the discovery subsystem.
    #[must_use]
    pub fn is_discovery(&self) -> bool {
        self.config.nqn.is_discovery()
    }

    /// Whether it is being deleted.
    #[must_use]
    pub fn is_deleting(&self) -> bool {
        self.deleting.get()
    }

    /// Whether its device went away and hosts are to look for another path.
    #[must_use]
    pub fn has_moved_away(&self) -> bool {
        self.moved_away.get()
    }

    /// Refuses new users from now on; false when somebody else deletes it already.
    pub fn begin_delete(&self) -> bool {
        !self.deleting.replace(true)
    }

    // Hosts.

    /// Whether a host may connect.
    #[must_use]
    pub fn allows(&self, host: &str) -> bool {
        self.allow_any_host.get() || self.hosts.borrow().iter().any(|h| h.nqn.as_str() == host)
    }

    /// The allow-list, newest first.
    #[must_use]
    pub fn hosts(&self) -> Vec<Host> {
        self.hosts.borrow().iter().rev().cloned().collect()
    }

    /// Puts a host on the list.
    pub fn add_host(&self, nqn: Nqn) -> Result<(), SubsystemError> {
        let mut hosts = self.hosts.borrow_mut();
        if hosts.iter().any(|h| h.nqn == nqn) {
            return Err(SubsystemError::HostExists(nqn));
        }
        hosts.push(Host { nqn });
        Ok(())
    }

    /// Takes a host off the list and ends its controllers. Ready when all I/O of its queues has completed.
    pub async fn remove_host(&self, core: &Core, nqn: &Nqn, limit: Nanos) -> Result<(), SubsystemError> {
        let known = {
            let mut hosts = self.hosts.borrow_mut();
            let before = hosts.len();
            hosts.retain(|h| h.nqn != *nqn);
            hosts.len() != before
        };
        if !known {
            return Err(SubsystemError::NoHost(nqn.clone()));
        }
        self.end_controllers(core, limit, |c| c.host() == nqn.as_str()).await
    }

    // Listeners.

    /// All listeners, newest first.
    #[must_use]
    pub fn listeners(&self) -> Vec<SubsystemListener> {
        self.listeners.borrow().iter().rev().cloned().collect()
    }

    /// The listener of an address.
    #[must_use]
    pub fn listener(&self, address: Address) -> Option<SubsystemListener> {
        self.listeners.borrow().iter().find(|l| l.address == address).cloned()
    }

    /// Adds a listener to the list; the socket is the target's.
    pub fn add_listener(&self, address: Address, state: AnaState) -> Result<(), SubsystemError> {
        if self.is_deleting() {
            return Err(SubsystemError::Deleting(self.nqn().clone()));
        }
        let mut listeners = self.listeners.borrow_mut();
        if listeners.iter().any(|l| l.address == address) {
            return Err(SubsystemError::ListenerExists(address));
        }
        if listeners.len() >= LISTENERS_MAX {
            return Err(SubsystemError::ListenersFull);
        }
        let used = |port: &u16| listeners.iter().any(|l| l.port == *port);
        let port = (0..).find(|p| !used(p)).unwrap_or(0);
        let ana = Arc::new(AnaStates::new(self.config.max_namespaces, state));
        listeners.push(SubsystemListener { address, port, ana });
        Ok(())
    }

    /// Takes a listener off the list; its connections are for [`Self::end_controllers`] and [`Self::close_queues`].
    pub fn remove_listener(&self, address: Address) -> Result<(), SubsystemError> {
        let mut listeners = self.listeners.borrow_mut();
        let before = listeners.len();
        listeners.retain(|l| l.address != address);
        if listeners.len() == before { Err(SubsystemError::NoListener(address)) } else { Ok(()) }
    }

    // Namespaces.

    /// Looks at the namespaces, by ascending number.
    pub fn with_namespaces<T>(&self, look: impl FnOnce(&BTreeMap<u32, Namespace>) -> T) -> T {
        look(&self.namespaces.borrow())
    }

    /// What a data core has to know of the namespaces.
    #[must_use]
    pub fn namespace_uses(&self) -> Vec<NamespaceUse> {
        self.namespaces.borrow().values().map(Namespace::to_use).collect()
    }

    /// Adds a namespace; ready when every core with queues serves it. Gives its number.
    pub async fn add_namespace(
        self: &Rc<Self>,
        core: &Core,
        registry: &Rc<Registry>,
        params: NamespaceParams,
    ) -> Result<u32, SubsystemError> {
        let (nsid, using) = self.open_namespace(core, registry, params)?;
        let id = self.id;
        let calls = core.data_cores().into_iter().map(|to| {
            let using = using.clone();
            core.call(to, move |core| poll_group::add_namespace(core, id, &using))
        });
        join_all(calls).await;
        self.namespace_changed(core, nsid);
        Ok(nsid)
    }

    fn open_namespace(
        self: &Rc<Self>,
        core: &Core,
        registry: &Rc<Registry>,
        params: NamespaceParams,
    ) -> Result<(u32, NamespaceUse), SubsystemError> {
        if self.is_deleting() {
            return Err(SubsystemError::Deleting(self.nqn().clone()));
        }
        let max = self.config.max_namespaces;
        let nsid = self.choose_nsid(params.nsid)?;
        let ana_group = params.ana_group.unwrap_or(nsid);
        if ana_group == 0 || ana_group > max {
            return Err(SubsystemError::AnaGroup { group: ana_group, max });
        }
        let (weak, core) = (Rc::downgrade(self), core.clone());
        let listener = move |event| device_event(&weak, &core, nsid, event);
        let desc = registry.open(&params.bdev_name, Access::Exclusive(CLAIM), listener)?;
        let uuid = params.uuid.unwrap_or(desc.entry().bdev.info().uuid);
        let namespace = Namespace {
            nsid,
            nguid: params.nguid.unwrap_or(*uuid.as_bytes()),
            eui64: params.eui64.unwrap_or_default(),
            uuid,
            ana_group,
            desc,
        };
        let using = namespace.to_use();
        self.namespaces.borrow_mut().insert(nsid, namespace);
        self.moved_away.set(false);
        Ok((nsid, using))
    }

    fn choose_nsid(&self, wish: u32) -> Result<u32, SubsystemError> {
        if self.is_discovery() {
            return Err(SubsystemError::Discovery("namespaces"));
        }
        let max = self.config.max_namespaces;
        let namespaces = self.namespaces.borrow();
        match wish {
            0 => (1..=max).find(|n| !namespaces.contains_key(n)).ok_or(SubsystemError::NamespacesFull(max)),
            nsid if nsid > max => Err(SubsystemError::NsidRange { nsid, max }),
            nsid if namespaces.contains_key(&nsid) => Err(SubsystemError::NsidUsed(nsid)),
            nsid => Ok(nsid),
        }
    }

    /// Takes a namespace away. Ready when all its I/O has completed on every core and its device is closed.
    pub async fn remove_namespace(self: &Rc<Self>, core: &Core, nsid: u32) -> Result<(), SubsystemError> {
        let removed = self.namespaces.borrow_mut().remove(&nsid);
        let namespace = removed.ok_or(SubsystemError::NoNamespace(nsid))?;
        self.namespace_changed(core, nsid);
        let id = self.id;
        let drain = |to| core.call_async(to, move |core| poll_group::remove_namespace(core, id, nsid));
        // Sent before anything else can be: later messages to these cores find the namespace gone.
        let drains: Vec<_> = core.data_cores().into_iter().map(drain).collect();
        let (done, wait) = futures::channel::oneshot::channel();
        core.spawn(async move {
            join_all(drains).await;
            drop(namespace);
            let _ = done.send(());
        });
        match core.timeout(DRAIN_NS, wait).await {
            Some(_) => Ok(()),
            None => Err(SubsystemError::DrainTimeout(DRAIN_NS / NANOS_PER_MS)),
        }
    }

    /// The device of a namespace is about to be taken away.
    fn device_goes(&self, core: &Core, nsid: u32) {
        let shared = |namespace: &Namespace| namespace.desc.entry().bdev.has_other_paths();
        if self.namespaces.borrow().get(&nsid).is_some_and(shared) {
            self.moved_away.set(true);
            for controller in self.controllers() {
                controller.end(core, "the volume is not served here any more");
            }
        }
    }

    /// Tells all controllers that a namespace was added, removed or changed.
    pub fn namespace_changed(&self, core: &Core, nsid: u32) {
        for controller in self.controllers() {
            controller.namespace_changed(core, nsid);
        }
    }

    // Controllers.

    /// All controllers, by ascending number.
    #[must_use]
    pub fn controllers(&self) -> Vec<Rc<Controller>> {
        self.controllers.borrow().values().cloned().collect()
    }

    /// The controller of that number.
    #[must_use]
    pub fn controller(&self, cntlid: u16) -> Option<Rc<Controller>> {
        self.controllers.borrow().get(&cntlid).cloned()
    }

    /// The next unused controller number; none when all are taken.
    #[must_use]
    pub fn next_cntlid(&self) -> Option<u16> {
        let controllers = self.controllers.borrow();
        let (min, max) = (self.config.min_cntlid, self.config.max_cntlid);
        let first = self.next_cntlid.get();
        let free = (first..=max).chain(min..first).find(|id| !controllers.contains_key(id))?;
        self.next_cntlid.set(if free >= max { min } else { free + 1 });
        Some(free)
    }

    /// Adds a controller.
    pub fn insert_controller(&self, controller: Rc<Controller>) {
        self.controllers.borrow_mut().insert(controller.cntlid(), controller);
    }

    /// A controller has ended with all its queues.
    pub fn remove_controller(&self, controller: &Controller) {
        self.controllers.borrow_mut().remove(&controller.cntlid());
        self.changed.wake();
    }

    /// Ends the controllers that `which` picks; ready when all their I/O has completed.
    pub async fn end_controllers(
        &self,
        core: &Core,
        limit: Nanos,
        which: impl Fn(&Controller) -> bool,
    ) -> Result<(), SubsystemError> {
        let picked: Vec<_> = self.controllers().into_iter().filter(|c| which(c)).collect();
        for controller in &picked {
            controller.end(core, "the target drops it");
        }
        let ended = self.changed.until(|| picked.iter().all(|c| c.is_gone()));
        match core.timeout(limit, ended).await {
            Some(()) => Ok(()),
            None => Err(SubsystemError::DrainTimeout(limit / NANOS_PER_MS)),
        }
    }

    /// Closes the I/O queues that came by `address`; ready when all their I/O has completed.
    pub async fn close_queues(&self, core: &Core, address: Address) -> Result<(), SubsystemError> {
        let by_address = |q: &super::queues::QueueRef| Address(q.listen) == address;
        let controllers = self.controllers();
        let closing: Vec<_> = controllers.iter().flat_map(|c| c.close_queues(core, by_address)).collect();
        let none = || !self.controllers.borrow().values().any(|c| c.has_any(&closing));
        match core.timeout(DRAIN_NS, self.changed.until(none)).await {
            Some(()) => Ok(()),
            None => Err(SubsystemError::DrainTimeout(DRAIN_NS / NANOS_PER_MS)),
        }
    }
}

fn device_event(subsystem: &Weak<Subsystem>, core: &Core, nsid: u32, event: BdevEvent) {
    let Some(subsystem) = subsystem.upgrade() else { return };
    match event {
        BdevEvent::Resized => subsystem.namespace_changed(core, nsid),
        BdevEvent::Removing => {
            subsystem.device_goes(core, nsid);
            let task_core = core.clone();
            core.spawn(async move {
                if let Err(error) = subsystem.remove_namespace(&task_core, nsid).await {
                    tracing::warn!(nqn = %subsystem.nqn(), nsid, %error, "removing a namespace whose device goes away");
                }
            });
        }
    }
}
