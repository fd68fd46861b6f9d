//! What can happen in a world, and what follows.

use mirror_core::{
    EngineInstance, Epoch, HostId, Input, LegError, LegId, Op, OpenInput, OpenWaits, Opener, OpenerParams,
    PromoteError, ReplicaFacts, SwapId, SwapOutcome, VolumeId,
};

use super::*;

impl World {
    /// Everything that can happen now.
    pub fn choices(&self) -> Vec<Choice> {
        let mut all = Vec::new();
        if self.violation.is_some() {
            return all;
        }
        for (e, process) in self.engines.iter().enumerate() {
            match process {
                None if self.instances < self.bounds.instances => all.push(Choice::Start(e)),
                None => {}
                Some(process) => self.engine_choices(e, process, &mut all),
            }
        }
        for (i, request) in self.requests.iter().enumerate() {
            if request.waits.is_some() {
                all.push(if request.executed { Choice::Timeout(i) } else { Choice::Settle(i) });
                if !request.executed && self.unheard < self.bounds.unheard {
                    all.push(Choice::Timeout(i));
                }
            }
            if !request.executed && request.expect == self.record.version() {
                let free = request.waits.is_none() || self.unheard < self.bounds.unheard;
                all.extend(free.then_some(Choice::LateSwap(i)));
            }
        }
        all.extend((0..self.replicas.len()).filter(|r| self.replicas[*r].disk.is_some()).map(Choice::Land));
        let keeps = |r: &usize| !self.replicas[*r].keeping.is_empty();
        all.extend((0..self.replicas.len()).filter(keeps).map(Choice::LandBits));
        if self.now < 1 + self.bounds.times * STEP {
            all.push(Choice::TimePasses);
        }
        all
    }

    fn engine_choices(&self, e: usize, process: &Process, all: &mut Vec<Choice>) {
        all.push(Choice::Die(e));
        all.extend(process.promotes.iter().map(|r| Choice::Promote(e, *r)));
        if !matches!(process.job, Job::Serving(_)) {
            return;
        }
        for (id, leg) in &process.legs {
            let newer = self.replicas[leg.replica].epoch > process.epoch;
            if !leg.stuck.is_empty() && newer {
                all.push(Choice::Fence(e, *id));
            }
            if !leg.up && !newer {
                all.push(Choice::Reattach(e, *id));
            }
            if leg.up && self.replicas[leg.replica].session == Some((e, *id)) && self.breaks < self.bounds.breaks {
                all.push(Choice::Break(e, *id));
            }
        }
        for (r, replica) in self.replicas.iter().enumerate() {
            let known = process.legs.values().any(|leg| leg.replica == r);
            if !known && replica.epoch <= process.epoch && self.joins < self.bounds.joins {
                all.push(Choice::Rejoin(e, r));
            }
        }
        if self.written < 1 + self.bounds.writes {
            all.push(Choice::Write(e));
        }
        if self.reads < self.bounds.reads {
            all.push(Choice::Read(e));
        }
    }

    /// Makes one of [`World::choices`] happen.
    pub fn take(&mut self, choice: Choice) {
        match choice {
            Choice::Start(e) => self.start(e),
            Choice::Promote(e, r) => self.promote(e, r),
            Choice::Settle(i) => self.settle(i),
            Choice::LateSwap(i) => {
                if self.requests[i].waits.is_some() {
                    self.unheard += 1;
                }
                self.happened.push(Happened::Unheard);
                self.execute(i);
                self.requests[i].executed = true;
            }
            Choice::Timeout(i) => self.timeout(i),
            Choice::Land(r) => self.land(r),
            Choice::LandBits(r) => self.land_bits(r),
            Choice::Fence(e, leg) => {
                let stuck = std::mem::take(&mut self.process(e).legs.get_mut(&leg).unwrap().stuck);
                for io in stuck {
                    self.feed.push_back(Feed::Core(e, Input::LegDone { leg, io, result: Err(LegError::Fenced) }));
                }
            }
            Choice::Break(e, leg) => {
                self.breaks += 1;
                self.lose(e, leg);
                self.feed.push_back(Feed::Core(e, Input::LegLost { leg, announced: false }));
            }
            Choice::Reattach(e, leg) => {
                self.attach(e, leg);
                self.happened.push(Happened::Replayed);
                self.feed.push_back(Feed::Core(e, Input::LegBack { leg, cache_lost: false }));
            }
            Choice::Rejoin(e, r) => self.rejoin(e, r),
            Choice::Write(e) => {
                self.written += 1;
                let value = self.written;
                self.host(e, Op::Write { fua: false }, value);
            }
            Choice::Read(e) => {
                self.reads += 1;
                self.host(e, Op::Read, self.floor);
            }
            Choice::TimePasses => self.time_passes(),
            Choice::Die(e) => self.die(e),
        }
        self.settle_feed();
        let current = (self.record.epoch, self.record.config_number);
        let alive = |r: &Request| r.waits.is_some() || (r.expect.epoch, r.expect.config_number) >= current;
        self.requests.retain(|r| alive(r) && !(r.executed && r.waits.is_none()));
        self.check();
    }

    fn check(&mut self) {
        for id in self.record.in_sync.clone() {
            let data = self.replicas[replica_index(&id)].data;
            if data < self.acknowledged {
                self.fail(format!(
                    "{id} is in the recorded S, holds {data}, and {} was acknowledged",
                    self.acknowledged
                ));
            }
        }
    }

    fn start(&mut self, e: usize) {
        self.instances += 1;
        let instance = EngineInstance::new(&format!("e{}", self.instances)).unwrap();
        let waits = OpenWaits {
            promote_wait_ns: 0,
            retry_ns: 0,
            connect_wait_ns: 1000 * STEP,
            bits_wait_ns: 1000 * STEP,
            give_up_ns: 1000 * STEP,
            lease_margin_ns: 1,
        };
        let opener = Opener::new(OpenerParams {
            volume: VolumeId::new("v1").unwrap(),
            block_size: 512,
            engine_instance: instance.clone(),
            lineage: None,
            local: [].into(),
            dead_engines: [].into(),
            in_vain: None,
            options: self.options(),
            waits,
        });
        self.engines[e] = Some(Process::new(instance, Epoch(0), Job::Opening(Box::new(opener))));
        self.feed.push_back(Feed::Opener(e, OpenInput::Start));
    }

    fn die(&mut self, e: usize) {
        let legs: Vec<LegId> = self.process(e).legs.keys().copied().collect();
        legs.into_iter().for_each(|leg| self.lose(e, leg));
        self.engines[e] = None;
        for request in self.requests.iter_mut().filter(|r| r.waits == Some(e)) {
            request.waits = None;
        }
    }

    /// The session ends; what the disk has of it may land until the next session has drained it.
    pub(super) fn lose(&mut self, e: usize, leg: LegId) {
        let Some(state) = self.process(e).legs.get_mut(&leg) else { return };
        state.up = false;
        state.stuck.clear();
        let r = state.replica;
        if self.replicas[r].session == Some((e, leg)) {
            self.replicas[r].session = None;
            let replica = &mut self.replicas[r];
            replica.disk.iter_mut().for_each(|io| io.owner = None);
            replica.keeping.iter_mut().for_each(|io| io.owner = None);
        }
    }

    /// Ends and drains the older session, makes epoch and instance durable (rule 13). False when a newer one is there.
    fn admit(&mut self, e: usize, r: usize) -> bool {
        let (epoch, instance) = (self.process(e).epoch, self.process(e).instance.clone());
        let replica = &mut self.replicas[r];
        if replica.epoch > epoch || (replica.epoch == epoch && replica.instance.as_ref() != Some(&instance)) {
            return false;
        }
        replica.epoch = epoch;
        replica.instance = Some(instance);
        replica.session = None;
        let data = replica.disk.take().and_then(|io| io.owner);
        let bits = replica.keeping.drain(..).filter_map(|io| io.owner);
        let drained: Vec<_> = bits.chain(data).collect();
        for (old, leg, io) in drained {
            if let Some(leg) = self.engines[old].as_mut().and_then(|p| p.legs.get_mut(&leg)) {
                leg.stuck.push(io);
            }
        }
        true
    }

    fn promote(&mut self, e: usize, r: usize) {
        self.process(e).promotes.retain(|p| *p != r);
        let facts = ReplicaFacts { meta: self.bounds.bits, ..ReplicaFacts::default() };
        let result = if self.admit(e, r) { Ok(facts) } else { Err(PromoteError::Newer) };
        self.feed.push_back(Feed::Opener(e, OpenInput::Promoted { replica: replica_id(r), result }));
    }

    pub(super) fn attach(&mut self, e: usize, leg: LegId) -> bool {
        let r = self.process(e).legs[&leg].replica;
        let up = self.admit(e, r);
        if up {
            self.replicas[r].session = Some((e, leg));
        }
        if let Some(state) = self.process(e).legs.get_mut(&leg) {
            state.up = up;
            state.stuck.clear();
        }
        up
    }

    fn rejoin(&mut self, e: usize, r: usize) {
        self.joins += 1;
        let process = self.process(e);
        let leg = (0..).map(LegId).find(|id| !process.legs.contains_key(id)).unwrap();
        process.legs.insert(leg, Leg { replica: r, up: false, stuck: Vec::new() });
        if self.attach(e, leg) {
            let meta = self.bounds.bits;
            self.feed.push_back(Feed::Core(e, Input::AddLeg { leg, replica: replica_id(r), local: false, meta }));
        }
    }

    fn land(&mut self, r: usize) {
        let Some(io) = self.replicas[r].disk.take() else { return };
        self.replicas[r].data = io.value;
        if let Some((e, leg, io)) = io.owner {
            self.feed.push_back(Feed::Core(e, Input::LegDone { leg, io, result: Ok(()) }));
        }
    }

    /// For the beginning: the first engine's bits are on the disks.
    pub(super) fn land_all_bits(&mut self) {
        while let Some(r) = (0..self.replicas.len()).find(|r| !self.replicas[*r].keeping.is_empty()) {
            self.land_bits(r);
            self.settle_feed();
        }
    }

    fn land_bits(&mut self, r: usize) {
        let MetaWrite { at, bytes, owner } = self.replicas[r].keeping.remove(0);
        self.replicas[r].meta.0[at..at + bytes.0.len()].copy_from_slice(&bytes.0);
        if let Some((e, leg, io)) = owner {
            self.feed.push_back(Feed::Core(e, Input::LegDone { leg, io, result: Ok(()) }));
        }
    }

    fn host(&mut self, e: usize, op: Op, value: u64) {
        let id = HostId(self.next_host);
        self.next_host += 1;
        let epoch = self.process(e).epoch;
        let newer = |p: &Process| p.epoch > epoch && matches!(p.job, Job::Serving(_));
        let replaced = self.engines.iter().flatten().any(newer);
        let process = self.process(e);
        process.values.insert(id, value);
        process.begun.insert(id, (op, value, replaced));
        self.feed.push_back(Feed::Core(e, Input::Host { id, op, lba: 0, blocks: 1 }));
    }

    fn time_passes(&mut self) {
        self.now += STEP;
        for e in 0..2 {
            let Some(process) = &self.engines[e] else { continue };
            if process.wake <= self.now {
                let tick = match process.job {
                    Job::Opening(_) => Feed::Opener(e, OpenInput::Tick),
                    _ => Feed::Core(e, Input::Tick),
                };
                self.feed.push_back(tick);
            }
        }
    }

    /// The arbiter's compare-and-swap.
    fn execute(&mut self, i: usize) -> SwapOutcome {
        let request = &self.requests[i];
        if self.record.version() != request.expect {
            return SwapOutcome::Refused { current: self.record.clone() };
        }
        let next = request.next.clone();
        if let Err(error) = self.record.check_successor(&next) {
            self.fail(format!("the arbiter was given an unlawful record: {error}"));
        }
        if next.in_sync.len() < self.record.in_sync.len() {
            self.happened.push(Happened::Left);
        }
        if next.in_sync.len() > self.record.in_sync.len() {
            self.happened.push(Happened::Joined);
        }
        self.record = next;
        SwapOutcome::Committed
    }

    fn settle(&mut self, i: usize) {
        let outcome = self.execute(i);
        let Request { swap, waits, .. } = self.requests.remove(i);
        self.answer_swap(waits, swap, outcome);
    }

    fn timeout(&mut self, i: usize) {
        if !self.requests[i].executed {
            self.unheard += 1;
        }
        let (swap, waits) = (self.requests[i].swap, self.requests[i].waits.take());
        let copy =
            |r: &Request| (r.waits, &r.expect, &r.next) == (None, &self.requests[i].expect, &self.requests[i].next);
        if self.requests.iter().enumerate().any(|(other, r)| other != i && copy(r)) {
            self.requests.remove(i);
        }
        self.answer_swap(waits, swap, SwapOutcome::Unknown);
    }

    fn answer_swap(&mut self, waits: Option<usize>, swap: SwapId, outcome: SwapOutcome) {
        let Some(e) = waits else { return };
        let answer = match self.process(e).job {
            Job::Opening(_) => Feed::Opener(e, OpenInput::CasAnswer { cas: swap, outcome }),
            _ => Feed::Core(e, Input::SwapAnswer { swap, outcome }),
        };
        self.feed.push_back(answer);
    }
}
