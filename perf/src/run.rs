//! Puts target, workloads and reactors together.
//!
//! *Flow.* The engine's reactors start, one data core per processor asked for. The control core asks what the namespace
//! is, makes the workloads, runs a worker on every data core, and stops the reactors.
//!
//! *When things fail.* [`Failure`] carries the exit code: usage or I/O.

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use addax_engine::app::{App, Options};
use addax_engine::nvme::host::NamespaceInfo;
use addax_engine::reactor::CoreId;
use addax_engine::reactor::net::KernelNet;
use addax_engine::start::{self, StartConfig};
use addax_hugepages::{BufPool, ClassConfig, Hugepages, MapPolicy, PoolConfig};
use nix::sys::signal::{SigSet, Signal};
use uuid::Uuid;

use crate::access::{Access, Pattern};
use crate::cli::{LoadArgs, PhaseChoice, RunArgs, TargetArgs, Unwritten, VerifyArgs};
use crate::load::{Limit, Load};
use crate::pace::Pace;
use crate::progress::Progress;
use crate::report::{LoadReport, RunReport, Setup, VerifyReport};
use crate::session;
use crate::verify::judge::Rules;
use crate::verify::stamp::UNIT_BYTES;
use crate::verify::workload::{Phase, Region, Verifier};
use crate::verify::writelog::{Header, Opened, WriteLog};
use crate::worker::{self, Live, WorkerParams, WorkerReport, Workload};

/// Why there is no report.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Something asked for is not allowed.
    #[error("{0}")]
    Usage(String),
    /// No connection, or the log cannot be used.
    #[error("{0}")]
    Io(String),
}

/// What can be told to stop.
type Stops = Arc<Mutex<Vec<Arc<Live>>>>;

/// The signals that end a run early. They are blocked before any thread starts, so that all inherit it.
fn end_on_signals(stops: &Stops) -> Result<(), Failure> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGINT);
    set.add(Signal::SIGTERM);
    set.thread_block().map_err(|e| Failure::Io(format!("signals: {e}")))?;
    let stops = Arc::clone(stops);
    let listen = move || {
        for count in 0.. {
            if set.wait().is_err() {
                return;
            }
            if count > 0 {
                // Asked twice: the target may never answer what is in flight.
                std::process::exit(130);
            }
            if let Ok(lives) = stops.lock() {
                lives.iter().for_each(|live| live.stop.store(true, Ordering::Relaxed));
            }
        }
    };
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(listen)
        .map_err(|e| Failure::Io(format!("signals: {e}")))?;
    Ok(())
}

/// Runs `job` on the control core of fresh reactors.
fn on_reactors<T, F>(target: &TargetArgs, job: impl FnOnce(Host) -> F + 'static) -> Result<T, Failure>
where
    T: 'static,
    F: Future<Output = Result<T, Failure>> + 'static,
{
    let stops = Stops::default();
    end_on_signals(&stops)?;
    // I/O buffers are the workers' own; the reactors only need a pool to exist.
    let small = ClassConfig { bytes: 8 << 10, count: 8 };
    let policy = MapPolicy { hugepages: Hugepages::Never, ..MapPolicy::default() };
    let pool = BufPool::new(PoolConfig { small, large: ClassConfig { bytes: 16 << 10, count: 0 }, policy })
        .map_err(|e| Failure::Io(format!("buffers: {e}")))?;
    let cpus = target.cores.0.clone();
    let options = Options { rpc_socket: PathBuf::new(), cpus: cpus.clone(), interrupt_mode: false };
    let config = StartConfig { cpus, pool, options, pin: !target.no_pin };
    let outcome = Rc::new(RefCell::new(None));
    let slot = Rc::clone(&outcome);
    let init = move |app: App| {
        let core = app.core().clone();
        let work = job(Host { app, stops });
        core.clone().spawn(async move {
            *slot.borrow_mut() = Some(work.await);
            core.stop();
        });
    };
    start::run(config, init).map_err(|e| Failure::Io(format!("start: {e}")))?;
    let result = outcome.borrow_mut().take();
    result.unwrap_or_else(|| Err(Failure::Io("a reactor has ended early".to_owned())))
}

/// What came of workers.
struct Worked<W> {
    reports: Vec<WorkerReport>,
    workloads: Vec<W>,
    /// Why a worker could not begin.
    failure: Option<Failure>,
}

/// The control core, for a job.
struct Host {
    app: App,
    stops: Stops,
}

impl Host {
    async fn probe(&self, target: &TargetArgs) -> Result<NamespaceInfo, Failure> {
        let params = target.session();
        session::probe(self.app.core(), &KernelNet, &params).await.map_err(|e| {
            Failure::Io(format!("connect to {} at {} as {}: {e}", target.nqn, target.target, target.host_nqn))
        })
    }

    /// Runs one workload per data core, in order, and gives them back.
    async fn work<W: Workload>(
        &self,
        what: &str,
        args: (&TargetArgs, &LoadArgs),
        namespace: &NamespaceInfo,
        workloads: Vec<W>,
    ) -> Result<Worked<W>, Failure> {
        let (target, load) = args;
        let core = self.app.core();
        let lives: Vec<Arc<Live>> = workloads.iter().map(|_| Arc::default()).collect();
        if let Ok(mut stops) = self.stops.lock() {
            stops.clone_from(&lives);
        }
        let progress = Progress::start(core, what, lives.clone(), load.quiet);
        let mut running = Vec::new();
        let pace = Pace::new(load.rate, workloads.len());
        for (index, (workload, live)) in workloads.into_iter().zip(lives).enumerate() {
            let params = WorkerParams {
                session: target.session(),
                depth: target.depth(),
                io_bytes: load.bs as usize,
                max_errors: load.max_errors,
                pace,
                live,
            };
            let expected = namespace.clone();
            let id = CoreId(index as u32 + 1);
            running.push(core.call_async(id, move |core| {
                let same = move |session: &session::Session| same_format(&expected, &session.namespace());
                worker::run(core.clone(), params, workload, same)
            }));
        }
        let mut worked = Worked { reports: Vec::new(), workloads: Vec::new(), failure: None };
        for worker in running {
            let Some((report, workload)) = worker.await else {
                return Err(Failure::Io("a reactor has ended early".to_owned()));
            };
            worked.workloads.push(workload);
            match report {
                Ok(report) => worked.reports.push(report),
                Err(error) => worked.failure = worked.failure.or(Some(Failure::Io(error))),
            }
        }
        drop(progress);
        Ok(worked)
    }
}

/// A namespace that comes back under another identifier is judged by its data; another format cannot be used.
fn same_format(expected: &NamespaceInfo, found: &NamespaceInfo) -> Result<(), String> {
    if found.limits != expected.limits || found.blocks < expected.blocks {
        return Err("the namespace has become smaller or has another format since it was looked at".to_owned());
    }
    Ok(())
}

fn namespace_bytes(namespace: &NamespaceInfo) -> u64 {
    namespace.blocks.saturating_mul(u64::from(namespace.limits.block_size))
}

fn check_io_size(load: &LoadArgs, namespace: &NamespaceInfo, unit: u64) -> Result<(), Failure> {
    let block = u64::from(namespace.limits.block_size);
    load.check_io_size(unit.max(block), namespace.limits.transfer * block).map_err(Failure::Usage)
}

fn setup(target: &TargetArgs, load: &LoadArgs, pattern: Pattern, reports: &[&WorkerReport]) -> Setup {
    Setup {
        target: target.target.to_string(),
        nqn: target.nqn.clone(),
        pattern,
        read_percent: pattern.read_percent(load.mix),
        io_bytes: load.bs,
        queue_depth: target.qd,
        connections: reports.iter().map(|r| r.queues).sum(),
        cores: target.cores.0.len(),
    }
}

/// `addax-perf run`.
///
/// # Errors
/// When nothing could be measured.
pub fn run(args: RunArgs) -> Result<RunReport, Failure> {
    let target = args.target.clone();
    on_reactors(&target, move |host| async move { measure(host, args).await })
}

async fn measure(host: Host, args: RunArgs) -> Result<RunReport, Failure> {
    let RunArgs { target, rw, load } = &args;
    let namespace = host.probe(target).await?;
    check_io_size(load, &namespace, 1)?;
    let (offset, bytes) = load.region(namespace_bytes(&namespace)).map_err(Failure::Usage)?;
    if namespace.read_only && rw.read_percent(load.mix) < 100 {
        return Err(Failure::Usage("the namespace is read-only: only reads are possible".to_owned()));
    }
    let count = target.cores.0.len() as u64;
    let (first, extents) = (offset / load.bs, bytes / load.bs);
    let part = |worker: u64| {
        let limit = match load.limit() {
            Limit::Bytes(all) => Limit::Bytes(all / count + if worker < all % count { 1 } else { 0 }),
            time => time,
        };
        // Each core has its own part in sequential order, so that together they touch everything once.
        let (from, to) = if rw.is_random() || extents < count {
            (0, extents)
        } else {
            (extents * worker / count, extents * (worker + 1) / count)
        };
        let seed = load.seed.wrapping_add(worker.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Load::new(Access::new(*rw, load.mix, first + from, to - from, seed), load.bs as u32, limit, seed)
    };
    let workloads = (0..count).map(part).collect();
    let Worked { reports, failure, .. } = host.work("run", (target, load), &namespace, workloads).await?;
    if let Some(failure) = failure {
        return Err(failure);
    }
    let setup = setup(target, load, *rw, &reports.iter().collect::<Vec<_>>());
    Ok(RunReport { setup, load: LoadReport::new(&reports) })
}

/// `addax-perf verify`.
///
/// # Errors
/// When nothing could be judged.
pub fn verify(args: VerifyArgs) -> Result<VerifyReport, Failure> {
    if args.target.cores.0.len() != 1 {
        return Err(Failure::Usage("--cores: a verification runs on one core; use --connections for more".to_owned()));
    }
    let target = args.target.clone();
    on_reactors(&target, move |host| async move { judge(host, args).await })
}

fn rules(args: &VerifyArgs, namespace: &NamespaceInfo) -> Result<Rules, Failure> {
    let block = u64::from(namespace.limits.block_size);
    let atomic = args.atomic.unwrap_or(block.min(UNIT_BYTES as u64));
    if !atomic.is_power_of_two() || !(512..=1 << 30).contains(&atomic) {
        return Err(Failure::Usage(format!("--atomic {atomic} is not allowed: a power of two from 512 is needed")));
    }
    Ok(Rules { atomic_bytes: atomic as usize, unwritten_zero: args.unwritten == Unwritten::Zero })
}

/// The log and its model, opened or made.
fn open_log(args: &VerifyArgs, units: u64, rules: Rules) -> Result<Opened, Failure> {
    let volume = args.expect_volume.as_ref().unwrap_or(&args.target.nqn);
    let exists = args.log.try_exists().map_err(|e| Failure::Io(format!("log {}: {e}", args.log.display())))?;
    if !exists {
        if args.phase == PhaseChoice::Check {
            return Err(Failure::Usage(format!(
                "--log {}: nothing to check against: no such file",
                args.log.display()
            )));
        }
        let (log, _) = Uuid::new_v4().as_u64_pair();
        let header = Header { log, units, volume: volume.clone() };
        return WriteLog::create(&args.log, header, rules, args.sync_log).map_err(|e| Failure::Io(e.to_string()));
    }
    let mut opened = WriteLog::open(&args.log, rules, args.sync_log).map_err(|e| Failure::Io(e.to_string()))?;
    let header = opened.log.header();
    if header.volume != *volume {
        return Err(Failure::Usage(format!(
            "--log {} is of volume {}, not of {volume}: give --expect-volume to check another copy of it",
            args.log.display(),
            header.volume
        )));
    }
    if units < header.units {
        return Err(Failure::Usage(format!(
            "the namespace has {units} units of {UNIT_BYTES} bytes, the log is of a volume of {}",
            header.units
        )));
    }
    opened.model.grow(units);
    Ok(opened)
}

async fn judge(host: Host, args: VerifyArgs) -> Result<VerifyReport, Failure> {
    let VerifyArgs { target, load, rw, .. } = &args;
    let namespace = host.probe(target).await?;
    check_io_size(load, &namespace, UNIT_BYTES as u64)?;
    let bytes = namespace_bytes(&namespace);
    let (offset, range) = load.region(bytes).map_err(Failure::Usage)?;
    if namespace.read_only && args.phase != PhaseChoice::Check {
        return Err(Failure::Usage("the namespace is read-only: only --phase check is possible".to_owned()));
    }
    let rules = rules(&args, &namespace)?;
    let Opened { mut log, mut model, dropped_bytes } = open_log(&args, bytes / UNIT_BYTES as u64, rules)?;
    let record = model.begin_run();
    if log.header().units < model.len() {
        log.compact(&model).map_err(|e| Failure::Io(e.to_string()))?;
    } else {
        log.push(&record);
        log.flush(&model).map_err(|e| Failure::Io(e.to_string()))?;
    }
    let (written_units, uncertain_units) = model.census();
    if uncertain_units > 0 {
        host.app.core().sleep(u64::try_from(args.settle.as_nanos()).unwrap_or(u64::MAX)).await;
    }
    let per_io = load.bs / UNIT_BYTES as u64;
    let region = Region { first: offset / UNIT_BYTES as u64, units: range / UNIT_BYTES as u64, per_io: per_io as u16 };
    let seed = load.seed.wrapping_add(u64::from(model.run()) << 32);
    let access = Access::new(*rw, load.mix, offset / load.bs, range / load.bs, seed);
    let write = Phase::Write(load.limit());
    let check = Phase::Check { written_only: args.written_only };
    let run = model.run();
    let mut report = VerifyReport {
        ok: false,
        setup: setup(target, load, *rw, &[]),
        volume: log.header().volume.clone(),
        log: args.log.display().to_string(),
        log_id: format!("{:016x}", log.header().log),
        run,
        log_dropped_bytes: dropped_bytes,
        uncertain_units,
        written_units,
        written_bytes: 0,
        checked_units: 0,
        check_complete: false,
        mismatches: Default::default(),
        mismatches_total: 0,
        mismatches_repeated: 0,
        mismatch_samples: Vec::new(),
        write: None,
        check: None,
        failure: None,
    };
    let mut verifier = Verifier::new(log, model, region, access, write, args.samples);
    if args.phase != PhaseChoice::Check {
        (report.write, verifier) = phase(&host, &args, &namespace, "write", verifier, &mut report).await?;
    }
    let early = report.failure.is_some() || report.write.as_ref().is_some_and(|w| w.aborted.is_some());
    if args.phase != PhaseChoice::Write && !early {
        verifier.set_phase(check);
        (report.check, verifier) = phase(&host, &args, &namespace, "check", verifier, &mut report).await?;
        report.checked_units = verifier.units_read();
        let clean = report.check.as_ref().is_some_and(|check| check.errors == 0 && check.aborted.is_none());
        report.check_complete = clean && verifier.is_complete();
    }
    finish(&mut report, &verifier, &args);
    match &report.failure {
        Some(failure) if report.write.is_none() && report.check.is_none() => Err(Failure::Io(failure.clone())),
        _ => Ok(report),
    }
}

/// Runs a phase of the verification; without measures when it could not begin.
async fn phase(
    host: &Host,
    args: &VerifyArgs,
    namespace: &NamespaceInfo,
    what: &str,
    verifier: Verifier,
    report: &mut VerifyReport,
) -> Result<(Option<LoadReport>, Verifier), Failure> {
    let Worked { reports, mut workloads, failure } =
        host.work(what, (&args.target, &args.load), namespace, vec![verifier]).await?;
    let Some(mut verifier) = workloads.pop() else { return Err(Failure::Io("a reactor has ended early".to_owned())) };
    report.failure = failure.map(|failure| failure.to_string());
    let Some(worker) = reports.into_iter().next() else { return Ok((None, verifier)) };
    verifier.settle();
    let flushed = verifier.flush();
    report.setup = setup(&args.target, &args.load, args.rw, &[&worker]);
    let mut load = LoadReport::new(&[worker]);
    load.aborted = load.aborted.or(flushed.err());
    Ok((Some(load), verifier))
}

fn finish(report: &mut VerifyReport, verifier: &Verifier, args: &VerifyArgs) {
    report.set_findings(verifier.findings());
    report.written_bytes = verifier.written_bytes();
    (report.written_units, _) = verifier.model().census();
    let phases = [&report.write, &report.check];
    let clean = phases.into_iter().flatten().all(|phase| phase.errors == 0 && phase.aborted.is_none());
    let complete = args.phase == PhaseChoice::Write || report.check_complete;
    report.ok = clean && complete && report.failure.is_none() && report.mismatches_total == 0;
}
