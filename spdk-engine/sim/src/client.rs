//! Hosts: they read and write, remember what they did and saw, and retry when the path is gone.
//!
//! Every attempt of a write has a value of its own, the same on all its blocks. A command that lost its path is sent
//! again on the next one; an answer from a path that the host has left is not heard. The new attempt has a new value,
//! because a host that has several overlapping writes in flight may find the first attempt, then another write, then
//! the second attempt. An attempt on another engine is dead when the next one is sent (rule 15). An attempt on another
//! connection to the same engine may be under way; it is finished or dead before the next one is executed (rule 17),
//! so certainly when that one is acknowledged.

//!
//! *The host that clings.* The last host only reads. It stays with an engine that was replaced until that engine says
//! that it is no longer the one, is gone, or the host gives up. What it reads there must fit with what the others write
//! elsewhere (rule 16).

use mirror_core::{HostError, HostId, HostResult, Op};

use crate::engine::Process;
use crate::faults::MS;
use crate::history::Stamp;
use crate::rng::Rng;
use crate::world::{BLOCKS, CLIENTS, EngineRef, Event, HostConn, ToEngine, World};

/// Numbers from here on are commands given to an engine that was replaced; nobody may ever hear of them.
pub(crate) const ZOMBIE: u64 = 1 << 60;

/// Most commands of one host in flight; a run draws its own number.
pub(crate) const DEPTH_MAX: u64 = 4;
/// Of the host that only reads: some may wait for long behind writes that never end.
const READER_DEPTH: usize = 12;

#[derive(Debug, Default)]
pub(crate) struct Client {
    pub(crate) inflight: usize,
    /// Number of its connection.
    conn: u64,
    /// The engine that was replaced and that this host still uses.
    clings_to: Option<EngineRef>,
}

#[derive(Debug, Clone)]
pub(crate) struct ClientOp {
    pub(crate) client: usize,
    pub(crate) op: Op,
    pub(crate) lba: u64,
    pub(crate) blocks: u32,
    pub(crate) value: u64,
    pub(crate) start: Stamp,
    pub(crate) sent_to: Option<EngineRef>,
    /// The attempt whose answer counts.
    attempt: Option<HostId>,
    /// Values of earlier attempts at the same engine.
    ghosts: Vec<u64>,
}

/// How long hosts write near one place, and how far around it.
const STRETCH_NS: u64 = 150 * MS;
const STRETCH_BLOCKS: u64 = 6;

impl World {
    /// A host thinks of something to do.
    pub(crate) fn client_step(&mut self, client: usize) {
        if self.faults_over || self.outcome.ops >= self.scenario.ops {
            return;
        }
        let think = self.rng.range(MS / 2, 14 * MS);
        self.post(think, Event::Client { client });
        let reader = client == CLIENTS - 1;
        if self.clients[client].inflight >= if reader { READER_DEPTH } else { self.depth } {
            return;
        }
        let op = match self.rng.range(0, 100) {
            _ if reader => Op::Read,
            0..=41 => Op::Read,
            42..=84 => Op::Write { fua: self.rng.permille(100) },
            85..=89 => Op::Flush,
            90..=94 => Op::Unmap,
            _ => Op::WriteZeroes,
        };
        // Half of the commands meet on few blocks.
        let space = if self.rng.permille(500) { 6 } else { BLOCKS };
        let lba = self.rng.range(0, space);
        let lba = if self.wanders && op.changes_blocks() { self.wander(lba) } else { lba };
        let blocks = self.rng.range(1, if reader { 2 } else { 5 }).min(BLOCKS - lba);
        self.begin(client, op, lba, u32::try_from(blocks).unwrap_or(1));
    }

    /// Brings a block near to where hosts write at this time.
    fn wander(&self, lba: u64) -> u64 {
        let stretch = Rng::new(self.scenario.seed ^ (self.now / STRETCH_NS)).range(0, BLOCKS);
        (stretch + lba % STRETCH_BLOCKS) % BLOCKS
    }

    pub(crate) fn begin(&mut self, client: usize, op: Op, lba: u64, blocks: u32) {
        let id = HostId(self.fresh_id());
        let start = self.stamp();
        let value = if op.changes_blocks() { id.0 } else { 0 };
        let (sent_to, attempt, ghosts) = (None, None, Vec::new());
        let command = ClientOp { client, op, lba, blocks, value, start, sent_to, attempt, ghosts };
        self.trace(|| format!("host {client} begins {}: {op:?} {lba}+{blocks}", id.0));
        if op.changes_blocks() {
            for block in lba..lba + u64::from(blocks) {
                self.history.write_begins(block, value, start);
            }
        }
        self.ops.insert(id, command);
        self.clients[client].inflight += 1;
        self.outcome.ops += 1;
        self.submit(id);
    }

    /// Sends a command on the path there is; without one it waits for the next.
    pub(crate) fn submit(&mut self, id: HostId) {
        let Some(op) = self.ops.get(&id) else { return };
        let path = self.clings_to(op.client).or(self.manager.active);
        let Some(to) = path.filter(|to| op.sent_to != Some(*to)) else { return };
        if op.attempt.is_some() && op.op.changes_blocks() {
            self.replace_value(id, true);
        }
        self.send(id, to);
    }

    /// A new value for a new attempt. With `dead` all earlier attempts have taken effect by now or never will.
    fn replace_value(&mut self, id: HostId, dead: bool) {
        let (value, at) = (self.fresh_id(), self.stamp());
        let Some(op) = self.ops.get_mut(&id) else { return };
        op.ghosts.push(std::mem::replace(&mut op.value, value));
        let ghosts = if dead { std::mem::take(&mut op.ghosts) } else { Vec::new() };
        for block in op.lba..op.lba + u64::from(op.blocks) {
            ghosts.iter().for_each(|ghost| self.history.write_abandoned(block, *ghost, at));
            self.history.write_begins(block, value, at);
        }
    }

    fn send(&mut self, id: HostId, to: EngineRef) {
        let attempt = HostId(self.fresh_id());
        let Some(op) = self.ops.get_mut(&id) else { return };
        (op.sent_to, op.attempt) = (Some(to), Some(attempt));
        self.attempts.insert(attempt, id);
        let conn = HostConn { client: op.client, number: self.clients[op.client].conn };
        let body = ToEngine::Host { conn, id: attempt, op: op.op, lba: op.lba, blocks: op.blocks, value: op.value };
        let delay = if self.rng.permille(10) { self.rng.range(MS, 60 * MS) } else { self.rng.range(MS / 100, MS / 2) };
        self.post(delay, Event::Engine { to, body });
    }

    /// A host's connection breaks. It comes back at once and sends again what was not answered.
    pub(crate) fn break_host(&mut self, client: usize) {
        self.clients[client].conn += 1;
        let waiting: Vec<_> = self.ops.iter().filter(|(_, o)| o.client == client).collect();
        let waiting: Vec<_> = waiting.iter().filter_map(|(id, o)| Some((**id, o.sent_to?))).collect();
        for (id, to) in waiting {
            if self.ops.get(&id).is_some_and(|o| o.op.changes_blocks()) {
                self.replace_value(id, false);
            }
            self.send(id, to);
        }
    }

    /// All hosts start anew: what was in flight is forgotten, and what the blocks hold is what is found there.
    pub(crate) fn restart_hosts(&mut self) {
        if let Err(contradiction) = self.history.check() {
            return self.fail(contradiction.to_string());
        }
        self.trace(|| "hosts start anew".to_owned());
        self.history.restart();
        self.forget_snapshots();
        self.ops.clear();
        self.attempts.clear();
        for client in &mut self.clients {
            (client.inflight, client.clings_to) = (0, None);
            client.conn += 1;
        }
    }

    /// The engine that a host clings to, as long as that serves.
    fn clings_to(&self, client: usize) -> Option<EngineRef> {
        let engine = self.clients[client].clings_to?;
        self.process_ref(engine).is_some_and(Process::is_serving).then_some(engine)
    }

    /// A new engine serves: the last host stays with the old one for a while.
    pub(crate) fn cling(&mut self, old: Option<EngineRef>) {
        let client = CLIENTS - 1;
        if self.faults_over || self.clings_to(client).is_some() {
            return;
        }
        self.clients[client].clings_to = old;
        let after = self.rng.range(20 * MS, 900 * MS);
        self.post(after, Event::LetGo { client });
    }

    pub(crate) fn let_go(&mut self, client: usize) {
        self.clients[client].clings_to = None;
        self.switch_path();
    }

    /// All hosts leave the old path; what was in flight there is sent on the new one.
    pub(crate) fn switch_path(&mut self) {
        let waiting: Vec<HostId> = self.ops.keys().copied().collect();
        for id in waiting {
            self.submit(id);
        }
    }

    pub(crate) fn client_done(&mut self, from: EngineRef, id: HostId, result: HostResult, data: Option<Vec<u64>>) {
        if id.0 >= ZOMBIE {
            if result.is_ok() {
                self.fail(format!("{from:?} was replaced and acknowledged write {} given to it later", id.0));
            }
            return;
        }
        let now = self.stamp();
        let attempt = id;
        let Some(id) = self.attempts.remove(&attempt) else { return };
        let Some(op) = self.ops.get_mut(&id).filter(|o| o.attempt == Some(attempt)) else { return };
        if result.is_err_and(HostError::is_retryable) {
            op.sent_to = None;
            let client = &mut self.clients[op.client];
            client.clings_to = client.clings_to.filter(|e| *e != from);
            self.post(5 * MS, Event::Resubmit { id });
            return;
        }
        let Some(op) = self.ops.remove(&id) else { return };
        self.clients[op.client].inflight -= 1;
        self.trace(|| format!("host {} hears of {}: {result:?} {data:?}", op.client, id.0));
        if result.is_err() {
            return; // A write that failed may take effect or not; a read saw nothing.
        }
        self.outcome.acked += 1;
        for (i, block) in (op.lba..op.lba + u64::from(op.blocks)).enumerate() {
            if op.op.changes_blocks() {
                self.history.write_ends(block, op.value, now);
                op.ghosts.iter().for_each(|ghost| self.history.write_abandoned(block, *ghost, now));
            } else if op.op == Op::Read {
                let Some(value) = data.as_ref().and_then(|d| d.get(i)) else {
                    return self.fail(format!("read {} was answered without data", id.0));
                };
                if let Err(contradiction) = self.history.read(block, *value, op.start, now) {
                    return self.fail(contradiction.to_string());
                }
            }
        }
    }

    /// Gives writes to engines that were replaced but do not know it.
    pub(crate) fn tempt_old_engines(&mut self) {
        for to in self.old_engines() {
            for _ in 0..2 {
                let id = HostId(ZOMBIE + self.fresh_id());
                let lba = self.rng.range(0, BLOCKS);
                let conn = HostConn { client: CLIENTS, number: 0 };
                let body = ToEngine::Host { conn, id, op: Op::Write { fua: false }, lba, blocks: 1, value: id.0 };
                let delay = self.rng.range(0, 40 * MS);
                self.post(delay, Event::Engine { to, body });
            }
        }
    }
}
