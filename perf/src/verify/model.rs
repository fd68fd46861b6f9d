//! What the volume must hold: the state of every unit, moved by what is issued, acknowledged, failed and read.
//!
//! *What it is.* An I/O-free model. The driver asks [`Model::begin_write`] for leave to write, fills the buffer by
//! [`Model::fill`], reports the end by [`Model::end_write`]; around a read it calls [`Model::begin_read`] and
//! [`Model::end_read`], which judges the bytes. Every change that must survive is handed out as a [`Record`], and
//! [`Model::apply`] makes the same change from a record, so the log and the model cannot drift apart.
//!
//! *Memory.* Eight bytes for each 4 KiB unit: 128 MiB for 64 GiB, zeroed pages until they are used.
//!
//! *Invariants.* At most one write of a unit is in flight; reads may overlap with writes and with each other.
//!
//! *When things fail.* A record that does not fit the state is refused by [`ModelError`]: the log is not what it claims.

use std::collections::BTreeMap;

use super::judge::{Class, Content, Fault, Identity, Part, Rules, Seen, content, judge};
use super::record::Record;
use super::stamp::{Stamp, UNIT_BYTES, write_unit};
use super::state::UnitState;

/// A record that does not fit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    #[error("{record:?} is beyond the last unit of {units}")]
    Range { record: Record, units: u64 },
    #[error("{record:?} does not fit the state of unit {unit}")]
    State { record: Record, unit: u64 },
}

/// A read that was issued: the units' states at that time.
#[derive(Debug, Clone)]
pub struct ReadTicket {
    first: u64,
    states: Vec<UnitState>,
}

impl ReadTicket {
    /// First unit.
    #[must_use]
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Number of units.
    #[must_use]
    pub fn units(&self) -> usize {
        self.states.len()
    }
}

/// A unit that is not as it must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    pub unit: u64,
    pub fault: Fault,
    /// The same unit was reported before, and has not been written since.
    pub repeated: bool,
}

/// The model; see the module.
#[derive(Debug)]
pub struct Model {
    identity: Identity,
    rules: Rules,
    units: Vec<UnitState>,
    run: u32,
    serial: u64,
}

impl Model {
    /// A volume of `units` units of which nothing is known.
    #[must_use]
    pub fn new(identity: Identity, units: u64, rules: Rules) -> Self {
        let units = vec![UnitState::default(); units as usize];
        Self { identity, rules, units, run: 0, serial: 0 }
    }

    /// Number of units.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.units.len() as u64
    }

    /// Whether there are no units.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.units.is_empty()
    }

    /// Changes what must hold beyond the log.
    pub fn set_rules(&mut self, rules: Rules) {
        self.rules = rules;
    }

    /// Makes room for a volume that has grown.
    pub fn grow(&mut self, units: u64) {
        let units = self.units.len().max(units as usize);
        self.units.resize(units, UnitState::default());
    }

    /// The state of a unit; that of an unwritten one beyond the end.
    #[must_use]
    pub fn state(&self, unit: u64) -> UnitState {
        self.units.get(unit as usize).copied().unwrap_or_default()
    }

    /// Number of the present run.
    #[must_use]
    pub fn run(&self) -> u32 {
        self.run
    }

    /// Units that were ever written, and of those the ones whose last write may be there or not.
    #[must_use]
    pub fn census(&self) -> (u64, u64) {
        self.units.iter().fold((0, 0), |(written, uncertain), state| {
            (written + u64::from(state.written()), uncertain + u64::from(state.uncertain()))
        })
    }

    /// What a log must hold so that the model can be made from it again.
    pub fn snapshot(&self, mut emit: impl FnMut(Record)) {
        emit(Record::Run { run: self.run, serial: self.serial });
        let mut start = 0;
        while start < self.units.len() {
            let state = self.units[start];
            let same = self.units[start..].iter().take(usize::from(u16::MAX)).take_while(|s| **s == state).count();
            if state != UnitState::default() {
                emit(Record::State { first: start as u64, units: same as u16, bits: state.bits() });
            }
            start += same;
        }
    }

    /// Begins another run: what was in flight in the last one may be there or not.
    pub fn begin_run(&mut self) -> Record {
        let record = Record::Run { run: self.run + 1, serial: self.serial };
        self.start_run(self.run + 1, self.serial);
        record
    }

    fn start_run(&mut self, run: u32, serial: u64) {
        self.run = run;
        self.serial = self.serial.max(serial);
        for state in &mut self.units {
            if state.in_flight() {
                *state = state.abandon();
            }
        }
    }

    fn range(&mut self, first: u64, count: u16) -> Option<&mut [UnitState]> {
        let first = usize::try_from(first).ok()?;
        self.units.get_mut(first..first.checked_add(usize::from(count))?)
    }

    /// Issues a write of `count` units; `None` when one of them cannot be written now.
    pub fn begin_write(&mut self, first: u64, count: u16) -> Option<Record> {
        let serial = self.serial + 1;
        let states = self.range(first, count)?;
        if states.is_empty() || !states.iter().all(|s| s.can_write()) {
            return None;
        }
        states.iter_mut().for_each(|s| *s = s.issue());
        self.serial = serial;
        Some(Record::Issue { first, units: count, serial })
    }

    /// Fills the buffer of the write that `record` has issued.
    pub fn fill(&self, record: &Record, buffer: &mut [u8]) {
        let Record::Issue { first, units, serial } = *record else { return };
        for (offset, bytes) in buffer.chunks_exact_mut(UNIT_BYTES).take(usize::from(units)).enumerate() {
            let unit = first + offset as u64;
            let Identity { log, volume } = self.identity;
            let seq = self.state(unit).last();
            let stamp = Stamp { log, volume, unit, seq, run: self.run, serial, io_first: first, io_units: units };
            write_unit(&stamp, bytes);
        }
    }

    /// The write of these units was acknowledged, or has failed.
    pub fn end_write(&mut self, first: u64, count: u16, acknowledged: bool) -> Record {
        if let Some(states) = self.range(first, count) {
            states.iter_mut().for_each(|s| *s = if acknowledged { s.acknowledge() } else { s.abandon() });
        }
        if acknowledged { Record::Ack { first, units: count } } else { Record::Fail { first, units: count } }
    }

    /// Issues a read.
    #[must_use]
    pub fn begin_read(&self, first: u64, count: u16) -> ReadTicket {
        ReadTicket { first, states: (first..first + u64::from(count)).map(|unit| self.state(unit)).collect() }
    }

    /// Judges what a read has returned. `news` gets what the log has to remember.
    pub fn end_read(&mut self, ticket: &ReadTicket, bytes: &[u8], news: &mut Vec<Record>) -> Vec<Mismatch> {
        let mut faults = BTreeMap::new();
        let mut contents = Vec::with_capacity(ticket.units());
        for (offset, (bytes, before)) in bytes.chunks_exact(UNIT_BYTES).zip(&ticket.states).enumerate() {
            let unit = ticket.first + offset as u64;
            let content = content(bytes, self.identity, unit);
            match judge(*before, self.state(unit), &content, self.rules) {
                Ok(seen) => news.extend(seen.and_then(|seen| self.note(unit, seen))),
                Err(fault) => drop(faults.insert(unit, fault)),
            }
            contents.push(content);
        }
        self.check_whole_ios(ticket.first, &contents, &mut faults);
        faults.into_iter().map(|(unit, fault)| self.mismatch(unit, fault)).collect()
    }

    fn note(&mut self, unit: u64, seen: Seen) -> Option<Record> {
        let Seen { seq, settled } = seen;
        let state = self.units.get_mut(unit as usize)?;
        *state = state.observe(seq, settled);
        Some(Record::Seen { unit, seq, settled })
    }

    fn mismatch(&mut self, unit: u64, fault: Fault) -> Mismatch {
        let state = self.units.get_mut(unit as usize);
        let repeated = state.as_ref().is_some_and(|s| s.reported());
        if let Some(state) = state {
            *state = state.report();
        }
        Mismatch { unit, fault, repeated }
    }

    /// Where whole I/Os are promised to be atomic: no unit of one may be older than another.
    fn check_whole_ios(&self, first: u64, contents: &[Content], faults: &mut BTreeMap<u64, Fault>) {
        if self.rules.atomic_bytes <= UNIT_BYTES {
            return;
        }
        for content in contents {
            let Some(Part::Ours { seq, serial, io_first, io_units, .. }) = content.whole() else { continue };
            if usize::from(*io_units) * UNIT_BYTES > self.rules.atomic_bytes {
                continue;
            }
            for unit in *io_first..io_first.saturating_add(u64::from(*io_units)) {
                let Some(other) = unit.checked_sub(first).and_then(|o| contents.get(o as usize)) else { continue };
                let older = match other.whole() {
                    Some(Part::Ours { serial: theirs, .. }) => theirs < serial,
                    Some(Part::Zero | Part::Earlier | Part::Foreign | Part::Stranger(..)) => true,
                    _ => false,
                };
                if older {
                    faults.entry(unit).or_insert_with(|| Fault {
                        class: Class::Torn,
                        expected: format!("the I/O at unit {io_first} (write {seq} of its unit) or a later one"),
                        found: other.to_string(),
                    });
                }
            }
        }
    }

    /// Makes the change that a record stands for.
    pub fn apply(&mut self, record: &Record) -> Result<(), ModelError> {
        let units = self.len();
        match *record {
            Record::Run { run, serial } => {
                self.start_run(run, serial);
                return Ok(());
            }
            Record::Issue { serial, .. } => self.serial = self.serial.max(serial),
            _ => {}
        }
        let (first, count) = record.units();
        let states = self.range(first, count).ok_or(ModelError::Range { record: *record, units })?;
        for (offset, state) in states.iter_mut().enumerate() {
            let unit = first + offset as u64;
            let next = step(*state, record);
            *state = next.ok_or(ModelError::State { record: *record, unit })?;
        }
        Ok(())
    }
}

fn step(state: UnitState, record: &Record) -> Option<UnitState> {
    match *record {
        Record::Issue { .. } => state.can_write().then(|| state.issue()),
        Record::Ack { .. } => state.in_flight().then(|| state.acknowledge()),
        Record::Fail { .. } => state.in_flight().then(|| state.abandon()),
        Record::Seen { seq, settled, .. } => {
            (state.seen()..=state.last()).contains(&seq).then(|| state.observe(seq, settled))
        }
        Record::State { bits, .. } => UnitState::from_bits(bits),
        Record::Run { .. } => Some(state),
    }
}
