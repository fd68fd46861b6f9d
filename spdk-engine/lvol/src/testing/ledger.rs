//! What may be found in a store at this very moment, if its power were cut now.
//!
//! While a call runs there are two candidates: the model without it and the model with it. I/O that is acknowledged
//! meanwhile enters both. A snapshot splits when its lvol's I/O is held back ([`Ledger::frozen`]): what is acknowledged
//! later is not in it. Writes in flight may or may not be found, block by block.

use std::collections::BTreeMap;

use super::model::{Call, Model, Verdict, VolId};
use super::pattern::Tag;

/// See the module.
#[derive(Debug, Clone)]
pub struct Ledger {
    before: Model,
    after: Option<Model>,
    running: Option<Call>,
    in_flight: BTreeMap<u64, Begun>,
    /// All I/O that changes blocks, in the order in which it began.
    begun: Vec<Call>,
    next: u64,
}

#[derive(Debug, Clone)]
struct Begun {
    call: Call,
    /// For a flush: what was acknowledged when it began.
    acknowledged: u64,
    /// Number of changing I/Os that had begun before it.
    position: usize,
}

/// A read on its way: what it may find.
#[derive(Debug, Clone)]
pub struct ReadTicket {
    vol: VolId,
    first: u64,
    expected: Vec<Tag>,
    since: usize,
}

impl Ledger {
    /// Of a store that contains this.
    pub fn new(model: Model) -> Self {
        Self { before: model, after: None, running: None, in_flight: BTreeMap::new(), begun: Vec::new(), next: 0 }
    }

    /// The state without the call that runs.
    pub fn model(&self) -> &Model {
        &self.before
    }

    /// The state, to be corrected by what was found when nothing runs.
    pub fn model_mut(&mut self) -> &mut Model {
        &mut self.before
    }

    /// The states that a cut may leave, and the writes whose blocks may each be found or not.
    pub fn at_cut(&self) -> AtCut {
        let candidates = std::iter::once(&self.before).chain(&self.after).cloned().collect();
        let in_flight = self.in_flight.values().filter_map(|begun| begun.call.blocks()).collect();
        AtCut { candidates, in_flight, running: self.running.clone() }
    }

    /// A call that is no I/O begins.
    pub fn begin(&mut self, call: &Call) {
        self.running = Some(call.clone());
        let refused = matches!(self.before.verdict(call), Verdict::Refused(_));
        if !refused && !matches!(call, Call::Snapshot { .. }) {
            self.split();
        }
    }

    /// The I/O of an lvol is held back: a snapshot of it contains what was acknowledged so far.
    pub fn frozen(&mut self, vol: VolId) {
        let snapshot = matches!(self.running, Some(Call::Snapshot { vol: of, .. }) if of == vol);
        if snapshot && self.after.is_none() {
            self.split();
        }
    }

    fn split(&mut self) {
        if let Some(call) = &self.running {
            let mut after = self.before.clone();
            after.apply(call);
            self.after = Some(after);
        }
    }

    /// The call that runs ended.
    ///
    /// # Errors
    /// When a snapshot was taken without holding back I/O.
    pub fn end(&mut self, succeeded: bool) -> Result<(), String> {
        let after = self.after.take();
        let running = self.running.take();
        if succeeded {
            self.before = after.ok_or_else(|| format!("{running:?} succeeded and never held back I/O"))?;
        }
        Ok(())
    }

    /// I/O begins.
    pub fn begin_io(&mut self, call: Call) -> u64 {
        self.next += 1;
        let position = self.begun.len();
        if call.blocks().is_some() {
            self.begun.push(call.clone());
        }
        self.in_flight.insert(self.next, Begun { call, acknowledged: self.before.flush_begins(), position });
        self.next
    }

    /// I/O was acknowledged, or failed: then its blocks are left to [`Ledger::settle`].
    pub fn end_io(&mut self, io: u64, succeeded: bool) {
        let Some(begun) = self.in_flight.remove(&io) else { return };
        if !succeeded {
            return;
        }
        for model in std::iter::once(&mut self.before).chain(&mut self.after) {
            match &begun.call {
                Call::Flush { .. } => model.flush_ends(begun.acknowledged),
                call => model.apply(call),
            }
        }
    }

    /// See [`Model::settle`].
    pub fn settle(&mut self, vol: VolId, first: u64, found: &[Tag]) {
        for model in std::iter::once(&mut self.before).chain(&mut self.after) {
            model.settle(vol, first, found);
        }
    }

    /// A read begins.
    pub fn begin_read(&self, vol: VolId, first: u64, count: u64) -> ReadTicket {
        let since = self.in_flight.values().map(|begun| begun.position).min().unwrap_or(self.begun.len());
        let expected = (first..first + count).map(|block| self.before.cell(vol, block).latest()).collect();
        ReadTicket { vol, first, expected, since }
    }

    /// Whether a read may have found this in its `index`-th block.
    pub fn may_have_read(&self, ticket: &ReadTicket, index: usize, found: Tag) -> bool {
        let block = ticket.first + index as u64;
        ticket.expected.get(index) == Some(&found)
            || self.begun[ticket.since..].iter().filter_map(Call::blocks).any(|(vol, first, count, tag)| {
                vol == ticket.vol && tag == found && (first..first + count).contains(&block)
            })
    }
}

/// What may be found after a cut.
#[derive(Debug, Clone)]
pub struct AtCut {
    /// The state without and with the call that ran.
    pub candidates: Vec<Model>,
    /// Writes in flight: lvol, first block, blocks, tag.
    pub in_flight: Vec<(VolId, u64, u64, Tag)>,
    /// The call that ran.
    pub running: Option<Call>,
}

impl AtCut {
    /// A store that nothing happens to.
    pub fn still(model: &Model) -> Self {
        Self { candidates: vec![model.clone()], in_flight: Vec::new(), running: None }
    }

    /// Whether a block may be found to hold this, in a candidate state.
    pub fn may_be(&self, model: &Model, vol: VolId, block: u64, found: Tag) -> bool {
        model.cell(vol, block).may_be(found)
            || self
                .in_flight
                .iter()
                .any(|(of, first, count, tag)| *of == vol && *tag == found && (*first..first + count).contains(&block))
    }
}
