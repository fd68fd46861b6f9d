//! Meta areas in the simulator: their I/O between engine and replica, and what the disks must say about it.
//!
//! *What is checked.* Nothing is acknowledged by a record that the members' superblocks do not carry (rule 6). Data of a write is sent only when the bits of its regions are set on the disks of all recorded
//! members (rules 9 and 18). A bit is cleared only when all members have flushed the region. Only regions whose bit was
//! set on a member when the engine opened are made equal. With `check_bits` off none of this is looked at: then only
//! what hosts read tells.

use std::sync::Arc;

use mirror_core::{CopySlot, Input, IoId, LegError, LegId, MetaOp, MetaUnreadable, OpenInput};

use crate::engine::{COPY_QUEUE_DEPTH, Job};
use crate::replica::{DiskIo, Replica};
use crate::world::{ConnId, EngineRef, OPENER_IO, ToEngine, ToReplica, World, layout, replica_id, replica_index};

impl World {
    /// Sends I/O on a meta area.
    pub(crate) fn meta_io(&mut self, me: EngineRef, leg: LegId, io: Option<IoId>, op: MetaOp) {
        let Some(process) = self.process(me) else { return };
        let epoch = process.epoch;
        let Some(state) = process.legs.get(&leg).copied() else { return };
        let serving = matches!(process.job, Job::Serving(_));
        let Some(conn) = state.conn else {
            if serving {
                self.fail(format!("the core sends to the meta area of {leg:?}, which it was told is lost"));
            }
            return; // The opener waits for an answer until its deadline.
        };
        if !state.meta {
            return self.fail(format!("{leg:?} has no meta area, but is asked for it"));
        }
        self.outcome.meta_writes += u64::from(matches!(op, MetaOp::Write { .. }));
        self.send_replica(me, state.replica, ToReplica::Meta { conn, epoch, io, leg, op });
    }

    pub(crate) fn meta_reply(
        &mut self,
        me: EngineRef,
        conn: ConnId,
        leg: LegId,
        (io, reads): (Option<IoId>, bool),
        result: Result<Arc<[u8]>, LegError>,
    ) {
        let Some(process) = self.process(me) else { return };
        if process.legs.get(&leg).is_none_or(|l| l.conn != Some(conn)) {
            return;
        }
        if matches!(result, Err(LegError::Gone)) {
            self.conn_lost(me, conn);
        }
        let Some(io) = io else {
            if matches!(result, Err(LegError::Gone)) {
                return; // As above.
            }
            let result = result.map_err(|_| MetaUnreadable);
            return self.feed_opener(me, OpenInput::MetaRead { leg, result });
        };
        match result {
            Err(LegError::Gone) => {}
            Ok(data) if reads => self.feed_core(me, Input::MetaRead { leg, io, data }),
            result => self.feed_core(me, Input::LegDone { leg, io, result: result.map(|_| ()) }),
        }
    }

    /// Rule 18: when data goes out, every member's bits say so already (and a joiner's, rule 9).
    pub(crate) fn check_bits(&mut self, me: EngineRef, (lba, blocks): (u64, u32)) {
        let Some(process) = self.process_ref(me) else { return };
        if !process.keeps_bits || self.arbiter.hold || process.epoch != self.arbiter.record.epoch {
            return;
        }
        let failed = process.meta_failed.clone();
        let geometry = layout();
        let (first, last) = geometry.regions_of(lba, blocks);
        for member in self.arbiter.record.in_sync.iter().map(replica_index).filter(|m| !failed.contains(m)) {
            let replica = &self.replicas[member];
            let bits = replica.bits(&geometry);
            if let Some(region) = (first..=last).find(|r| replica.has_meta() && !bits.contains(*r)) {
                return self.fail(format!("region {region} is written but its bit is not set on r{member}"));
            }
        }
    }

    /// Rule 6: nothing is acknowledged by a record that the superblocks of its members do not carry.
    pub(crate) fn check_carried(&mut self, me: EngineRef) {
        let Some(process) = self.process(me).filter(|p| p.keeps_bits) else { return };
        let Job::Serving(core) = &process.job else { return };
        let config = core.config();
        if process.carried == Some(config.config_number) {
            return; // Superblocks never fall back.
        }
        let number = config.config_number;
        process.carried = Some(number);
        let epoch = process.epoch;
        let leaving = core.status().leaving;
        let leaving: Vec<usize> = leaving.iter().filter_map(|l| process.legs.get(l)).map(|l| l.replica).collect();
        let stays = |r: &usize| !leaving.contains(r);
        let members: Vec<usize> = config.in_sync.iter().map(replica_index).filter(stays).collect();
        // What a replica went through after a newer engine fenced it is not this engine's, which may pass on old answers.
        // One that a swap took out of which the engine has not heard yet may be deleted already.
        let record = &self.arbiter.record;
        let newer = record.config_number > number && record.epoch == epoch;
        let members = members.into_iter().filter(|r| !newer || record.in_sync.contains(&replica_id(*r)));
        let members: Vec<usize> = members.collect();
        let carries = |r: &Replica| r.epoch > epoch || r.superblock().is_some_and(|s| s.record.config_number >= number);
        let without = members.iter().find(|m| self.replicas[**m].has_meta() && !carries(&self.replicas[**m]));
        if let Some(member) = without {
            self.fail(format!("{me:?} acknowledges by configuration {number}, which r{member} does not carry"));
        }
    }

    /// Only regions that may differ are made equal, not the whole volume.
    pub(crate) fn check_copy(&mut self, me: EngineRef, slot: CopySlot, (lba, blocks): (u64, u32)) {
        let Some(process) = self.process_ref(me) else { return };
        if slot.0 <= COPY_QUEUE_DEPTH {
            return; // The copy of a rebuild, or the repair of a failed write.
        }
        let (first, last) = layout().regions_of(lba, blocks);
        if let Some(region) = (first..=last).find(|r| !process.inherited.contains(*r)) {
            self.fail(format!("region {region} is made equal but its bit was set on no member"));
        }
    }

    /// A meta area's I/O is executed. Whoever clears a bit has had the region flushed on every member.
    pub(crate) fn meta_done(&mut self, r: usize, io: &DiskIo, op: &MetaOp) {
        let geometry = layout();
        let before = self.replicas[r].bits(&geometry);
        let result = self.replicas[r].execute_meta(op, self.now, &mut self.rng);
        let after = self.replicas[r].bits(&geometry);
        self.note_dirty(&after);
        if result.is_err() {
            self.note_unknown(None);
        }
        let reads = matches!(op, MetaOp::Read { .. });
        self.trace(|| {
            let set: Vec<u32> = after.iter().collect();
            let what = if reads { "reads" } else { "writes" };
            format!("r{r} meta {what} of {:?}: {:?}, bits {set:?}", io.from, result.as_ref().err())
        });
        let cleared: Vec<u32> = before.iter().filter(|region| !after.contains(*region)).collect();
        self.outcome.cleared += cleared.len() as u64;
        let recorded = self.arbiter.record.in_sync.iter().filter(|_| !self.arbiter.hold);
        let members: Vec<usize> = recorded.map(replica_index).collect();
        for region in cleared.into_iter().filter(|_| self.scenario.check_bits && members.contains(&r)) {
            if let Some(member) = members.iter().find(|m| self.replicas[**m].unflushed.contains(&region)) {
                let what = format!("the bit of region {region} was cleared on r{r} before r{member} was flushed");
                return self.fail(what);
            }
        }
        if self.replicas[r].session.map(|s| s.0) == Some(io.conn) {
            let tag = (io.io != OPENER_IO).then_some(io.io);
            self.send_engine(io.from, r, ToEngine::MetaReply { conn: io.conn, leg: io.leg, io: tag, reads, result });
        }
    }
}
