//! Who is in and who is out: links, grace, ejection, joining, swaps (rules 6, 7, 8, 10, 12).
//!
//! *What it is.* Inputs about legs and the arbiter change flags on legs; [`Core::pump_swap`] compares the flags with
//! the record and asks for one swap at a time, the most urgent first: leave, abandon a rebuild, start one, join,
//! close. What a swap changes takes effect when it is committed, never before.
//!
//! *Decision table for a member whose connection is lost.*
//!
//! | other members | after | then |
//! |---|---|---|
//! | all lost too | – | hold, for ever (the engine is the suspect) |
//! | most look bad (see [`suspicion`]) | `grace_long_ns` | leaves, if `S` may shrink |
//! | healthy | `grace_ns` (`grace_long_ns` when announced) | leaves, if `S` may shrink |
//! | healthy, `S` is at `minInSync` | – | frozen; it may come back at any time |
//!
//! [`suspicion`]: crate::suspicion
//!
//! *Invariants.* The last member that stays is never marked to leave; `k` rises with every swap of a set.
//!
//! *When things fail.* A swap that shows another owner stops the core. A joiner that fails before its swap was sent
//! is dropped at once; after that it counts as a member and leaves by a swap of its own.

use crate::config::{Config, ReplicaId};
use crate::core::{Core, Life};
use crate::events::{Action, DropReason, Event, LegId, Nanos, StopReason, SwapId, SwapOutcome, SwapReason};
use crate::gate::Verdict;
use crate::legmeta::LegMeta;
use crate::legs::{Leg, Link, Role};
use crate::open::known_instance;

impl Core {
    /// Legs that were not up at opening: their grace window begins with the first input, which brings the time.
    pub(crate) fn start_grace(&mut self, now: Nanos) {
        for leg in self.legs.iter_mut() {
            if let Link::Lost { since: since @ Nanos::MAX, .. } = &mut leg.link {
                *since = now;
            }
        }
    }

    pub(crate) fn apply_leg_lost(&mut self, now: Nanos, leg: LegId, announced: bool, out: &mut Vec<Action>) {
        self.mark_lost(now, leg, announced, out);
        self.fail_inflight(leg, out);
        self.legs.reap(leg);
    }

    pub(crate) fn mark_lost(&mut self, now: Nanos, id: LegId, announced: bool, out: &mut Vec<Action>) {
        let Some(leg) = self.legs.get_mut(id) else { return };
        if leg.is_up() {
            leg.link = Link::Lost { since: now, announced };
            self.rescan = true;
            if leg.role != Role::Dropped {
                out.push(Action::Event(Event::LegLost { leg: id }));
            }
        }
    }

    /// All I/O in flight on a leg has an unknown outcome.
    fn fail_inflight(&mut self, leg: LegId, out: &mut Vec<Action>) {
        let mut found = std::mem::take(&mut self.found);
        self.io.list(leg, &mut found);
        for io in found.drain(..) {
            if let Some(entry) = self.io.take(io, leg) {
                self.finish_io(leg, entry, Err(crate::LegError::Gone), out);
            }
        }
        self.found = found;
    }

    pub(crate) fn apply_leg_back(&mut self, now: Nanos, id: LegId, cache_lost: bool, out: &mut Vec<Action>) {
        // A runner that tells of the new session only: the old one's I/O is lost all the same.
        self.mark_lost(now, id, false, out);
        self.fail_inflight(id, out);
        let asked = self.leave_is_asked(id);
        self.meta.pump = true;
        let Some(leg) = self.legs.get_mut(id) else { return };
        leg.link = Link::Up;
        if leg.eject == Some(DropReason::Lost) && !asked {
            // Its window was over but no swap could be sent for it: it is welcome again.
            leg.eject = None;
            if leg.unequal {
                self.copies.begin(id, true); // Its copy had ended with it.
            }
            self.update_expected();
        } else if leg.eject == Some(DropReason::Removed) && asked {
            // The swap that takes it out may be committed, and its data deleted since: its meta area must not be made to look
            // like that of a member (rules 9 and 22).
            leg.eject = Some(DropReason::Lost);
            self.update_expected();
            return;
        } else if leg.is_failed() {
            return; // Dropped already, or will be when the swap is committed.
        }
        let Some(leg) = self.legs.get(id) else { return };
        let lost = cache_lost && leg.has_unflushed() && !self.bends_cache();
        if lost && !self.eject_or_drop(id, DropReason::CacheLost) {
            self.stop(StopReason::CacheLost { leg: id }, out);
            return;
        }
        self.rescan = true;
        self.refresh_grace(now);
        let replayed = self.replay(id, out);
        out.push(Action::Event(Event::LegBack { leg: id, replayed }));
    }

    /// A replica's instance changed. What that may have cost is told by `LegBack`.
    pub(crate) fn apply_leg_instance(&mut self, id: LegId, instance: &str) {
        let instance = known_instance(instance);
        let Some(leg) = self.legs.get_mut(id).filter(|l| l.instance != instance) else { return };
        leg.instance = instance;
        // The superblock of a joiner is written once more when it joins.
        if leg.role == Role::Member {
            self.meta.outdate();
        }
    }

    /// From now on the members together are the truth (rule 1).
    pub(crate) fn apply_hosts_detached(&mut self) {
        if std::mem::take(&mut self.hosts_must_detach) {
            self.meta.outdate();
        }
    }

    /// Rule 1 broken on purpose: a lost cache is not noticed.
    fn bends_cache(&self) -> bool {
        #[cfg(feature = "planted-bugs")]
        {
            self.options.bug == Some(crate::PlantedBug::Rule01CacheLossIgnored)
        }
        #[cfg(not(feature = "planted-bugs"))]
        {
            false
        }
    }

    /// A swap is under way that removes this member, or the leg is no member.
    fn leave_is_asked(&self, id: LegId) -> bool {
        let Some(leg) = self.legs.get(id).filter(|l| l.role == Role::Member) else { return true };
        self.gate.pending.as_ref().is_some_and(|swap| !swap.next.in_sync.contains(&leg.replica))
    }

    /// The first leg back after all were lost: the others get their whole window from now (rule 12).
    fn refresh_grace(&mut self, now: Nanos) {
        if std::mem::take(&mut self.all_lost) {
            for leg in self.legs.iter_mut() {
                if let Link::Lost { since, .. } = &mut leg.link {
                    *since = now;
                }
            }
        }
    }

    /// Marks a leg to leave. False when it is the last member that stays, which never leaves.
    pub(crate) fn eject_or_drop(&mut self, id: LegId, reason: DropReason) -> bool {
        let others_stay = self.legs.iter().any(|l| l.id != id && l.role == Role::Member && l.eject.is_none());
        let Some(leg) = self.legs.get_mut(id) else { return true };
        if leg.is_failed() {
            return true;
        }
        if leg.role == Role::Member && !others_stay && leg.eject.is_none() {
            return false;
        }
        leg.eject = Some(reason);
        self.update_expected();
        true
    }

    pub(crate) fn apply_add_leg(
        &mut self,
        leg: LegId,
        replica: ReplicaId,
        (local, meta): (bool, bool),
        out: &mut Vec<Action>,
    ) {
        let mut fresh = Leg::new(leg, replica, local, Role::Announced, Link::Up);
        if let Some(wib) = self.wib.as_ref().filter(|_| meta) {
            fresh.meta = Some(Box::new(LegMeta::new(&wib.geometry)));
        }
        let member = self.gate.requires(&fresh.replica);
        self.gone.back(&fresh.replica);
        if self.life != Life::Running || member || !self.legs.insert(fresh) {
            out.push(Action::LegDrop { leg, reason: DropReason::Refused });
        }
    }

    pub(crate) fn apply_remove_leg(&mut self, id: LegId, out: &mut Vec<Action>) {
        let Some(leg) = self.legs.get(id) else { return };
        let is_member = leg.role == Role::Member;
        let may = !is_member || (self.may_shrink() && self.legs.iter().any(|l| l.id != id && l.is_source()));
        if !may || !self.eject_or_drop(id, DropReason::Removed) {
            out.push(Action::Event(Event::RemoveRefused { leg: id }));
        }
    }

    /// Members that are marked to leave.
    fn leaving(&self) -> usize {
        self.legs.iter().filter(|l| l.role == Role::Member && l.eject.is_some()).count()
    }

    /// How many members may leave by the record.
    fn may_leave(&self) -> usize {
        let config = &self.gate.config;
        let min = if self.bends_strict() { 1 } else { config.members_min() };
        config.in_sync.len().saturating_sub(min)
    }

    /// Rule 12 broken on purpose: an engine that lost everybody ejects them.
    pub(crate) fn bends_suspicion(&self) -> bool {
        #[cfg(feature = "planted-bugs")]
        {
            self.options.bug == Some(crate::PlantedBug::Rule12EjectAlthoughSuspect)
        }
        #[cfg(not(feature = "planted-bugs"))]
        {
            false
        }
    }

    /// Rule 6 broken on purpose: strict mode shrinks below its minimum.
    fn bends_strict(&self) -> bool {
        #[cfg(feature = "planted-bugs")]
        {
            self.options.bug == Some(crate::PlantedBug::Rule06StrictShrinks)
        }
        #[cfg(not(feature = "planted-bugs"))]
        {
            false
        }
    }

    /// How many more members may be marked to leave.
    pub(crate) fn may_still_leave(&self) -> usize {
        self.may_leave().saturating_sub(self.leaving())
    }

    /// One more member may be marked to leave.
    fn may_shrink(&self) -> bool {
        self.leaving() < self.may_leave()
    }

    /// Marks legs whose window is over, and finds out whether the engine is the suspect or the volume frozen.
    pub(crate) fn expire(&mut self, now: Nanos, out: &mut Vec<Action>) {
        let members = self.legs.mask(|l| l.role == Role::Member && l.eject.is_none());
        let lost = self.legs.mask(|l| l.role == Role::Member && l.eject.is_none() && !l.is_up());
        self.all_lost = !lost.is_empty() && lost == members;
        let suspect = self.is_suspect(now, out);
        Self::tell(&mut self.suspect, suspect, Event::Suspect, None, out);
        let mut stuck = self.leaving() > self.may_leave() || self.is_stuck_on_meta();
        for id in self.legs.mask(|l| !l.is_up() && !l.is_failed()).iter() {
            let expired = self.grace_end(id).is_some_and(|end| end <= now);
            let member = members.contains(id);
            if !expired || (member && self.all_lost && !self.bends_suspicion()) {
                continue;
            }
            if member && !self.may_shrink() {
                stuck = true;
            } else {
                self.eject_or_drop(id, DropReason::Lost);
            }
        }
        if stuck && !self.frozen {
            self.rescan = true;
        }
        Self::tell(&mut self.frozen, stuck, Event::Frozen, Some(Event::Thawed), out);
    }

    /// When a lost leg's window is over.
    fn grace_end(&self, id: LegId) -> Option<Nanos> {
        let leg = self.legs.get(id)?;
        let Link::Lost { since, announced } = leg.link else { return None };
        let long = leg.role == Role::Member && (announced || self.suspect);
        let window = if long { self.options.grace_long_ns } else { self.options.grace_ns };
        Some(since.saturating_add(window))
    }

    pub(crate) fn next_deadline(&self, now: Nanos) -> Option<Nanos> {
        let swap = self.gate.pending.as_ref().and_then(|s| s.retry_at);
        let lost = self.legs.iter().filter(|l| !l.is_failed()).filter_map(|l| self.grace_end(l.id));
        let later = self.lease_deadline().into_iter().chain(self.marks.look_at);
        lost.chain(swap).chain(later).chain(self.snapshot_deadline()).chain(self.broken()).filter(|at| *at > now).min()
    }

    /// Asks for the next swap, or again for the one that is not settled.
    pub(crate) fn pump_swap(&mut self, now: Nanos, out: &mut Vec<Action>) {
        self.drop_failed_joiners(out);
        self.begin_announced(out);
        let ask = if self.gate.pending.is_some() {
            self.gate.retry(now)
        } else {
            self.plan_swap().map(|(next, reason)| {
                let swap = self.gate.propose(next.clone(), reason);
                (swap, next, reason)
            })
        };
        if let Some((swap, next, reason)) = ask {
            out.push(Action::Swap { swap, expect: self.gate.config.version(), next: Box::new(next), reason });
            if reason == SwapReason::Join {
                self.update_expected();
            }
        }
    }

    fn plan_swap(&mut self) -> Option<(Config, SwapReason)> {
        let recorded = &self.gate.config.rebuilding;
        self.abandoned.retain(|r| recorded.contains(r));
        self.plan_leave()
            .or_else(|| self.plan_snapshot())
            .or_else(|| self.plan_abandon())
            .or_else(|| self.plan_start())
            .or_else(|| self.plan_join())
            .or_else(|| self.plan_close())
    }

    pub(crate) fn next_config(&self) -> Config {
        let mut next = self.gate.config.clone();
        #[cfg(feature = "planted-bugs")]
        if self.options.bug == Some(crate::PlantedBug::Rule08SameNumber) {
            return next;
        }
        next.config_number = next.config_number.next();
        next
    }

    /// Rule 6: those that failed leave; never so many that `S` falls below its minimum.
    fn plan_leave(&self) -> Option<(Config, SwapReason)> {
        if self.leaving() == 0 || self.may_leave() == 0 {
            return None; // The usual case: nothing is copied or allocated.
        }
        let leaving = self.legs.iter().filter(|l| l.role == Role::Member && l.eject.is_some());
        let mut next = self.next_config();
        for leg in leaving.take(self.may_leave()) {
            next.in_sync.remove(&leg.replica);
        }
        (next.in_sync != self.gate.config.in_sync).then_some((next, SwapReason::Leave))
    }

    fn plan_abandon(&self) -> Option<(Config, SwapReason)> {
        if self.abandoned.is_empty() {
            return None;
        }
        let mut next = self.next_config();
        for replica in &self.abandoned {
            next.rebuilding.remove(replica);
        }
        Some((next, SwapReason::AbandonRebuild))
    }

    fn plan_start(&self) -> Option<(Config, SwapReason)> {
        let announced = |l: &&Leg| l.role == Role::Announced && l.eject.is_none();
        if self.life != Life::Running || !self.legs.iter().any(|l| announced(&l)) {
            return None;
        }
        let mut next = self.next_config();
        next.rebuilding.extend(self.legs.iter().filter(announced).map(|l| l.replica.clone()));
        (next.rebuilding != self.gate.config.rebuilding).then_some((next, SwapReason::StartRebuild))
    }

    /// Rule 10: only legs that are copied, flushed and whose answers are required already.
    fn plan_join(&self) -> Option<(Config, SwapReason)> {
        let ready = |l: &&Leg| l.role == Role::Admitted && l.eject.is_none() && l.is_up() && self.may_join(l);
        if self.life != Life::Running || self.keeps_joiners_out() || !self.legs.iter().any(|l| ready(&l)) {
            return None;
        }
        let mut next = self.next_config();
        for leg in self.legs.iter().filter(ready) {
            next.rebuilding.remove(&leg.replica);
            next.in_sync.insert(leg.replica.clone());
        }
        Some((next, SwapReason::Join))
    }

    /// Joiners that failed and whom no record counts in.
    fn drop_failed_joiners(&mut self, out: &mut Vec<Action>) {
        let gate = &self.gate;
        let failed = |l: &Leg| l.eject.is_some() && l.role != Role::Member && !gate.requires(&l.replica);
        let failed = self.legs.mask(|l| l.role != Role::Dropped && failed(l));
        for id in failed.iter() {
            self.drop_leg(id, out);
        }
    }

    /// Announced legs whose replica is recorded in `R`: mirror and copy to them from now on.
    fn begin_announced(&mut self, out: &mut Vec<Action>) {
        if self.life != Life::Running {
            return;
        }
        let (recorded, abandoned) = (&self.gate.config.rebuilding, &self.abandoned);
        let may = |r: &ReplicaId| recorded.contains(r) && !abandoned.contains(r);
        let begin = self.legs.mask(|l| l.role == Role::Announced && l.eject.is_none() && may(&l.replica));
        for id in begin.iter() {
            let Some(leg) = self.legs.get_mut(id) else { continue };
            leg.role = Role::Copying;
            out.push(Action::Event(Event::RebuildStarted { leg: id, replica: leg.replica.clone() }));
            // With a meta area it is first found out what it lacks.
            let everything = leg.meta.is_none();
            self.copies.begin(id, everything);
            self.update_expected();
        }
    }

    /// Lets a leg go. Its replica is in no record's `S`.
    fn drop_leg(&mut self, id: LegId, out: &mut Vec<Action>) {
        self.end_copy(id);
        let Some(leg) = self.legs.get_mut(id) else { return };
        let was_member = leg.role == Role::Member;
        leg.role = Role::Dropped;
        let reason = leg.eject.unwrap_or(DropReason::Removed);
        let was_mirrored = leg.meta.is_some() && !was_member;
        if was_mirrored {
            // It misses writes from now on, whenever the swap that says so is committed.
            self.advance_stamps();
        }
        let Some(leg) = self.legs.get_mut(id) else { return };
        if !was_member && !self.abandoned.contains(&leg.replica) {
            self.abandoned.push(leg.replica.clone());
        }
        out.push(Action::LegDrop { leg: id, reason });
        // Its number may be given to another leg: nothing may remember what this one did.
        self.host.forget_leg(id);
        self.copies.forget_leg(id);
        self.repairs.forget_leg(id);
        self.regions.forget_leg(id);
        self.forget_flushed(id);
        self.forget_snapshot_flush(id);
        self.legs.reap(id);
        self.update_expected();
    }

    pub(crate) fn apply_swap_answer(&mut self, now: Nanos, swap: SwapId, outcome: SwapOutcome, out: &mut Vec<Action>) {
        let retry_at = now.saturating_add(self.options.swap_retry_ns);
        match self.gate.answer(swap, outcome, retry_at) {
            Verdict::Committed(reason) => self.committed(reason, out),
            Verdict::Superseded(current) => {
                self.stop(StopReason::Superseded { current: current.version() }, out);
            }
            Verdict::Unsettled { unknown: true } => {
                out.push(Action::Event(Event::SwapUnknown { swap }));
                self.bend_unknown(out);
            }
            Verdict::Unsettled { unknown: false } | Verdict::Ignored => {}
        }
    }

    /// Rule 7 broken on purpose.
    fn bend_unknown(&mut self, out: &mut Vec<Action>) {
        #[cfg(feature = "planted-bugs")]
        if self.options.bug == Some(crate::PlantedBug::Rule07AssumeCommitted)
            && let Verdict::Committed(reason) = self.gate.commit()
        {
            self.committed(reason, out);
        }
        let _ = out;
    }

    fn committed(&mut self, reason: SwapReason, out: &mut Vec<Action>) {
        let config = self.gate.config.clone();
        if reason == SwapReason::Join {
            self.refresh_grace(self.now); // Those that were lost together are not judged by the time before.
        }
        let gone = self.legs.mask(|l| l.role == Role::Member && !config.in_sync.contains(&l.replica));
        for id in gone.iter() {
            self.note_gone(id);
            self.drop_leg(id, out);
        }
        for leg in self.legs.iter_mut() {
            if leg.role == Role::Admitted && config.in_sync.contains(&leg.replica) {
                leg.role = Role::Member;
                out.push(Action::Event(Event::Joined { leg: leg.id, replica: leg.replica.clone() }));
            }
        }
        self.advance_stamps();
        self.update_expected();
        self.meta.outdate();
        out.push(Action::Event(Event::ConfigChanged { config: Box::new(config) }));
        if reason == SwapReason::Snapshot {
            self.snapshot_recorded(out);
        }
        if reason == SwapReason::Close {
            self.closed(out);
        }
    }
}
