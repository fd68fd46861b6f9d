//! Copies of volumes on this node.
//!
//! *What it is.* [`Replicas`] finds the replicas in the agent's state and gives each an owner task (see `owner`), which
//! alone changes its record, its lvol and its export. Calls are sent to the owner and answered by it, so two calls about one replica
//! never run at once, and calls about different replicas never wait for each other.
//!
//! *Invariants.* A name is used once on a node. Every call has a deadline. Nobody may connect to a replica until a
//! promote (rules 13 and 14).
//!
//! *When things fail.* [`AgentError`]. A replica with damaged state has an owner as well: it is listed with its error,
//! cannot be started, and can be deleted.

mod export;
mod owner;
mod permit;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use addax_api::{name, nqn};
use addax_proto::engine_v1 as pb;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use crate::disk::{CLUSTER_BYTES, Disks};
use crate::error::{AgentError, blocking};
use crate::hub::{Hub, Key};
use crate::machine::Machine;
use crate::state;
use crate::supervise::PlaneStatus;
pub(crate) use export::serial;
use owner::{Command, Owner};
pub use permit::Permit;

/// Calls that may wait for one replica.
const QUEUE_MAX: usize = 16;
/// Deadline of a call; a promote may have to drain sessions first.
const CALL_DEADLINE: Duration = Duration::from_secs(40);
/// How long draining old sessions may take.
pub const DRAIN_DEADLINE: Duration = Duration::from_secs(15);

/// What the owners of replicas share.
#[derive(Clone, Debug)]
pub struct ReplicaContext {
    /// Folder of the replicas' records.
    pub folder: PathBuf,
    /// The data plane.
    pub plane: watch::Receiver<PlaneStatus>,
    /// Where changes are told.
    pub hub: Hub,
    /// Where the data plane listens.
    pub data_address: SocketAddr,
    /// What replicas say of their power.
    pub machine: Machine,
    /// Ends the owners.
    pub shutdown: CancellationToken,
}

/// What is asked of a promote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promotion {
    /// The volume.
    pub volume: String,
    /// The epoch.
    pub epoch: u64,
    /// The engine instance.
    pub instance: String,
    /// The lineage.
    pub lineage: String,
    /// When set: what the replica's instance has to be (consistency rule 1).
    pub expected: Option<String>,
}

#[derive(Clone, Debug)]
struct Handle {
    disk: String,
    commands: mpsc::Sender<Command>,
}

/// The replicas of this node; cheap to clone.
#[derive(Clone, Debug)]
pub struct Replicas {
    disks: Disks,
    context: ReplicaContext,
    owners: Arc<Mutex<BTreeMap<String, Handle>>>,
}

impl Replicas {
    /// Finds the replicas in the agent's state and gives each its owner.
    ///
    /// # Errors
    /// [`AgentError::Internal`] when the folder cannot be used.
    pub async fn open(disks: Disks, context: ReplicaContext) -> Result<Self, AgentError> {
        let folder = context.folder.clone();
        let replicas = Self { disks, context, owners: Arc::default() };
        let found = blocking(move || {
            let unusable = |error: std::io::Error| AgentError::Internal(format!("{}: {error}", folder.display()));
            std::fs::create_dir_all(&folder).map_err(unusable)?;
            let names = state::replica_names(&folder)?.into_iter();
            let load = |name: String| {
                let record = state::ReplicaFile::open(&folder, &name);
                (name, record.ok().and_then(|(_, record)| record))
            };
            Ok::<_, AgentError>(names.map(load).collect::<Vec<_>>())
        })
        .await??;
        for (name, record) in found.into_iter().filter(|(name, _)| check_name("name", name).is_ok()) {
            // Of a damaged record nobody knows the disk.
            let disk = record.as_ref().map(|record| record.disk.clone()).unwrap_or_default();
            if record.is_some_and(|record| !record.deleted) {
                replicas.disks.register_known(&disk, &name);
            }
            replicas.owner_on(&name, &disk)?;
            replicas.disks.look(&disk);
        }
        Ok(replicas)
    }

    /// Whether a replica of that name is on this node.
    pub fn has(&self, name: &str) -> bool {
        self.lock().get(name).is_some_and(|handle| !handle.commands.is_closed())
    }

    /// All replicas.
    pub fn list(&self) -> Vec<pb::Replica> {
        let names: Vec<String> = self.lock().keys().cloned().collect();
        names.iter().filter_map(|name| self.context.hub.replica(name)).collect()
    }

    /// Makes and exports a replica.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn start(&self, request: pb::StartReplicaRequest) -> Result<pb::Replica, AgentError> {
        check_name("name", &request.name)?;
        name::validate_volume_name(&request.volume).map_err(|error| invalid("volume", &request.volume, error))?;
        check_size(request.size_bytes)?;
        let known = self.has(&request.name);
        if !known && request.name.ends_with(state::META_SUFFIX) {
            let allowed = format!("names that end in '{}' are those of meta areas", state::META_SUFFIX);
            return Err(invalid("name", &request.name, allowed));
        }
        if !request.create && !known {
            return Err(not_found(&request.name));
        }
        if !known {
            // The owner does so again; here an unknown disk is refused before there is an owner.
            self.disks.register(&request.disk, &request.name)?;
        }
        let handle = self.owner_on(&request.name, &request.disk).inspect_err(|_| {
            // Its owner is on another disk.
            if !known {
                self.disks.unregister(&request.disk, &request.name);
            }
        })?;
        let (volume, size, create) = (request.volume, request.size_bytes, request.create);
        // If nothing is made, the owner itself frees the name: this call may be given up before the answer.
        ask(&handle, |reply| Command::Start { volume, size, create, reply }).await
    }

    /// Takes the export away.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn stop(&self, name: &str) -> Result<(), AgentError> {
        let handle = self.owner(name)?;
        ask(&handle, |reply| Command::Stop { reply }).await
    }

    /// Removes a replica with its data, whatever it knows. Absent is fine.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn delete(&self, name: &str, disk: &str) -> Result<(), AgentError> {
        self.delete_by(name, disk, None).await
    }

    /// Removes a replica with its data, by a record that it must not know as much as. Absent is fine.
    ///
    /// # Errors
    /// [`AgentError::Forbidden`] when it does.
    pub async fn delete_by(&self, name: &str, disk: &str, permit: Option<Permit>) -> Result<(), AgentError> {
        check_name("name", name)?;
        if !self.has(name) {
            // An lvol without a record is nobody's: it is listed, not deleted (rule 22).
            return Ok(());
        }
        let handle = self.owner_on(name, disk)?;
        let disk_name = disk.to_owned();
        ask(&handle, |reply| Command::Delete { disk: disk_name, permit, reply }).await?;
        self.context.hub.remove(Key::Replica(name.to_owned()));
        Ok(())
    }

    /// Raises a replica's epoch; see the proto file.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn promote(&self, name: &str, promotion: Promotion) -> Result<pb::Replica, AgentError> {
        if promotion.epoch == 0 {
            return Err(invalid("epoch", "0", "epochs count from 1"));
        }
        if promotion.instance.is_empty() || promotion.instance.contains(':') || promotion.instance.len() > 64 {
            return Err(invalid("engine_instance", &promotion.instance, "1 to 64 characters without ':' are allowed"));
        }
        if promotion.lineage.is_empty() || promotion.lineage.len() > 64 {
            return Err(invalid("lineage", &promotion.lineage, "1 to 64 characters are allowed"));
        }
        let handle = self.owner(name)?;
        ask(&handle, |reply| Command::Promote { promotion, reply }).await
    }

    fn owner(&self, name: &str) -> Result<Handle, AgentError> {
        let handle = self.lock().get(name).cloned().filter(|handle| !handle.commands.is_closed());
        handle.ok_or_else(|| not_found(name))
    }

    /// The owner of a replica on that disk; a new one when the name is not in use.
    fn owner_on(&self, name: &str, disk: &str) -> Result<Handle, AgentError> {
        let mut owners = self.lock();
        if let Some(handle) = owners.get(name).filter(|handle| !handle.commands.is_closed()) {
            if handle.disk != disk && !handle.disk.is_empty() {
                let text = format!("replica '{name}' is on disk '{}', not on '{disk}'", handle.disk);
                return Err(AgentError::Exists(text));
            }
            return Ok(handle.clone());
        }
        owners.retain(|_, handle| !handle.commands.is_closed());
        let (commands, queue) = mpsc::channel(QUEUE_MAX);
        let owner = Owner::new(name, disk, self.disks.clone(), self.context.clone());
        tokio::spawn(owner.run(queue));
        let handle = Handle { disk: disk.to_owned(), commands };
        owners.insert(name.to_owned(), handle.clone());
        Ok(handle)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Handle>> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn ask<T>(
    handle: &Handle,
    command: impl FnOnce(oneshot::Sender<Result<T, AgentError>>) -> Command,
) -> Result<T, AgentError> {
    let (reply, answer) = oneshot::channel();
    let exchange = async {
        let ended = || AgentError::Unavailable("the replica is being deleted or the agent ends".to_owned());
        handle.commands.send(command(reply)).await.map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    };
    let late = || AgentError::Unavailable(format!("not done within {CALL_DEADLINE:?}; it may still be under way"));
    tokio::time::timeout(CALL_DEADLINE, exchange).await.map_err(|_| late())?
}

fn not_found(name: &str) -> AgentError {
    AgentError::NotFound { kind: "replica", name: name.to_owned() }
}

fn invalid(field: &'static str, value: &str, allowed: impl ToString) -> AgentError {
    AgentError::Invalid { field, value: value.to_owned(), allowed: allowed.to_string() }
}

fn check_name(field: &'static str, value: &str) -> Result<(), AgentError> {
    name::validate_label(field, value, name::MAX_LABEL).map_err(|error| invalid(field, value, error))
}

fn check_size(size: u64) -> Result<(), AgentError> {
    let max = u64::try_from(addax_api::volume::MAX_SIZE_BYTES).unwrap_or(u64::MAX);
    if size == 0 || !size.is_multiple_of(CLUSTER_BYTES) || size > max {
        let allowed = format!("a multiple of {CLUSTER_BYTES} from {CLUSTER_BYTES} to {max} bytes is allowed");
        return Err(invalid("size_bytes", &size.to_string(), allowed));
    }
    Ok(())
}

/// The host that a promotion lets in.
fn host_nqn(volume: &str, epoch: u64, instance: &str) -> String {
    nqn::engine_host_nqn(volume, epoch, instance)
}

#[cfg(test)]
mod tests;
