//! The judgement: what a read of a unit may have returned, and what it means when it returned something else.
//!
//! *What it is.* Pure functions. [`content`] says what a unit's bytes are; [`judge`] compares that with the state of the
//! unit when the read was issued and when it ended.
//!
//! *What a read may return.* Let nothing be written to the unit while the read runs: then exactly the newest write that
//! was acknowledged or read before; or, when the fate of later writes is unknown (`uncertain`), any of those, and from
//! then on that one. When a write was in flight meanwhile: also that write. Nothing older, ever.
//!
//! *Atomicity.* The sectors of a unit are of one write. Only where the device promises less than a unit (`atomic_bytes`)
//! and a write was in flight, or is of unknown fate, may pieces of that size be of different allowed writes.
//!
//! *Soundness.* What is reported is a fault of the storage for any order in which it may have done the I/O. The converse
//! is not claimed: a wrong answer among those allowed to concurrent I/O goes unseen.

use std::fmt;

use serde::Serialize;

use super::stamp::{SECTOR_BYTES, SECTORS, Sector, Stamp, UNIT_BYTES, read_unit};
use super::state::UnitState;

/// What is wrong with a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// An acknowledged write is absent; older content is there.
    Lost,
    /// A read has returned what is older than what an earlier read returned, or what the next read returns.
    Stale,
    /// Pieces of different writes in what must be whole.
    Torn,
    /// Content of another place or of another volume.
    Misplaced,
    /// Content that was never written by anyone.
    Corrupt,
    /// A write of unknown fate appeared after a read had shown that it was not there.
    Resurrected,
    /// A write that the log has never issued.
    Unissued,
}

impl Class {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Lost, Self::Stale, Self::Torn, Self::Misplaced, Self::Corrupt, Self::Resurrected, Self::Unissued];

    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lost => "lost",
            Self::Stale => "stale",
            Self::Torn => "torn",
            Self::Misplaced => "misplaced",
            Self::Corrupt => "corrupt",
            Self::Resurrected => "resurrected",
            Self::Unissued => "unissued",
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which blocks are ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    pub log: u64,
    pub volume: u64,
}

/// One sector as seen from the place where it was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Of this unit, by this log.
    Ours {
        seq: u32,
        serial: u64,
        io_first: u64,
        io_units: u16,
    },
    /// Of this unit, by another log.
    Earlier,
    /// By this log, for another place.
    Elsewhere(Stamp, u8),
    /// By another log, for another place or volume.
    Stranger(Stamp, u8),
    Zero,
    Foreign,
    Damaged,
}

impl Part {
    fn of(sector: Sector, identity: Identity, unit: u64, index: usize) -> Self {
        let Sector::Valid { stamp, index: written } = sector else {
            return match sector {
                Sector::Zero => Self::Zero,
                Sector::Damaged => Self::Damaged,
                _ => Self::Foreign,
            };
        };
        let here = stamp.volume == identity.volume && stamp.unit == unit && usize::from(written) == index;
        match (here, stamp.log == identity.log) {
            (true, true) => {
                Self::Ours { seq: stamp.seq, serial: stamp.serial, io_first: stamp.io_first, io_units: stamp.io_units }
            }
            (true, false) => Self::Earlier,
            (false, true) => Self::Elsewhere(stamp, written),
            (false, false) => Self::Stranger(stamp, written),
        }
    }

    /// The write it stands for: 0 for what was there before all writes.
    fn version(&self) -> Option<u32> {
        match self {
            Self::Ours { seq, .. } => Some(*seq),
            Self::Earlier | Self::Zero => Some(0),
            _ => None,
        }
    }

    /// Whether both are pieces of one whole.
    fn same_write(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Ours { seq: a, .. }, Self::Ours { seq: b, .. }) => a == b,
            (Self::Stranger(..), Self::Stranger(..)) | (Self::Elsewhere(..), Self::Elsewhere(..)) => true,
            _ => self == other,
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ours { seq, .. } => write!(f, "write {seq}"),
            Self::Earlier => f.write_str("a block of an earlier log"),
            Self::Elsewhere(s, sector) => write!(f, "write {} of unit {} sector {sector}", s.seq, s.unit),
            Self::Stranger(s, sector) => {
                write!(f, "unit {} sector {sector} of volume {:016x} of another log {:016x}", s.unit, s.volume, s.log)
            }
            Self::Zero => f.write_str("zeroes"),
            Self::Foreign => f.write_str("bytes that no verifier wrote"),
            Self::Damaged => f.write_str("a block with a wrong checksum"),
        }
    }
}

/// What a unit's bytes are, sector by sector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Content(pub [Part; SECTORS]);

/// Interprets the bytes of `unit`.
#[must_use]
pub fn content(bytes: &[u8], identity: Identity, unit: u64) -> Content {
    let sectors = read_unit(bytes);
    let mut parts = [Part::Foreign; SECTORS];
    for (index, part) in parts.iter_mut().enumerate() {
        *part = Part::of(sectors[index], identity, unit, index);
    }
    Content(parts)
}

impl Content {
    /// The one write that all of it is of, if there is one.
    #[must_use]
    pub fn whole(&self) -> Option<&Part> {
        self.0.iter().all(|p| p.same_write(&self.0[0])).then_some(&self.0[0])
    }

    fn find(&self, what: impl Fn(&Part) -> bool) -> Option<(usize, &Part)> {
        self.0.iter().enumerate().find(|(_, part)| what(part))
    }

    fn in_whole_pieces(&self, bytes: usize) -> bool {
        let per_piece = (bytes / SECTOR_BYTES).clamp(1, SECTORS);
        self.0.chunks(per_piece).all(|piece| piece.iter().all(|p| p.same_write(&piece[0])))
    }
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut start = 0;
        for end in 1..=SECTORS {
            if end < SECTORS && self.0[end].same_write(&self.0[start]) {
                continue;
            }
            if (start, end) == (0, SECTORS) {
                return write!(f, "{}", self.0[0]);
            }
            let comma = if start == 0 { "" } else { ", " };
            match end - start {
                1 => write!(f, "{comma}sector {start}: {}", self.0[start])?,
                _ => write!(f, "{comma}sectors {start}-{}: {}", end - 1, self.0[start])?,
            }
            start = end;
        }
        Ok(())
    }
}

/// What must hold beyond the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// Bytes that a write changes at once, by the device's promise.
    pub atomic_bytes: usize,
    /// Whether units that were never written must be all zeroes.
    pub unwritten_zero: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self { atomic_bytes: UNIT_BYTES, unwritten_zero: false }
    }
}

/// A right answer's news.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    pub seq: u32,
    /// Nothing else can be there from now on.
    pub settled: bool,
}

/// A wrong answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    pub class: Class,
    /// What was allowed, in words.
    pub expected: String,
    /// What was there, in words.
    pub found: String,
}

/// What the read of one unit may return.
struct Allowed {
    /// Nothing older.
    base: UnitState,
    /// Newest write that was issued when the read began.
    last_before: u32,
    /// Newest write issued when the read ended.
    last_now: u32,
    in_flight_before: bool,
    /// A write was in flight at some time during the read.
    active: bool,
}

impl Allowed {
    fn new(before: UnitState, now: UnitState) -> Self {
        let active = before.in_flight() || before.last() != now.last();
        Self {
            // Without writes only reads have changed the state, and what they found holds for this one too: storage
            // that is not written to does not change.
            base: if active { before } else { now },
            last_before: before.last(),
            last_now: now.last(),
            in_flight_before: before.in_flight(),
            active,
        }
    }

    fn takes(&self, version: u32) -> bool {
        version == self.base.seen()
            || (self.base.uncertain() && (self.base.seen()..=self.last_before).contains(&version))
            || (self.in_flight_before && version == self.last_before)
            || (self.last_before + 1..=self.last_now).contains(&version)
    }

    fn in_doubt(&self) -> bool {
        self.active || self.base.uncertain()
    }
}

impl fmt::Display for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seen = self.base.seen();
        match seen {
            0 => f.write_str("what was there before all writes")?,
            _ => write!(f, "write {seen}")?,
        }
        if self.base.acked() < seen {
            write!(f, " (read before; {} acknowledged)", self.base.acked())?;
        }
        let newest = if self.active { self.last_now } else { self.last_before };
        if self.in_doubt() && newest > seen {
            write!(f, " or a later one up to {newest}")?;
        }
        Ok(())
    }
}

/// Whether a read may return `content`, given the unit's state when it was issued (`before`) and now that it has ended.
pub fn judge(before: UnitState, now: UnitState, content: &Content, rules: Rules) -> Result<Option<Seen>, Fault> {
    let allowed = Allowed::new(before, now);
    match check(&allowed, content, rules) {
        Ok(None) => Ok(None),
        Ok(Some(seq)) => {
            let settled = !allowed.active && allowed.base.uncertain();
            Ok((settled || seq > now.seen()).then_some(Seen { seq, settled }))
        }
        Err(class) => Err(Fault { class, expected: allowed.to_string(), found: content.to_string() }),
    }
}

/// The write that the content is of; `None` where that cannot be said and need not be.
fn check(allowed: &Allowed, content: &Content, rules: Rules) -> Result<Option<u32>, Class> {
    if content.find(|p| matches!(p, Part::Elsewhere(..))).is_some() {
        return Err(Class::Misplaced);
    }
    if allowed.base.seen() == 0 {
        if let Some(verdict) = check_before_all_writes(content, rules) {
            return verdict;
        }
    } else if content.find(|p| matches!(p, Part::Stranger(..))).is_some() {
        return Err(Class::Misplaced);
    } else if content.find(|p| matches!(p, Part::Damaged | Part::Foreign)).is_some() {
        return Err(Class::Corrupt);
    }
    match content.whole() {
        Some(part) => check_version(allowed, part.version().unwrap_or(0)).map(Some),
        None => check_mixed(allowed, content, rules).map(|()| None),
    }
}

/// Units where the content from before all writes may still be. `None`: go on as usual.
fn check_before_all_writes(content: &Content, rules: Rules) -> Option<Result<Option<u32>, Class>> {
    if content.find(|p| matches!(p, Part::Ours { .. })).is_some() {
        return None;
    }
    if rules.unwritten_zero {
        let (_, part) = content.find(|p| !matches!(p, Part::Zero))?;
        let placed = matches!(part, Part::Stranger(..) | Part::Earlier);
        return Some(Err(if placed { Class::Misplaced } else { Class::Corrupt }));
    }
    Some(Ok(Some(0)))
}

fn check_version(allowed: &Allowed, version: u32) -> Result<u32, Class> {
    if allowed.takes(version) {
        return Ok(version);
    }
    Err(if version > allowed.last_now {
        Class::Unissued
    } else if version < allowed.base.acked() {
        Class::Lost
    } else if version < allowed.base.seen() {
        Class::Stale
    } else {
        Class::Resurrected
    })
}

fn check_mixed(allowed: &Allowed, content: &Content, rules: Rules) -> Result<(), Class> {
    let pieces_allowed = rules.atomic_bytes < UNIT_BYTES && allowed.in_doubt();
    if !pieces_allowed || !content.in_whole_pieces(rules.atomic_bytes) {
        return Err(Class::Torn);
    }
    let right = |part: &Part| part.version().map_or(allowed.base.seen() == 0, |version| allowed.takes(version));
    if content.0.iter().all(right) { Ok(()) } else { Err(Class::Torn) }
}
