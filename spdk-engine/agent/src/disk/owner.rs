//! The owner task of one disk: opens its lvstore, keeps it open, tells what is in it.
//!
//! *States.* `Away` (with the reason; looked at again every [`RETRY`] while the data plane is up), `Ready`.
//!
//! *Invariants.* The identity is durable before the disk is `Ready` for the first time; the name of an lvstore that is
//! to be made, and its device, are durable before it is made. A disk is forgotten, and others may have its device, only
//! when it is known that no data plane has it open; that nobody uses it is decided here, in the same moment as that nobody
//! will.
//!
//! *When things fail.* A lvstore that vanishes (its device was pulled), is another one, or is on a remote namespace whose
//! target is lost makes the disk `Away`, and it is used again when the device is back. One that went and came back between
//! two looks is seen by the exports that lost their namespaces: it counts as opened anew.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use addax_api::nqn::replica_nqn;
use addax_proto::engine_v1 as pb;
use pb::event::Object;
use tokio::sync::{Notify, mpsc, oneshot};
use uuid::Uuid;

use super::attach::{Attach, Refusal, Step};
use super::{Away, DiskContext, DiskState, ReadyDisk, Records, Table, Unmanaged, Usage, is_same_place, probe, tell};
use crate::error::{AgentError, blocking};
use crate::hub::Key;
use crate::rpc::{Lvol, Lvstore, RpcError};
use crate::state::{DiskIdentity, DiskRecord, DiskWish, Forming, Place, meta_lvol_name};
use crate::supervise::Plane;

/// How often a disk that is away is looked for.
const RETRY: Duration = Duration::from_secs(5);
/// How often a disk that is there is looked at.
const LOOK: Duration = Duration::from_secs(30);
/// How often a remote namespace is looked at whose contents were refused: to look is to open it.
const LOOK_INSIDE: Duration = Duration::from_secs(300);
/// Looks in a row that find a target lost until the disk is away: a connection that is just being made anew is none.
const LOST_LOOKS: u32 = 2;

/// What an owner is asked for.
#[derive(Debug)]
pub(super) enum Command {
    Put { wish: DiskWish, reply: oneshot::Sender<Result<(), AgentError>> },
    Remove { reply: oneshot::Sender<Result<(), AgentError>> },
}

pub(super) struct Owner {
    record: DiskRecord,
    context: DiskContext,
    records: Records,
    table: Table,
    look: Arc<Notify>,
    state: DiskState,
    /// Of the device that is there.
    device: String,
    fingerprint: String,
    usage: Arc<Usage>,
    /// An lvstore that is there and is to be confirmed.
    found: Option<Uuid>,
    /// Keeps others on this machine from the device.
    held: Option<File>,
    /// Looks in a row that found the target lost.
    lost: u32,
}

/// What became of an lvstore that was open.
enum Still {
    /// Nothing.
    Open,
    /// It was closed meanwhile, and is open again.
    Reopened,
    /// Its target does not answer.
    Lost(Refusal),
    Gone(Away),
}

impl Owner {
    pub(super) fn new(
        record: DiskRecord,
        context: DiskContext,
        records: Records,
        table: Table,
        look: Arc<Notify>,
    ) -> Self {
        let state = DiskState::Away(Away::passing("Starting", "the disk is being opened"));
        let device = record.identity.as_ref().map(|identity| identity.device.clone()).unwrap_or_default();
        Self {
            record,
            context,
            records,
            table,
            look,
            state,
            device,
            fingerprint: String::new(),
            usage: Arc::default(),
            found: None,
            held: None,
            lost: 0,
        }
    }

    pub(super) async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        self.tell();
        let mut plane = self.context.plane.clone();
        plane.mark_unchanged();
        let shutdown = self.context.shutdown.clone();
        // The first look comes at once.
        let mut first = true;
        loop {
            let pause = match &self.state {
                _ if std::mem::take(&mut first) => Duration::ZERO,
                DiskState::Ready(_) if self.lost > 0 => RETRY,
                DiskState::Ready(_) => LOOK,
                DiskState::Away(away) if self.attach_is_to_look() && away.is_about_content() => LOOK_INSIDE,
                DiskState::Away(_) => RETRY,
            };
            tokio::select! {
                () = shutdown.cancelled() => return,
                command = commands.recv() => match command {
                    Some(Command::Put { wish, reply }) => {
                        let result = self.put(wish).await;
                        let _ = reply.send(result);
                        self.settle().await;
                    }
                    // Who has given up waiting may want something else by now.
                    Some(Command::Remove { reply }) if reply.is_closed() => {}
                    Some(Command::Remove { reply }) => {
                        let result = self.remove().await;
                        let gone = result.is_ok();
                        let _ = reply.send(result);
                        if gone {
                            return;
                        }
                    }
                    None => return,
                },
                changed = plane.changed() => match changed {
                    Ok(()) => self.settle().await,
                    Err(_) => return,
                },
                () = self.look.notified() => self.measure().await,
                () = tokio::time::sleep(pause) => self.settle().await,
            }
        }
    }

    fn name(&self) -> &str {
        &self.record.wish.name
    }

    fn plane(&self) -> Result<Arc<Plane>, Away> {
        let status = self.context.plane.borrow();
        let down = || Away::passing("DataPlaneDown", format!("the data plane is down: {}", status.reason));
        status.plane.clone().ok_or_else(down)
    }

    // --- commands ---

    async fn put(&mut self, wish: DiskWish) -> Result<(), AgentError> {
        if wish == self.record.wish {
            return Ok(());
        }
        // Of two that declare the name at the same moment, the second.
        if !is_same_place(&self.record.wish.place, &wish.place) {
            let text = format!("disk '{}' is another device: remove it first, or use another name", self.name());
            return Err(AgentError::Exists(text));
        }
        let record = DiskRecord { wish, ..self.record.clone() };
        self.records.put(&record).await?;
        self.record = record;
        self.tell();
        Ok(())
    }

    async fn remove(&mut self) -> Result<(), AgentError> {
        self.table.begin_removal(self.name())?;
        let result = self.forget().await;
        self.table.end_removal(self.name(), result.is_ok());
        if result.is_ok() {
            self.held = None;
            self.context.hub.remove(Key::Disk(self.name().to_owned()));
            tracing::info!(disk = %self.name(), "forgotten");
        }
        result
    }

    async fn forget(&self) -> Result<(), AgentError> {
        match self.plane() {
            Ok(plane) => self.attach(&plane).close().await?,
            // One that has ended has nothing open, and is not given this disk again.
            Err(_) if self.context.plane.borrow().ended => {}
            Err(away) => {
                let text = format!("whether the disk is still open cannot be seen: {}", away.message);
                return Err(AgentError::Unavailable(text));
            }
        }
        self.records.remove(self.name()).await
    }

    // --- the lvstore ---

    fn attach<'a>(&'a self, plane: &'a Plane) -> Attach<'a> {
        Attach { plane, record: &self.record, node: &self.context.node }
    }

    /// Whether the device can only be looked at by opening it.
    fn attach_is_to_look(&self) -> bool {
        matches!(self.record.wish.place, Place::Nvme { .. })
    }

    /// Brings the disk to where it should be, as far as that can be done now.
    async fn settle(&mut self) {
        let plane = match self.plane() {
            Ok(plane) => plane,
            Err(away) => return self.away(away),
        };
        let ready = match &self.state {
            DiskState::Ready(ready) => Some(ready.clone()),
            DiskState::Away(_) => None,
        };
        let is_same =
            |ready: &Arc<ReadyDisk>| ready.plane.instance == plane.instance && !ready.plane.client.is_closed();
        if let Some(ready) = ready.filter(is_same) {
            let still = self.look_again(&ready).await;
            self.lost = if matches!(still, Ok(Still::Lost(_))) { self.lost + 1 } else { 0 };
            match still {
                Ok(Still::Open) => return self.measure().await,
                Ok(Still::Reopened) => tracing::warn!(disk = %self.name(), "its device was gone for a moment"),
                Ok(Still::Lost(_)) if self.lost < LOST_LOOKS => return,
                Ok(Still::Lost(refusal)) => return self.away(refusal.away),
                Ok(Still::Gone(away)) => self.away(away),
                Err(error) => return tracing::warn!(disk = %self.name(), %error, "cannot look at the disk"),
            }
        }
        self.lost = 0;
        match self.open(&plane).await {
            Ok((store, block_bytes)) => self.ready(plane, store, block_bytes).await,
            Err(refusal) => {
                self.fingerprint = refusal.fingerprint;
                self.found = refusal.found;
                self.away(refusal.away);
            }
        }
    }

    /// Looks whether the lvstore is open as it was.
    async fn look_again(&self, ready: &ReadyDisk) -> Result<Still, RpcError> {
        let attach = self.attach(&ready.plane);
        match attach.store().await? {
            Some(store) if store.uuid == ready.store => {}
            Some(store) => {
                let text = format!("it holds the lvstore '{}' ({}) instead of {}", store.name, store.uuid, ready.store);
                return Ok(Still::Gone(Away::lasting("DiskChanged", text)));
            }
            None => {
                return Ok(Still::Gone(Away::lasting("DeviceMissing", "the data plane has lost the device")));
            }
        }
        if let Err(refusal) = attach.require_connection().await {
            return Ok(Still::Lost(refusal));
        }
        // A namespace goes with its lvol, and does not come back with it.
        let nqns: Vec<String> = self.table.replicas(self.name()).iter().map(|replica| replica_nqn(replica)).collect();
        let subsystems = ready.plane.client.nvmf_get_subsystems().await?;
        let is_bare = subsystems.iter().any(|found| found.namespaces.is_empty() && nqns.contains(&found.nqn));
        Ok(if is_bare { Still::Reopened } else { Still::Open })
    }

    /// The lvstore, and bytes of a block of it.
    async fn open(&mut self, plane: &Plane) -> Result<(Lvstore, u32), Refusal> {
        let mut held = self.held.take();
        let (device, step) = self.attach(plane).look(&mut held).await;
        self.held = held;
        self.device = device;
        let store = match step? {
            Step::Use(store) => store,
            Step::Form { wipe } => self.form(plane, wipe).await?,
        };
        let block_bytes = self.attach(plane).block_size().await?;
        let identity = DiskIdentity { lvstore: store.uuid, device: self.device.clone() };
        if self.record.identity.as_ref() != Some(&identity) || self.record.forming.is_some() {
            let record = DiskRecord { identity: Some(identity), forming: None, ..self.record.clone() };
            self.records.put(&record).await?;
            self.record = record;
        }
        Ok((store, block_bytes))
    }

    async fn form(&mut self, plane: &Plane, wipe: bool) -> Result<Lvstore, Refusal> {
        if self.record.forming.as_ref().is_none_or(|forming| forming.device != self.device) {
            // Unlike any other, wherever the disk may be plugged in later.
            let lvstore = format!("addax-{}", Uuid::new_v4().simple());
            let forming = Some(Forming { lvstore, device: self.device.clone() });
            let record = DiskRecord { forming, ..self.record.clone() };
            self.records.put(&record).await?;
            self.record = record;
        }
        self.away(Away::passing("Formatting", "it is being formatted"));
        tracing::info!(disk = %self.name(), forming = ?self.record.forming, wipe, "formatting");
        self.attach(plane).form(wipe).await
    }

    async fn ready(&mut self, plane: Arc<Plane>, store: Lvstore, block_bytes: u32) {
        tracing::info!(disk = %self.name(), lvstore = %store.name, uuid = %store.uuid, "the disk is ready");
        self.fingerprint.clear();
        self.found = None;
        let (uuid, name) = (store.uuid, store.name.clone());
        let (cluster_bytes, opening) = (store.cluster_size, Uuid::new_v4());
        let (volatile, remote) = self.cache().await;
        let ready =
            ReadyDisk { plane, store: uuid, store_name: name, cluster_bytes, block_bytes, opening, volatile, remote };
        self.state = DiskState::Ready(Arc::new(ready));
        self.table.set_state(self.name(), self.state.clone());
        self.measure().await;
    }

    /// Whether the disk has a volatile cache, and is at another machine.
    async fn cache(&self) -> (bool, bool) {
        match self.record.wish.place.clone() {
            // The file system keeps what it knows of a file in memory too.
            Place::File { .. } => (true, false),
            Place::Block { path } => {
                let read = blocking(move || Ok::<_, AgentError>(probe::has_cache(&path))).await;
                (read.and_then(|read| read).unwrap_or(true), false)
            }
            Place::Nvme { .. } => (true, true),
        }
    }

    fn away(&mut self, away: Away) {
        let known = matches!(&self.state, DiskState::Away(before) if *before == away);
        if !known {
            if away.reason != "DataPlaneDown" && away.reason != "Formatting" {
                tracing::warn!(disk = %self.name(), reason = away.reason, message = %away.message, "cannot be used");
            }
            self.state = DiskState::Away(away);
            self.table.set_state(self.name(), self.state.clone());
        }
        self.tell();
    }

    // --- what is in it ---

    /// Looks at the clusters and tells.
    async fn measure(&mut self) {
        if let DiskState::Ready(ready) = &self.state {
            match self.count(ready).await {
                Ok(usage) => {
                    self.usage = Arc::new(usage);
                    self.table.set_usage(self.name(), self.usage.clone());
                }
                Err(error) => tracing::warn!(disk = %self.name(), %error, "cannot look at the lvols"),
            }
        }
        self.tell();
    }

    async fn count(&self, ready: &ReadyDisk) -> Result<Usage, RpcError> {
        let client = &ready.plane.client;
        let gone = || RpcError::Answer { method: "bdev_lvol_get_lvstores".to_owned(), reason: "no lvstore".to_owned() };
        let store = self.attach(&ready.plane).store().await?.ok_or_else(gone)?;
        let lvols = client.lvols_of(&store.uuid).await?;
        let replicas = self.table.replicas(self.name());
        let bytes = |clusters: u64| clusters.saturating_mul(store.cluster_size);
        let metas: BTreeSet<String> = replicas.iter().map(|replica| meta_lvol_name(replica)).collect();
        let is_own = |lvol: &Lvol| replicas.contains(&lvol.name) || metas.contains(&lvol.name);
        let (own, others): (Vec<Lvol>, Vec<Lvol>) = lvols.into_iter().partition(is_own);
        let allocated: BTreeMap<String, u64> =
            own.into_iter().map(|lvol| (lvol.name, bytes(lvol.num_allocated_clusters))).collect();
        let sizes = if others.is_empty() { BTreeMap::new() } else { client.bdev_sizes().await? };
        let unmanaged = others.into_iter().map(|lvol| Unmanaged {
            // One that cannot be opened has no device: it takes what it has.
            size: sizes.get(&lvol.uuid.to_string()).copied().unwrap_or(bytes(lvol.num_allocated_clusters)),
            allocated: bytes(lvol.num_allocated_clusters),
            name: lvol.name,
            uuid: lvol.uuid,
            is_snapshot: lvol.is_snapshot,
        });
        let mut available = bytes(store.free_clusters);
        if let Place::File { path, .. } = &self.record.wish.place {
            let path = path.clone();
            // A sparse file cannot take more than the file system around it.
            let around = blocking(move || probe::free_around(&path)).await.ok().flatten();
            available = available.min(around.unwrap_or(u64::MAX));
        }
        let size = bytes(store.total_data_clusters);
        Ok(Usage { size, available, allocated, unmanaged: unmanaged.collect() })
    }

    fn tell(&self) {
        let mut disk = pb::Disk {
            name: self.name().to_owned(),
            wish: Some(tell::wish(&self.record.wish)),
            device: self.device.clone(),
            fingerprint: self.fingerprint.clone(),
            ..pb::Disk::default()
        };
        let recorded = self.record.identity.as_ref().map(|identity| identity.lvstore);
        disk.uuid = recorded.or(self.found).map(|uuid| uuid.to_string()).unwrap_or_default();
        match &self.state {
            DiskState::Ready(ready) => {
                disk.cluster_bytes = ready.cluster_bytes;
                disk.block_bytes = ready.block_bytes;
                disk.lvstore = ready.store_name.clone();
                disk.no_overcommit = !ready.plane.tells_full();
            }
            DiskState::Away(away) => {
                disk.reason = away.reason.to_owned();
                disk.message = away.message.clone();
            }
        }
        tell::usage(&mut disk, &self.usage);
        self.context.hub.set(Key::Disk(self.name().to_owned()), Object::Disk(disk));
    }
}
