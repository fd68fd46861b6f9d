//! The owner task of one replica: its files, its export, its epoch.
//!
//! *States.* `Stopped` (no export), `Starting` (wanted, but the data plane is down or refused; tried again),
//! `Running`, `Error` (damaged; a call has to act).
//!
//! *Invariants.*
//! - The order of a promote: check, end and drain all sessions, make `(g, e)` durable, let the new host in. A crash
//!   between any two steps leaves nobody in, or the old host with the old record.
//! - Also a promote to the same `(g, e)` ends and drains what is there: every session begins on a quiet disk.
//! - Whether it should run is durable, so that a restart of agent and data plane needs no manager.
//!
//! *When things fail.* A data plane that restarts is given the export again, with nobody on its allow-list. Steps that
//! fail are tried again every [`RETRY`].

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use addax_api::nqn::replica_nqn;
use addax_proto::engine_v1 as pb;
use pb::event::Object;
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use super::{Promotion, ReplicaContext, export, host_nqn};
use crate::error::{AgentError, blocking};
use crate::hub::Key;
use crate::state::{self, ReplicaFiles, ReplicaRecord, StateError};
use crate::supervise::Plane;

/// Pause before a failed export is tried again.
const RETRY: Duration = Duration::from_secs(1);

type Reply<T> = oneshot::Sender<Result<T, AgentError>>;

/// What an owner is asked for.
#[derive(Debug)]
pub(super) enum Command {
    Start { volume: String, size: u64, create: bool, reply: Reply<pb::Replica> },
    Stop { reply: Reply<()> },
    Delete { reply: Reply<()> },
    Promote { promotion: Promotion, reply: Reply<pb::Replica> },
}

/// Where the export is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Export {
    Stopped,
    /// Wanted; why it is not there.
    Waiting(String),
    /// There, in this instance of the data plane.
    Running(String),
    /// Damaged.
    Damaged(String),
}

pub(super) struct Owner {
    name: String,
    disk: String,
    folder: PathBuf,
    context: ReplicaContext,
    files: Option<ReplicaFiles>,
    record: Option<ReplicaRecord>,
    export: Export,
}

impl Owner {
    pub(super) fn new(name: &str, disk: &str, folder: &Path, context: ReplicaContext) -> Self {
        Self {
            name: name.to_owned(),
            disk: disk.to_owned(),
            folder: folder.to_owned(),
            context,
            files: None,
            record: None,
            export: Export::Stopped,
        }
    }

    pub(super) async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        self.load().await;
        self.settle().await;
        let mut plane = self.context.plane.clone();
        let shutdown = self.context.shutdown.clone();
        loop {
            let retry = matches!(self.export, Export::Waiting(_)) && self.plane().is_some();
            tokio::select! {
                () = shutdown.cancelled() => return,
                command = commands.recv() => match command {
                    Some(Command::Delete { reply }) => {
                        let result = self.delete().await;
                        let gone = result.is_ok();
                        let _ = reply.send(result);
                        if gone {
                            return;
                        }
                    }
                    Some(command) => self.apply(command).await,
                    None => return,
                },
                changed = plane.changed() => match changed {
                    Ok(()) => self.settle().await,
                    Err(_) => return,
                },
                () = tokio::time::sleep(RETRY), if retry => self.settle().await,
            }
        }
    }

    async fn apply(&mut self, command: Command) {
        match command {
            Command::Start { volume, size, create, reply } => {
                let _ = reply.send(self.start(&volume, size, create).await);
            }
            Command::Stop { reply } => {
                let _ = reply.send(self.stop().await);
            }
            Command::Promote { promotion, reply } => {
                let _ = reply.send(self.promote(promotion).await);
            }
            // Handled by `run`, since it ends the owner.
            Command::Delete { reply } => drop(reply),
        }
    }

    fn plane(&self) -> Option<std::sync::Arc<Plane>> {
        self.context.plane.borrow().plane.clone()
    }

    fn require_plane(&self) -> Result<std::sync::Arc<Plane>, AgentError> {
        let status = self.context.plane.borrow();
        let down = || AgentError::Unavailable(format!("the data plane is down: {}", status.reason));
        status.plane.clone().ok_or_else(down)
    }

    // --- files ---

    /// Reads the files; what is damaged is kept as the state.
    async fn load(&mut self) {
        let (folder, name) = (self.folder.clone(), self.name.clone());
        match blocking(move || ReplicaFiles::open(&folder, &name)).await {
            Ok(Ok((files, record))) => {
                self.files = Some(files);
                self.record = record;
            }
            Ok(Err(error)) => self.export = Export::Damaged(error.to_string()),
            Err(error) => self.export = Export::Damaged(error.to_string()),
        }
    }

    /// Makes a record durable. On failure the files are read again before the next use, because it is unknown which
    /// record is on the disk.
    async fn save(&mut self, record: ReplicaRecord, with_image: bool) -> Result<(), AgentError> {
        let lost = || AgentError::Internal("the replica's files are not open".to_owned());
        let mut files = self.files.take().ok_or_else(lost)?;
        let work = move || {
            let saved = files.save(&record);
            let saved = saved.and_then(|()| if with_image { files.ensure_image(&record) } else { Ok(()) });
            (files, record, saved)
        };
        let (files, record, saved) = blocking(work).await?;
        match saved {
            Ok(()) => {
                self.files = Some(files);
                self.record = Some(record);
                Ok(())
            }
            Err(error) => {
                self.load().await;
                Err(error.into())
            }
        }
    }

    // --- commands ---

    async fn start(&mut self, volume: &str, size: u64, create: bool) -> Result<pb::Replica, AgentError> {
        if matches!(self.export, Export::Damaged(_)) {
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
            Some(record) => self.check_same(record, volume, size)?.clone(),
            None if create => self.new_record(volume, size),
            None => return Err(AgentError::NotFound { kind: "replica", name: self.name.clone() }),
        };
        if self.record.is_none() || !record.running {
            record.running = true;
            self.save(record, true).await?;
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

    fn new_record(&self, volume: &str, size: u64) -> ReplicaRecord {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        ReplicaRecord {
            replica: self.name.clone(),
            volume: volume.to_owned(),
            size,
            uuid: Uuid::new_v4(),
            lineage: String::new(),
            promoted_epoch: 0,
            promoted_instance: String::new(),
            created,
            running: false,
        }
    }

    async fn stop(&mut self) -> Result<(), AgentError> {
        if let Some(record) = self.record.clone().filter(|record| record.running) {
            self.save(ReplicaRecord { running: false, ..record }, false).await?;
        }
        self.unmake().await?;
        if !matches!(self.export, Export::Damaged(_)) {
            self.export = Export::Stopped;
        }
        self.tell();
        Ok(())
    }

    /// Takes the export away where there may be one. While the data plane is down there is none.
    async fn unmake(&self) -> Result<(), AgentError> {
        match self.plane() {
            Some(plane) => export::unmake(&plane, &self.name).await,
            None => Ok(()),
        }
    }

    async fn delete(&mut self) -> Result<(), AgentError> {
        self.unmake().await?;
        self.export = Export::Stopped;
        self.files = None;
        self.record = None;
        let (folder, name) = (self.folder.clone(), self.name.clone());
        Ok(blocking(move || state::delete_replica_files(&folder, &name)).await??)
    }

    async fn promote(&mut self, promotion: Promotion) -> Result<pb::Replica, AgentError> {
        let plane = self.require_plane()?;
        let record = self.check_promotion(&promotion)?;
        self.settle().await;
        match &self.export {
            Export::Running(_) => {}
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
            self.save(next, false).await?;
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
        let record = self.record.clone().ok_or_else(not_found)?;
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
            && !matches!(self.export, Export::Damaged(_))
        {
            self.export = self.export_now(&record).await;
        }
        self.tell();
    }

    async fn export_now(&self, record: &ReplicaRecord) -> Export {
        let plane = match self.require_plane() {
            Ok(plane) => plane,
            Err(error) => return Export::Waiting(error.to_string()),
        };
        if self.export == Export::Running(plane.instance.clone()) {
            return self.export.clone();
        }
        let Some(files) = &self.files else {
            return Export::Waiting("the replica's files are not open".to_owned());
        };
        match files.ensure_image(record) {
            Ok(()) => {}
            Err(error @ (StateError::ImageGone(_) | StateError::ImageSize { .. })) => {
                return Export::Damaged(error.to_string());
            }
            Err(error) => return Export::Waiting(error.to_string()),
        }
        let host = host_nqn(&record.volume, record.promoted_epoch, &record.promoted_instance);
        let keep = (!record.is_fresh()).then_some(host.as_str());
        match export::make(&plane, record, &files.image(), self.context.data_address, keep).await {
            Ok(()) => Export::Running(plane.instance.clone()),
            Err(error @ AgentError::Damaged(_)) => Export::Damaged(error.to_string()),
            Err(error) => {
                tracing::warn!(replica = %self.name, %error, "cannot export the replica yet");
                Export::Waiting(error.to_string())
            }
        }
    }

    // --- telling ---

    fn tell(&self) {
        // A name that was asked for but never made is nothing to tell of.
        if self.record.is_some() || matches!(self.export, Export::Damaged(_)) {
            self.context.hub.set(Key::Replica(self.name.clone()), Object::Replica(self.describe()));
        }
    }

    fn describe(&self) -> pb::Replica {
        let (state, message, instance) = match &self.export {
            Export::Stopped => (pb::State::Stopped, String::new(), String::new()),
            Export::Waiting(reason) => (pb::State::Starting, reason.clone(), String::new()),
            Export::Running(instance) => (pb::State::Running, String::new(), instance.clone()),
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
            allocated_bytes: self.files.as_ref().map_or(0, ReplicaFiles::allocated_bytes),
            lineage: record.map(|record| record.lineage.clone()).unwrap_or_default(),
        }
    }
}
