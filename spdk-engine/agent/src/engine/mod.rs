//! Engines: volumes served by this node.
//!
//! *What it is.* [`Engines`] keeps one owner task (see `owner`) per volume that a manager asked for, remembers the
//! wishes durably, and wakes owners by the data plane's events.
//!
//! ```text
//! StartEngine ─▶ owner ─▶ open (record, CAS g+1, promotes, CAS, attach, mirror) ─▶ export ─▶ swaps, hosts, replicas
//!                  ▲                                                                   │
//!                  └── data plane restarted, while the record is still ours ───────────┘
//! ```
//! *Invariants.* One owner per volume. What a manager asked for is durable before it is begun. An engine is opened
//! without being asked only when the record at the arbiter is this agent's own: otherwise another node has taken over.
//!
//! *When things fail.* [`AgentError`] for calls; the state of an engine carries the reason in its message.

mod array;
mod build;
mod device;
mod events;
mod open;
mod owner;
mod peers;
mod raid;
mod recover;
mod swaps;

pub use peers::Peers;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use addax_api::name;
use addax_proto::engine_v1 as pb;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::arbiter::Arbiter;
use crate::error::{AgentError, blocking};
use crate::hub::{Hub, Key};
use crate::machine::Machine;
use crate::state::slots::SlotsError;
use crate::state::{EngineStore, EngineWish, MemberWish};
use crate::supervise::PlaneStatus;
use owner::{Command, Owner};

/// Calls that may wait for one engine.
const QUEUE_MAX: usize = 16;
/// Deadline of a call. Closing drains and flushes first; see `owner::CLOSE_DEADLINE`.
const CALL_DEADLINE: Duration = Duration::from_secs(90);
/// Most replicas of a volume.
const MEMBERS_MAX: usize = mirror_core::LEGS_MAX;
/// Most hosts on an allow-list.
const HOSTS_MAX: usize = 128;

/// How often the progress of rebuilds is told; every step would be a stream of events up to the API.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

/// What the owners of engines share.
#[derive(Clone, Debug)]
pub struct EngineContext {
    /// The data plane.
    pub plane: watch::Receiver<PlaneStatus>,
    /// Where changes are told.
    pub hub: Hub,
    /// Where the data plane listens.
    pub data_address: SocketAddr,
    /// Where records are kept.
    pub arbiter: Arc<dyn Arbiter>,
    /// The agents of replicas.
    pub peers: Peers,
    /// This machine.
    pub machine: Machine,
    /// Ends the owners.
    pub shutdown: CancellationToken,
}

/// How one engine is woken.
#[derive(Debug, Default)]
struct Signals {
    /// The mirror may have a swap pending.
    swaps: Notify,
    /// The owner should look.
    changes: Notify,
    state: Mutex<SignalState>,
}

#[derive(Debug, Default)]
struct SignalState {
    stale: bool,
    progress: BTreeMap<String, (u64, u64)>,
    progress_told: Option<Instant>,
}

impl Signals {
    fn lock(&self) -> std::sync::MutexGuard<'_, SignalState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stale(&self) {
        self.lock().stale = true;
        self.changes.notify_one();
    }

    fn set_progress(&self, replica: &str, copied: u64, total: u64) {
        let mut state = self.lock();
        state.progress.insert(replica.to_owned(), (copied, total));
        let now = Instant::now();
        // The end of a rebuild is told by another event, so the last of these may wait.
        if state.progress_told.is_none_or(|told| now.duration_since(told) >= PROGRESS_INTERVAL) {
            state.progress_told = Some(now);
            self.changes.notify_one();
        }
    }

    /// What happened since the last time: whether the mirror must be read, and how far rebuilds are.
    fn take(&self) -> (bool, BTreeMap<String, (u64, u64)>) {
        let mut state = self.lock();
        (std::mem::take(&mut state.stale), std::mem::take(&mut state.progress))
    }
}

#[derive(Clone, Debug)]
struct Handle {
    commands: mpsc::Sender<Command>,
    signals: Arc<Signals>,
}

/// The durable wishes. Writes block, so they run away from the reactor threads.
#[derive(Clone, Debug)]
struct Wishes(Arc<Mutex<EngineStore>>);

impl Wishes {
    async fn change<F>(&self, work: F) -> Result<(), AgentError>
    where
        F: FnOnce(&mut EngineStore) -> Result<(), SlotsError> + Send + 'static,
    {
        let store = self.0.clone();
        blocking(move || work(&mut store.lock().unwrap_or_else(PoisonError::into_inner))).await??;
        Ok(())
    }

    async fn put(&self, wish: &EngineWish) -> Result<(), AgentError> {
        let wish = wish.clone();
        self.change(move |store| store.put(&wish)).await
    }

    async fn remove(&self, volume: &str) -> Result<(), AgentError> {
        let volume = volume.to_owned();
        self.change(move |store| store.remove(&volume)).await
    }
}

/// The engines of this node; cheap to clone.
#[derive(Clone, Debug)]
pub struct Engines {
    context: EngineContext,
    wishes: Wishes,
    owners: Arc<Mutex<BTreeMap<String, Handle>>>,
}

impl Engines {
    /// Puts back the engines that the store tells of.
    pub fn open(store: EngineStore, context: EngineContext) -> Self {
        let wishes: Vec<EngineWish> = store.all().cloned().collect();
        let engines = Self { context, wishes: Wishes(Arc::new(Mutex::new(store))), owners: Arc::default() };
        for wish in wishes {
            engines.spawn(wish, false);
        }
        let (status, shutdown) = (engines.context.plane.clone(), engines.context.shutdown.clone());
        tokio::spawn(events::run(engines.clone(), status, shutdown));
        engines
    }

    /// All engines.
    pub fn list(&self) -> Vec<pb::Engine> {
        let volumes: Vec<String> = self.lock().keys().cloned().collect();
        volumes.iter().filter_map(|volume| self.context.hub.engine(volume)).collect()
    }

    /// One engine.
    ///
    /// # Errors
    /// [`AgentError::NotFound`].
    pub fn get(&self, volume: &str) -> Result<pb::Engine, AgentError> {
        self.context.hub.engine(volume).ok_or_else(|| not_found(volume))
    }

    /// Opens a volume, or gives an engine that is there new members and hosts.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn start(&self, request: pb::StartEngineRequest) -> Result<pb::Engine, AgentError> {
        let wish = parse_wish(request)?;
        let status = self.context.plane.borrow().plane.clone();
        if status.is_some_and(|plane| !plane.can_serve()) {
            let text = "the data plane of this node has neither a mirror nor a raid1: it holds replicas, not engines";
            return Err(AgentError::Forbidden(text.to_owned()));
        }
        let volume = wish.volume.clone();
        let known = self.handle(&volume);
        let handle = match known {
            Some(handle) => handle,
            None => {
                self.wishes.put(&wish).await?;
                self.spawn(wish.clone(), true)
            }
        };
        self.ask(&handle, |reply| Command::Start { wish, reply }).await
    }

    /// Closes a volume. Absent is fine.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn stop(&self, volume: &str) -> Result<pb::Engine, AgentError> {
        let stopped = |epoch| pb::Engine {
            volume: volume.to_owned(),
            state: pb::State::Stopped.into(),
            epoch,
            ..pb::Engine::default()
        };
        let Some(handle) = self.handle(volume) else { return Ok(stopped(0)) };
        let epoch = self.ask(&handle, |reply| Command::Stop { reply }).await?;
        self.lock().remove(volume);
        self.context.hub.remove(Key::Engine(volume.to_owned()));
        Ok(stopped(epoch))
    }

    /// Starts a rebuild of a replica.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn add_replica(&self, volume: &str, member: Option<pb::Member>) -> Result<pb::Engine, AgentError> {
        let member = parse_member(member.unwrap_or_default())?;
        let handle = self.handle(volume).ok_or_else(|| not_found(volume))?;
        self.ask(&handle, |reply| Command::AddReplica { member, reply }).await
    }

    /// Takes a replica out.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn remove_replica(&self, volume: &str, replica: &str) -> Result<pb::Engine, AgentError> {
        let handle = self.handle(volume).ok_or_else(|| not_found(volume))?;
        let replica = replica.to_owned();
        self.ask(&handle, |reply| Command::RemoveReplica { replica, reply }).await
    }

    /// Replaces the allow-list.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn set_hosts(&self, volume: &str, hosts: Vec<String>) -> Result<pb::Engine, AgentError> {
        check_hosts(&hosts)?;
        let handle = self.handle(volume).ok_or_else(|| not_found(volume))?;
        self.ask(&handle, |reply| Command::SetHosts { hosts, reply }).await
    }

    fn spawn(&self, wish: EngineWish, asked: bool) -> Handle {
        let mut owners = self.lock();
        if let Some(handle) = owners.get(&wish.volume).filter(|handle| !handle.commands.is_closed()) {
            return handle.clone();
        }
        let (commands, queue) = mpsc::channel(QUEUE_MAX);
        let handle = Handle { commands, signals: Arc::default() };
        owners.insert(wish.volume.clone(), handle.clone());
        let owner = Owner::new(wish, asked, self.context.clone(), self.wishes.clone(), handle.signals.clone());
        tokio::spawn(owner.run(queue));
        handle
    }

    fn signals(&self, volume: &str) -> Option<Arc<Signals>> {
        self.lock().get(volume).map(|handle| handle.signals.clone())
    }

    fn wake_all(&self) {
        for handle in self.lock().values() {
            handle.signals.swaps.notify_one();
            handle.signals.stale();
        }
    }

    fn handle(&self, volume: &str) -> Option<Handle> {
        self.lock().get(volume).filter(|handle| !handle.commands.is_closed()).cloned()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Handle>> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn ask<T>(
        &self,
        handle: &Handle,
        command: impl FnOnce(oneshot::Sender<Result<T, AgentError>>) -> Command,
    ) -> Result<T, AgentError> {
        let (reply, answer) = oneshot::channel();
        let exchange = async {
            let ended = || AgentError::Unavailable("the engine has just been stopped, or the agent ends".to_owned());
            handle.commands.send(command(reply)).await.map_err(|_| ended())?;
            answer.await.map_err(|_| ended())?
        };
        let late = || AgentError::Unavailable(format!("not done within {CALL_DEADLINE:?}; it may still be under way"));
        tokio::time::timeout(CALL_DEADLINE, exchange).await.map_err(|_| late())?
    }
}

fn not_found(volume: &str) -> AgentError {
    AgentError::NotFound { kind: "engine of volume", name: volume.to_owned() }
}

fn invalid(field: &'static str, value: impl ToString, allowed: impl ToString) -> AgentError {
    AgentError::Invalid { field, value: value.to_string(), allowed: allowed.to_string() }
}

fn parse_wish(request: pb::StartEngineRequest) -> Result<EngineWish, AgentError> {
    name::validate_volume_name(&request.volume).map_err(|error| invalid("volume", &request.volume, error))?;
    let uuid = request.uuid.parse().map_err(|_| invalid("uuid", &request.uuid, "a UUID is allowed"))?;
    if request.replicas.is_empty() || request.replicas.len() > MEMBERS_MAX {
        return Err(invalid("replicas", request.replicas.len(), format!("1 to {MEMBERS_MAX} members are allowed")));
    }
    check_hosts(&request.allowed_hosts)?;
    let mut members = BTreeMap::new();
    for member in request.replicas {
        let member = parse_member(member)?;
        if let Some(twice) = members.insert(member.replica.clone(), member) {
            return Err(invalid("replicas", twice.replica, "each replica may be named once"));
        }
    }
    Ok(EngineWish {
        volume: request.volume,
        size: request.size_bytes,
        uuid,
        members,
        allowed_hosts: request.allowed_hosts,
        instances: Vec::new(),
        served: None,
        must_detach: BTreeSet::new(),
    })
}

fn parse_member(member: pb::Member) -> Result<MemberWish, AgentError> {
    name::validate_label("replica", &member.replica, name::MAX_LABEL)
        .map_err(|error| invalid("replica", &member.replica, error))?;
    let address = member.address.unwrap_or_default();
    let traddr: std::net::IpAddr =
        address.traddr.parse().map_err(|_| invalid("address.traddr", &address.traddr, "an IP address is allowed"))?;
    let port = u16::try_from(address.trsvcid).ok().filter(|port| *port > 0);
    let trsvcid = port.ok_or_else(|| invalid("address.trsvcid", address.trsvcid, "1 to 65535 is allowed"))?;
    if address.nqn.is_empty() {
        return Err(invalid("address.nqn", "", "the NQN of the replica's subsystem is required"));
    }
    if member.agent.is_empty() {
        return Err(invalid("agent", "", "host:port of the replica's agent is required"));
    }
    Ok(MemberWish {
        replica: member.replica,
        agent: member.agent,
        traddr: traddr.to_string(),
        trsvcid,
        nqn: address.nqn,
    })
}

fn check_hosts(hosts: &[String]) -> Result<(), AgentError> {
    if hosts.len() > HOSTS_MAX {
        return Err(invalid("allowed_hosts", hosts.len(), format!("at most {HOSTS_MAX} hosts are allowed")));
    }
    // The data plane would refuse it, but only after the volume was opened.
    match hosts.iter().find(|host| !host.starts_with("nqn.") || host.len() < 11 || host.len() > 223) {
        Some(bad) => Err(invalid("allowed_hosts", bad, "NQNs of 11 to 223 bytes beginning with 'nqn.' are allowed")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
