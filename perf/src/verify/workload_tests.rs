//! The verifier's phases on a simulated disk that answers out of order and sometimes wrongly.

use std::collections::BTreeMap;
use std::path::Path;

use nvme_wire::Status;
use proptest::prelude::*;

use super::judge::{Class, Rules};
use super::stamp::UNIT_BYTES;
use super::workload::{CONFIRM_READS, Phase, Region, Verifier};
use super::writelog::{Header, Opened, WriteLog};
use crate::access::{Access, Pattern, Rng};
use crate::load::Limit;
use crate::session::IoError;
use crate::worker::{Next, Request, Workload};

const UNITS: u64 = 32;
const REGION: Region = Region { first: 0, units: UNITS, per_io: 2 };
const SLOTS: usize = 8;

/// What a faulty disk does with an I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Right,
    /// Takes a write, says so, and forgets it.
    Forget,
    /// Answers a read with what was there before the last write.
    Old,
    Error,
}

struct Disk {
    data: Vec<u8>,
    /// Before the last write of each extent.
    old: BTreeMap<u64, Vec<u8>>,
    rng: Rng,
}

impl Disk {
    fn new(seed: u64) -> Self {
        Self { data: vec![0; UNITS as usize * UNIT_BYTES], old: BTreeMap::new(), rng: Rng::new(seed) }
    }

    fn answer(&mut self, request: &Request, buffer: &mut [u8], how: Answer) -> Result<(), IoError> {
        let range = request.offset as usize..request.offset as usize + request.bytes as usize;
        match (request.write, how) {
            (_, Answer::Error) => return Err(IoError::Status(Status::WRITE_FAULT)),
            (true, Answer::Forget) => {}
            (true, _) => {
                self.old.insert(request.offset, self.data[range.clone()].to_vec());
                self.data[range].copy_from_slice(&buffer[..request.bytes as usize]);
            }
            (false, Answer::Old) => {
                let old = self.old.get(&request.offset).cloned().unwrap_or_else(|| self.data[range].to_vec());
                buffer[..old.len()].copy_from_slice(&old);
            }
            (false, _) => buffer[..request.bytes as usize].copy_from_slice(&self.data[range]),
        }
        Ok(())
    }

    /// Does what the worker does, with answers in random order. At most `ios` I/Os; whether the phase came to its end.
    fn run(&mut self, verifier: &mut Verifier, ios: u64, mut how: impl FnMut(u64, &Request) -> Answer) -> bool {
        let mut running: Vec<(usize, Request, Vec<u8>)> = Vec::new();
        let mut free: Vec<usize> = (0..SLOTS).collect();
        for count in 0..ios {
            let mut done = false;
            while let Some(slot) = free.last().copied() {
                let mut buffer = vec![0; usize::from(REGION.per_io) * UNIT_BYTES];
                match verifier.next(slot, &mut buffer, 0) {
                    Next::Io(request) => running.push((slot, request, buffer)),
                    Next::Wait => break,
                    Next::Done => {
                        done = true;
                        break;
                    }
                }
                free.pop();
            }
            verifier.flush().unwrap();
            if running.is_empty() {
                assert!(done, "it waits for nothing");
                return true;
            }
            let pick = self.rng.below(running.len() as u64) as usize;
            let (slot, request, mut buffer) = running.swap_remove(pick);
            let result = self.answer(&request, &mut buffer, how(count, &request));
            verifier.done(slot, &request, &buffer, result.as_ref().copied());
            free.push(slot);
        }
        false
    }
}

fn make(path: &Path) -> Opened {
    WriteLog::create(path, Header { log: 1, units: UNITS, volume: "v".to_owned() }, Rules::default(), false).unwrap()
}

fn verifier(opened: Opened, writes: u64, seed: u64) -> Verifier {
    let Opened { mut log, mut model, .. } = opened;
    log.push(&model.begin_run());
    let access = Access::new(Pattern::Randrw, 50, 0, UNITS / u64::from(REGION.per_io), seed);
    let limit = Limit::Bytes(writes * u64::from(REGION.per_io) * UNIT_BYTES as u64);
    Verifier::new(log, model, REGION, access, Phase::Write(limit), 10)
}

fn log_folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

const FOREVER: u64 = u64::MAX;

fn check(disk: &mut Disk, verifier: &mut Verifier, mut how: impl FnMut(u64, &Request) -> Answer) {
    verifier.set_phase(Phase::Check { written_only: false });
    assert!(disk.run(verifier, FOREVER, &mut how));
    verifier.settle();
}

#[test]
fn a_disk_that_forgets_a_write_is_caught_in_the_check() {
    let folder = log_folder();
    let mut disk = Disk::new(1);
    let mut verifier = verifier(make(&folder.path().join("log")), 40, 1);
    assert!(disk.run(&mut verifier, FOREVER, |_, _| Answer::Right));
    assert_eq!(verifier.findings().total(), 0);
    verifier.set_phase(Phase::Write(Limit::Bytes(verifier.written_bytes() + 8192)));
    assert!(disk.run(&mut verifier, FOREVER, |_, r| if r.write { Answer::Forget } else { Answer::Right }));
    check(&mut disk, &mut verifier, |_, _| Answer::Right);
    assert_eq!(verifier.findings().counts, BTreeMap::from([(Class::Lost, 2)]));
    assert!(verifier.findings().samples.iter().all(|f| !f.transient));
    assert_eq!(verifier.units_read(), UNITS);
    assert!(verifier.is_complete());
}

#[test]
fn old_content_served_once_or_twice_is_stale_and_not_lost() {
    for times in 1..=CONFIRM_READS {
        serve_old(times);
    }
}

fn serve_old(times: u32) {
    let folder = log_folder();
    let mut disk = Disk::new(2);
    let mut verifier = verifier(make(&folder.path().join("log")), 60, 2);
    assert!(disk.run(&mut verifier, FOREVER, |_, _| Answer::Right));
    let extent = *disk.old.keys().next().unwrap();
    let mut served = 0;
    check(&mut disk, &mut verifier, |_, request| {
        if request.offset != extent || served == times {
            return Answer::Right;
        }
        served += 1;
        Answer::Old
    });
    assert_eq!(verifier.findings().counts, BTreeMap::from([(Class::Stale, 2)]), "{times} times");
    assert!(verifier.findings().samples.iter().all(|f| f.transient));
}

#[test]
fn a_write_that_failed_may_be_there_or_not() {
    let folder = log_folder();
    let mut disk = Disk::new(3);
    let mut verifier = verifier(make(&folder.path().join("log")), 60, 3);
    assert!(disk.run(&mut verifier, FOREVER, |n, _| if n % 5 == 0 { Answer::Error } else { Answer::Right }));
    check(&mut disk, &mut verifier, |_, _| Answer::Right);
    assert_eq!(verifier.findings().total(), 0);
}

#[test]
fn a_mismatch_that_cannot_be_read_again_is_reported_all_the_same() {
    let folder = log_folder();
    let mut disk = Disk::new(4);
    let mut verifier = verifier(make(&folder.path().join("log")), 60, 4);
    assert!(disk.run(&mut verifier, FOREVER, |_, _| Answer::Right));
    let extent = *disk.old.keys().next().unwrap();
    let mut reads = 0;
    check(&mut disk, &mut verifier, |_, request| match request.offset == extent {
        true => {
            reads += 1;
            if reads == 1 { Answer::Old } else { Answer::Error }
        }
        false => Answer::Right,
    });
    assert_eq!(verifier.findings().counts, BTreeMap::from([(Class::Lost, 2)]));
}

#[test]
fn a_mismatch_seen_just_before_the_end_is_reported() {
    let folder = log_folder();
    let mut disk = Disk::new(5);
    let mut verifier = verifier(make(&folder.path().join("log")), 60, 5);
    assert!(disk.run(&mut verifier, FOREVER, |_, _| Answer::Right));
    disk.data.fill(0);
    verifier.set_phase(Phase::Check { written_only: true });
    assert!(!disk.run(&mut verifier, 1, |_, _| Answer::Right), "it is interrupted");
    verifier.settle();
    assert_eq!(verifier.findings().counts, BTreeMap::from([(Class::Lost, 2)]));
    assert!(!verifier.is_complete() || verifier.units_read() < UNITS);
}

#[test]
fn only_what_was_written_is_checked_when_asked_so() {
    let folder = log_folder();
    let mut disk = Disk::new(6);
    let mut verifier = verifier(make(&folder.path().join("log")), 1, 6);
    assert!(disk.run(&mut verifier, FOREVER, |_, _| Answer::Right));
    verifier.set_phase(Phase::Check { written_only: true });
    assert!(disk.run(&mut verifier, FOREVER, |_, _| Answer::Right));
    assert_eq!(verifier.units_read(), 2);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// The process is killed after any number of I/Os, with others in flight that land or not, and goes on from its log.
    #[test]
    fn a_kill_at_any_time_costs_no_wrong_verdict(kills in prop::collection::vec((1_u64..80, any::<u64>()), 1..5)) {
        let folder = log_folder();
        let path = folder.path().join("log");
        drop(make(&path));
        let mut disk = Disk::new(7);
        for (ios, seed) in kills {
            let opened = WriteLog::open(&path, Rules::default(), false).unwrap();
            let mut verifier = verifier(opened, 1000, seed);
            let errors = seed % 7 + 3;
            disk.run(&mut verifier, ios, |n, _| if n % errors == 0 { Answer::Error } else { Answer::Right });
            verifier.settle();
            prop_assert_eq!(verifier.findings().total(), 0);
        }
        let opened = WriteLog::open(&path, Rules::default(), false).unwrap();
        let mut verifier = verifier(opened, 0, 0);
        for _ in 0..2 {
            check(&mut disk, &mut verifier, |_, _| Answer::Right);
            prop_assert_eq!(verifier.findings().total(), 0);
        }
        prop_assert!(!verifier.model().is_empty());
    }
}
