//! The disks of this node: one lvstore each, on a file, a block device or a remote namespace.
//!
//! *What it is.* [`Disks`] keeps one owner task (see `owner`) per declared disk. Replicas follow their disk's
//! [`DiskState`] and put their lvols into the lvstore that it names.
//!
//! ```text
//! PutDisk ─▶ owner ─▶ device there? the one we know? ─▶ base bdev ─▶ lvstore ─▶ Ready ─▶ replicas
//!                        │ never seen: empty and to be made: format                ▲
//!                        └ anything else: Away, with the reason ── looks again ────┘
//! ```
//! *Invariants.*
//! - A disk is known by the UUID of its lvstore and by the identity of its device. Under a name that has these recorded
//!   nothing is formatted, and another disk is never taken for it.
//! - A device that was never seen is formatted only when that was asked for and it is empty, or when the fingerprint of
//!   just what it holds was given as permission. What a local device holds is read before the data plane opens it, and an
//!   lvstore that was not made here is opened only by its UUID (`Found` until then): another node may have it.
//! - Lvols that are not replicas of this node are counted and listed, and never touched.
//! - A disk with replicas cannot be removed; see [`Disks::register`]. Its owner decides that, so that a caller who has given
//!   up changes nothing.
//!
//! *When things fail.* The state says why in one word for programs and one sentence for people. Nothing is given up: a
//! device that comes back is used again.

mod attach;
mod owner;
mod probe;
mod tell;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use addax_api::name;
use addax_proto::engine_v1 as pb;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::error::{AgentError, blocking};
use crate::hub::Hub;
use crate::machine::Machine;
use crate::state::slots::SlotsError;
use crate::state::{DiskRecord, DiskStore, DiskWish, Place};
use crate::supervise::{Plane, PlaneStatus};
use owner::{Command, Owner};

/// Calls that may wait for one disk.
const QUEUE_MAX: usize = 16;
/// Deadline of a call. What takes longer, as formatting does, goes on and is told by the disk's state.
const CALL_DEADLINE: Duration = Duration::from_secs(10);
/// Deadline of closing a disk.
const REMOVE_DEADLINE: Duration = Duration::from_secs(50);
/// Most disks of a node.
const DISKS_MAX: usize = 128;
/// Bytes of a cluster of the lvstores made here: sizes of volumes are multiples of it.
pub const CLUSTER_BYTES: u64 = 1 << 20;

/// An lvstore that is open.
#[derive(Clone, Debug)]
pub struct ReadyDisk {
    /// The data plane that has it.
    pub plane: Arc<Plane>,
    /// The lvstore.
    pub store: Uuid,
    /// Its name.
    pub store_name: String,
    /// Bytes of its clusters.
    pub cluster_bytes: u64,
    /// Bytes of a block of its lvols.
    pub block_bytes: u32,
    /// Another one at every opening: what was made of the lvstore before is gone.
    pub opening: Uuid,
    /// What is not flushed may be lost with power (consistency rule 1).
    pub volatile: bool,
    /// It is at another machine, whose power this one does not know of.
    pub remote: bool,
}

impl ReadyDisk {
    /// The name by which the data plane knows an lvol of the disk.
    pub fn lvol_alias(&self, lvol: &str) -> String {
        format!("{}/{lvol}", self.store_name)
    }

    /// Another text when what was not flushed may be gone since; empty when nothing can be said, or nothing can be lost.
    ///
    /// All that is needed of a local disk is the boot of its machine: a data plane that died had handed everything to the
    /// kernel. The power of a remote one shows as the end of a connection only, so that every opening counts as a loss.
    pub fn instance(&self, machine: &Machine) -> String {
        match machine.boot() {
            "" => String::new(),
            _ if !self.volatile => String::new(),
            boot if self.remote => format!("{boot}/{}", self.opening.simple()),
            boot => boot.to_owned(),
        }
    }
}

/// Where a disk is.
#[derive(Clone, Debug)]
pub enum DiskState {
    /// It can be used.
    Ready(Arc<ReadyDisk>),
    /// It cannot.
    Away(Away),
}

/// Why a disk cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Away {
    /// One word for programs.
    pub reason: &'static str,
    /// One sentence for people.
    pub message: String,
    /// The disk itself is gone, another one, or not declared: it does not come by waiting for the data plane.
    pub lasting: bool,
}

impl Away {
    /// Something that passes by itself.
    pub(crate) fn passing(reason: &'static str, message: impl ToString) -> Self {
        Self { reason, message: message.to_string(), lasting: false }
    }

    /// Whether it is about what the device holds.
    fn is_about_content(&self) -> bool {
        ["NotEmpty", "ContentUnknown", "DiskChanged", "Damaged", "BlockSize"].contains(&self.reason)
    }

    /// Something that somebody has to do something about.
    pub(crate) fn lasting(reason: &'static str, message: impl ToString) -> Self {
        Self { reason, message: message.to_string(), lasting: true }
    }
}

/// What the owners of disks share.
#[derive(Clone, Debug)]
pub struct DiskContext {
    /// Name of the node.
    pub node: String,
    /// The data plane.
    pub plane: watch::Receiver<PlaneStatus>,
    /// Where changes are told.
    pub hub: Hub,
    /// Ends the owners.
    pub shutdown: CancellationToken,
}

/// The durable records. Writes block, so they run away from the reactor threads.
#[derive(Clone, Debug)]
pub(crate) struct Records(Arc<Mutex<DiskStore>>);

impl Records {
    async fn change<F>(&self, work: F) -> Result<(), AgentError>
    where
        F: FnOnce(&mut DiskStore) -> Result<(), SlotsError> + Send + 'static,
    {
        let store = self.0.clone();
        blocking(move || work(&mut store.lock().unwrap_or_else(PoisonError::into_inner))).await??;
        Ok(())
    }

    async fn put(&self, record: &DiskRecord) -> Result<(), AgentError> {
        let record = record.clone();
        self.change(move |store| store.put(&record)).await
    }

    async fn remove(&self, name: &str) -> Result<(), AgentError> {
        let name = name.to_owned();
        self.change(move |store| store.remove(&name)).await
    }
}

/// Where a disk's clusters are, as last looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes that lvols can take.
    pub size: u64,
    /// Bytes that they can still take.
    pub available: u64,
    /// Bytes that each lvol has, by name.
    pub allocated: BTreeMap<String, u64>,
    /// Lvols that are no replicas of this node: name, UUID, size, bytes that they have, whether they are snapshots.
    pub unmanaged: Vec<Unmanaged>,
}

/// An lvol that is no replica of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unmanaged {
    /// Its name.
    pub name: String,
    /// Its UUID.
    pub uuid: Uuid,
    /// Its size in bytes.
    pub size: u64,
    /// Bytes that it has.
    pub allocated: u64,
    /// Whether it is a snapshot, which takes no more than it has.
    pub is_snapshot: bool,
}

#[derive(Debug)]
struct Entry {
    /// `None`: replicas name it, but it is not declared.
    commands: Option<mpsc::Sender<Command>>,
    place: Option<Place>,
    state: watch::Sender<DiskState>,
    look: Arc<Notify>,
    usage: Arc<Usage>,
    replicas: BTreeSet<String>,
    removing: bool,
}

impl Default for Entry {
    fn default() -> Self {
        Self {
            commands: None,
            place: None,
            state: watch::Sender::new(undeclared()),
            look: Arc::default(),
            usage: Arc::default(),
            replicas: BTreeSet::new(),
            removing: false,
        }
    }
}

impl Entry {
    /// The way to its owner, unless that has ended.
    fn owner(&self) -> Option<&mpsc::Sender<Command>> {
        self.commands.as_ref().filter(|commands| !commands.is_closed())
    }

    fn require_empty(&self, name: &str) -> Result<(), AgentError> {
        let Some(replica) = self.replicas.first() else { return Ok(()) };
        let count = self.replicas.len();
        let text = format!("disk '{name}' holds {count} replicas, '{replica}' among them: evict them first");
        Err(AgentError::Forbidden(text))
    }
}

fn undeclared() -> DiskState {
    DiskState::Away(Away::lasting("NotDeclared", "the disk is not one of this node's disks"))
}

/// The table of disks, shared by everybody who has to do with them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table(Arc<Mutex<BTreeMap<String, Entry>>>);

impl Table {
    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_state(&self, disk: &str, state: DiskState) {
        if let Some(entry) = self.lock().get(disk) {
            entry.state.send_replace(state);
        }
    }

    fn set_usage(&self, disk: &str, usage: Arc<Usage>) {
        if let Some(entry) = self.lock().get_mut(disk) {
            entry.usage = usage;
        }
    }

    /// From now on nobody can register a replica.
    fn begin_removal(&self, disk: &str) -> Result<(), AgentError> {
        let mut table = self.lock();
        let entry = table.entry(disk.to_owned()).or_default();
        entry.require_empty(disk)?;
        entry.removing = true;
        Ok(())
    }

    /// Ends what [`Self::begin_removal`] began.
    fn end_removal(&self, disk: &str, gone: bool) {
        let mut table = self.lock();
        let entry = table.entry(disk.to_owned()).or_default();
        entry.removing = false;
        if gone {
            entry.commands = None;
            entry.place = None;
            entry.usage = Arc::default();
            entry.state.send_replace(undeclared());
        }
    }

    fn is_declared(&self, disk: &str) -> bool {
        self.lock().get(disk).is_some_and(|entry| entry.commands.is_some())
    }

    fn replicas(&self, disk: &str) -> BTreeSet<String> {
        self.lock().get(disk).map(|entry| entry.replicas.clone()).unwrap_or_default()
    }
}

/// The disks of this node; cheap to clone.
#[derive(Clone, Debug)]
pub struct Disks {
    context: DiskContext,
    records: Records,
    table: Table,
}

impl Disks {
    /// Puts back the disks that the store tells of.
    pub fn open(store: DiskStore, context: DiskContext) -> Self {
        let records: Vec<DiskRecord> = store.all().cloned().collect();
        let disks = Self { context, records: Records(Arc::new(Mutex::new(store))), table: Table::default() };
        for record in records {
            disks.spawn(record);
        }
        disks
    }

    /// All disks.
    pub fn list(&self) -> Vec<pb::Disk> {
        let names: Vec<String> = self.table.lock().keys().cloned().collect();
        names.iter().filter_map(|name| self.context.hub.disk(name)).collect()
    }

    /// Where a disk is, now and later.
    pub fn state(&self, disk: &str) -> watch::Receiver<DiskState> {
        self.table.lock().entry(disk.to_owned()).or_default().state.subscribe()
    }

    /// Bytes that an lvol of a disk has, as last looked at.
    pub fn allocated(&self, disk: &str, lvol: &str) -> u64 {
        let table = self.table.lock();
        table.get(disk).and_then(|entry| entry.usage.allocated.get(lvol).copied()).unwrap_or(0)
    }

    /// Counts a replica as one of the disk's: from now on the disk cannot be removed, and the lvol is not unmanaged.
    ///
    /// # Errors
    /// [`AgentError::NotFound`] when the disk is not declared; [`AgentError::Unavailable`] while it is being removed.
    pub fn register(&self, disk: &str, replica: &str) -> Result<(), AgentError> {
        let mut table = self.table.lock();
        let entry = table.get_mut(disk).filter(|entry| entry.commands.is_some());
        let entry = entry.ok_or_else(|| AgentError::NotFound { kind: "disk", name: disk.to_owned() })?;
        if entry.removing {
            return Err(AgentError::Unavailable(format!("disk '{disk}' is being removed")));
        }
        entry.replicas.insert(replica.to_owned());
        Ok(())
    }

    /// As [`Self::register`], for a replica that is there already, whatever became of its disk.
    pub fn register_known(&self, disk: &str, replica: &str) {
        self.table.lock().entry(disk.to_owned()).or_default().replicas.insert(replica.to_owned());
    }

    /// Ends what [`Self::register`] began.
    pub fn unregister(&self, disk: &str, replica: &str) {
        if let Some(entry) = self.table.lock().get_mut(disk) {
            entry.replicas.remove(replica);
        }
    }

    /// Looks at a disk's clusters soon: something was made or removed.
    pub fn look(&self, disk: &str) {
        if let Some(entry) = self.table.lock().get(disk) {
            entry.look.notify_one();
        }
    }

    /// Declares a disk, or changes what is wanted of one.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn put(&self, request: pb::PutDiskRequest) -> Result<pb::Disk, AgentError> {
        let wish = parse(request)?;
        let name = wish.name.clone();
        let commands = self.admit(&wish)?;
        let commands = match commands {
            Some(commands) => commands,
            None => {
                let record = DiskRecord { wish: wish.clone(), identity: None, forming: None };
                self.records.put(&record).await?;
                self.spawn(record)
            }
        };
        ask(&commands, CALL_DEADLINE, |reply| Command::Put { wish, reply }).await?;
        self.context.hub.disk(&name).ok_or_else(|| AgentError::Internal(format!("disk '{name}' is not told")))
    }

    /// The owner of a disk that is known; refuses what cannot be a disk of this node.
    fn admit(&self, wish: &DiskWish) -> Result<Option<mpsc::Sender<Command>>, AgentError> {
        let table = self.table.lock();
        let declared = table.iter().filter(|(_, entry)| entry.owner().is_some());
        if let Some((other, _)) = declared.clone().find(|(name, entry)| {
            **name != wish.name && entry.place.as_ref().is_some_and(|place| is_same_place(place, &wish.place))
        }) {
            return Err(AgentError::Exists(format!("disk '{}' is the same device as disk '{other}'", wish.name)));
        }
        let Some(entry) = table.get(&wish.name).filter(|entry| entry.owner().is_some()) else {
            if declared.count() >= DISKS_MAX {
                return Err(invalid("name", &wish.name, format!("a node can have at most {DISKS_MAX} disks")));
            }
            return Ok(None);
        };
        if entry.place.as_ref().is_some_and(|place| !is_same_place(place, &wish.place)) {
            let text = format!("disk '{}' is another device: remove it first, or use another name", wish.name);
            return Err(AgentError::Exists(text));
        }
        Ok(entry.owner().cloned())
    }

    /// Forgets a disk; what it holds stays. Absent is fine.
    ///
    /// # Errors
    /// [`AgentError::Forbidden`] while replicas are on it.
    pub async fn remove(&self, name: &str) -> Result<(), AgentError> {
        let commands = {
            let table = self.table.lock();
            let Some(entry) = table.get(name).filter(|entry| entry.commands.is_some()) else { return Ok(()) };
            entry.require_empty(name)?;
            entry.commands.clone()
        };
        let Some(commands) = commands else { return Ok(()) };
        match ask(&commands, REMOVE_DEADLINE, |reply| Command::Remove { reply }).await {
            // Somebody else asked for the same.
            Err(_) if !self.table.is_declared(name) => Ok(()),
            result => result,
        }
    }

    fn spawn(&self, record: DiskRecord) -> mpsc::Sender<Command> {
        let mut table = self.table.lock();
        let entry = table.entry(record.wish.name.clone()).or_default();
        if let Some(commands) = entry.owner() {
            return commands.clone();
        }
        let (commands, queue) = mpsc::channel(QUEUE_MAX);
        entry.commands = Some(commands.clone());
        entry.place = Some(record.wish.place.clone());
        entry.state.send_replace(DiskState::Away(Away::passing("Starting", "the disk is being opened")));
        let owner =
            Owner::new(record, self.context.clone(), self.records.clone(), self.table.clone(), entry.look.clone());
        tokio::spawn(owner.run(queue));
        commands
    }
}

async fn ask<T>(
    commands: &mpsc::Sender<Command>,
    deadline: Duration,
    command: impl FnOnce(oneshot::Sender<Result<T, AgentError>>) -> Command,
) -> Result<T, AgentError> {
    let (reply, answer) = oneshot::channel();
    let exchange = async {
        let ended = || AgentError::Unavailable("the disk has just been removed, or the agent ends".to_owned());
        commands.send(command(reply)).await.map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    };
    let late = || AgentError::Unavailable(format!("not done within {deadline:?}; it may still be under way"));
    tokio::time::timeout(deadline, exchange).await.map_err(|_| late())?
}

/// Whether two places are one device. The size of a file counts only when it is made.
fn is_same_place(a: &Place, b: &Place) -> bool {
    match (a, b) {
        (Place::File { path: a, .. }, Place::File { path: b, .. }) => a == b,
        _ => a == b,
    }
}

fn invalid(field: &'static str, value: impl ToString, allowed: impl ToString) -> AgentError {
    AgentError::Invalid { field, value: value.to_string(), allowed: allowed.to_string() }
}

fn parse(request: pb::PutDiskRequest) -> Result<DiskWish, AgentError> {
    name::validate_label("name", &request.name, name::MAX_LABEL)
        .map_err(|error| invalid("name", &request.name, error))?;
    let uuid = match request.uuid.as_str() {
        "" => None,
        text => Some(text.parse().map_err(|_| invalid("uuid", text, "a UUID is allowed"))?),
    };
    Ok(DiskWish {
        place: parse_place(&request)?,
        name: request.name,
        create: request.create,
        erase: request.erase,
        uuid,
        device: request.device,
    })
}

fn parse_place(request: &pb::PutDiskRequest) -> Result<Place, AgentError> {
    let path = || match Path::new(&request.path) {
        path if path.is_absolute() => Ok(path.to_owned()),
        _ => Err(invalid("path", &request.path, "an absolute path is required")),
    };
    match request.kind() {
        pb::DiskKind::File => Ok(Place::File { path: path()?, size: request.size_bytes }),
        pb::DiskKind::Block => Ok(Place::Block { path: path()? }),
        pb::DiskKind::Nvme => {
            let address = request.namespace_at.clone().unwrap_or_default();
            let ip = address.traddr.parse::<std::net::IpAddr>();
            ip.map_err(|_| invalid("namespace_at.traddr", &address.traddr, "an IP address is allowed"))?;
            let port = u16::try_from(address.trsvcid).ok().filter(|port| *port > 0);
            let trsvcid = port.ok_or_else(|| invalid("namespace_at.trsvcid", address.trsvcid, "1 to 65535"))?;
            if !address.nqn.starts_with("nqn.") {
                return Err(invalid("namespace_at.nqn", &address.nqn, "the NQN of a subsystem is required"));
            }
            Ok(Place::Nvme { traddr: address.traddr, trsvcid, subnqn: address.nqn, nsid: request.nsid.max(1) })
        }
        pb::DiskKind::Unspecified => Err(invalid("kind", "unspecified", "file, block or nvme is allowed")),
    }
}

#[cfg(test)]
mod tests;
