//! The judge on trial: a simulated disk that behaves, and one that loses, tears, misplaces, corrupts and serves old blocks.

use std::path::Path;

use proptest::prelude::*;

use super::judge::{Class, Identity, Rules};
use super::model::{Mismatch, Model};
use super::record::{RECORD_BYTES, Record};
use super::stamp::{SECTOR_BYTES, UNIT_BYTES, volume_hash};
use super::writelog::{Header, LogError, Opened, WriteLog};

const UNITS: u64 = 16;
const IDENTITY: Identity = Identity { log: 0x10c, volume: 0x701 };

/// A disk in memory, with its model.
struct Bench {
    model: Model,
    disk: Vec<u8>,
    /// Everything the log would hold.
    records: Vec<Record>,
}

/// A write that was issued and not yet applied to the disk.
struct Issued {
    first: u64,
    units: u16,
    data: Vec<u8>,
}

impl Bench {
    fn new() -> Self {
        Self::with_rules(Rules::default())
    }

    fn with_rules(rules: Rules) -> Self {
        let mut model = Model::new(IDENTITY, UNITS, rules);
        let records = vec![model.begin_run()];
        Self { model, disk: vec![0; UNITS as usize * UNIT_BYTES], records }
    }

    fn at(unit: u64) -> usize {
        unit as usize * UNIT_BYTES
    }

    fn try_issue(&mut self, first: u64, units: u16) -> Option<Issued> {
        let record = self.model.begin_write(first, units)?;
        let mut data = vec![0; usize::from(units) * UNIT_BYTES];
        self.model.fill(&record, &mut data);
        self.records.push(record);
        Some(Issued { first, units, data })
    }

    fn issue(&mut self, first: u64, units: u16) -> Issued {
        self.try_issue(first, units).expect("the units are free")
    }

    fn apply(&mut self, write: &Issued) {
        let at = Self::at(write.first);
        self.disk[at..at + write.data.len()].copy_from_slice(&write.data);
    }

    fn end(&mut self, write: &Issued, acknowledged: bool) {
        let record = self.model.end_write(write.first, write.units, acknowledged);
        self.records.push(record);
    }

    /// A write as it should be.
    fn write(&mut self, first: u64, units: u16) -> Vec<u8> {
        let write = self.issue(first, units);
        self.apply(&write);
        self.end(&write, true);
        write.data
    }

    fn read(&mut self, first: u64, units: u16) -> Vec<Mismatch> {
        let ticket = self.model.begin_read(first, units);
        let data = self.disk[Self::at(first)..Self::at(first + u64::from(units))].to_vec();
        self.model.end_read(&ticket, &data, &mut self.records)
    }

    fn classes(&mut self, first: u64, units: u16) -> Vec<(u64, Class)> {
        self.read(first, units).into_iter().map(|m| (m.unit, m.fault.class)).collect()
    }

    /// The process is killed: only the records remain.
    fn restart(&mut self) {
        self.restart_with(Rules::default());
    }

    fn restart_with(&mut self, rules: Rules) {
        let mut model = Model::new(IDENTITY, UNITS, rules);
        for record in &self.records {
            model.apply(record).expect("the records fit");
        }
        self.records.push(model.begin_run());
        self.model = model;
    }
}

#[test]
fn what_was_acknowledged_is_right_and_never_written_units_may_hold_anything() {
    let mut bench = Bench::new();
    bench.write(2, 3);
    bench.disk[..UNIT_BYTES].fill(0xab);
    assert_eq!(bench.classes(0, UNITS as u16), []);
}

#[test]
fn a_lost_write_is_lost() {
    let mut bench = Bench::new();
    let old = bench.write(3, 1);
    bench.write(3, 1);
    bench.disk[Bench::at(3)..Bench::at(4)].copy_from_slice(&old);
    assert_eq!(bench.classes(0, UNITS as u16), [(3, Class::Lost)]);
}

#[test]
fn a_first_write_that_left_zeroes_is_lost() {
    let mut bench = Bench::new();
    bench.write(3, 2);
    bench.disk[Bench::at(4)..Bench::at(5)].fill(0);
    assert_eq!(bench.classes(3, 2), [(4, Class::Lost)]);
}

#[test]
fn a_lost_write_over_an_earlier_log_is_lost() {
    let mut bench = Bench::new();
    bench.write(3, 1);
    let mut earlier = Model::new(Identity { log: 1, ..IDENTITY }, UNITS, Rules::default());
    let record = earlier.begin_write(3, 1).unwrap();
    earlier.fill(&record, &mut bench.disk[Bench::at(3)..Bench::at(4)]);
    assert_eq!(bench.classes(3, 1), [(3, Class::Lost)]);
}

#[test]
fn older_than_what_was_read_is_stale() {
    let mut bench = Bench::new();
    let old = bench.write(5, 1);
    let write = bench.issue(5, 1);
    bench.apply(&write);
    assert_eq!(bench.classes(5, 1), [], "a write in flight may be seen");
    bench.disk[Bench::at(5)..Bench::at(6)].copy_from_slice(&old);
    assert_eq!(bench.classes(5, 1), [(5, Class::Stale)]);
}

#[test]
fn a_read_that_began_before_the_acknowledgement_may_return_the_old_content() {
    let mut bench = Bench::new();
    let old = bench.write(5, 1);
    let write = bench.issue(5, 1);
    let early = bench.model.begin_read(5, 1);
    bench.apply(&write);
    bench.end(&write, true);
    let late = bench.model.begin_read(5, 1);
    assert_eq!(bench.model.end_read(&early, &old, &mut Vec::new()), []);
    let found = bench.model.end_read(&late, &old, &mut Vec::new());
    assert_eq!(found[0].fault.class, Class::Lost);
}

#[test]
fn a_read_during_which_a_write_came_and_went_may_return_either() {
    let mut bench = Bench::new();
    let old = bench.write(5, 1);
    let tickets = [bench.model.begin_read(5, 1), bench.model.begin_read(5, 1)];
    let new = bench.write(5, 1);
    for (ticket, data) in tickets.iter().zip([&old, &new]) {
        assert_eq!(bench.model.end_read(ticket, data, &mut Vec::new()), []);
    }
}

#[test]
fn concurrent_reads_of_a_unit_in_doubt_must_agree() {
    let mut bench = Bench::new();
    let old = bench.write(5, 1);
    let write = bench.issue(5, 1);
    bench.end(&write, false);
    let ticket = bench.model.begin_read(5, 1);
    assert_eq!(bench.classes(5, 1), [], "the write is not there");
    let found = bench.model.end_read(&ticket, &write.data, &mut Vec::new());
    assert_eq!(found[0].fault.class, Class::Resurrected);
    assert_eq!(bench.model.end_read(&ticket, &old, &mut Vec::new()), []);
}

#[test]
fn sectors_of_two_writes_are_torn() {
    for sector in 1..8 {
        let mut bench = Bench::new();
        let old = bench.write(7, 1);
        bench.write(7, 1);
        let cut = sector * SECTOR_BYTES;
        let at = Bench::at(7);
        bench.disk[at..at + cut].copy_from_slice(&old[..cut]);
        assert_eq!(bench.classes(7, 1), [(7, Class::Torn)], "cut at sector {sector}");
    }
}

#[test]
fn half_a_first_write_is_torn() {
    let mut bench = Bench::new();
    bench.write(7, 1);
    bench.disk[Bench::at(7)..Bench::at(7) + 2048].fill(0);
    assert_eq!(bench.classes(7, 1), [(7, Class::Torn)]);
}

#[test]
fn a_write_torn_by_a_crash_is_torn_where_units_are_atomic_and_fine_where_sectors_are() {
    for (atomic_bytes, expected) in [(4096, vec![(7, Class::Torn)]), (512, vec![])] {
        let mut bench = Bench::with_rules(Rules { atomic_bytes, ..Rules::default() });
        bench.write(7, 1);
        let write = bench.issue(7, 1);
        let at = Bench::at(7);
        bench.disk[at..at + 1024].copy_from_slice(&write.data[..1024]);
        bench.end(&write, false);
        assert_eq!(bench.classes(7, 1), expected, "atomic {atomic_bytes}");
    }
}

#[test]
fn pieces_smaller_than_promised_are_torn() {
    let mut bench = Bench::with_rules(Rules { atomic_bytes: 2048, ..Rules::default() });
    bench.write(7, 1);
    let write = bench.issue(7, 1);
    let at = Bench::at(7);
    bench.disk[at..at + 1024].copy_from_slice(&write.data[..1024]);
    assert_eq!(bench.classes(7, 1), [(7, Class::Torn)]);
    bench.disk[at..at + 2048].copy_from_slice(&write.data[..2048]);
    bench.write(6, 1);
    assert_eq!(bench.classes(6, 2), []);
}

#[test]
fn settled_units_are_whole_whatever_the_device_promises() {
    let mut bench = Bench::with_rules(Rules { atomic_bytes: 512, ..Rules::default() });
    let old = bench.write(7, 1);
    bench.write(7, 1);
    let at = Bench::at(7);
    bench.disk[at..at + 512].copy_from_slice(&old[..512]);
    assert_eq!(bench.classes(7, 1), [(7, Class::Torn)]);
}

#[test]
fn pieces_must_be_of_writes_that_are_allowed() {
    let mut bench = Bench::with_rules(Rules { atomic_bytes: 512, ..Rules::default() });
    let lost = bench.write(7, 1);
    bench.write(7, 1);
    let write = bench.issue(7, 1);
    let at = Bench::at(7);
    bench.disk[at..at + 512].copy_from_slice(&write.data[..512]);
    assert_eq!(bench.classes(7, 1), []);
    bench.disk[at + 512..at + 1024].copy_from_slice(&lost[512..1024]);
    assert_eq!(bench.classes(7, 1), [(7, Class::Torn)]);
}

#[test]
fn a_block_of_another_place_is_misplaced() {
    let mut bench = Bench::new();
    let data = bench.write(3, 1);
    bench.write(9, 1);
    bench.disk[Bench::at(9)..Bench::at(10)].copy_from_slice(&data);
    assert_eq!(bench.classes(0, UNITS as u16), [(9, Class::Misplaced)]);
}

#[test]
fn a_misplaced_block_is_found_where_nothing_was_ever_written() {
    let mut bench = Bench::new();
    let data = bench.write(3, 1);
    bench.disk[Bench::at(12)..Bench::at(13)].copy_from_slice(&data);
    assert_eq!(bench.classes(0, UNITS as u16), [(12, Class::Misplaced)]);
}

#[test]
fn sectors_in_the_wrong_order_are_misplaced() {
    let mut bench = Bench::new();
    bench.write(3, 1);
    let at = Bench::at(3);
    let (first, second) = bench.disk[at..at + 2 * SECTOR_BYTES].split_at_mut(SECTOR_BYTES);
    first.swap_with_slice(second);
    assert_eq!(bench.classes(3, 1), [(3, Class::Misplaced)]);
}

#[test]
fn a_block_of_another_volume_is_misplaced() {
    let mut bench = Bench::new();
    bench.write(3, 1);
    for log in [IDENTITY.log, 99] {
        let mut other = Model::new(Identity { log, volume: volume_hash("other") }, UNITS, Rules::default());
        let record = other.begin_write(3, 1).unwrap();
        other.fill(&record, &mut bench.disk[Bench::at(3)..Bench::at(4)]);
        assert_eq!(bench.classes(3, 1), [(3, Class::Misplaced)], "log {log}");
    }
}

#[test]
fn flipped_bits_are_corrupt() {
    for offset in [0, 8, 30, 100, 511, 4000] {
        let mut bench = Bench::new();
        bench.write(3, 1);
        bench.disk[Bench::at(3) + offset] ^= 0x10;
        assert_eq!(bench.classes(3, 1), [(3, Class::Corrupt)], "byte {offset}");
    }
}

#[test]
fn strange_bytes_over_a_write_are_corrupt() {
    let mut bench = Bench::new();
    bench.write(3, 1);
    bench.disk[Bench::at(3)..Bench::at(4)].fill(0x5a);
    assert_eq!(bench.classes(3, 1), [(3, Class::Corrupt)]);
}

#[test]
fn unwritten_units_must_be_zero_where_that_was_asked_for() {
    let mut bench = Bench::with_rules(Rules { unwritten_zero: true, ..Rules::default() });
    assert_eq!(bench.classes(0, UNITS as u16), []);
    bench.disk[Bench::at(2) + 77] = 1;
    assert_eq!(bench.classes(0, UNITS as u16), [(2, Class::Corrupt)]);
    bench.issue(5, 1);
    bench.disk[Bench::at(5)..Bench::at(6)].fill(7);
    assert_eq!(bench.classes(5, 1), [(5, Class::Corrupt)], "neither zeroes nor the write in flight");
}

#[test]
fn a_block_from_the_future_is_unissued() {
    let mut bench = Bench::new();
    bench.write(3, 1);
    let kept = bench.records.clone();
    bench.write(3, 1);
    bench.records = kept;
    bench.restart();
    assert_eq!(bench.classes(3, 1), [(3, Class::Unissued)]);
}

#[test]
fn after_a_restart_an_unacknowledged_write_is_there_or_not_and_then_stable() {
    for landed in [false, true] {
        let mut bench = Bench::new();
        let old = bench.write(4, 1);
        let write = bench.issue(4, 1);
        if landed {
            bench.apply(&write);
        }
        bench.restart();
        assert_eq!(bench.classes(4, 1), [], "either is right");
        assert_eq!(bench.classes(4, 1), [], "and stays right");
        let other = if landed { &old } else { &write.data };
        bench.disk[Bench::at(4)..Bench::at(5)].copy_from_slice(other);
        let expected = if landed { Class::Stale } else { Class::Resurrected };
        assert_eq!(bench.classes(4, 1), [(4, expected)], "a change without a write");
        bench.restart();
        let changed = bench.classes(4, 1);
        assert_eq!(changed, [(4, expected)], "the log remembers what was read");
    }
}

#[test]
fn an_older_write_than_the_acknowledged_one_is_lost_even_after_failed_ones() {
    let mut bench = Bench::new();
    let old = bench.write(4, 1);
    bench.write(4, 1);
    for _ in 0..3 {
        let write = bench.issue(4, 1);
        bench.end(&write, false);
    }
    bench.disk[Bench::at(4)..Bench::at(5)].copy_from_slice(&old);
    assert_eq!(bench.classes(4, 1), [(4, Class::Lost)]);
}

#[test]
fn a_whole_io_is_torn_only_where_it_is_promised_to_be_atomic() {
    for (atomic_bytes, expected) in [(4096, vec![]), (16384, vec![(9, Class::Torn)])] {
        let mut bench = Bench::with_rules(Rules { atomic_bytes, ..Rules::default() });
        bench.write(8, 4);
        let write = bench.issue(8, 4);
        bench.apply(&write);
        // Unit 9 of the write did not arrive before the crash.
        let before = bench.disk.clone();
        let mut older = Bench::with_rules(Rules { atomic_bytes, ..Rules::default() });
        older.write(8, 4);
        bench.disk[Bench::at(9)..Bench::at(10)].copy_from_slice(&older.disk[Bench::at(9)..Bench::at(10)]);
        assert_ne!(before, bench.disk);
        bench.end(&write, false);
        assert_eq!(bench.classes(8, 4), expected, "atomic {atomic_bytes}");
    }
}

#[test]
fn an_io_larger_than_what_is_promised_may_be_torn_between_units() {
    let mut bench = Bench::with_rules(Rules { atomic_bytes: 8192, ..Rules::default() });
    let write = bench.issue(8, 4);
    bench.apply(&write);
    bench.disk[Bench::at(9)..Bench::at(10)].fill(0);
    bench.end(&write, false);
    assert_eq!(bench.classes(8, 4), []);
}

#[test]
fn a_unit_written_again_does_not_tear_the_larger_io() {
    let rules = Rules { atomic_bytes: 16384, ..Rules::default() };
    for compacted in [false, true] {
        let mut bench = Bench::with_rules(rules);
        for _ in 0..3 {
            bench.write(8, 4);
        }
        bench.write(9, 1);
        assert_eq!(bench.classes(8, 4), []);
        if compacted {
            bench.records.clear();
            bench.model.snapshot(|record| bench.records.push(record));
        }
        // I/Os of a later run are later, too.
        bench.restart_with(rules);
        bench.write(10, 1);
        assert_eq!(bench.classes(8, 4), [], "compacted: {compacted}");
    }
}

#[test]
fn a_mismatch_is_new_once_until_the_unit_is_written_again() {
    let mut bench = Bench::new();
    for _ in 0..2 {
        bench.write(3, 1);
        bench.disk[Bench::at(3)..Bench::at(4)].fill(0);
        let repeated: Vec<bool> = (0..2).map(|_| bench.read(3, 1)[0].repeated).collect();
        assert_eq!(repeated, [false, true]);
    }
}

#[test]
fn overlapping_writes_are_not_issued() {
    let mut bench = Bench::new();
    let write = bench.issue(3, 2);
    assert!(bench.try_issue(4, 2).is_none());
    assert!(bench.try_issue(UNITS - 1, 2).is_none(), "beyond the end");
    bench.end(&write, true);
    assert!(bench.try_issue(4, 2).is_some());
}

#[test]
fn records_that_do_not_fit_are_refused() {
    let mut model = Model::new(IDENTITY, UNITS, Rules::default());
    for record in [
        Record::Ack { first: 0, units: 1 },
        Record::Fail { first: 0, units: 1 },
        Record::Issue { first: UNITS, units: 1, serial: 1 },
        Record::Seen { unit: 0, seq: 1, settled: true },
        Record::State { first: 0, units: 1, bits: u64::MAX },
    ] {
        assert!(model.apply(&record).is_err(), "{record:?}");
    }
}

/// One step of a random history.
#[derive(Debug, Clone)]
enum Step {
    Issue {
        first: u64,
        units: u16,
    },
    /// The disk does a write, or a part of its units, without having answered yet.
    Apply {
        pick: usize,
        part: u16,
    },
    /// It is applied and answered.
    Acknowledge {
        pick: usize,
    },
    Fail {
        pick: usize,
    },
    BeginRead {
        first: u64,
        units: u16,
    },
    /// The disk answers a read with what it holds now.
    EndRead {
        pick: usize,
    },
    Restart,
    Compact,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let extent = || (0..UNITS, 1_u16..4);
    let step = prop_oneof![
        6 => extent().prop_map(|(first, units)| Step::Issue { first, units }),
        2 => (any::<usize>(), 1_u16..4).prop_map(|(pick, part)| Step::Apply { pick, part }),
        4 => any::<usize>().prop_map(|pick| Step::Acknowledge { pick }),
        1 => any::<usize>().prop_map(|pick| Step::Fail { pick }),
        4 => extent().prop_map(|(first, units)| Step::BeginRead { first, units }),
        4 => any::<usize>().prop_map(|pick| Step::EndRead { pick }),
        1 => Just(Step::Restart),
        1 => Just(Step::Compact),
    ];
    prop::collection::vec(step, 1..200)
}

/// Runs a history on a disk that behaves, and gives it back with everything answered.
fn behave(steps: &[Step]) -> Bench {
    let mut bench = Bench::new();
    let mut writes: Vec<Issued> = Vec::new();
    let mut reads = Vec::new();
    for step in steps {
        match *step {
            Step::Issue { first, units } => writes.extend(bench.try_issue(first, units)),
            Step::Apply { pick, part } if !writes.is_empty() => {
                let write = &writes[pick % writes.len()];
                let len = usize::from(part.min(write.units)) * UNIT_BYTES;
                let at = Bench::at(write.first);
                let data = write.data[..len].to_vec();
                bench.disk[at..at + len].copy_from_slice(&data);
            }
            Step::Acknowledge { pick } if !writes.is_empty() => {
                let write = writes.swap_remove(pick % writes.len());
                bench.apply(&write);
                bench.end(&write, true);
            }
            Step::Fail { pick } if !writes.is_empty() => {
                let write = writes.swap_remove(pick % writes.len());
                bench.end(&write, false);
            }
            Step::BeginRead { first, units } if first + u64::from(units) <= UNITS => {
                reads.push(bench.model.begin_read(first, units));
            }
            Step::EndRead { pick } if !reads.is_empty() => {
                let ticket = reads.swap_remove(pick % reads.len());
                let at = Bench::at(ticket.first());
                let data = bench.disk[at..at + ticket.units() * UNIT_BYTES].to_vec();
                let found = bench.model.end_read(&ticket, &data, &mut bench.records);
                assert_eq!(found, [], "a disk that behaves");
            }
            Step::Restart => {
                // Whatever was in flight ends with the process, done or not.
                writes.clear();
                reads.clear();
                bench.restart();
            }
            Step::Compact => {
                let mut records = Vec::new();
                bench.model.snapshot(|record| records.push(record));
                bench.records = records;
            }
            _ => {}
        }
    }
    for write in writes {
        bench.apply(&write);
        bench.end(&write, true);
    }
    bench
}

/// What goes wrong with one settled, acknowledged unit.
#[derive(Debug, Clone, Copy)]
enum Evil {
    RollBack,
    Tear { sectors: usize },
    Flip { byte: usize },
    Misplace,
    OtherVolume,
}

fn evil() -> impl Strategy<Value = Evil> {
    prop_oneof![
        Just(Evil::RollBack),
        (1_usize..8).prop_map(|sectors| Evil::Tear { sectors }),
        (0..UNIT_BYTES).prop_map(|byte| Evil::Flip { byte }),
        Just(Evil::Misplace),
        Just(Evil::OtherVolume),
    ]
}

fn harm(bench: &mut Bench, unit: u64, evil: Evil) -> Class {
    let old = bench.disk[Bench::at(unit)..Bench::at(unit + 1)].to_vec();
    let other = bench.write((unit + 1) % UNITS, 1);
    bench.write(unit, 1);
    let bytes = &mut bench.disk[Bench::at(unit)..Bench::at(unit + 1)];
    match evil {
        Evil::RollBack => {
            bytes.copy_from_slice(&old);
            Class::Lost
        }
        Evil::Tear { sectors } => {
            bytes[..sectors * SECTOR_BYTES].copy_from_slice(&old[..sectors * SECTOR_BYTES]);
            Class::Torn
        }
        Evil::Flip { byte } => {
            bytes[byte] ^= 1;
            Class::Corrupt
        }
        Evil::Misplace => {
            bytes.copy_from_slice(&other);
            Class::Misplaced
        }
        Evil::OtherVolume => {
            let mut other = Model::new(Identity { log: 5, volume: 5 }, UNITS, Rules::default());
            let record = other.begin_write(unit, 1).unwrap();
            other.fill(&record, bytes);
            Class::Misplaced
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_disk_that_behaves_is_never_accused(steps in steps()) {
        let mut bench = behave(&steps);
        prop_assert_eq!(bench.read(0, UNITS as u16), []);
        bench.restart();
        prop_assert_eq!(bench.read(0, UNITS as u16), []);
    }

    #[test]
    fn whatever_happened_before_each_evil_is_called_by_its_name(steps in steps(), unit in 0..UNITS, evil in evil()) {
        let mut bench = behave(&steps);
        let class = harm(&mut bench, unit, evil);
        prop_assert_eq!(bench.classes(0, UNITS as u16), [(unit, class)]);
        bench.restart();
        prop_assert_eq!(bench.classes(0, UNITS as u16), [(unit, class)], "after a restart");
    }
}

fn header() -> Header {
    Header { log: IDENTITY.log, units: UNITS, volume: "volume".to_owned() }
}

fn open(path: &Path) -> Result<Opened, LogError> {
    WriteLog::open(path, Rules::default(), false)
}

/// A log with one acknowledged write of unit 1 and one of unit 2 that was not.
fn made_log(path: &Path) {
    let Opened { mut log, mut model, .. } = WriteLog::create(path, header(), Rules::default(), false).unwrap();
    log.push(&model.begin_run());
    log.push(&model.begin_write(1, 1).unwrap());
    log.push(&model.end_write(1, 1, true));
    log.push(&model.begin_write(2, 1).unwrap());
    log.flush(&model).unwrap();
}

#[test]
fn a_log_is_read_back_and_goes_on_after_a_kill() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v.wlog");
    made_log(&path);
    for run in 2..4 {
        let Opened { mut log, mut model, dropped_bytes } = open(&path).unwrap();
        assert_eq!((log.header(), dropped_bytes), (&header(), 0));
        log.push(&model.begin_run());
        assert_eq!(model.run(), run);
        assert_eq!(model.census(), (2, 1));
        assert_eq!((model.state(1).acked(), model.state(2).acked()), (1, 0));
        log.flush(&model).unwrap();
    }
}

#[test]
fn a_log_cut_off_anywhere_loses_only_what_was_cut_off() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v.wlog");
    made_log(&path);
    let whole = std::fs::read(&path).unwrap();
    let records = (whole.len() - 512) / RECORD_BYTES;
    for len in 512..whole.len() {
        std::fs::write(&path, &whole[..len]).unwrap();
        let opened = open(&path).unwrap();
        assert_eq!(opened.dropped_bytes as usize, (len - 512) % RECORD_BYTES);
        let kept = (len - 512) / RECORD_BYTES;
        assert_eq!(opened.model.state(1).acked(), u32::from(kept >= 4), "{kept} of {records} records");
        // What is appended follows what was kept.
        let Opened { mut log, mut model, .. } = opened;
        let run = model.run();
        log.push(&model.begin_run());
        log.flush(&model).unwrap();
        drop(log);
        assert_eq!(open(&path).unwrap().model.run(), run + 1);
    }
}

#[test]
fn a_log_damaged_in_its_middle_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v.wlog");
    made_log(&path);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[512 + RECORD_BYTES + 9] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    assert!(matches!(open(&path), Err(LogError::Damaged { at: 536, .. })));
    bytes[20] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    assert!(matches!(open(&path), Err(LogError::NotALog { .. })));
    std::fs::write(&path, b"text").unwrap();
    assert!(matches!(open(&path), Err(LogError::NotALog { .. })));
}

#[test]
fn a_log_in_use_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v.wlog");
    made_log(&path);
    let mut first = open(&path).unwrap();
    assert!(matches!(open(&path), Err(LogError::InUse { .. })));
    first.log.compact(&first.model).unwrap();
    assert!(matches!(open(&path), Err(LogError::InUse { .. })), "the new file is locked as well");
    drop(first);
    assert!(open(&path).is_ok());
}

#[test]
fn compaction_keeps_the_states() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v.wlog");
    made_log(&path);
    let Opened { mut log, mut model, .. } = open(&path).unwrap();
    log.push(&model.begin_run());
    for _ in 0..1000 {
        log.push(&model.begin_write(5, 3).unwrap());
        log.push(&model.end_write(5, 3, true));
    }
    log.push(&model.begin_write(9, 1).unwrap());
    log.flush(&model).unwrap();
    let before = log.bytes();
    log.compact(&model).unwrap();
    assert!(log.bytes() < before / 10);
    let states = |model: &Model| (0..UNITS).map(|unit| model.state(unit)).collect::<Vec<_>>();
    let expected = states(&model);
    // Records after a compaction go on from its states.
    log.push(&model.end_write(9, 1, true));
    log.flush(&model).unwrap();
    drop(log);
    let again = open(&path).unwrap().model;
    assert_eq!(states(&again)[..9], expected[..9]);
    assert_eq!(again.state(9).acked(), 1);
    assert_eq!(again.run(), model.run());
}

#[test]
fn a_volume_that_has_grown_keeps_its_log() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v.wlog");
    made_log(&path);
    let Opened { mut log, mut model, .. } = open(&path).unwrap();
    model.grow(UNITS * 2);
    log.compact(&model).unwrap();
    drop(log);
    let again = open(&path).unwrap();
    assert_eq!((again.log.header().units, again.model.len()), (UNITS * 2, UNITS * 2));
}
