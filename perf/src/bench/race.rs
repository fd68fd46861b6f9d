//! The race itself: groups of cells that share a device, pairs of runs in each cell.
//!
//! *Flow.* group by device and block size → prepare both sides → for each cell, pairs: floor, Addax, stock target → the
//! engine at rest. The order within a pair changes from pair to pair, so that neither side always runs on a machine that
//! the other has warmed.
//!
//! *When things fail.* A side that cannot be prepared fails its cells with the reason, or is left out with a note when it
//! just lacks the device. SIGINT and SIGTERM end the race at the next run: its processes, frozen ones too, are killed.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};

use super::contest::{Absence, Contestant, Side};
use super::generator::Generator;
use super::matrix::{Cell, Device};
use super::parse::Run;
use super::results::{CellResult, FORMAT, Machine, Race, Settings};
use super::{BenchArgs, RestChoice, floor, rest};
use crate::run::Failure;

/// The part of a run's time that the floor beside it takes.
const FLOOR_PART: f64 = 0.25;

/// Says how far it is, on standard error.
#[derive(Debug)]
pub struct Teller {
    quiet: bool,
    terminal: bool,
}

impl Teller {
    /// A line that the next one replaces on a terminal; elsewhere nothing.
    fn passing(&self, text: &str) {
        if !self.quiet && self.terminal {
            // Progress is a courtesy: a closed standard error is no reason to fail.
            let _ = write!(std::io::stderr(), "\r\x1b[K{text}");
        }
    }

    /// A line that stays.
    pub fn line(&self, text: &str) {
        if !self.quiet {
            let clear = if self.terminal { "\r\x1b[K" } else { "" };
            let _ = writeln!(std::io::stderr(), "{clear}{text}");
        }
    }
}

/// What all steps of a race share.
#[derive(Debug)]
pub struct Course<'a> {
    pub args: &'a BenchArgs,
    pub generator: Generator,
    pub addax: Side,
    pub spdk: Option<Side>,
    /// Folder for sockets, logs and files.
    pub folder: &'a Path,
    pub teller: Teller,
    stop: Arc<AtomicBool>,
}

impl Course<'_> {
    /// Ends everything when a signal has asked for it.
    ///
    /// # Errors
    /// That it was interrupted.
    pub fn check(&self) -> Result<(), Failure> {
        match self.stop.load(Ordering::Relaxed) {
            true => Err(Failure::Io("interrupted".to_owned())),
            false => Ok(()),
        }
    }
}

/// Cells that share a device, one after another.
#[must_use]
pub fn groups(cells: &[Cell]) -> Vec<(Device, u32, Vec<Cell>)> {
    let mut groups: Vec<(Device, u32, Vec<Cell>)> = Vec::new();
    for cell in cells {
        match groups.iter_mut().find(|(device, lba, _)| (*device, *lba) == (cell.device, cell.lba())) {
            Some((_, _, members)) => members.push(*cell),
            None => groups.push((cell.device, cell.lba(), vec![*cell])),
        }
    }
    groups
}

/// Runs it all.
///
/// # Errors
/// When it was interrupted, or there is nothing to start.
pub fn run(args: &BenchArgs, cells: &[Cell]) -> Result<Race, Failure> {
    check_args(args)?;
    let stop = stop_on_signals()?;
    let folder = args.out.join(format!("run-{}", std::process::id()));
    let folder = RunFolder::new(&folder)?;
    let terminal = std::io::stderr().is_terminal();
    let generator = match &args.spdk {
        Some(tree) => Generator::Spdk(tree.join("build/bin/spdk_nvme_perf")),
        None => Generator::Addax(std::env::current_exe().map_err(|e| Failure::Io(format!("this program: {e}")))?),
    };
    let course = Course {
        args,
        generator,
        addax: Side::Addax(args.engine.clone()),
        spdk: args.spdk.clone().map(Side::Spdk),
        folder: &folder.0,
        teller: Teller { quiet: args.quiet, terminal },
        stop,
    };
    let mut race = empty_race(&course);
    let total = cells.len();
    let began = Instant::now();
    for (device, lba, members) in groups(cells) {
        group(&course, &mut race, (device, lba), &members, (total, began))?;
    }
    if args.rest != RestChoice::No {
        rest::measure(&course, &mut race)?;
    }
    Ok(race)
}

/// The folder of a race, away with it.
#[derive(Debug)]
struct RunFolder(std::path::PathBuf);

impl RunFolder {
    fn new(path: &Path) -> Result<Self, Failure> {
        std::fs::create_dir_all(path).map_err(|e| Failure::Io(format!("{}: {e}", path.display())))?;
        // Programs are started with paths below it, from wherever.
        let absolute = path.canonicalize().map_err(|e| Failure::Io(format!("{}: {e}", path.display())))?;
        Ok(Self(absolute))
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn check_args(args: &BenchArgs) -> Result<(), Failure> {
    if args.target_cpu == args.load_cpu {
        return Err(Failure::Usage(format!(
            "--target-cpu and --load-cpu are both {}: two processors are needed",
            args.load_cpu
        )));
    }
    if args.target_cpu.max(args.load_cpu) >= 64 {
        return Err(Failure::Usage("--target-cpu and --load-cpu: processors 0 to 63 are allowed".to_owned()));
    }
    let mut programs = vec![args.engine.clone()];
    if let Some(tree) = &args.spdk {
        programs.extend(["nvmf_tgt", "spdk_nvme_perf"].map(|name| tree.join("build/bin").join(name)));
    }
    match programs.iter().find(|program| !program.is_file()) {
        Some(missing) => Err(Failure::Usage(format!("{} is not there: build it first", missing.display()))),
        None => Ok(()),
    }
}

fn stop_on_signals() -> Result<Arc<AtomicBool>, Failure> {
    let failed = |e: &dyn std::fmt::Display| Failure::Io(format!("signals: {e}"));
    let mut set = SigSet::empty();
    set.add(Signal::SIGINT);
    set.add(Signal::SIGTERM);
    // Before any thread starts, so that all have it; new programs start with no signal blocked.
    set.thread_block().map_err(|e| failed(&e))?;
    let stop = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&stop);
    let listen = move || {
        while set.wait().is_ok() {
            seen.store(true, Ordering::Relaxed);
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(listen).map_err(|e| failed(&e))?;
    Ok(stop)
}

fn empty_race(course: &Course<'_>) -> Race {
    let BenchArgs { pairs, seconds, target_cpu, load_cpu, .. } = *course.args;
    let generator = course.generator.name().to_owned();
    Race {
        format: FORMAT,
        began: format!("{:.0}", jiff::Timestamp::now()),
        machine: machine(),
        settings: Settings { pairs, seconds, generator, target_cpu, load_cpu },
        addax: String::new(),
        spdk: None,
        cells: Vec::new(),
        extras: Vec::new(),
        notes: Vec::new(),
    }
}

fn machine() -> Machine {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    Machine {
        processor: model.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned()),
        processors: std::thread::available_parallelism().map_or(1, usize::from),
        kernel: kernel.trim().to_owned(),
    }
}

fn group(
    course: &Course<'_>,
    race: &mut Race,
    (device, lba): (Device, u32),
    cells: &[Cell],
    (total, began): (usize, Instant),
) -> Result<(), Failure> {
    course.check()?;
    course.teller.passing(&format!("preparing: {}", device.title()));
    let prepare = |side: &Side| Contestant::prepare(side, device, lba, course.folder, course.args.target_cpu);
    let addax = prepare(&course.addax);
    let spdk = course.spdk.as_ref().map(prepare);
    for (side, found) in [("Addax", Some(&addax)), ("SPDK", spdk.as_ref())] {
        let note = found.and_then(|found| note(side, device, found));
        race.notes.extend(note.filter(|note| !race.notes.contains(note)));
    }
    // A stock target without the device does not keep Addax from being measured.
    let spdk = spdk.and_then(Result::ok);
    match &addax {
        Ok(contestant) => contestant.version().clone_into(&mut race.addax),
        Err(Absence::Unable) => return Ok(()),
        Err(Absence::Failed(_)) => {}
    }
    if let Some(contestant) = &spdk {
        race.spdk = Some(contestant.version().to_owned());
    }
    let plain = plain_device(course, device, lba);
    if let Some(Err(why)) = &plain {
        race.notes.push(format!("{}: not compared with its plain device: {why}", device.name()));
    }
    let mut sides = Sides { addax, spdk, plain: plain.and_then(Result::ok) };
    for cell in cells {
        if let Some(why) = course.generator.refuses(cell) {
            race.notes.push(format!("{cell}: left out: {why}"));
            continue;
        }
        let done = race.cells.len();
        let result = pairs(course, cell, &mut sides, &progress(done, total, began))?;
        course.teller.line(&format!("[{:>3}/{total}] {}", done + 1, short(&result)));
        race.cells.push(result);
    }
    Ok(())
}

/// Who takes part in the cells of a device.
struct Sides {
    addax: Result<Contestant, Absence>,
    spdk: Option<Contestant>,
    plain: Option<Contestant>,
}

/// Another process of the same engine, with the device that this one is compared with.
fn plain_device(course: &Course<'_>, device: Device, lba: u32) -> Option<Result<Contestant, Absence>> {
    let (plain, _) = device.plain()?;
    let folder = course.folder.join("plain");
    let made = std::fs::create_dir_all(&folder).map_err(|e| Absence::Failed(format!("{}: {e}", folder.display())));
    Some(made.and_then(|()| Contestant::prepare(&course.addax, plain, lba, &folder, course.args.target_cpu)))
}

fn progress(done: usize, total: usize, began: Instant) -> String {
    let left = match done {
        0 => String::new(),
        done => {
            let seconds = began.elapsed().as_secs_f64() / done as f64 * (total - done) as f64;
            format!(", {:.0} min left", (seconds / 60.0).ceil())
        }
    };
    format!("[{:>3}/{total}{left}]", done + 1)
}

fn pairs(course: &Course<'_>, cell: &Cell, sides: &mut Sides, progress: &str) -> Result<CellResult, Failure> {
    let mut result = CellResult {
        cell: cell.to_string(),
        addax: Vec::new(),
        spdk: Vec::new(),
        floor: Vec::new(),
        plain: Vec::new(),
        failures: Vec::new(),
    };
    let Sides { addax, spdk, plain } = sides;
    let addax = match addax {
        Ok(contestant) => contestant,
        Err(why) => {
            result.failures.push(format!("addax: {why}"));
            return Ok(result);
        }
    };
    for pair in 0..course.args.pairs {
        course.check()?;
        course.teller.passing(&format!("{progress} {cell} pair {} of {}", pair + 1, course.args.pairs));
        match self::pair(course, cell, addax, (spdk.as_mut(), plain.as_mut()), pair % 2 == 0) {
            // Only whole pairs count, in each list at the same place.
            Ok(found) => {
                result.floor.push(found.floor);
                result.addax.push(found.ours);
                result.spdk.extend(found.stock);
                result.plain.extend(found.plain);
            }
            Err(why) => {
                course.check()?;
                // What fails once will fail again, and each time may take minutes.
                result.failures.push(why);
                break;
            }
        }
    }
    Ok(result)
}

/// What is measured together.
struct Pair {
    floor: Run,
    ours: Run,
    stock: Option<Run>,
    plain: Option<Run>,
}

/// The floor, then the sides in the order asked for: Addax is between the other two.
fn pair(
    course: &Course<'_>,
    cell: &Cell,
    addax: &mut Contestant,
    (spdk, plain): (Option<&mut Contestant>, Option<&mut Contestant>),
    plain_first: bool,
) -> Result<Pair, String> {
    let BenchArgs { seconds, target_cpu, load_cpu, .. } = *course.args;
    let floor_time = Duration::from_secs_f64(f64::from(seconds) * FLOOR_PART);
    let floor = floor::measure(cell, floor_time, target_cpu, load_cpu).map_err(|e| format!("floor: {e}"))?;
    let measure = |side: &mut Contestant, name: &str| {
        side.measure(cell, &course.generator, seconds, load_cpu).map_err(|e| format!("{name}: {e}"))
    };
    let (mut stock, mut beside) = (None, None);
    let mut others = [(spdk, "spdk", &mut stock), (plain, "plain device", &mut beside)];
    if plain_first {
        others.reverse();
    }
    let [(first, first_name, first_run), (last, last_name, last_run)] = others;
    *first_run = first.map(|side| measure(side, first_name)).transpose()?;
    let ours = measure(addax, "addax")?;
    *last_run = last.map(|side| measure(side, last_name)).transpose()?;
    Ok(Pair { floor, ours, stock, plain: beside })
}

/// What a reader must know of one side's device.
fn note(side: &str, device: Device, found: &Result<Contestant, Absence>) -> Option<String> {
    let name = device.name();
    match found {
        Ok(contestant) => contestant.stand_in().map(|what| format!("{name}: {what} stands in on {side}")),
        Err(Absence::Unable) => Some(format!("{side} has no {name}: left out")),
        Err(Absence::Failed(why)) => Some(format!("{side} could not be prepared with {name}: {why}")),
    }
}

/// A cell on one line.
fn short(result: &CellResult) -> String {
    use super::results::{IOPS, P50, summary};
    let CellResult { cell, addax, spdk, .. } = result;
    if let Some(why) = result.failures.first() {
        return format!("{cell:<30} FAILED: {}", why.lines().next().unwrap_or_default());
    }
    let side = |runs: &[Run]| {
        let (Some(iops), Some(p50)) = (summary(runs, IOPS), summary(runs, P50)) else { return "-".to_owned() };
        format!("{:>9.0} IOPS {:>8.1} us", iops.median, p50.median)
    };
    let ratio = result.iops_ratio().map(|r| format!("  spdk {}  ratio {:.3}", side(spdk), r.median));
    let floor = result.floor_iops_ratio().map(|r| format!("  of floor {:.3}", r.median));
    let plain = result.plain_iops_ratio().map(|r| format!("  of plain device {:.3}", r.median));
    let [ratio, plain, floor] = [ratio, plain, floor].map(Option::unwrap_or_default);
    format!("{cell:<30} addax {}{ratio}{plain}{floor}", side(addax))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_of_a_device_are_measured_together() {
        let cells: Vec<Cell> =
            ["null/read/4k/qd1/c1", "malloc/read/4k/qd1/c1", "null/read/512/qd1/c1", "null/write/1m/qd1/c1"]
                .iter()
                .map(|name| name.parse().unwrap())
                .collect();
        let groups = groups(&cells);
        let sizes: Vec<_> = groups.iter().map(|(device, lba, cells)| (*device, *lba, cells.len())).collect();
        assert_eq!(sizes, [(Device::Null, 4096, 2), (Device::Malloc, 4096, 1), (Device::Null, 512, 1)]);
    }

    #[test]
    fn this_machine_has_a_name() {
        let machine = machine();
        assert!(machine.processors > 0 && !machine.processor.is_empty() && !machine.kernel.is_empty());
    }
}
