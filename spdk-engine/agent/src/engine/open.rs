//! Runs the mirror core's opener: its actions become calls to the arbiter, to other agents and to the data plane.
//!
//! *What it is.* [`open`] is one attempt to open a volume, from the record to a mirror that runs. The decisions are all
//! in [`mirror_core::Opener`]; here are the hands.
//!
//! *Invariants.*
//! - A replica counts as promoted only when it is promoted *and* connected, so that a member which cannot be reached by
//!   the data plane leaves `S` as one that cannot be promoted.
//! - A replica has a meta area when the data plane that will run the mirror sees one, over the session of this epoch. A
//!   data plane without mirrors keeps no bits, so it is told of none: what it leaves, the next one does not trust.
//! - Engines are called dead (rule 16) only by what this agent saw itself: the one that served here last has ended, or is
//!   swept away before anything else, and attempts since were raised on top of that one alone.
//! - An attempt that fails before there is a mirror says what it raised in vain, so that the next one trusts the bits of
//!   the last engine that served. From the moment at which a mirror may be made, nothing is said any more.
//! - The instance is durable before the arbiter hears of it (the caller's duty).
//! - A member of `S` that was never promoted holds no data although the record says so: its disk was emptied or
//!   replaced. It is not promoted, unless this is the first epoch, or no member of `S` ever was (the first opening failed).
//!
//! *When things fail.* The attempt fails and everything attached is swept away; the caller tries again with a new
//! instance. A failed attempt leaves a raised epoch behind, which is harmless.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use addax_proto::engine_v1 as pb;
use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use mirror_core::{
    Config, EngineInstance, LegId, MetaUnreadable, OpenAction, OpenError, OpenEvent, OpenInput, OpenParams, Opener,
    OpenerParams, Options, PromoteError, RaisedInVain, ReplicaFacts, ReplicaId, SwapOutcome, VolumeId,
};
use tokio::sync::watch;
use tokio::time::Instant;

use super::Signals;
use super::build::{self, Identity};
use super::device::Device;
use super::peers::Peers;
use crate::arbiter::{Arbiter, block_size, config_to_mirror, mirror_to_config};
use crate::error::AgentError;
use crate::rpc::{LegParams, MirrorParams};
use crate::state::{EngineWish, MemberWish};
use crate::supervise::Plane;

/// What an attempt needs.
#[derive(Clone, Debug)]
pub(super) struct Attempt {
    pub(super) plane: Arc<Plane>,
    pub(super) arbiter: Arc<dyn Arbiter>,
    pub(super) peers: Peers,
    /// The wish as it is now; members may be told while the attempt runs.
    pub(super) wish: watch::Receiver<EngineWish>,
    pub(super) instance: String,
    pub(super) signals: Arc<Signals>,
    /// What the last attempts raised in vain; this one replaces it.
    pub(super) in_vain: InVain,
    /// The engine that served here last, when it is known to have ended, or runs in `plane` and is swept away first.
    pub(super) ended: Option<String>,
}

/// What attempts left behind, kept between them.
#[derive(Clone, Debug, Default)]
pub(super) struct InVain(Arc<Mutex<Vain>>);

#[derive(Clone, Debug, Default)]
struct Vain {
    raised: Option<RaisedInVain>,
    /// Instances that never served, and that followed engines which have all ended: so all before them have.
    dead: BTreeSet<EngineInstance>,
}

impl InVain {
    fn get(&self) -> Vain {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes what an opener says after each step; `None` when a mirror may follow, and write.
    fn note(&self, instance: &EngineInstance, opener: Option<&Opener>) {
        let mut vain = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match opener {
            Some(opener) if opener.raised_in_vain().is_none() => {}
            Some(opener) => {
                vain.raised = opener.raised_in_vain();
                if opener.follows_dead() {
                    vain.dead.insert(instance.clone());
                } else {
                    vain.dead.remove(instance);
                }
            }
            None => *vain = Vain::default(),
        }
    }
}

/// A mirror that runs.
#[derive(Clone, Debug)]
pub(super) struct Opened {
    pub(super) plane: Arc<Plane>,
    pub(super) device: Device,
    pub(super) identity: Identity,
    pub(super) config: Config,
    /// Data-plane instance of each replica when it was promoted.
    pub(super) planes: BTreeMap<String, String>,
    /// No member is certain to hold every acknowledged write (rule 1).
    pub(super) hosts_must_detach: bool,
    /// Whether its closing has begun.
    pub(super) closing: bool,
}

/// Why an attempt failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum OpenFailure {
    /// By the rules.
    #[error(transparent)]
    Rule(#[from] OpenError),
    /// By the data plane or a bad request.
    #[error(transparent)]
    Agent(#[from] AgentError),
}

/// What is known of the replicas during one attempt.
#[derive(Debug, Default)]
struct Known {
    /// Whether a member of `S` was never promoted.
    fresh: BTreeMap<String, bool>,
    planes: BTreeMap<String, String>,
}

impl Attempt {
    fn volume(&self) -> String {
        self.wish.borrow().volume.clone()
    }

    fn member(&self, replica: &str) -> Option<MemberWish> {
        self.wish.borrow().members.get(replica).cloned()
    }
}

/// How far an attempt has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    /// The epoch, once it is this engine's.
    pub(super) raised: u64,
    /// It waits until the lease of an older engine is over (rule 16).
    pub(super) waits_for_lease: bool,
}

/// Opens a volume.
pub(super) async fn open(attempt: &Attempt, progress: &watch::Sender<Progress>) -> Result<Opened, OpenFailure> {
    let volume = attempt.volume();
    let client = &attempt.plane.client;
    build::sweep(&attempt.plane, &volume).await.map_err(AgentError::from)?;
    let steps = async {
        let (params, known) = run(attempt, progress).await?;
        create(attempt, &params, &known).await.map_err(OpenFailure::from)
    };
    let opened = tokio::select! {
        opened = steps => opened,
        // Nothing that was attached is left; waiting for members would only lose time.
        () = client.closed() => Err(AgentError::Unavailable("the data plane ended meanwhile".to_owned()).into()),
    };
    if opened.is_err()
        && let Err(error) = build::sweep(&attempt.plane, &volume).await
    {
        // The next attempt sweeps again, or the data plane is gone and everything with it.
        tracing::warn!(volume, %error, "cannot remove what a failed opening left behind");
    }
    opened
}

struct Run<'a> {
    attempt: &'a Attempt,
    progress: &'a watch::Sender<Progress>,
    known: Arc<Mutex<Known>>,
    config: Option<Config>,
    legs: BTreeMap<LegId, ReplicaId>,
    pending: FuturesUnordered<BoxFuture<'a, OpenInput>>,
    wake_at: Duration,
    done: Option<Result<OpenParams, OpenError>>,
}

async fn run(attempt: &Attempt, progress: &watch::Sender<Progress>) -> Result<(OpenParams, Known), OpenFailure> {
    let params = opener_params(attempt)?;
    let instance = params.engine_instance.clone();
    let mut opener = Opener::new(params);
    let mut run = Run {
        attempt,
        progress,
        known: Arc::default(),
        config: None,
        legs: BTreeMap::new(),
        pending: FuturesUnordered::new(),
        wake_at: Duration::MAX,
        done: None,
    };
    let began = Instant::now();
    let mut input = OpenInput::Start;
    loop {
        let mut actions = Vec::new();
        let now = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        opener.apply(now, input, &mut actions);
        // A mirror may follow, and write: then this epoch was not in vain.
        let is_ready = actions.iter().any(|action| matches!(action, OpenAction::Ready(_)));
        attempt.in_vain.note(&instance, Some(&opener).filter(|_| !is_ready));
        for action in actions {
            run.act(action);
        }
        if let Some(done) = run.done.take() {
            let known = std::mem::take(&mut *lock(&run.known));
            return Ok((done?, known));
        }
        let until = began.checked_add(run.wake_at).unwrap_or_else(|| began + Duration::from_secs(3600));
        input = tokio::select! {
            Some(answer) = run.pending.next() => answer,
            () = tokio::time::sleep_until(until) => OpenInput::Tick,
        };
    }
}

fn opener_params(attempt: &Attempt) -> Result<OpenerParams, OpenFailure> {
    let wish = attempt.wish.borrow();
    let local = wish.members.keys().filter(|replica| attempt.peers.is_local(replica));
    let local = local.map(|replica| ReplicaId::new(replica)).collect::<Result<_, _>>().map_err(OpenError::from)?;
    let Vain { raised: in_vain, dead } = attempt.in_vain.get();
    let served = attempt.ended.as_ref().map(|instance| EngineInstance::new(instance)).transpose();
    let served = served.map_err(OpenError::from)?;
    // Attempts follow the engine that served; what is known of them is worth nothing without it.
    let dead_engines = if served.is_some() { dead.into_iter().chain(served).collect() } else { BTreeSet::new() };
    Ok(OpenerParams {
        volume: VolumeId::new(&wish.volume).map_err(OpenError::from)?,
        block_size: block_size(),
        engine_instance: EngineInstance::new(&attempt.instance).map_err(OpenError::from)?,
        lineage: None,
        local,
        dead_engines,
        in_vain,
        options: Options::default(),
        waits: mirror_core::OpenWaits::default(),
    })
}

impl<'a> Run<'a> {
    fn act(&mut self, action: OpenAction) {
        let attempt = self.attempt;
        match action {
            OpenAction::ReadRecord => self.pending.push(Box::pin(async move {
                let result = attempt.arbiter.read(&attempt.volume()).await;
                OpenInput::RecordRead { result }
            })),
            OpenAction::DoCas { cas, expect, next } => {
                self.config = Some(next.clone());
                self.pending.push(Box::pin(async move {
                    let outcome = attempt.arbiter.swap(&attempt.volume(), &expect, &next).await;
                    OpenInput::CasAnswer { cas, outcome }
                }));
            }
            OpenAction::Promote { replica, epoch, .. } => self.promote(replica, epoch.0),
            // It is connected: see the module's invariants.
            OpenAction::Connect { leg, replica } => {
                self.legs.insert(leg, replica);
                self.pending.push(Box::pin(async move { OpenInput::Connected { leg, up: true } }));
            }
            OpenAction::ReadMeta { leg, block, blocks } => self.read_meta(leg, block, blocks),
            OpenAction::WakeAt { at } => self.wake_at = Duration::from_nanos(at),
            OpenAction::Event(event) => self.tell(&event),
            OpenAction::Ready(params) => self.done = Some(Ok(*params)),
            OpenAction::Failed { reason } => self.done = Some(Err(reason)),
        }
    }

    fn identity(&self, config: &Config, epoch: u64) -> Identity {
        Identity {
            volume: self.attempt.volume(),
            epoch,
            instance: self.attempt.instance.clone(),
            lineage: config.lineage.as_str().to_owned(),
        }
    }

    fn read_meta(&mut self, leg: LegId, block: u64, blocks: u32) {
        let device = match (&self.config, self.legs.get(&leg)) {
            (Some(config), Some(replica)) => build::meta_bdev(&self.identity(config, config.epoch.0), replica.as_str()),
            _ => return,
        };
        let client = &self.attempt.plane.client;
        self.pending.push(Box::pin(async move {
            let read = client.addax_mirror_read_meta(&device, block, blocks).await;
            let result = read.map(Arc::from).map_err(|error| {
                tracing::warn!(device, %error, "a meta area cannot be read");
                MetaUnreadable
            });
            OpenInput::MetaRead { leg, result }
        }));
    }

    fn promote(&mut self, replica: ReplicaId, epoch: u64) {
        let Some(config) = &self.config else { return };
        let (attempt, known) = (self.attempt, self.known.clone());
        let identity = self.identity(config, epoch);
        let members: Vec<String> = config.in_sync.iter().map(|member| member.as_str().to_owned()).collect();
        self.pending.push(Box::pin(async move {
            let result = promote_and_attach(attempt, &identity, replica.as_str(), &members, &known).await;
            OpenInput::Promoted { replica, result }
        }));
    }

    fn tell(&self, event: &OpenEvent) {
        tracing::info!(volume = %self.attempt.volume(), ?event, "opening");
        self.progress.send_modify(|progress| match event {
            OpenEvent::EpochRaised { epoch, .. } => progress.raised = epoch.0,
            OpenEvent::LeaseWait { .. } => progress.waits_for_lease = true,
            OpenEvent::Decided { .. } => progress.waits_for_lease = false,
            _ => {}
        });
    }
}

async fn promote_and_attach(
    attempt: &Attempt,
    identity: &Identity,
    replica: &str,
    members: &[String],
    known: &Mutex<Known>,
) -> Result<ReplicaFacts, PromoteError> {
    // A manager may yet tell where it is.
    let member = attempt.member(replica).ok_or(PromoteError::Unreachable)?;
    // Epoch 1 is a volume's first opening: nobody can have held data before.
    if identity.epoch > 1 && members.iter().any(|name| name == replica) {
        check_not_emptied(attempt, &member, members, known).await?;
    }
    let promoted = attempt.peers.promote(&member, identity.promotion()).await?;
    let (volatile, instance) = (promoted.volatile, power_instance(&promoted));
    let plane = promoted.data_plane_instance;
    let attached = build::attach(&attempt.plane, identity, &member, &plane).await;
    let has_meta = attached.map_err(|error| {
        tracing::warn!(volume = %identity.volume, replica, %error, "promoted, but cannot be connected");
        PromoteError::Unreachable
    })?;
    lock(known).planes.insert(replica.to_owned(), plane);
    Ok(ReplicaFacts { meta: has_meta && attempt.plane.has_mirror(), volatile, instance })
}

/// What a mirror is told as the instance of a replica: nothing, when its disk loses nothing with power (rule 1).
pub(super) fn power_instance(replica: &pb::Replica) -> String {
    if replica.volatile { replica.instance.clone() } else { String::new() }
}

/// Refuses a member of `S` that was never promoted while another one was; see the module's invariants.
async fn check_not_emptied(
    attempt: &Attempt,
    member: &MemberWish,
    members: &[String],
    known: &Mutex<Known>,
) -> Result<(), PromoteError> {
    let decided = lock(known).fresh.get(&member.replica).copied();
    let fresh = match decided {
        Some(fresh) => fresh,
        None => {
            let found = attempt.peers.replica(member).await?;
            let fresh = found.ok_or(PromoteError::Unusable)?.fresh;
            lock(known).fresh.insert(member.replica.clone(), fresh);
            fresh
        }
    };
    if !fresh {
        return Ok(());
    }
    let known = lock(known);
    let others: Vec<Option<bool>> = members.iter().map(|name| known.fresh.get(name).copied()).collect();
    if others.contains(&Some(false)) {
        tracing::error!(replica = %member.replica, "in sync by the record, but it never held data: not used");
        return Err(PromoteError::Unusable);
    }
    // As long as one was not asked, it may be the one that holds the data.
    if others.iter().all(|fresh| *fresh == Some(true)) { Ok(()) } else { Err(PromoteError::Unreachable) }
}

/// Makes the mirror that the opener decided on.
async fn create(attempt: &Attempt, params: &OpenParams, known: &Known) -> Result<Opened, AgentError> {
    let wish = attempt.wish.borrow().clone();
    let config = &params.config;
    let identity = Identity {
        volume: wish.volume.clone(),
        epoch: config.epoch.0,
        instance: attempt.instance.clone(),
        lineage: config.lineage.as_str().to_owned(),
    };
    let leg = |leg: &mirror_core::LegInit| LegParams {
        replica: leg.replica.as_str().to_owned(),
        bdev_name: build::leg_bdev(&identity, leg.replica.as_str()),
        meta_bdev_name: leg.meta.then(|| build::meta_bdev(&identity, leg.replica.as_str())),
        local: leg.local,
        instance: leg.instance.clone(),
        changed: leg.changed,
    };
    let replica_of = |id| params.legs.iter().find(|leg| leg.leg == id).map(|leg| leg.replica.as_str().to_owned());
    let mut mirror = MirrorParams {
        name: build::mirror_name(&wish.volume),
        uuid: build::mirror_uuid(&wish.uuid).to_string(),
        block_size: params.block_size,
        size_bytes: params.num_blocks * u64::from(params.block_size),
        volume: wish.volume.clone(),
        config: config_to_mirror(config),
        legs: params.legs.iter().map(leg).collect(),
        equalise_from: params.equalise_from.and_then(replica_of),
        inherited: params.meta.as_ref().map(|meta| meta.inherited.clone()),
        served_epoch: params.meta.as_ref().and_then(|meta| meta.served).map(|epoch| epoch.0),
        flushed: params.flushed,
        hosts_must_detach: params.hosts_must_detach,
    };
    if !attempt.plane.has_mirror()
        && let Some(source) = mirror.equalise_from.take()
    {
        let next = leave_unequal(config, &source);
        settle(attempt, config, &next).await?;
        mirror.config = config_to_mirror(&next);
    }
    let config = mirror_to_config(&mirror.config).map_err(|error| AgentError::Internal(error.to_string()))?;
    let device = Device::create(&attempt.plane, &mirror, attempt.signals.clone()).await?;
    // Connections that the decision has no use for.
    let legs: BTreeSet<&str> = params.legs.iter().map(|leg| leg.replica.as_str()).collect();
    let wanted = |replica: &str, epoch| epoch == identity.epoch && legs.contains(replica);
    build::detach_others(&attempt.plane.client, &identity.volume, wanted).await?;
    Ok(Opened {
        plane: attempt.plane.clone(),
        device,
        identity: identity.clone(),
        config,
        planes: known.planes.clone(),
        hosts_must_detach: params.hosts_must_detach,
        closing: false,
    })
}

/// An array cannot make its members equal before it serves hosts: all but the source leave the set and are rebuilt.
fn leave_unequal(config: &Config, source: &str) -> Config {
    let mut next = config.clone();
    let (stay, leave) = next.in_sync.into_iter().partition(|member| member.as_str() == source);
    next.in_sync = stay;
    next.rebuilding.extend(leave);
    next.config_number.0 += 1;
    next
}

/// Swaps the record, or fails the attempt.
async fn settle(attempt: &Attempt, now: &Config, next: &Config) -> Result<(), AgentError> {
    match attempt.arbiter.swap(&attempt.volume(), &now.version(), next).await {
        SwapOutcome::Committed => Ok(()),
        SwapOutcome::Refused { .. } => Err(AgentError::Superseded("the record has changed meanwhile".to_owned())),
        SwapOutcome::Unknown => Err(AgentError::Unavailable("the arbiter did not answer a swap".to_owned())),
    }
}

fn lock(known: &Mutex<Known>) -> std::sync::MutexGuard<'_, Known> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}
