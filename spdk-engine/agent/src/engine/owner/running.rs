//! An open volume: what the mirror says, and what is mended beside it.
//!
//! *What it is.* The owner's steps while its phase is open: read the mirror when it has changed, promote and connect lost
//! legs and replicas of `R` without a leg, export again, find out that another engine has the volume.
//!
//! *Invariants.*
//! - Before a lost leg's replica is promoted again, the mirror knows what that replica may have lost (rule 1).
//! - A leg that the mirror let go is detached, so that nothing of it reconnects.
//! - A mirror that has stopped is removed before the volume is opened anew.
//!
//! *When things fail.* What could not be mended is tried again with growing pauses, from [`MEND`] to [`MEND_MAX`]. A
//! replica that knows a newer epoch has the arbiter asked, whose word counts.

use std::collections::BTreeSet;

use addax_proto::engine_v1 as pb;
use mirror_core::PromoteError;
use tokio::time::Instant;

use super::{MEND, MEND_MAX, Owner, Phase};
use crate::engine::build;
use crate::engine::open::power_instance;
use crate::error::AgentError;
use crate::replica::Promotion;
use crate::rpc::{LegParams, MirrorState};
use crate::state::MemberWish;

impl Owner {
    /// Takes what the events brought, and reads the mirror if anything but progress happened or if told to.
    pub(super) async fn look(&mut self, anyway: bool) {
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

    pub(super) fn mend_soon(&mut self) {
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

    pub(super) async fn mend(&mut self) {
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
    pub(super) async fn is_superseded(&self) -> bool {
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
    pub(super) async fn connect_leg(&mut self, member: &MemberWish) -> Result<(), AgentError> {
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
}
