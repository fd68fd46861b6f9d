//! What a runner does with the actions of openers and cores.

use mirror_core::{
    Action, Core, HostId, HostResult, Input, IoId, LegId, MetaOp, MetaUnreadable, Op, OpenAction, OpenInput,
    OpenParams, Payload,
};

use super::*;

impl World {
    /// Hands over inputs until none is left.
    pub(super) fn settle_feed(&mut self) {
        while let Some(feed) = self.feed.pop_front() {
            match feed {
                Feed::Core(e, input) => self.feed_core(e, input),
                Feed::Opener(e, input) => self.feed_opener(e, input),
            }
        }
    }

    fn feed_core(&mut self, e: usize, input: Input) {
        let now = self.now;
        let Some(process) = self.engines[e].as_mut() else { return };
        let Job::Serving(core) = &mut process.job else { return };
        let mut actions = Vec::new();
        core.apply(now, input, &mut actions);
        actions.into_iter().for_each(|action| self.act(e, action));
    }

    fn feed_opener(&mut self, e: usize, input: OpenInput) {
        let now = self.now;
        let Some(process) = self.engines[e].as_mut() else { return };
        let Job::Opening(opener) = &mut process.job else { return };
        let mut actions = Vec::new();
        opener.apply(now, input, &mut actions);
        actions.into_iter().for_each(|action| self.act_opening(e, action));
    }

    fn act_opening(&mut self, e: usize, action: OpenAction) {
        match action {
            OpenAction::ReadRecord => {
                let result = Ok(self.record.clone());
                self.feed.push_back(Feed::Opener(e, OpenInput::RecordRead { result }));
            }
            OpenAction::DoCas { cas, expect, next } => {
                self.requests.push(Request { swap: cas, expect, next, waits: Some(e), executed: false });
            }
            OpenAction::Promote { replica, epoch, .. } => {
                let process = self.process(e);
                process.epoch = epoch;
                process.promotes.push(replica_index(&replica));
            }
            OpenAction::Connect { leg, replica } => {
                let state = Leg { replica: replica_index(&replica), up: false, stuck: Vec::new() };
                self.process(e).legs.insert(leg, state);
                let up = self.attach(e, leg);
                self.feed.push_back(Feed::Opener(e, OpenInput::Connected { leg, up }));
            }
            OpenAction::ReadMeta { leg, block, blocks } => {
                let result = self.meta_bytes(e, leg, block, blocks).ok_or(MetaUnreadable);
                self.feed.push_back(Feed::Opener(e, OpenInput::MetaRead { leg, result }));
            }
            OpenAction::WakeAt { at } => self.process(e).wake = at,
            OpenAction::Ready(params) => {
                let opened =
                    if params.legs.len() < self.bounds.members { Happened::OpenedWithoutAll } else { Happened::Opened };
                self.happened.push(opened);
                self.serve(e, *params);
            }
            OpenAction::Failed { .. } => self.process(e).job = Job::Finished,
            OpenAction::Event(_) => {}
        }
    }

    pub(super) fn serve(&mut self, e: usize, params: OpenParams) {
        let kept: Vec<LegId> = params.legs.iter().map(|l| l.leg).collect();
        let core = Core::open(params).unwrap();
        let process = self.process(e);
        process.copies = vec![0; core.copy_slots() as usize];
        process.legs.retain(|leg, _| kept.contains(leg));
        process.promotes.clear();
        process.job = Job::Serving(Box::new(core));
        self.feed.push_back(Feed::Core(e, Input::Tick));
    }

    fn act(&mut self, e: usize, action: Action) {
        match action {
            Action::LegIo { leg, io, op, payload, .. } => self.leg_io(e, leg, io, op, payload),
            Action::MetaIo { leg, io, op } => self.meta_io(e, leg, io, op),
            Action::HostDone { id, result } => self.host_done(e, id, result),
            Action::Swap { swap, expect, next, .. } => {
                self.requests.push(Request { swap, expect, next: *next, waits: Some(e), executed: false });
            }
            Action::WakeAt { at } => self.process(e).wake = at,
            Action::LegDrop { leg, .. } => {
                self.lose(e, leg);
                self.process(e).legs.remove(&leg);
                self.feed.push_back(Feed::Core(e, Input::LegLost { leg, announced: false }));
            }
            Action::Stopped { .. } => {
                self.happened.push(Happened::Stopped);
                self.process(e).job = Job::Finished;
            }
            Action::Event(_) | Action::Progress { .. } | Action::Closed => {}
            // Nobody asks for snapshots here.
            Action::SnapshotHeld { .. } | Action::SnapshotDone { .. } => {}
        }
    }

    /// Writes go to the disk and land when they are told to; everything else is done at once.
    fn leg_io(&mut self, e: usize, leg: LegId, io: IoId, op: Op, payload: Payload) {
        let Some(r) = self.process(e).legs.get(&leg).map(|l| l.replica) else { return };
        if self.replicas[r].session != Some((e, leg)) {
            self.process(e).legs.get_mut(&leg).unwrap().stuck.push(io);
            return;
        }
        if op == Op::Read {
            let process = self.engines[e].as_mut().unwrap();
            let data = self.replicas[r].data;
            match payload {
                Payload::Host(id) => drop(process.values.insert(id, data)),
                Payload::Copy(slot) => process.copies[slot.0 as usize] = data,
                Payload::Probe | Payload::None => {}
            }
            let owns = self.record.epoch == process.epoch && self.record.engine_instance == process.instance;
            if owns && payload != Payload::Probe && !self.record.in_sync.contains(&replica_id(r)) {
                self.fail(format!("r{r} is read from and is not in the recorded S"));
            }
        }
        if op.changes_blocks() {
            let value = match payload {
                Payload::Host(id) => self.process(e).values[&id],
                Payload::Copy(slot) => self.process(e).copies[slot.0 as usize],
                Payload::Probe | Payload::None => 0,
            };
            assert!(self.replicas[r].disk.is_none(), "two writes to one block on one session");
            self.replicas[r].disk = Some(DiskIo { value, owner: Some((e, leg, io)) });
        } else {
            self.feed.push_back(Feed::Core(e, Input::LegDone { leg, io, result: Ok(()) }));
        }
    }

    /// What a leg's meta area holds, if its session is there.
    fn meta_bytes(&mut self, e: usize, leg: LegId, block: u64, blocks: u32) -> Option<Arc<[u8]>> {
        let r = self.process(e).legs.get(&leg)?.replica;
        let from = usize::try_from(block).ok()? * META_BLOCK_BYTES;
        let bytes = self.replicas[r].meta.0.get(from..from + blocks as usize * META_BLOCK_BYTES)?;
        (self.replicas[r].session == Some((e, leg))).then(|| Arc::from(bytes))
    }

    /// Superblocks are written at once, bits when they are told to.
    fn meta_io(&mut self, e: usize, leg: LegId, io: IoId, op: MetaOp) {
        let Some(r) = self.process(e).legs.get(&leg).map(|l| l.replica) else { return };
        if self.replicas[r].session != Some((e, leg)) {
            self.process(e).legs.get_mut(&leg).unwrap().stuck.push(io);
            return;
        }
        let done = match op {
            MetaOp::Read { block, blocks } => {
                let data = self.meta_bytes(e, leg, block, blocks).unwrap();
                Input::MetaRead { leg, io, data }
            }
            MetaOp::Write { block, data } => {
                let at = usize::try_from(block).unwrap() * META_BLOCK_BYTES;
                if block >= SUPERBLOCK_SLOTS {
                    let owner = Some((e, leg, io));
                    return self.replicas[r].keeping.push(MetaWrite { at, bytes: Bits(data), owner });
                }
                self.replicas[r].meta.0[at..at + data.len()].copy_from_slice(&data);
                Input::LegDone { leg, io, result: Ok(()) }
            }
        };
        self.feed.push_back(Feed::Core(e, done));
    }

    fn host_done(&mut self, e: usize, id: HostId, result: HostResult) {
        let process = self.process(e);
        let Some((op, value, replaced)) = process.begun.remove(&id) else { return };
        let held = process.values.remove(&id).unwrap_or(0);
        let epoch = process.epoch;
        if result.is_err() {
            return;
        }
        if op == Op::Read {
            self.happened.push(Happened::Read);
            if held < value {
                self.fail(format!("a read returned {held} and {value} was acknowledged or read before it began"));
            }
            self.floor = self.floor.max(held);
            return;
        }
        if replaced {
            self.fail(format!("write {value} was acknowledged by an engine that was replaced before it began"));
        }
        let after = epoch > Epoch(1);
        self.happened.push(if after { Happened::AcknowledgedAfterTakeover } else { Happened::Acknowledged });
        self.acknowledged = self.acknowledged.max(value);
        self.floor = self.floor.max(value);
    }

    /// The state as text in which numbers are left out that have no meaning but to be different.
    pub fn text(&self) -> String {
        let mut text = String::with_capacity(8192);
        let counts = (self.now, self.instances, self.written, self.reads, self.breaks, self.unheard, self.joins);
        let _ = write!(text, "{counts:?} {} {} {:?} ", self.acknowledged, self.floor, self.record);
        for request in &self.requests {
            let _ = write!(text, "{:?} {:?} {:?} {}", request.waits, request.expect, request.next, request.executed);
        }
        let _ = write!(text, "{:?} {:?}", self.replicas, self.engines);
        without_names(&text)
    }
}

/// Leaves out numbers of I/O and swaps, and puts the table of I/O in flight in order.
fn without_names(text: &str) -> String {
    const NAMES: [&str; 6] = ["IoId(", "SwapId(", "generation: ", "next_swap: ", "next_cas: ", "turn: "];
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(table) = rest.find("IoTable { slots: [") {
        let end = table + rest[table..].find("free: [").unwrap();
        out.push_str(&rest[..table]);
        let mut entries: Vec<&str> = rest[table..end].split("IoSlot {").filter(|s| s.contains("Some(")).collect();
        entries.sort_unstable();
        out.push_str(&entries.concat());
        rest = &rest[end + rest[end..].find(']').unwrap()..];
    }
    out.push_str(rest);
    for name in NAMES {
        let mut cleaned = String::with_capacity(out.len());
        let mut parts = out.split(name);
        cleaned.push_str(parts.next().unwrap_or_default());
        for part in parts {
            cleaned.push_str(name);
            cleaned.push_str(part.trim_start_matches(|c: char| c.is_ascii_digit()));
        }
        out = cleaned;
    }
    out
}
