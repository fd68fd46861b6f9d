//! The owner task of one engine: opens its volume, keeps it open, closes it.
//!
//! *What it is.* The task itself, its state, and what wakes it are here; its steps by phase in `opening` and `running`, its
//! answers to calls in `commands`, its words to managers in `telling`.
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
//! - A mirror that is closing is exported no more, also when the call to close it has failed meanwhile. Once it is closed
//!   it is done with: if nobody asks to stop the engine again, the volume is opened anew.
//! - Hosts that may hold acknowledged writes which no copy has are not let in until they were not wanted for once: a manager
//!   has seen them detach (rule 1).
//!
//! *When things fail.* A lost leg whose data plane was restarted is promoted again in the same epoch, so that it can come
//! back within the mirror's grace. A replica of `R` without a leg is connected again and again. Both with growing
//! pauses, from [`MEND`] to [`MEND_MAX`].

mod commands;
mod opening;
mod running;
mod telling;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use addax_proto::engine_v1 as pb;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::build::Identity;
use super::device::Device;
use super::open::{InVain, OpenFailure, Opened, Progress};
use super::{EngineContext, Signals, Wishes};
use crate::error::AgentError;
use crate::rpc::{MirrorConfig, MirrorLeg};
use crate::state::{EngineWish, MemberWish};
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
}
