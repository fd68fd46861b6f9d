//! What an engine costs at rest, and whether it listens at full load: figures that are no cells.
//!
//! *Many connected volumes, no I/O*: processor time over [`WINDOW`] with and without keep-alives, the first I/O after
//! such a window against the usual one (and what waking a bare thread costs on this machine), memory for each volume.
//! *Full load*: how long calls take while the engine, all of it on one processor, serves I/O at depth 128.
//!
//! *Hosts* are plain sockets of this process, without any load of their own. I/O is timed by a host that polls, on the
//! load's processor, before its I/O ([`AWAKE`]) as while it waits: what is seen is the engine's waking and not this
//! program's. The other data plane never sleeps: its row shows what is left of the latter.
//!
//! *When things fail.* The figures that were not reached are missing, and a note says why.

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::contest::{Contestant, Memory, Side, apply, free_port, version};
use super::floor;
use super::generator::Length;
use super::matrix::{Cell, Device, Pattern};
use super::race::Course;
use super::results::{Extra, Race};
use super::setup;
use super::stats::quantile;
use crate::plane::process::{DataPlane, pin_thread};
use crate::plane::procfs;
use crate::plane::rpc::Connection;
use crate::run::Failure;
use crate::wirehost::{Host, Names, Queue, Wait, WireError};

/// A time without I/O.
const WINDOW: Duration = Duration::from_secs(10);
/// The end of it that a host polls through: it has all of its processor when it begins an I/O, as one has that is polled
/// all the time.
const AWAKE: Duration = Duration::from_millis(200);
/// Windows without keep-alives: each gives one first I/O.
const WINDOWS: usize = 5;
/// Keep-alive timeout of the hosts, in milliseconds: long, since all of them are one thread here.
const KEEP_ALIVE_MS: u32 = 120_000;
/// How often a host tells of itself where that is measured.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(10);
/// I/Os that show the usual latency.
const BUSY_IOS: usize = 2000;
/// Seconds of load under which calls are made.
const LOAD_SECONDS: u32 = 4;
/// Pause between calls.
const CALL_PAUSE: Duration = Duration::from_millis(5);

/// Processor time for a connected volume at rest, in percent of one processor for all of them.
const CPU_LIMIT: f64 = 1.0;
/// First I/O above the usual one, in microseconds.
const FIRST_LIMIT: f64 = 100.0;
/// Memory with one volume, in MiB.
const ONE_LIMIT: f64 = 64.0;
/// Memory for each further volume, in MiB.
const MORE_LIMIT: f64 = 2.0;
/// Calls at full load, in milliseconds.
const CALL_LIMIT: f64 = 10.0;

/// Figures of one data plane by name.
type Figures = Vec<(&'static str, f64)>;

/// What is measured: name, unit, promise, how.
const KINDS: [(&str, &str, Option<f64>, &str); 9] = [
    ("idle processor", "% of a core", Some(CPU_LIMIT), "connected volumes without I/O or keep-alives, over 10 s"),
    (
        "idle processor with keep-alives",
        "% of a core",
        Some(CPU_LIMIT),
        "as above, each host telling of itself every 10 s",
    ),
    (
        "first I/O after idle, above busy",
        "µs",
        Some(FIRST_LIMIT),
        "4 KiB read after 10 s without any, median, less the median at depth 1",
    ),
    (
        "bare sockets after idle, above busy",
        "µs",
        None,
        "the same bytes from a thread that waited in the kernel as long, less the same: what waking costs here",
    ),
    ("4 KiB read at depth 1, busy", "µs", None, "median, by a host that polls"),
    ("memory with one volume", "MiB", Some(ONE_LIMIT), "resident, one connected volume, memory options as they come"),
    ("memory for each further volume", "MiB", Some(MORE_LIMIT), "resident, connected and idle"),
    (
        "RPC at full load, p99",
        "ms",
        Some(CALL_LIMIT),
        "bdev_get_bdevs, all of the data plane on one processor, 4 KiB reads at depth 128",
    ),
    ("RPC at full load, p50", "ms", None, "as above"),
];

/// Measures both sides and adds the figures.
///
/// # Errors
/// When it was interrupted.
pub fn measure(course: &Course<'_>, race: &mut Race) -> Result<(), Failure> {
    let mut found: Vec<(Figures, Figures)> = Vec::new();
    for (side, of_addax) in [(Some(&course.addax), true), (course.spdk.as_ref(), false)] {
        let Some(side) = side else { continue };
        course.teller.line(&format!("at rest: {} with {} volumes", side.name(), course.args.idle_volumes));
        let mut figures = Figures::new();
        for part in [at_rest, under_load] {
            course.check()?;
            if let Err(why) = part(course, side, race, &mut figures) {
                course.check()?;
                race.notes.push(format!("{} at rest and under load: not all was measured: {why}", side.name()));
            }
        }
        found.push(if of_addax { (figures, Figures::new()) } else { (Figures::new(), figures) });
    }
    let (addax, spdk): (Vec<Figures>, Vec<Figures>) = found.into_iter().unzip();
    let (addax, spdk) = (addax.concat(), spdk.concat());
    for (name, unit, limit, how) in KINDS {
        let of = |figures: &Figures| figures.iter().find(|(found, _)| *found == name).map(|(_, value)| *value);
        let (ours, stock) = (of(&addax), of(&spdk));
        if ours.is_some() || stock.is_some() {
            let (name, unit) = (name.to_owned(), unit.to_owned());
            let how = format!("{how}; {} volumes", course.args.idle_volumes);
            race.extras.push(Extra { name, unit, addax: ours, spdk: stock, limit, how });
        }
    }
    Ok(())
}

fn at_rest(course: &Course<'_>, side: &Side, race: &mut Race, figures: &mut Figures) -> Result<(), String> {
    let count = usize::from(course.args.idle_volumes);
    let plane = side.start(course.folder, course.args.target_cpu, Memory::Least)?;
    remember_version(side, &plane, race)?;
    let port = free_port()?;
    apply(&plane, &setup::many_volumes(count, port))?;
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let fail = |e: WireError| e.to_string();
    let mut hosts = vec![Idle::connect(address, 0).map_err(fail)?];
    hosts[0].queue.read(0, 1, 4096).map_err(fail)?;
    let one = rss_mib(&plane)?;
    figures.push(("memory with one volume", one));
    for index in 1..count {
        hosts.push(Idle::connect(address, index).map_err(fail)?);
    }
    figures.push(("memory for each further volume", (rss_mib(&plane)? - one) / (count - 1) as f64));
    let load_cpu = course.args.load_cpu;
    let busy = on_processor(load_cpu, || busy_us(&mut hosts[0].queue).map_err(fail))?;
    figures.push(("4 KiB read at depth 1, busy", busy));

    let cpu = |from: Duration| Ok::<_, String>(percent(from, cpu_time(&plane)?, WINDOW));
    let began = cpu_time(&plane)?;
    keep_alive_for(&mut hosts, WINDOW).map_err(fail)?;
    figures.push(("idle processor with keep-alives", cpu(began)?));
    let (mut shares, mut firsts) = (Vec::new(), Vec::new());
    for _ in 0..WINDOWS {
        if course.check().is_err() {
            return Err("interrupted".to_owned());
        }
        let began = cpu_time(&plane)?;
        let first = on_processor(load_cpu, || {
            pass(WINDOW);
            timed_read(&mut hosts[0].queue, 0).map_err(fail)
        })?;
        shares.push(cpu(began)?);
        firsts.push(first);
        hosts.iter_mut().try_for_each(|host| host.host.keep_alive()).map_err(fail)?;
    }
    figures.push(("idle processor", median(&mut shares)));
    figures.push(("first I/O after idle, above busy", median(&mut firsts) - busy));
    let target_cpu = course.args.target_cpu;
    let bare = || floor::after_idle(|| pass(WINDOW), WINDOWS, 4096, target_cpu).map_err(|e| e.to_string());
    figures.push(("bare sockets after idle, above busy", median(&mut on_processor(load_cpu, bare)?) - busy));
    Ok(())
}

/// Lets a time without I/O pass, awake at its end.
fn pass(time: Duration) {
    let began = Instant::now();
    thread::sleep(time.saturating_sub(AWAKE));
    while began.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// Does something in a thread of one processor; this one stays free, and with it the processes that it starts.
fn on_processor<T: Send>(cpu: u32, what: impl FnOnce() -> Result<T, String> + Send) -> Result<T, String> {
    thread::scope(|scope| {
        let pinned =
            scope.spawn(move || pin_thread(cpu).map_err(|e| format!("processor {cpu}: {e}")).and_then(|()| what()));
        pinned.join().unwrap_or_else(|_| Err("a measuring thread has panicked".to_owned()))
    })
}

fn remember_version(side: &Side, plane: &DataPlane, race: &mut Race) -> Result<(), String> {
    let version = version(plane)?;
    match side {
        Side::Addax(_) => race.addax = version,
        Side::Spdk(_) => race.spdk = Some(version),
    }
    Ok(())
}

/// A connected host that does nothing: an admin queue and one I/O queue.
#[derive(Debug)]
struct Idle {
    host: Host,
    queue: Queue,
}

impl Idle {
    fn connect(address: SocketAddr, index: usize) -> Result<Self, WireError> {
        let names = Names::new(&setup::many_nqn(index), &format!("nqn.2026-11.io.addax:host:idle-{index}"));
        let host = Host::connect(address, names, KEEP_ALIVE_MS)?;
        let mut queue = host.io_queue(1, 32)?;
        queue.set_wait(Wait::Spin)?;
        Ok(Self { host, queue })
    }
}

/// Lets each host tell of itself every [`KEEP_ALIVE_EVERY`], one after another as real hosts would.
fn keep_alive_for(hosts: &mut [Idle], time: Duration) -> Result<(), WireError> {
    let step = KEEP_ALIVE_EVERY / u32::try_from(hosts.len()).unwrap_or(u32::MAX).max(1);
    let (began, count) = (Instant::now(), hosts.len());
    for turn in 0.. {
        if began.elapsed() >= time {
            break;
        }
        hosts[turn % count].host.keep_alive()?;
        thread::sleep(step);
    }
    Ok(())
}

fn timed_read(queue: &mut Queue, lba: u64) -> Result<f64, WireError> {
    let began = Instant::now();
    queue.read(lba, 1, 4096)?;
    Ok(began.elapsed().as_secs_f64() * 1e6)
}

fn busy_us(queue: &mut Queue) -> Result<f64, WireError> {
    let mut all = Vec::with_capacity(BUSY_IOS);
    for lba in 0..BUSY_IOS as u64 {
        all.push(timed_read(queue, lba)?);
    }
    Ok(median(&mut all))
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    quantile(values, 0.5).unwrap_or(f64::NAN)
}

fn percent(before: Duration, after: Duration, period: Duration) -> f64 {
    after.saturating_sub(before).as_secs_f64() / period.as_secs_f64() * 100.0
}

fn cpu_time(plane: &DataPlane) -> Result<Duration, String> {
    procfs::cpu_time(plane.pid()).ok_or_else(|| "its processor time cannot be read".to_owned())
}

fn rss_mib(plane: &DataPlane) -> Result<f64, String> {
    let bytes = procfs::rss_bytes(plane.pid()).ok_or("its memory cannot be read")?;
    Ok(bytes as f64 / 1_048_576.0)
}

fn under_load(course: &Course<'_>, side: &Side, _: &mut Race, figures: &mut Figures) -> Result<(), String> {
    let cell = Cell { device: Device::Null, pattern: Pattern::Read, block: 4096, depth: 128, connections: 1 };
    let (target_cpu, load_cpu) = (course.args.target_cpu, course.args.load_cpu);
    let contestant = Contestant::prepare(side, cell.device, cell.lba(), course.folder, target_cpu);
    let contestant = contestant.map_err(|e| e.to_string())?;
    let calls = contestant.while_loaded(|address, socket| {
        let mut running = course.generator.start(&cell, address, Length::Seconds(LOAD_SECONDS), load_cpu)?;
        // The generator takes a moment to begin, and ends by itself.
        thread::sleep(Duration::from_secs(1));
        let mut connection = Connection::open(socket).map_err(|e| e.to_string())?;
        let (mut calls, began) = (Vec::new(), Instant::now());
        while began.elapsed() < Duration::from_secs(u64::from(LOAD_SECONDS) - 2) && !running.has_ended() {
            let began = Instant::now();
            connection.call("bdev_get_bdevs", &json!({})).map_err(|e| e.to_string())?;
            calls.push(began.elapsed().as_secs_f64() * 1e3);
            thread::sleep(CALL_PAUSE);
        }
        running.finish()?;
        Ok(calls)
    });
    let mut calls = calls?;
    calls.sort_by(f64::total_cmp);
    for (name, part) in [("RPC at full load, p99", 0.99), ("RPC at full load, p50", 0.5)] {
        figures.extend(quantile(&calls, part).map(|ms| (name, ms)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_one_processor() {
        let seconds = Duration::from_secs_f64;
        assert_eq!(percent(seconds(1.0), seconds(1.5), seconds(10.0)), 5.0);
        assert_eq!(percent(seconds(2.0), seconds(1.0), seconds(10.0)), 0.0);
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
    }

    #[test]
    fn every_figure_has_a_kind() {
        let names: std::collections::BTreeSet<_> = KINDS.iter().map(|kind| kind.0).collect();
        assert_eq!(names.len(), KINDS.len());
    }
}
