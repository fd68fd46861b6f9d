//! The owner task of one engine: opens its volume, keeps it open, closes it.
//!
//! *States.*
//! ```text
//!            ┌──────────── pause ◀── attempt failed ──┐
//!            ▼                                        │
//! Waiting (data plane down) ──▶ Opening ──────────────┴──▶ Lost (another engine has the volume): a manager must ask
//!            ▲                     │ mirror runs
//!            └── data plane gone, mirror stopped ── Open
//!                                  │ StopEngine
//!                                  ▼ closed, forgotten
//! ```
//! *Invariants.*
//! - An opening that nobody asked for begins by reading the record; it goes on only if the record is this agent's.
//! - While `Open`, a task of its own serves swaps, so that no call to this owner delays an acknowledgement.
//! - Hosts are told to keep their commands before a mirror is closed. One that is closing is exported no more, also when the call to close it has failed meanwhile. Once it is closed it
//!   is done with: if nobody asks to stop the engine again, the volume is opened anew.
//! - Hosts that may hold acknowledged writes which no copy has are not let in until they were not wanted for once: a manager
//!   has seen them detach (rule 1).
//! - Before a lost leg's replica is promoted again, the mirror knows what that replica may have lost (rule 1).
//! - A leg that the mirror let go is detached, so that nothing of it reconnects.
//!
//! *When things fail.* A lost leg whose data plane was restarted is promoted again in the same epoch, so that it can come
//! back within the mirror's grace. A replica of `R` without a leg is connected again and again. Both with growing
//! pauses, from [`MEND`] to [`MEND_MAX`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use addax_api::nqn::volume_nqn;
use addax_proto::engine_v1 as pb;
use mirror_core::{OpenError, PromoteError, RecordError};
use pb::event::Object;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::build::{self, Identity};
use super::device::Device;
use super::open::{Attempt, InVain, OpenFailure, Opened, Progress, open, power_instance};
use super::swaps::SwapServer;
use super::{EngineContext, Signals, Wishes};
use crate::arbiter::{config_to_mirror, mirror_to_config};
use crate::error::AgentError;
use crate::hub::Key;
use crate::replica::Promotion;
use crate::rpc::{LegParams, MirrorConfig, MirrorLeg, MirrorState};
use crate::state::{BLOCK_SIZE, EngineWish, MemberWish, Served};
use crate::supervise::process::ProcessId;
use crate::supervise::{Plane, PlaneStatus};

/// Deadline of closing a mirror: drain, flush, and the closing swap.
const CLOSE_DEADLINE: Duration = Duration::from_secs(60);
/// Deadline of taking a leg out, which needs a swap.
const REMOVE_DEADLINE: Duration = Duration::from_secs(20);
/// Pauses between attempts to open.
const PAUSE_MIN: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// How often lost legs and replicas of `R` without a leg are looked after.
const MEND: Duration = Duration::from_millis(250);
const MEND_MAX: Duration = Duration::from_secs(5);

const FROZEN: &str = "writes wait: the in-sync set may not shrink further";
const LEASE_WAIT: &str =
    "a replica cannot be reached: waits until an older engine can answer no reads from it any more";
const EQUALISING: &str = "the members are made equal after an unclean stop; hosts are served after that";

type Reply<T> = oneshot::Sender<Result<T, AgentError>>;

/// What an owner is asked for.
#[derive(Debug)]
pub(super) enum Command {
    Start { wish: EngineWish, reply: Reply<pb::Engine> },
    Stop { reply: Reply<u64> },
    AddReplica { member: MemberWish, reply: Reply<pb::Engine> },
    RemoveReplica { replica: String, reply: Reply<pb::Engine> },
    SetHosts { hosts: Vec<String>, reply: Reply<pb::Engine> },
}

enum Phase {
    /// Not open; tried again at that time or when the data plane comes.
    Waiting {
        reason: String,
        until: Instant,
    },
    Opening(Opening),
    Open(Box<Open>),
    /// Not open, and not tried until a manager asks.
    Lost(String),
}

struct Opening {
    task: JoinHandle<Result<Opened, OpenFailure>>,
    progress: watch::Receiver<Progress>,
}

struct Open {
    plane: Arc<Plane>,
    device: Device,
    identity: Identity,
    config: MirrorConfig,
    legs: Vec<MirrorLeg>,
    /// Data-plane instance of each replica at its last promote.
    planes: BTreeMap<String, String>,
    frozen: bool,
    equalising: bool,
    /// The mirror waits for hosts to detach.
    hosts_must_detach: bool,
    /// Why the frontend is not there yet.
    unexported: Option<String>,
    /// Its closing has begun: no host may write any more.
    closing: bool,
    stop_swaps: CancellationToken,
}

impl Open {
    /// Ends what runs beside the device, which stays.
    fn release(&self) {
        self.stop_swaps.cancel();
        self.device.let_go();
    }
}

pub(super) struct Owner {
    wish: EngineWish,
    /// What an opening under way reads.
    published: watch::Sender<EngineWish>,
    /// A manager asked, and no epoch was raised since.
    asked: bool,
    phase: Phase,
    pause: Duration,
    in_vain: InVain,
    /// The last opening found a replica that knows more than the record (rule 21).
    record_old: bool,
    /// The process in which `wish.served` ran, if this agent has seen it run.
    served_by: Option<ProcessId>,
    mend_at: Option<Instant>,
    mend_pause: Duration,
    stopping: bool,
    context: EngineContext,
    wishes: Wishes,
    signals: Arc<Signals>,
}

/// What woke the owner.
enum Wake {
    Command(Option<Command>),
    Plane(bool),
    Changes,
    Opened(Result<Opened, OpenFailure>),
    /// An opening has come further, which is to be told.
    Progress,
    Timer,
    Shutdown,
}

impl Owner {
    pub(super) fn new(
        wish: EngineWish,
        asked: bool,
        context: EngineContext,
        wishes: Wishes,
        signals: Arc<Signals>,
    ) -> Self {
        let published = watch::Sender::new(wish.clone());
        let phase = Phase::Waiting { reason: "starting".to_owned(), until: Instant::now() };
        Self {
            wish,
            published,
            asked,
            phase,
            pause: PAUSE_MIN,
            in_vain: InVain::default(),
            record_old: false,
            served_by: None,
            mend_at: None,
            mend_pause: MEND,
            stopping: false,
            context,
            wishes,
            signals,
        }
    }

    pub(super) async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        let mut plane = self.context.plane.clone();
        plane.mark_changed();
        loop {
            self.tell();
            match self.wait(&mut commands, &mut plane).await {
                Wake::Command(Some(Command::Stop { reply })) => {
                    let result = self.stop().await;
                    let stopped = result.is_ok();
                    let _ = reply.send(result);
                    if stopped {
                        return;
                    }
                }
                Wake::Command(Some(command)) => self.apply(command).await,
                Wake::Command(None) | Wake::Shutdown | Wake::Plane(false) => {
                    self.let_go();
                    return;
                }
                Wake::Plane(true) => self.plane_changed(),
                Wake::Changes => self.look(false).await,
                Wake::Opened(result) => self.opened(result).await,
                Wake::Progress | Wake::Timer => {}
            }
            self.advance().await;
        }
    }

    async fn wait(&mut self, commands: &mut mpsc::Receiver<Command>, plane: &mut watch::Receiver<PlaneStatus>) -> Wake {
        let shutdown = self.context.shutdown.clone();
        let timer = match &self.phase {
            Phase::Waiting { until, .. } if self.context.plane.borrow().plane.is_some() => Some(*until),
            Phase::Open(_) => self.mend_at,
            _ => None,
        };
        let opening = async {
            let Phase::Opening(Opening { task, progress }) = &mut self.phase else {
                return std::future::pending().await;
            };
            tokio::select! {
                biased;
                ended = task => Wake::Opened(ended.unwrap_or_else(|error| {
                    Err(AgentError::Internal(format!("opening ended: {error}")).into())
                })),
                Ok(()) = progress.changed() => Wake::Progress,
            }
        };
        let sleep = async {
            match timer {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = shutdown.cancelled() => Wake::Shutdown,
            command = commands.recv() => Wake::Command(command),
            changed = plane.changed() => Wake::Plane(changed.is_ok()),
            () = self.signals.changes.notified() => Wake::Changes,
            wake = opening => wake,
            () = sleep => Wake::Timer,
        }
    }

    /// Does what can be done now: begin an opening, mend legs, export.
    async fn advance(&mut self) {
        match &self.phase {
            Phase::Waiting { until, .. } if *until <= Instant::now() => self.begin().await,
            Phase::Open(_) if self.mend_at.is_some_and(|at| at <= Instant::now()) => {
                let pause = self.mend_pause;
                self.look(true).await;
                // Looking says that there is something to mend, not that it is new.
                self.mend_pause = pause;
                self.mend().await;
            }
            _ => {}
        }
    }

    // --- opening ---

    fn plane_changed(&mut self) {
        let plane = self.context.plane.borrow().plane.clone();
        let lost = match &self.phase {
            Phase::Open(open) => {
                // A new connection to the same process changes nothing but the connection: adopt again.
                plane.as_ref().is_none_or(|plane| plane.client.is_closed() || open.plane.client.is_closed())
            }
            // An opening notices by itself that its data plane has gone.
            _ => false,
        };
        if lost {
            self.let_go();
        }
        if let Phase::Waiting { until, .. } = &mut self.phase {
            *until = Instant::now();
            self.pause = PAUSE_MIN;
        }
    }

    /// Forgets a mirror or an opening without touching the data plane.
    fn let_go(&mut self) {
        match &self.phase {
            Phase::Open(open) => open.release(),
            Phase::Opening(opening) => opening.task.abort(),
            _ => {}
        }
        if !matches!(self.phase, Phase::Lost(_)) {
            self.phase = Phase::Waiting { reason: "the data plane is down".to_owned(), until: Instant::now() };
        }
        self.mend_at = None;
    }

    fn wait_again(&mut self, reason: String) {
        tracing::warn!(volume = %self.wish.volume, %reason, "the volume is not open");
        self.phase = Phase::Waiting { reason, until: Instant::now() + self.pause };
        self.pause = (self.pause * 2).min(PAUSE_MAX);
    }

    async fn begin(&mut self) {
        let plane = self.context.plane.borrow().plane.clone();
        let Some(plane) = plane else {
            let reason = format!("the data plane is down: {}", self.context.plane.borrow().reason);
            self.phase = Phase::Waiting { reason, until: Instant::now() };
            return;
        };
        if !plane.can_serve() {
            self.phase = Phase::Lost(format!("the data plane ({}) can serve no volumes", plane.version));
            return;
        }
        match self.adopt(&plane).await {
            Ok(true) => return,
            Ok(false) => {}
            Err(error) => return self.wait_again(error.to_string()),
        }
        if !self.asked {
            match self.is_record_ours().await {
                Ok(true) => {}
                Ok(false) => {
                    self.phase = Phase::Lost("another engine has opened the volume since".to_owned());
                    return;
                }
                Err(error) => return self.wait_again(format!("the arbiter: {error}")),
            }
        }
        let instance = Uuid::new_v4().to_string();
        self.wish.remember(&instance);
        self.published.send_replace(self.wish.clone());
        if let Err(error) = self.wishes.put(&self.wish).await {
            return self.wait_again(error.to_string());
        }
        let ended = self.ended_engine(&plane);
        let attempt = Attempt {
            plane,
            ended,
            arbiter: self.context.arbiter.clone(),
            peers: self.context.peers.clone(),
            wish: self.published.subscribe(),
            instance,
            signals: self.signals.clone(),
            in_vain: self.in_vain.clone(),
        };
        let (tell, progress) = watch::channel(Progress::default());
        let task = tokio::spawn(async move { open(&attempt, &tell).await });
        self.phase = Phase::Opening(Opening { task, progress });
    }

    /// The engine that served here last, when it can answer nothing any more: its machine was started again since, its
    /// process has ended, or is the one that the next engine comes into, where it is swept away first.
    fn ended_engine(&self, plane: &Plane) -> Option<String> {
        let served = self.wish.served.as_ref()?;
        let process_ended = self.served_by.is_some_and(|by| by == plane.process || !by.is_alive());
        let restarted = self.context.machine.has_restarted_since(&served.machine, &served.boot);
        (process_ended || restarted).then(|| served.instance.clone())
    }

    /// From now on this engine serves.
    async fn note_served(&mut self, opened: &Opened) {
        let process = opened.plane.process;
        self.served_by = Some(process).filter(ProcessId::is_alive);
        let (instance, machine) = (opened.identity.instance.clone(), &self.context.machine);
        let served = Served { instance, machine: machine.identity().to_owned(), boot: machine.boot().to_owned() };
        let mut wish = EngineWish { served: Some(served), ..self.wish.clone() };
        // Taken over with a mirror that runs, what is known of its hosts goes on.
        let goes_on = self.wish.served == wish.served && !wish.must_detach.is_empty();
        match (opened.hosts_must_detach, goes_on) {
            (true, true) => {}
            (true, false) => wish.must_detach = wish.allowed_hosts.iter().cloned().collect(),
            (false, _) => wish.must_detach.clear(),
        }
        if !wish.must_detach.is_empty() {
            tracing::error!(volume = %wish.volume, hosts = ?wish.must_detach,
                "all copies may lack acknowledged writes: these hosts are refused until they have detached");
        }
        self.wish = wish;
        self.published.send_replace(self.wish.clone());
        if let Err(error) = self.wishes.put(&self.wish).await {
            // If the agent ends now, the next one refuses all hosts, or waits for a lease that is over.
            tracing::error!(volume = %self.wish.volume, %error, "cannot keep that the engine serves");
        }
    }

    /// Tells the mirror once no host is left that was attached before it was made.
    async fn settle_hosts(&mut self) {
        let Phase::Open(open) = &mut self.phase else { return };
        if !open.hosts_must_detach || !self.wish.must_detach.is_empty() {
            return;
        }
        match open.device.hosts_detached().await {
            Ok(()) => open.hosts_must_detach = false,
            Err(error) => {
                tracing::warn!(volume = %self.wish.volume, %error, "cannot tell the mirror that all hosts have detached");
                self.mend_soon();
            }
        }
    }

    async fn is_record_ours(&self) -> Result<bool, RecordError> {
        let record = self.context.arbiter.read(&self.wish.volume).await?;
        Ok(self.wish.instances.iter().any(|instance| instance == record.engine_instance.as_str()))
    }

    /// Takes over a mirror that runs already, made by an earlier life of this agent.
    async fn adopt(&mut self, plane: &Arc<Plane>) -> Result<bool, AgentError> {
        let found = Device::find(plane, &self.wish, &*self.context.arbiter, self.signals.clone()).await?;
        let Some((device, mirror)) = found else { return Ok(false) };
        let Ok(config) = mirror_to_config(&mirror.config) else { return Ok(false) };
        let identity = Identity {
            volume: self.wish.volume.clone(),
            epoch: config.epoch.0,
            instance: config.engine_instance.as_str().to_owned(),
            lineage: config.lineage.as_str().to_owned(),
        };
        tracing::info!(volume = %self.wish.volume, epoch = identity.epoch, "adopting a mirror that runs");
        self.asked = false;
        let (closing, hosts_must_detach) = (mirror.state == "closing", mirror.hosts_must_detach);
        let (plane, planes) = (plane.clone(), BTreeMap::new());
        self.hold(Opened { plane, device, identity, config, planes, hosts_must_detach, closing }).await;
        Ok(true)
    }

    async fn opened(&mut self, result: Result<Opened, OpenFailure>) {
        if let Phase::Opening(opening) = &self.phase
            && opening.progress.borrow().raised > 0
        {
            self.asked = false;
        }
        self.record_old = matches!(&result, Err(OpenFailure::Rule(OpenError::RecordOld { .. })));
        match result {
            Ok(opened) => self.hold(opened).await,
            Err(OpenFailure::Rule(OpenError::Superseded)) => {
                // Engines raise the record before they promote. If it is ours still, a replica has outrun it: it is old.
                self.record_old = self.is_record_ours().await.unwrap_or(false);
                self.phase = Phase::Lost(OpenError::Superseded.to_string());
            }
            Err(failure) => {
                let again = self.context.plane.borrow().plane.is_some();
                self.wait_again(failure.to_string());
                if !again {
                    // The next data plane is used as soon as it is there.
                    self.pause = PAUSE_MIN;
                }
            }
        }
    }

    /// From now on the mirror is ours to serve.
    async fn hold(&mut self, opened: Opened) {
        self.note_served(&opened).await;
        let stop_swaps = self.context.shutdown.child_token();
        let server = SwapServer {
            client: opened.plane.client.clone(),
            device: opened.device.clone(),
            arbiter: self.context.arbiter.clone(),
            identity: opened.identity.clone(),
            signals: self.signals.clone(),
            stop: stop_swaps.clone(),
        };
        tokio::spawn(server.run());
        self.pause = PAUSE_MIN;
        self.mend_pause = MEND;
        self.phase = Phase::Open(Box::new(Open {
            plane: opened.plane,
            device: opened.device,
            identity: opened.identity,
            config: config_to_mirror(&opened.config),
            legs: Vec::new(),
            planes: opened.planes,
            frozen: false,
            equalising: false,
            hosts_must_detach: opened.hosts_must_detach,
            unexported: Some("not exported yet".to_owned()),
            closing: opened.closing,
            stop_swaps,
        }));
        self.export().await;
        self.settle_hosts().await;
        self.signals.stale();
    }

    async fn export(&mut self) {
        let Phase::Open(open) = &mut self.phase else { return };
        if open.closing {
            return;
        }
        let (client, epoch) = (&open.plane.client, open.identity.epoch);
        let result = build::export(client, &self.wish, epoch, self.context.data_address).await;
        open.unexported = result.err().map(|error| error.to_string());
        if let Some(reason) = &open.unexported {
            tracing::warn!(volume = %self.wish.volume, %reason, "cannot export the volume yet");
            self.mend_soon();
        }
    }

    // --- while open ---

    /// Takes what the events brought, and reads the mirror if anything but progress happened or if told to.
    async fn look(&mut self, anyway: bool) {
        let (stale, progress) = self.signals.take();
        let Phase::Open(open) = &mut self.phase else { return };
        for (replica, (copied, total)) in progress {
            if let Some(leg) = open.legs.iter_mut().find(|leg| leg.replica == replica) {
                (leg.copied_blocks, leg.total_blocks) = (copied, total);
            }
        }
        if !stale && !anyway {
            return;
        }
        match open.device.get().await {
            Ok(Some(mirror)) => self.seen(mirror).await,
            Ok(None) => self.end("the mirror is not in the data plane any more").await,
            Err(error) => {
                tracing::warn!(volume = %self.wish.volume, %error, "cannot read the mirror");
                self.mend_soon();
            }
        }
    }

    async fn seen(&mut self, mirror: MirrorState) {
        let Phase::Open(open) = &mut self.phase else { return };
        open.config = mirror.config;
        open.legs = mirror.legs;
        (open.frozen, open.equalising) = (mirror.frozen, mirror.equalising);
        open.hosts_must_detach = mirror.hosts_must_detach;
        match mirror.state.as_str() {
            "stopped" => return self.end("the mirror stopped: the record or a replica refuses this engine").await,
            "closed" => return self.end("the mirror was closed, but the engine was not stopped").await,
            "closing" => {
                open.closing = true;
                open.unexported.get_or_insert_with(|| "it is being closed".to_owned());
            }
            _ if open.closing => {
                // It is open again: what closing took away comes back.
                open.closing = false;
                open.unexported.get_or_insert_with(|| "it could not be closed".to_owned());
            }
            _ => {}
        }
        let epoch = open.identity.epoch;
        let legs: BTreeSet<&str> =
            open.legs.iter().filter(|leg| leg.state != "out").map(|leg| leg.replica.as_str()).collect();
        let wanted = |replica: &str, of: u64| of == epoch && legs.contains(replica);
        if let Err(error) = build::detach_others(&open.plane.client, &open.identity.volume, wanted).await {
            tracing::warn!(volume = %self.wish.volume, %error, "cannot detach what the mirror let go");
        }
        if self.needs_mending() {
            self.mend_pause = MEND;
            self.mend_soon();
        } else {
            self.mend_at = None;
        }
    }

    fn mend_soon(&mut self) {
        self.mend_at.get_or_insert(Instant::now() + self.mend_pause);
    }

    fn needs_mending(&self) -> bool {
        let Phase::Open(open) = &self.phase else { return false };
        let undetached = open.hosts_must_detach && self.wish.must_detach.is_empty();
        open.unexported.is_some() || undetached || !self.lost_legs().is_empty() || !self.orphans().is_empty()
    }

    fn lost_legs(&self) -> Vec<MemberWish> {
        let Phase::Open(open) = &self.phase else { return Vec::new() };
        let lost = open.legs.iter().filter(|leg| leg.state == "lost");
        lost.filter_map(|leg| self.wish.members.get(&leg.replica).cloned()).collect()
    }

    /// Replicas of `R` that have no leg.
    fn orphans(&self) -> Vec<MemberWish> {
        let Phase::Open(open) = &self.phase else { return Vec::new() };
        let has_leg = |replica: &String| open.legs.iter().any(|leg| leg.replica == *replica);
        let orphans = open.config.rebuilding.iter().filter(|replica| !has_leg(replica));
        orphans.filter_map(|replica| self.wish.members.get(replica).cloned()).collect()
    }

    /// The mirror is of no use any more. If the record is still ours, the volume is opened anew; else another engine has
    /// it, and `begin` finds that out.
    async fn end(&mut self, reason: &str) {
        let Phase::Open(open) = &self.phase else { return };
        open.release();
        if let Err(error) = build::sweep(&open.plane, &self.wish.volume).await {
            tracing::warn!(volume = %self.wish.volume, %error, "cannot remove the stopped mirror");
        }
        self.mend_at = None;
        self.wait_again(reason.to_owned());
    }

    async fn mend(&mut self) {
        self.mend_at = None;
        if matches!(&self.phase, Phase::Open(open) if open.unexported.is_some()) {
            self.export().await;
        }
        self.settle_hosts().await;
        for member in self.lost_legs() {
            self.revive(&member).await;
        }
        for member in self.orphans() {
            if let Err(error) = self.connect_leg(&member).await {
                tracing::warn!(volume = %self.wish.volume, replica = %member.replica, %error, "cannot rebuild yet");
                if matches!(error, AgentError::Superseded(_)) {
                    // While nothing is written the mirror itself may never notice.
                    self.check_superseded().await;
                }
            }
        }
        if self.needs_mending() {
            self.mend_pause = (self.mend_pause * 2).min(MEND_MAX);
            self.mend_soon();
        }
    }

    /// A lost leg's data plane may have been restarted: then nobody is on its allow-list until a promote. While it is
    /// the same process, the connection comes back by itself and a promote would only end it again. A stock one gets
    /// a promote either way, which drains the lost session, and only then a new session. Its machine may have lost power
    /// (rule 1): the mirror hears of that before anybody may connect.
    async fn revive(&mut self, member: &MemberWish) {
        let Phase::Open(open) = &mut self.phase else { return };
        let Ok(Some(found)) = self.context.peers.replica(member).await else { return };
        if found.promoted_epoch > open.identity.epoch {
            return self.check_superseded().await;
        }
        let running = found.state() == pb::State::Running;
        let stock = build::is_stock(&found.data_plane_instance);
        let same = open.planes.get(&member.replica) == Some(&found.data_plane_instance);
        if !running || (same && !stock) {
            return;
        }
        let instance = power_instance(&found);
        if let Err(error) = open.device.set_instance(&member.replica, &instance).await {
            tracing::warn!(volume = %self.wish.volume, replica = %member.replica, %error, "cannot tell its instance");
            return;
        }
        let promotion = Promotion { expected: Some(found.instance), ..open.identity.promotion() };
        match self.context.peers.promote(member, promotion).await {
            Ok(promoted) => {
                open.planes.insert(member.replica.clone(), promoted.data_plane_instance);
            }
            Err(error) => {
                tracing::warn!(volume = %self.wish.volume, replica = %member.replica, %error, "cannot promote again");
                return;
            }
        }
        let name = build::controller_name(&open.identity, &member.replica);
        if stock && let Err(error) = open.plane.client.bdev_nvme_reset_controller(&name).await {
            tracing::warn!(volume = %self.wish.volume, replica = %member.replica, %error, "cannot be connected again yet");
        }
    }

    /// A replica knows a newer epoch. The mirror may never notice: with all its legs refused it waits for ever (rule 12).
    /// The arbiter's word counts.
    async fn check_superseded(&mut self) {
        if self.is_superseded().await {
            self.end("a replica and the arbiter know a newer epoch").await;
        }
    }

    /// Whether the arbiter knows a newer epoch than that of the mirror which runs here. No, if it cannot be asked.
    async fn is_superseded(&self) -> bool {
        let Phase::Open(open) = &self.phase else { return false };
        match self.context.arbiter.read(&self.wish.volume).await {
            Ok(record) => record.epoch.0 > open.identity.epoch,
            Err(error) => {
                tracing::warn!(volume = %self.wish.volume, %error, "cannot ask the arbiter for the epoch");
                false
            }
        }
    }

    /// Promotes and connects a replica, and gives it to the mirror for a rebuild.
    async fn connect_leg(&mut self, member: &MemberWish) -> Result<(), AgentError> {
        let Phase::Open(open) = &mut self.phase else {
            return Err(AgentError::Unavailable(format!("volume '{}' is not open now", self.wish.volume)));
        };
        let promoted = self.context.peers.promote(member, open.identity.promotion()).await;
        let promoted = promoted.map_err(|error| {
            let text = format!("replica '{}' cannot be promoted: {error}", member.replica);
            if error == PromoteError::Newer { AgentError::Superseded(text) } else { AgentError::Unavailable(text) }
        })?;
        let client = &open.plane.client;
        let power = power_instance(&promoted);
        let instance = promoted.data_plane_instance;
        let has_meta = build::attach(&open.plane, &open.identity, member, &instance).await?;
        let leg = LegParams {
            replica: member.replica.clone(),
            bdev_name: build::leg_bdev(&open.identity, &member.replica),
            meta_bdev_name: has_meta.then(|| build::meta_bdev(&open.identity, &member.replica)),
            local: self.context.peers.is_local(&member.replica),
            instance: power,
            changed: false,
        };
        if let Err(error) = open.device.add_leg(&leg).await {
            build::detach(client, &open.identity, &member.replica).await?;
            return Err(error.into());
        }
        open.planes.insert(member.replica.clone(), instance);
        Ok(())
    }

    // --- commands ---

    async fn apply(&mut self, command: Command) {
        match command {
            Command::Start { wish, reply } => {
                let result = self.start(wish).await;
                let _ = reply.send(result.map(|()| self.describe()));
            }
            Command::AddReplica { member, reply } => {
                let result = self.add_replica(member).await;
                let _ = reply.send(result.map(|()| self.describe()));
            }
            Command::RemoveReplica { replica, reply } => {
                let result = self.remove_replica(&replica).await;
                let _ = reply.send(result.map(|()| self.describe()));
            }
            Command::SetHosts { hosts, reply } => {
                let result = self.set_hosts(hosts).await;
                let _ = reply.send(result.map(|()| self.describe()));
            }
            // Handled by `run`, since it ends the owner.
            Command::Stop { reply } => drop(reply),
        }
    }

    /// Makes a changed wish durable and known to an opening under way.
    async fn keep(&mut self, wish: EngineWish) -> Result<(), AgentError> {
        self.wishes.put(&wish).await?;
        self.wish = wish;
        self.published.send_replace(self.wish.clone());
        Ok(())
    }

    async fn start(&mut self, asked: EngineWish) -> Result<(), AgentError> {
        if asked.uuid != self.wish.uuid {
            let text = format!("volume '{}' has the UUID {}, not {}", asked.volume, self.wish.uuid, asked.uuid);
            return Err(AgentError::Exists(text));
        }
        let EngineWish { instances, served, must_detach, .. } = self.wish.clone();
        let mut wish = EngineWish { instances, served, must_detach, ..asked };
        wish.forget_detached();
        // A replica that still has a leg or a place in the record stays known even if the manager leaves it out.
        if let Phase::Open(open) = &self.phase {
            for replica in open.legs.iter().map(|leg| &leg.replica) {
                if let Some(member) = self.wish.members.get(replica) {
                    wish.members.entry(replica.clone()).or_insert_with(|| member.clone());
                }
            }
        }
        let hosts_changed = wish.allowed_hosts != self.wish.allowed_hosts;
        self.keep(wish).await?;
        match &mut self.phase {
            Phase::Lost(_) => {
                self.asked = true;
                self.phase = Phase::Waiting { reason: "starting".to_owned(), until: Instant::now() };
            }
            Phase::Waiting { until, .. } => {
                self.asked = true;
                *until = Instant::now();
            }
            Phase::Opening(_) => {}
            Phase::Open(_) if hosts_changed => {
                self.allow_hosts().await?;
                self.settle_hosts().await;
            }
            Phase::Open(_) => {}
        }
        Ok(())
    }

    async fn set_hosts(&mut self, hosts: Vec<String>) -> Result<(), AgentError> {
        let mut wish = EngineWish { allowed_hosts: hosts, ..self.wish.clone() };
        wish.forget_detached();
        self.keep(wish).await?;
        self.allow_hosts().await?;
        self.settle_hosts().await;
        Ok(())
    }

    async fn allow_hosts(&self) -> Result<(), AgentError> {
        match &self.phase {
            Phase::Open(open) => {
                build::allow_only(&open.plane.client, &self.wish.volume, &self.wish.admitted_hosts()).await
            }
            // The export will have them.
            _ => Ok(()),
        }
    }

    async fn add_replica(&mut self, member: MemberWish) -> Result<(), AgentError> {
        let mut wish = self.wish.clone();
        wish.members.insert(member.replica.clone(), member.clone());
        if wish != self.wish {
            self.keep(wish).await?;
        }
        self.look(true).await;
        if let Phase::Open(open) = &self.phase
            && open.legs.iter().any(|leg| leg.replica == member.replica && leg.state != "out")
        {
            return Ok(());
        }
        self.connect_leg(&member).await?;
        self.look(true).await;
        Ok(())
    }

    async fn remove_replica(&mut self, replica: &str) -> Result<(), AgentError> {
        self.look(true).await;
        let Phase::Open(open) = &self.phase else {
            return Err(AgentError::Unavailable(format!("volume '{}' is not open now", self.wish.volume)));
        };
        let (client, identity) = (open.plane.client.clone(), open.identity.clone());
        let has_leg = open.legs.iter().any(|leg| leg.replica == replica);
        if has_leg {
            open.device.remove_leg(replica, REMOVE_DEADLINE).await?;
            self.wait_out(replica).await?;
        } else if is_named(&open.config, replica) {
            return Err(AgentError::Unavailable(format!(
                "replica '{replica}' is in the record but not connected; it leaves when its rebuild is abandoned"
            )));
        }
        build::detach(&client, &identity, replica).await?;
        let mut wish = self.wish.clone();
        wish.members.remove(replica);
        self.keep(wish).await
    }

    /// Waits until the record does not name a replica any more; the swap server does the work meanwhile.
    async fn wait_out(&mut self, replica: &str) -> Result<(), AgentError> {
        let end = Instant::now() + REMOVE_DEADLINE;
        loop {
            self.look(true).await;
            let Phase::Open(open) = &self.phase else {
                return Err(AgentError::Unavailable(format!("volume '{}' is not open any more", self.wish.volume)));
            };
            if !is_named(&open.config, replica) && !open.legs.iter().any(|leg| leg.replica == replica) {
                return Ok(());
            }
            if Instant::now() >= end {
                return Err(AgentError::Forbidden(format!(
                    "replica '{replica}' is still in the record after {REMOVE_DEADLINE:?}: is it the last one in sync?"
                )));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Closes the volume; its epoch.
    async fn stop(&mut self) -> Result<u64, AgentError> {
        let epoch = self.epoch();
        self.stopping = true;
        self.tell();
        let result = self.close().await;
        self.stopping = false;
        result.map(|()| epoch)
    }

    async fn close(&mut self) -> Result<(), AgentError> {
        let closed = || Phase::Lost("closed".to_owned());
        let superseded = self.is_superseded().await;
        match &mut self.phase {
            Phase::Open(open) if superseded => {
                // It can acknowledge nothing and swap nothing any more: draining would only make its hosts wait.
                open.release();
                self.phase = closed();
            }
            Phase::Opening(opening) => {
                opening.task.abort();
                // What the opening made is removed below, when it has really ended.
                let _ = (&mut opening.task).await;
                self.phase = closed();
            }
            Phase::Open(open) => {
                build::leave_path(&open.plane.client, &self.wish.volume, self.context.data_address).await;
                let done = open.device.close(&open.plane.client, &self.wish.volume, CLOSE_DEADLINE).await;
                let is_closed =
                    |found: &Option<MirrorState>| found.as_ref().is_some_and(|found| found.state == "closed");
                if let Err(error) = done
                    && !open.device.get().await.is_ok_and(|found| is_closed(&found))
                {
                    // The export may be gone, and the closing swap under way: what is so now says the device.
                    open.unexported = Some(format!("it could not be closed: {error}"));
                    self.look(true).await;
                    self.mend_soon();
                    return Err(error);
                }
                open.release();
                self.phase = closed();
            }
            Phase::Waiting { .. } | Phase::Lost(_) => {}
        }
        let plane = self.context.plane.borrow().plane.clone().filter(|plane| plane.can_serve());
        if let Some(plane) = plane {
            build::sweep(&plane, &self.wish.volume).await?;
        }
        self.wishes.remove(&self.wish.volume).await?;
        tracing::info!(volume = %self.wish.volume, "closed");
        Ok(())
    }

    // --- telling ---

    fn epoch(&self) -> u64 {
        match &self.phase {
            Phase::Open(open) => open.identity.epoch,
            Phase::Opening(opening) => opening.progress.borrow().raised,
            _ => 0,
        }
    }

    fn tell(&self) {
        self.context.hub.set(Key::Engine(self.wish.volume.clone()), Object::Engine(self.describe()));
    }

    fn describe(&self) -> pb::Engine {
        let (state, message) = match &self.phase {
            _ if self.stopping => (pb::State::Stopping, String::new()),
            Phase::Waiting { reason, .. } => (pb::State::Starting, reason.clone()),
            Phase::Opening(opening) if opening.progress.borrow().waits_for_lease => {
                (pb::State::Starting, LEASE_WAIT.to_owned())
            }
            Phase::Opening(_) => (pb::State::Starting, "opening".to_owned()),
            Phase::Open(open) => match &open.unexported {
                None if open.frozen => (pb::State::Running, FROZEN.to_owned()),
                None if !self.wish.must_detach.is_empty() => (pb::State::Running, must_detach(&self.wish)),
                None if open.equalising => (pb::State::Running, EQUALISING.to_owned()),
                None => (pb::State::Running, String::new()),
                Some(reason) => (pb::State::Starting, reason.clone()),
            },
            Phase::Lost(reason) => (pb::State::Error, reason.clone()),
        };
        let address = pb::Address {
            traddr: self.context.data_address.ip().to_string(),
            trsvcid: u32::from(self.context.data_address.port()),
            nqn: volume_nqn(&self.wish.volume),
        };
        let open = match &self.phase {
            Phase::Open(open) => Some(open),
            _ => None,
        };
        pb::Engine {
            volume: self.wish.volume.clone(),
            state: state.into(),
            message,
            address: Some(address),
            epoch: self.epoch(),
            engine_instance: open.map(|open| open.identity.instance.clone()).unwrap_or_default(),
            replicas: open.map(|open| self.describe_replicas(open)).unwrap_or_default(),
            allowed_hosts: self.wish.allowed_hosts.clone(),
            config_number: open.map_or(0, |open| open.config.config_number),
            best_effort: open.is_some_and(|open| open.device.is_best_effort()),
            record_old: self.record_old,
        }
    }

    fn describe_replicas(&self, open: &Open) -> Vec<pb::ReplicaMode> {
        let named = open.config.in_sync.iter().chain(&open.config.rebuilding);
        let names: BTreeSet<&String> = named.chain(self.wish.members.keys()).collect();
        names.into_iter().map(|replica| describe_replica(open, replica)).collect()
    }
}

/// For people: who is refused, and why (rule 1).
fn must_detach(wish: &EngineWish) -> String {
    let hosts: Vec<&str> = wish.must_detach.iter().map(String::as_str).collect();
    format!(
        "all copies lost power with writes that were acknowledged and not flushed; hosts that were attached then may \
         remember them, and are refused until they have been detached: {}",
        hosts.join(", ")
    )
}

fn is_named(config: &MirrorConfig, replica: &str) -> bool {
    config.in_sync.iter().chain(&config.rebuilding).any(|name| name == replica)
}

fn describe_replica(open: &Open, replica: &str) -> pb::ReplicaMode {
    let leg = open.legs.iter().find(|leg| leg.replica == replica);
    let member = open.config.in_sync.iter().any(|name| name == replica);
    let rebuilding = open.config.rebuilding.iter().any(|name| name == replica);
    let lost = leg.is_some_and(|leg| leg.state == "lost");
    // The record decides what a replica is; the leg says how it is.
    let mode = match (member, rebuilding) {
        (true, _) if lost => pb::Mode::Lost,
        (true, _) => pb::Mode::InSync,
        (_, true) => pb::Mode::Rebuilding,
        _ => pb::Mode::Out,
    };
    let block = u64::from(BLOCK_SIZE);
    let (copied, total) = leg.map_or((0, 0), |leg| (leg.copied_blocks, leg.total_blocks));
    pb::ReplicaMode {
        replica: replica.to_owned(),
        mode: mode.into(),
        copied_bytes: copied.saturating_mul(block),
        total_bytes: total.saturating_mul(block),
        message: if rebuilding && leg.is_none() { "waits to be connected".to_owned() } else { String::new() },
    }
}
