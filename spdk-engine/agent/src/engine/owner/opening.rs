//! Opening a volume, from the first look at the data plane to an exported mirror.
//!
//! *What it is.* The owner's steps while its phase is waiting or opening: take over a mirror that runs, or read whose the
//! record is, begin an opening as a task of its own, take what it made, serve its swaps, export it.
//!
//! *Invariants.*
//! - An opening that nobody asked for goes on only if the record is this agent's.
//! - The name of an engine's instance is durable before the record can carry it, so that it is known again as ours.
//! - That an engine serves, and which hosts it refuses, is kept before its swaps are served.
//!
//! *When things fail.* The volume waits, with growing pauses from [`PAUSE_MIN`] to [`PAUSE_MAX`], and tries again; a new
//! data plane is tried at once. Another engine's epoch ends that: a manager must ask.

use std::collections::BTreeMap;
use std::sync::Arc;

use mirror_core::{OpenError, RecordError};
use tokio::sync::watch;
use tokio::time::Instant;
use uuid::Uuid;

use super::{MEND, Open, Opening, Owner, PAUSE_MAX, PAUSE_MIN, Phase};
use crate::arbiter::{config_to_mirror, mirror_to_config};
use crate::engine::build::{self, Identity};
use crate::engine::device::Device;
use crate::engine::open::{Attempt, OpenFailure, Opened, Progress, open};
use crate::engine::swaps::SwapServer;
use crate::error::AgentError;
use crate::state::{EngineWish, Served};
use crate::supervise::Plane;
use crate::supervise::process::ProcessId;

impl Owner {
    pub(super) fn plane_changed(&mut self) {
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
    pub(super) fn let_go(&mut self) {
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

    pub(super) fn wait_again(&mut self, reason: String) {
        tracing::warn!(volume = %self.wish.volume, %reason, "the volume is not open");
        self.phase = Phase::Waiting { reason, until: Instant::now() + self.pause };
        self.pause = (self.pause * 2).min(PAUSE_MAX);
    }

    pub(super) async fn begin(&mut self) {
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
    pub(super) async fn settle_hosts(&mut self) {
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

    pub(super) async fn opened(&mut self, result: Result<Opened, OpenFailure>) {
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

    pub(super) async fn export(&mut self) {
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
}
