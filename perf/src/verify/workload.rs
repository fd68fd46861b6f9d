//! What the verifier does under load: writes and judged reads ([`Phase::Write`]), then a read of everything
//! ([`Phase::Check`]).
//!
//! *Invariants.* The record of a write is in the log before the write is sent: [`Workload::flush`] comes between. Writes
//! never overlap with writes in flight; reads may overlap with anything.
//!
//! *A wrong answer is asked again.* The extent is read anew up to [`CONFIRM_READS`] times. What was lost, torn or corrupt
//! and is right at a later read was not lost: it is *stale* if old content was served, otherwise it keeps its class and
//! is marked transient.
//!
//! *When things fail.* A write that ends with an error may be there or not. A log that cannot be written ends the run.

use std::collections::{BTreeMap, VecDeque};

use addax_engine::reactor::driver::Nanos;
use serde::Serialize;

use super::judge::Class;
use super::model::{Mismatch, Model, ReadTicket};
use super::record::Record;
use super::stamp::UNIT_BYTES;
use super::writelog::WriteLog;
use crate::access::Access;
use crate::load::Limit;
use crate::session::IoError;
use crate::worker::{Next, Request, Workload};

/// How often a wrong answer is asked again.
pub const CONFIRM_READS: u32 = 3;
/// How many extents are tried for a write that does not overlap with another before a read takes its place.
const WRITE_TRIES: u32 = 8;

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Writes and reads until the limit; it counts written bytes.
    Write(Limit),
    /// Every unit of the range is read once; only those ever written when `written_only`.
    Check { written_only: bool },
}

/// A mismatch as it is reported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub class: Class,
    /// Number of the 4096-byte unit.
    pub unit: u64,
    /// Its byte offset on the volume.
    pub offset: u64,
    /// What was allowed.
    pub expected: String,
    /// What was there.
    pub found: String,
    /// Right again at a later read.
    pub transient: bool,
}

/// All that was wrong.
#[derive(Debug, Clone, Default)]
pub struct Findings {
    /// Units with a mismatch, by class; a unit counts anew after it was written anew.
    pub counts: BTreeMap<Class, u64>,
    /// Further wrong answers of units that were reported already.
    pub repeated: u64,
    /// The first ones.
    pub samples: Vec<Finding>,
    samples_max: usize,
}

impl Findings {
    /// None so far; at most `samples_max` will be described.
    #[must_use]
    pub fn new(samples_max: usize) -> Self {
        Self { samples_max, ..Self::default() }
    }

    /// Units with a mismatch.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.counts.values().sum()
    }

    fn add(&mut self, mismatch: Mismatch, transient: bool) {
        let Mismatch { unit, fault, repeated } = mismatch;
        if repeated {
            self.repeated += 1;
            return;
        }
        let class = match fault.class {
            // It was not lost: the newer content is there.
            Class::Lost if transient => Class::Stale,
            class => class,
        };
        *self.counts.entry(class).or_default() += 1;
        if self.samples.len() < self.samples_max {
            let offset = unit * UNIT_BYTES as u64;
            let (expected, found) = (fault.expected, fault.found);
            self.samples.push(Finding { class, unit, offset, expected, found, transient });
        }
    }
}

/// An extent that gave a wrong answer and is read again.
#[derive(Debug)]
struct Suspect {
    first: u64,
    units: u16,
    mismatches: Vec<Mismatch>,
    reads: u32,
}

#[derive(Debug)]
enum Running {
    Write { first: u64, units: u16 },
    Read { ticket: ReadTicket, suspect: Option<Suspect> },
}

/// The region and the size of I/Os, in units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    pub first: u64,
    pub units: u64,
    /// Units of one I/O, at least 1.
    pub per_io: u16,
}

/// The verifier's workload; see the module.
#[derive(Debug)]
pub struct Verifier {
    model: Model,
    log: WriteLog,
    region: Region,
    access: Access,
    phase: Phase,
    cursor: u64,
    written_bytes: u64,
    running: BTreeMap<usize, Running>,
    suspects: VecDeque<Suspect>,
    findings: Findings,
    units_read: u64,
    news: Vec<Record>,
}

impl Verifier {
    /// A verifier; `access` numbers I/Os of the region from `region.first / region.per_io`.
    #[must_use]
    pub fn new(log: WriteLog, model: Model, region: Region, access: Access, phase: Phase, samples: usize) -> Self {
        Self {
            model,
            log,
            region,
            access,
            phase,
            cursor: region.first,
            written_bytes: 0,
            running: BTreeMap::new(),
            suspects: VecDeque::new(),
            findings: Findings::new(samples),
            units_read: 0,
            news: Vec::new(),
        }
    }

    /// Goes on with another phase, from its start.
    pub fn set_phase(&mut self, phase: Phase) {
        self.phase = phase;
        self.cursor = self.region.first;
        self.units_read = 0;
    }

    /// After the last I/O of a phase: suspects that could not be asked again are reported as they were found.
    pub fn settle(&mut self) {
        let left = std::mem::take(&mut self.suspects);
        left.into_iter().for_each(|suspect| self.pursue(Suspect { reads: CONFIRM_READS, ..suspect }));
        self.running.clear();
    }

    /// What was wrong so far.
    #[must_use]
    pub fn findings(&self) -> &Findings {
        &self.findings
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The log.
    #[must_use]
    pub fn log(&self) -> &WriteLog {
        &self.log
    }

    /// Units read and judged in this phase.
    #[must_use]
    pub fn units_read(&self) -> u64 {
        self.units_read
    }

    /// Whether a check phase has come to its end.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.cursor >= self.region.first + self.region.units
    }

    /// Bytes written in all phases.
    #[must_use]
    pub fn written_bytes(&self) -> u64 {
        self.written_bytes
    }

    fn read(&mut self, slot: usize, first: u64, units: u16, suspect: Option<Suspect>) -> Next {
        let ticket = self.model.begin_read(first, units);
        self.running.insert(slot, Running::Read { ticket, suspect });
        io(false, first, units)
    }

    fn try_write(&mut self, slot: usize, first: u64, units: u16, buffer: &mut [u8]) -> Option<Next> {
        let record = self.model.begin_write(first, units)?;
        self.model.fill(&record, buffer);
        self.log.push(&record);
        self.running.insert(slot, Running::Write { first, units });
        self.written_bytes += bytes(units);
        Some(io(true, first, units))
    }

    fn next_loaded(&mut self, slot: usize, buffer: &mut [u8], elapsed: Nanos, limit: Limit) -> Next {
        if limit.reached(elapsed, self.written_bytes) {
            return self.drain();
        }
        let per_io = self.region.per_io;
        let mut choice = self.access.next();
        for _ in 0..WRITE_TRIES {
            let first = choice.extent * u64::from(per_io);
            if !choice.write {
                return self.read(slot, first, per_io, None);
            }
            if let Some(next) = self.try_write(slot, first, per_io, buffer) {
                return next;
            }
            choice = self.access.next();
        }
        // Everything around is being written to. Reading it is worth as much, unless the amount of writes ends the run
        // and nothing could ever be written again.
        if self.running.is_empty() && !self.any_writable() {
            return Next::Done;
        }
        self.read(slot, choice.extent * u64::from(per_io), per_io, None)
    }

    fn any_writable(&self) -> bool {
        let Region { first, units, .. } = self.region;
        (first..first + units).any(|unit| self.model.state(unit).can_write())
    }

    fn next_checked(&mut self, slot: usize, written_only: bool) -> Next {
        let end = self.region.first + self.region.units;
        if written_only {
            while self.cursor < end && !self.model.state(self.cursor).written() {
                self.cursor += 1;
            }
        }
        if self.cursor >= end {
            return self.drain();
        }
        let first = self.cursor;
        let units = u64::from(self.region.per_io).min(end - first) as u16;
        self.cursor += u64::from(units);
        self.read(slot, first, units, None)
    }

    /// Nothing new; what runs may still bring suspects.
    fn drain(&self) -> Next {
        if self.running.is_empty() { Next::Done } else { Next::Wait }
    }

    fn judge(&mut self, ticket: &ReadTicket, suspect: Option<Suspect>, buffer: &[u8]) {
        let mismatches = self.model.end_read(ticket, buffer, &mut self.news);
        for record in self.news.drain(..) {
            self.log.push(&record);
        }
        let Some(mut suspect) = suspect else {
            self.units_read += ticket.units() as u64;
            if !mismatches.is_empty() {
                let (first, units) = (ticket.first(), ticket.units() as u16);
                self.suspects.push_back(Suspect { first, units, mismatches, reads: 0 });
            }
            return;
        };
        suspect.reads += 1;
        let wrong = |m: &Mismatch| mismatches.iter().any(|again| again.unit == m.unit);
        let (still, cleared): (Vec<_>, Vec<_>) = suspect.mismatches.into_iter().partition(wrong);
        for mismatch in cleared {
            self.findings.add(mismatch, true);
        }
        suspect.mismatches = still;
        self.pursue(suspect);
    }

    /// Reads a suspect again, or reports it.
    fn pursue(&mut self, suspect: Suspect) {
        if suspect.mismatches.is_empty() {
            return;
        }
        if suspect.reads < CONFIRM_READS {
            self.suspects.push_back(suspect);
            return;
        }
        for mismatch in suspect.mismatches {
            self.findings.add(mismatch, false);
        }
    }
}

fn bytes(units: u16) -> u64 {
    u64::from(units) * UNIT_BYTES as u64
}

fn io(write: bool, first: u64, units: u16) -> Next {
    Next::Io(Request { write, offset: first * UNIT_BYTES as u64, bytes: bytes(units) as u32 })
}

impl Workload for Verifier {
    fn prepare(&mut self, _buffer: &mut [u8]) {}

    fn next(&mut self, slot: usize, buffer: &mut [u8], elapsed: Nanos) -> Next {
        if let Some(suspect) = self.suspects.pop_front() {
            return self.read(slot, suspect.first, suspect.units, Some(suspect));
        }
        match self.phase {
            Phase::Write(limit) => self.next_loaded(slot, buffer, elapsed, limit),
            Phase::Check { written_only } => self.next_checked(slot, written_only),
        }
    }

    fn flush(&mut self) -> Result<(), String> {
        self.log.flush(&self.model).map_err(|error| error.to_string())
    }

    fn done(&mut self, slot: usize, _request: &Request, buffer: &[u8], result: Result<(), &IoError>) {
        match self.running.remove(&slot) {
            Some(Running::Write { first, units }) => {
                let record = self.model.end_write(first, units, result.is_ok());
                self.log.push(&record);
            }
            Some(Running::Read { ticket, suspect }) => match result {
                Ok(()) => self.judge(&ticket, suspect, buffer),
                // What could not be read again stays as it was found.
                Err(_) => suspect.into_iter().for_each(|s| self.pursue(Suspect { reads: CONFIRM_READS, ..s })),
            },
            None => {}
        }
    }

    fn progress(&self, elapsed: Nanos) -> f64 {
        match self.phase {
            Phase::Write(limit) => limit.part(elapsed, self.written_bytes),
            Phase::Check { .. } => (self.cursor - self.region.first) as f64 / self.region.units.max(1) as f64,
        }
    }

    fn wants_data(&self) -> bool {
        true
    }
}
