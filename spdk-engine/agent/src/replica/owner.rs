//! The owner task of one replica: its record, its lvols, its export, its epoch.
//!
//! *States.* `Stopped` (no export), `Starting` (wanted, but its disk is away or the data plane refused; tried again),
//! `Running`, `Error` (damaged; a call has to act). Beside them *deleted*: told of no more; its lvol goes as soon as its
//! disk is back.
//!
//! *Invariants.*
//! - The order of a promote: check, end and drain all sessions, make `(g, e)` durable, let the new host in. A crash
//!   between any two steps leaves nobody in, or the old host with the old record.
//! - A promote that expects another instance of the replica than it has changes nothing: the engine has to learn first what
//!   may be lost (rule 1).
//! - Also a promote to the same `(g, e)` ends and drains what is there: every session begins on a quiet disk.
//! - Whether it should run is durable, so that a restart of agent and data plane needs no manager.
//! - A record is made only where no lvol of the name is, and before that lvol. So an lvol that its record does not name
//!   yet was made for it and holds nothing, and an lvol without a record is nobody's: it is never taken for a replica,
//!   and never deleted (rule 22). Only of a record that cannot be read it is known that an lvol was made.
//! - The meta lvol is made, and deleted, after the data's. It has to read as zeroes when it is new: one that the record
//!   does not name yet is deleted and made again, since a thin lvol that was never written does.
//! - The disk counts the replica from before its record is made. An owner whose start made nothing ends, and its name is
//!   free; whoever asked need not be there any more.
//!
//! *When things fail.* A disk that is opened again (its device or its data plane was away) is given the export again,
//! with nobody on its allow-list. Steps that fail are tried again every [`RETRY`].

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use addax_api::nqn::replica_nqn;
use addax_proto::engine_v1 as pb;
use pb::event::Object;
use tokio::sync::{mpsc, oneshot, watch};
use uuid::Uuid;

use super::export::Lvols;
use super::permit::{Permit, read_superblock};
use super::{Promotion, ReplicaContext, export, host_nqn};
use crate::disk::{CLUSTER_BYTES, DiskState, Disks, ReadyDisk};
use crate::error::{AgentError, blocking};
use crate::hub::Key;
use crate::state::{self, BLOCK_SIZE, MetaArea, ReplicaFile, ReplicaRecord, meta_lvol_name};

/// Pause before a failed export is tried again.
const RETRY: Duration = Duration::from_secs(1);

type Reply<T> = oneshot::Sender<Result<T, AgentError>>;

/// What an owner is asked for.
#[derive(Debug)]
pub(super) enum Command {
    Start { volume: String, size: u64, create: bool, reply: Reply<pb::Replica> },
    Stop { reply: Reply<()> },
    Delete { disk: String, permit: Option<Permit>, reply: Reply<()> },
    Promote { promotion: Promotion, reply: Reply<pb::Replica> },
}

/// Where the export is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Export {
    Stopped,
    /// Wanted; why it is not there.
    Waiting(String),
    /// There, from this opening of its disk.
    Running {
        opening: Uuid,
        /// The data plane's instance.
        instance: String,
    },
    /// Damaged.
    Damaged(String),
}

pub(super) struct Owner {
    name: String,
    disk: String,
    disks: Disks,
    disk_state: watch::Receiver<DiskState>,
    context: ReplicaContext,
    file: Option<ReplicaFile>,
    record: Option<ReplicaRecord>,
    export: Export,
    /// There may be an export that is not wanted: no data plane has yet said that it is gone.
    may_linger: bool,
}

impl Owner {
    pub(super) fn new(name: &str, disk: &str, disks: Disks, context: ReplicaContext) -> Self {
        let disk_state = disks.state(disk);
        Self {
            name: name.to_owned(),
            disk: disk.to_owned(),
            disks,
            disk_state,
            context,
            file: None,
            record: None,
            export: Export::Stopped,
            may_linger: true,
        }
    }

    pub(super) async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        self.load().await;
        self.disk_state.mark_unchanged();
        self.settle().await;
        let shutdown = self.context.shutdown.clone();
        loop {
            if self.is_deleted() && self.bury().await {
                return;
            }
            let ready = matches!(&*self.disk_state.borrow(), DiskState::Ready(_));
            let lingers = self.may_linger && self.is_unwanted();
            let retry = ready && (matches!(self.export, Export::Waiting(_)) || self.is_deleted() || lingers);
            tokio::select! {
                () = shutdown.cancelled() => return,
                command = commands.recv() => match command {
                    Some(Command::Delete { disk, permit, reply }) => {
                        let result = self.delete(&disk, permit).await;
                        let gone = result.is_ok() && !self.is_deleted();
                        let _ = reply.send(result);
                        if gone {
                            return;
                        }
                    }
                    Some(Command::Start { volume, size, create, reply }) => {
                        let result = self.start(&volume, size, create).await;
                        let made_nothing = self.is_nothing();
                        if made_nothing {
                            self.disks.unregister(&self.disk, &self.name);
                            // Before the answer: from now on the name is free.
                            commands.close();
                        }
                        let _ = reply.send(result);
                        if made_nothing {
                            return;
                        }
                    }
                    Some(command) => self.apply(command).await,
                    None => return,
                },
                changed = self.disk_state.changed() => match changed {
                    Ok(()) => self.settle().await,
                    Err(_) => return,
                },
                () = tokio::time::sleep(RETRY), if retry => self.settle().await,
            }
        }
    }

    async fn apply(&mut self, command: Command) {
        match command {
            Command::Stop { reply } => {
                let _ = reply.send(self.stop().await);
            }
            Command::Promote { promotion, reply } => {
                let _ = reply.send(self.promote(promotion).await);
            }
            // Handled by `run`, since they may end the owner.
            Command::Start { reply, .. } => drop(reply),
            Command::Delete { reply, .. } => drop(reply),
        }
    }

    fn is_damaged(&self) -> bool {
        matches!(self.export, Export::Damaged(_))
    }

    /// Whether there is no replica of this name, not even a damaged one.
    fn is_nothing(&self) -> bool {
        self.record.is_none() && !self.is_damaged()
    }

    /// Whether there is a replica that is to be stopped.
    fn is_unwanted(&self) -> bool {
        !self.is_damaged() && self.record.as_ref().is_some_and(|record| !record.running)
    }

    fn is_deleted(&self) -> bool {
        self.record.as_ref().is_some_and(|record| record.deleted)
    }

    fn require_disk(&self) -> Result<Arc<ReadyDisk>, AgentError> {
        match &*self.disk_state.borrow() {
            DiskState::Ready(ready) => Ok(ready.clone()),
            DiskState::Away(away) => Err(AgentError::Unavailable(format!("disk '{}': {}", self.disk, away.message))),
        }
    }

    // --- the record ---

    /// Reads the record; what is damaged is kept as the state.
    async fn load(&mut self) {
        let (folder, name) = (self.context.folder.clone(), self.name.clone());
        match blocking(move || ReplicaFile::open(&folder, &name)).await {
            Ok(Ok((file, record))) => {
                self.file = Some(file);
                if let Some(disk) = record.as_ref().map(|record| record.disk.clone()).filter(|disk| *disk != self.disk)
                {
                    // The owner of a damaged record does not know it, or has it from a caller.
                    self.go_to(disk);
                }
                self.record = record;
            }
            Ok(Err(error)) => self.export = Export::Damaged(error.to_string()),
            Err(error) => self.export = Export::Damaged(error.to_string()),
        }
    }

    /// From now on the replica is one of this disk.
    fn go_to(&mut self, disk: String) {
        self.disks.unregister(&self.disk, &self.name);
        self.disks.register_known(&disk, &self.name);
        self.disk_state = self.disks.state(&disk);
        self.disk = disk;
    }

    /// Makes a record durable. On failure it is read again before the next use, because it is unknown which one is on
    /// the disk.
    async fn save(&mut self, record: ReplicaRecord) -> Result<(), AgentError> {
        let lost = || AgentError::Internal("the replica's record is not open".to_owned());
        let mut file = self.file.take().ok_or_else(lost)?;
        let work = move || {
            let saved = file.save(&record);
            (file, record, saved)
        };
        let (file, record, saved) = blocking(work).await?;
        match saved {
            Ok(()) => {
                self.file = Some(file);
                self.record = Some(record);
                Ok(())
            }
            Err(error) => {
                self.load().await;
                Err(error.into())
            }
        }
    }

    /// Removes the record, also one that cannot be read.
    async fn forget(&mut self) -> Result<(), AgentError> {
        self.file = None;
        self.record = None;
        let (folder, name) = (self.context.folder.clone(), self.name.clone());
        Ok(blocking(move || state::remove_replica(&folder, &name)).await??)
    }

    // --- commands ---

    async fn start(&mut self, volume: &str, size: u64, create: bool) -> Result<pb::Replica, AgentError> {
        if self.is_damaged() {
            // What was damaged may have been repaired by hand.
            self.export = Export::Stopped;
            self.load().await;
        }
        if let Export::Damaged(reason) = &self.export {
            let error = AgentError::Damaged(reason.clone());
            self.tell();
            return Err(error);
        }
        let mut record = match &self.record {
            Some(record) if record.deleted => {
                let text = format!("replica '{}' was deleted; its data goes when its disk is back", self.name);
                return Err(AgentError::Exists(text));
            }
            Some(record) => self.check_same(record, volume, size)?.clone(),
            None if create => self.new_record(volume, size).await?,
            None => return Err(AgentError::NotFound { kind: "replica", name: self.name.clone() }),
        };
        if self.record.is_none() || !record.running {
            record.running = true;
            self.save(record).await?;
        }
        self.settle().await;
        match &self.export {
            Export::Damaged(reason) => Err(AgentError::Damaged(reason.clone())),
            // The data plane may be down: the replica is wanted, and that is all that was asked.
            _ => Ok(self.describe()),
        }
    }

    fn check_same<'a>(
        &self,
        record: &'a ReplicaRecord,
        volume: &str,
        size: u64,
    ) -> Result<&'a ReplicaRecord, AgentError> {
        if record.volume != volume {
            let text = format!("replica '{}' is of volume '{}', not of '{volume}'", self.name, record.volume);
            return Err(AgentError::Exists(text));
        }
        if record.size != size {
            let text = format!("replica '{}' has {} bytes, not {size}", self.name, record.size);
            return Err(AgentError::Exists(text));
        }
        Ok(record)
    }

    /// The record of a replica that is to be made; refused where an lvol of its name is.
    async fn new_record(&self, volume: &str, size: u64) -> Result<ReplicaRecord, AgentError> {
        // From here on the disk cannot be removed.
        self.disks.register(&self.disk, &self.name)?;
        let disk = self.require_disk()?;
        if disk.block_bytes != BLOCK_SIZE {
            let text =
                format!("disk '{}' has blocks of {} bytes; replicas need {BLOCK_SIZE}", self.disk, disk.block_bytes);
            return Err(AgentError::Forbidden(text));
        }
        for lvol in [self.name.clone(), meta_lvol_name(&self.name)] {
            let alias = disk.lvol_alias(&lvol);
            if let Some(found) = disk.plane.client.find_bdev(&alias).await? {
                return Err(AgentError::Damaged(format!(
                    "there is an lvol {alias} ({}) without a record: what it holds is unknown, so it is not used; \
                     rename or delete it by hand",
                    found.uuid
                )));
            }
        }
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Ok(ReplicaRecord {
            replica: self.name.clone(),
            volume: volume.to_owned(),
            size,
            disk: self.disk.clone(),
            lvstore: disk.store,
            lvol: None,
            meta: Some(MetaArea::default()),
            uuid: Uuid::new_v4(),
            lineage: String::new(),
            promoted_epoch: 0,
            promoted_instance: String::new(),
            created,
            running: false,
            deleted: false,
        })
    }

    async fn stop(&mut self) -> Result<(), AgentError> {
        if let Some(record) = self.record.clone().filter(|record| record.running) {
            self.save(ReplicaRecord { running: false, ..record }).await?;
        }
        let unmade = self.unmake().await;
        if !self.is_damaged() {
            self.export = match &unmade {
                Ok(()) => Export::Stopped,
                Err(error) => Export::Waiting(format!("not stopped yet: {error}")),
            };
        }
        self.tell();
        unmade
    }

    /// Takes the export away where there may be one. A data plane that is known to have ended has none; one that cannot be
    /// reached has it still, and sessions on it: that is remembered until it is gone.
    async fn unmake(&mut self) -> Result<(), AgentError> {
        self.may_linger = true;
        let status = self.context.plane.borrow().clone();
        match status.plane {
            Some(plane) => export::unmake(&plane, &self.name).await?,
            None if status.ended => {}
            None => {
                let text = format!("the data plane cannot be reached, and may export replica '{}'", self.name);
                return Err(AgentError::Unavailable(format!("{text}: {}", status.reason)));
            }
        }
        self.may_linger = false;
        Ok(())
    }

    /// Removes the lvol and then the record. Of a disk that is gone for long the record stays, as deleted.
    async fn delete(&mut self, disk: &str, permit: Option<Permit>) -> Result<(), AgentError> {
        if self.disk.is_empty() {
            // The record is damaged; the caller knows the disk.
            self.go_to(disk.to_owned());
        }
        if self.is_deleted() {
            return Ok(());
        }
        if let Some(permit) = permit {
            self.check_permit(&permit).await?;
        }
        self.unmake().await?;
        if !self.is_damaged() {
            self.export = Export::Stopped;
        }
        let state = self.disk_state.borrow().clone();
        match state {
            DiskState::Ready(disk) => self.destroy(&disk).await?,
            DiskState::Away(away) if !away.lasting => return self.require_disk().map(drop),
            DiskState::Away(_) => {
                if let Some(record) = self.record.clone() {
                    self.save(ReplicaRecord { deleted: true, running: false, ..record }).await?;
                    self.disks.unregister(&self.disk, &self.name);
                    return Ok(());
                }
            }
        }
        self.forget().await?;
        self.export = Export::Stopped;
        self.disks.unregister(&self.disk, &self.name);
        self.disks.look(&self.disk);
        Ok(())
    }

    /// Whether the record lets the data go (rule 22). Of a disk that is gone for long there is nothing to read.
    async fn check_permit(&self, permit: &Permit) -> Result<(), AgentError> {
        let Some(record) = &self.record else { return Ok(()) };
        let state = self.disk_state.borrow().clone();
        let superblock = match state {
            DiskState::Ready(disk) => read_superblock(&disk, record).await?,
            DiskState::Away(away) if !away.lasting => return self.require_disk().map(drop),
            DiskState::Away(_) => None,
        };
        permit.check(record, superblock.as_ref())
    }

    async fn destroy(&self, disk: &ReadyDisk) -> Result<(), AgentError> {
        let known =
            |lvol: Option<Uuid>, name: &str| lvol.map_or_else(|| disk.lvol_alias(name), |uuid| uuid.to_string());
        let meta_name = meta_lvol_name(&self.name);
        let (data, meta) = match &self.record {
            Some(record) if record.lvstore != disk.store => return Ok(()),
            Some(ReplicaRecord { lvol, meta, .. }) => {
                (known(*lvol, &self.name), meta.as_ref().map(|meta| known(meta.lvol, &meta_name)))
            }
            // A record that cannot be read says that lvols of these names were made here.
            None if self.is_damaged() => (known(None, &self.name), Some(known(None, &meta_name))),
            None => return Ok(()),
        };
        tracing::info!(replica = %self.name, disk = %self.disk, data, meta, "deleting the data");
        for lvol in [Some(data), meta].into_iter().flatten() {
            disk.plane.client.bdev_lvol_delete(&lvol).await?;
        }
        Ok(())
    }

    /// Ends a deletion that had to wait for its disk; true when there is nothing left.
    async fn bury(&mut self) -> bool {
        let state = self.disk_state.borrow().clone();
        let destroyed = match state {
            DiskState::Ready(disk) => self.destroy(&disk).await,
            DiskState::Away(away) if away.reason == "NotDeclared" => Ok(()),
            DiskState::Away(_) => return false,
        };
        let ended = match destroyed {
            Ok(()) => self.forget().await,
            Err(error) => Err(error),
        };
        if let Err(error) = &ended {
            tracing::warn!(replica = %self.name, %error, "cannot remove what is left of a deleted replica yet");
        }
        ended.is_ok()
    }

    async fn promote(&mut self, promotion: Promotion) -> Result<pb::Replica, AgentError> {
        self.check_promotion(&promotion)?;
        let plane = self.require_disk()?.plane.clone();
        self.settle().await;
        let record = self.check_promotion(&promotion)?;
        let (_, instance) = self.power();
        if promotion.expected.as_ref().is_some_and(|expected| *expected != instance) {
            let text = format!("replica '{}' has the instance '{instance}', not {:?}", self.name, promotion.expected);
            return Err(AgentError::Unavailable(text));
        }
        match &self.export {
            Export::Running { .. } => {}
            Export::Stopped => {
                return Err(AgentError::Forbidden(format!("replica '{}' is stopped; start it first", self.name)));
            }
            Export::Waiting(reason) => return Err(AgentError::Unavailable(reason.clone())),
            Export::Damaged(reason) => return Err(AgentError::Damaged(reason.clone())),
        }
        export::drain_all(&plane, &self.name).await?;
        let next = ReplicaRecord {
            promoted_epoch: promotion.epoch,
            promoted_instance: promotion.instance.clone(),
            lineage: promotion.lineage.clone(),
            ..record.clone()
        };
        if next != record {
            self.save(next).await?;
        }
        let host = host_nqn(&promotion.volume, promotion.epoch, &promotion.instance);
        export::allow(&plane, &self.name, &host).await?;
        tracing::info!(replica = %self.name, epoch = promotion.epoch, instance = %promotion.instance, "promoted");
        self.tell();
        Ok(self.describe())
    }

    fn check_promotion(&self, promotion: &Promotion) -> Result<ReplicaRecord, AgentError> {
        if let Export::Damaged(reason) = &self.export {
            return Err(AgentError::Damaged(reason.clone()));
        }
        let not_found = || AgentError::NotFound { kind: "replica", name: self.name.clone() };
        let record = self.record.clone().filter(|record| !record.deleted).ok_or_else(not_found)?;
        if record.volume != promotion.volume {
            let text =
                format!("replica '{}' is of volume '{}', not of '{}'", self.name, record.volume, promotion.volume);
            return Err(AgentError::Forbidden(text));
        }
        let same = record.promoted_epoch == promotion.epoch;
        let other = record.promoted_instance != promotion.instance || record.lineage != promotion.lineage;
        if record.promoted_epoch > promotion.epoch || (same && other) {
            return Err(AgentError::Superseded(format!(
                "replica '{}' was promoted to epoch {} of engine '{}' (lineage '{}'); epoch {} of '{}' is too old",
                self.name,
                record.promoted_epoch,
                record.promoted_instance,
                record.lineage,
                promotion.epoch,
                promotion.instance
            )));
        }
        Ok(record)
    }

    // --- the export ---

    /// Brings the export to where it should be, as far as that can be done now.
    async fn settle(&mut self) {
        if let Some(record) = self.record.clone().filter(|record| record.running)
            && !self.is_damaged()
        {
            self.may_linger = true;
            self.export = self.export_now(&record).await;
        } else if self.may_linger && self.is_unwanted() {
            match self.unmake().await {
                Ok(()) => self.export = Export::Stopped,
                Err(error) => tracing::debug!(replica = %self.name, %error, "its export may be there still"),
            }
        }
        self.tell();
    }

    async fn export_now(&mut self, record: &ReplicaRecord) -> Export {
        let disk = match self.require_disk() {
            Ok(disk) => disk,
            Err(error) => return Export::Waiting(error.to_string()),
        };
        if matches!(&self.export, Export::Running { opening, .. } if *opening == disk.opening) {
            return self.export.clone();
        }
        let host = host_nqn(&record.volume, record.promoted_epoch, &record.promoted_instance);
        let keep = (!record.is_fresh()).then_some(host.as_str());
        let made = match self.ensure_lvols(&disk, record).await {
            Ok(lvols) => export::make(&disk.plane, record, lvols, self.context.data_address, keep).await,
            Err(error) => Err(error),
        };
        match made {
            Ok(()) => Export::Running { opening: disk.opening, instance: disk.plane.instance.clone() },
            Err(error @ AgentError::Damaged(_)) => Export::Damaged(error.to_string()),
            Err(error) => {
                tracing::warn!(replica = %self.name, %error, "cannot export the replica yet");
                Export::Waiting(error.to_string())
            }
        }
    }

    async fn ensure_lvols(&mut self, disk: &ReadyDisk, record: &ReplicaRecord) -> Result<Lvols, AgentError> {
        let data = self.ensure_lvol(disk, record).await?;
        let meta = match &record.meta {
            Some(area) => Some(self.ensure_meta(disk, area.lvol, record.size).await?),
            None => None,
        };
        Ok(Lvols { data, meta })
    }

    /// The replica's meta lvol. When the one that the record names is gone a new one takes its place: an engine finds
    /// that it holds nothing, and takes every region for one in which members may differ.
    async fn ensure_meta(&mut self, disk: &ReadyDisk, known: Option<Uuid>, size: u64) -> Result<Uuid, AgentError> {
        let damaged = |text: String| Err(AgentError::Damaged(text));
        let client = &disk.plane.client;
        let bytes = MetaArea::bytes_for(size).map_err(|error| AgentError::Internal(error.to_string()))?;
        let name = meta_lvol_name(&self.name);
        let alias = disk.lvol_alias(&name);
        let found = client.find_bdev(&alias).await?;
        let has = found.as_ref().map_or(0, |bdev| bdev.size());
        match (known, found.and_then(|bdev| bdev.uuid.parse::<Uuid>().ok())) {
            (Some(lvol), Some(uuid)) if lvol != uuid => {
                return damaged(format!("lvol {alias} is {uuid}, not the replica's {lvol}"));
            }
            (Some(_), Some(_)) if has < bytes => {
                return damaged(format!("lvol {alias} has {has} bytes; the replica's meta area needs {bytes}"));
            }
            (Some(lvol), Some(_)) => return Ok(lvol),
            (Some(lvol), None) => {
                tracing::error!(replica = %self.name, %lvol, "the meta area is gone; an empty one takes its place");
                self.save_meta(None).await?;
            }
            // Begun by a start that did not end.
            (None, Some(uuid)) => client.bdev_lvol_delete(&uuid.to_string()).await?,
            (None, None) => {}
        }
        let lvol = client.create_thin_lvol(&disk.store, &name, bytes.div_ceil(CLUSTER_BYTES)).await?;
        self.save_meta(Some(lvol)).await?;
        self.disks.look(&self.disk);
        Ok(lvol)
    }

    async fn save_meta(&mut self, lvol: Option<Uuid>) -> Result<(), AgentError> {
        let lost = || AgentError::Internal("the replica's record is not open".to_owned());
        let record = self.record.clone().ok_or_else(lost)?;
        self.save(ReplicaRecord { meta: Some(MetaArea { lvol }), ..record }).await
    }

    /// The replica's lvol. It is made only for a record that names none yet.
    async fn ensure_lvol(&mut self, disk: &ReadyDisk, record: &ReplicaRecord) -> Result<Uuid, AgentError> {
        let damaged = |text: String| Err(AgentError::Damaged(text));
        if disk.store != record.lvstore {
            return damaged(format!("disk '{}' is lvstore {}, not {}", self.disk, disk.store, record.lvstore));
        }
        let alias = disk.lvol_alias(&self.name);
        let found = disk.plane.client.find_bdev(&alias).await?;
        let uuid = found.as_ref().and_then(|bdev| bdev.uuid.parse::<Uuid>().ok());
        match (record.lvol, uuid) {
            (Some(lvol), Some(uuid)) if lvol != uuid => {
                return damaged(format!("lvol {alias} is {uuid}, not the replica's {lvol}"));
            }
            (Some(lvol), None) => return damaged(format!("lvol {alias} ({lvol}) is gone, although it held data")),
            _ => {}
        }
        if let Some(bdev) = found.filter(|bdev| bdev.size() < record.size) {
            return damaged(format!("lvol {alias} has {} bytes; the replica has {}", bdev.size(), record.size));
        }
        let lvol = match uuid {
            Some(uuid) => uuid,
            None => {
                let size_mib = record.size.div_ceil(CLUSTER_BYTES);
                disk.plane.client.create_thin_lvol(&disk.store, &self.name, size_mib).await?
            }
        };
        if record.lvol.is_none() {
            self.save(ReplicaRecord { lvol: Some(lvol), ..record.clone() }).await?;
            self.disks.look(&self.disk);
        }
        Ok(lvol)
    }

    // --- telling ---

    fn tell(&self) {
        // A name that was asked for but never made is nothing to tell of.
        let is_there = self.record.is_some() && !self.is_deleted();
        if is_there || matches!(self.export, Export::Damaged(_)) {
            self.context.hub.set(Key::Replica(self.name.clone()), Object::Replica(self.describe()));
        }
    }

    /// Whether the disk has a volatile cache, and its instance. Of one that is not open any more nothing is known.
    fn power(&self) -> (bool, String) {
        match (&self.export, &*self.disk_state.borrow()) {
            (Export::Running { opening, .. }, DiskState::Ready(disk)) if *opening == disk.opening => {
                (disk.volatile, disk.instance(&self.context.machine))
            }
            _ => (true, String::new()),
        }
    }

    fn describe(&self) -> pb::Replica {
        let (volatile, power) = self.power();
        let (state, message, instance) = match &self.export {
            Export::Stopped => (pb::State::Stopped, String::new(), String::new()),
            Export::Waiting(reason) => (pb::State::Starting, reason.clone(), String::new()),
            Export::Running { instance, .. } => (pb::State::Running, String::new(), instance.clone()),
            Export::Damaged(reason) => (pb::State::Error, reason.clone(), String::new()),
        };
        let address = pb::Address {
            traddr: self.context.data_address.ip().to_string(),
            trsvcid: u32::from(self.context.data_address.port()),
            nqn: replica_nqn(&self.name),
        };
        let record = self.record.as_ref();
        pb::Replica {
            name: self.name.clone(),
            volume: record.map(|record| record.volume.clone()).unwrap_or_default(),
            disk: self.disk.clone(),
            size_bytes: record.map_or(0, |record| record.size),
            state: state.into(),
            message,
            address: Some(address),
            fresh: record.is_some_and(ReplicaRecord::is_fresh),
            promoted_epoch: record.map_or(0, |record| record.promoted_epoch),
            promoted_instance: record.map(|record| record.promoted_instance.clone()).unwrap_or_default(),
            data_plane_instance: instance,
            allocated_bytes: self.disks.allocated(&self.disk, &self.name),
            lineage: record.map(|record| record.lineage.clone()).unwrap_or_default(),
            volatile,
            instance: power,
        }
    }
}
