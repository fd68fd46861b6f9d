//! What a manager asks of an engine: start, replicas in and out, hosts, stop.
//!
//! *What it is.* The owner's answers to calls, one at a time.
//!
//! *Invariants.*
//! - A changed wish is durable before anything is done for it.
//! - A replica that has a leg or a place in the record stays known, whatever a manager leaves out.
//! - Hosts are told to keep their commands before a mirror is closed, and a wish is forgotten only after it is closed.
//!
//! *When things fail.* [`AgentError`] to the caller; what was made durable is gone on with by itself.

use std::time::Duration;

use tokio::time::Instant;

use super::telling::is_named;
use super::{CLOSE_DEADLINE, Command, Owner, Phase, REMOVE_DEADLINE};
use crate::engine::build;
use crate::error::AgentError;
use crate::rpc::MirrorState;
use crate::state::{EngineWish, MemberWish};

impl Owner {
    pub(super) async fn apply(&mut self, command: Command) {
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
    pub(super) async fn stop(&mut self) -> Result<u64, AgentError> {
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
}
