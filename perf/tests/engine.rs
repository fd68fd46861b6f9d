//! The program against the engine's own target: measures, verdicts, restarts of either side, exit codes.

#![allow(clippy::unwrap_used)]

use std::fs::OpenOptions;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use addax_engine::app::{App, Options, Phase};
use addax_engine::rpc::Methods;
use addax_engine::start::{StartConfig, run};
use addax_engine::{bdev, nvmf};
use addax_hugepages::{BufPool, ClassConfig, Hugepages, MapPolicy, PoolConfig};
use serde_json::{Value, json};

const NQN: &str = "nqn.2026-11.io.addax:volume:perf-test";
const UUID: &str = "6b0cf3ac-3f5b-4a39-9d35-b1a2c5f6a001";
const IMAGE_BYTES: u64 = 4 << 20;
const UNIT: u64 = 4096;
/// For things that take a moment; nothing is asserted about how long they take.
const PATIENCE: Duration = Duration::from_secs(120);

/// Tells [`target_process`] what to serve: a port and a path.
const SERVE: &str = "ADDAX_PERF_TEST_SERVE";

/// A process with the engine's target that serves a file. Dropping it is `kill -9`.
struct Target(Child);

async fn serve(app: &App, image: &Path, port: u16) -> Result<(), String> {
    let mut methods = Methods::default();
    bdev::rpc::register(&mut methods);
    nvmf::register(&mut methods);
    app.set_phase(Phase::Runtime);
    let calls = [
        ("bdev_uring_create", json!({ "filename": image, "name": "U0", "block_size": 4096, "uuid": UUID })),
        ("nvmf_create_transport", json!({ "trtype": "TCP" })),
        ("nvmf_create_subsystem", json!({ "nqn": NQN, "allow_any_host": true })),
        ("nvmf_subsystem_add_ns", json!({ "nqn": NQN, "namespace": { "bdev_name": "U0", "uuid": UUID } })),
        (
            "nvmf_subsystem_add_listener",
            json!({ "nqn": NQN, "listen_address": { "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port.to_string() } }),
        ),
    ];
    for (name, params) in calls {
        let handler = &methods.table[name].handler;
        handler(app.clone(), Some(params)).await.map_err(|error| format!("{name}: {error:?}"))?;
    }
    Ok(())
}

/// Not a test but the target's process: this program, started anew, with [`SERVE`] set.
#[test]
fn target_process() {
    let Ok(what) = std::env::var(SERVE) else { return };
    let (port, image) = what.split_once(' ').unwrap();
    let (port, image) = (port.parse().unwrap(), PathBuf::from(image));
    let small = ClassConfig { bytes: 8 << 10, count: 256 };
    let large = ClassConfig { bytes: 132 << 10, count: 64 };
    let policy = MapPolicy { hugepages: Hugepages::Never, ..MapPolicy::default() };
    let pool = BufPool::new(PoolConfig { small, large, policy }).unwrap();
    let options = Options { rpc_socket: PathBuf::new(), cpus: vec![0], interrupt_mode: true };
    let config = StartConfig { cpus: vec![0], pool, options, pin: false };
    let init = move |app: App| {
        app.core().clone().spawn(async move {
            if let Err(error) = serve(&app, &image, port).await {
                eprintln!("target: {error}");
                app.core().stop();
            }
        });
    };
    run(config, init).unwrap();
}

impl Target {
    fn start(image: &Path, port: u16) -> Self {
        let began = Instant::now();
        // The kernel lets go of what a killed process had in io_uring some time after the process is gone.
        while TcpListener::bind(("127.0.0.1", port)).is_err() {
            assert!(began.elapsed() < PATIENCE, "the port stays taken");
            thread::sleep(Duration::from_millis(5));
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "target_process", "--nocapture"]).stdout(Stdio::null());
        let child = command.env(SERVE, format!("{port} {}", image.display())).spawn().unwrap();
        let target = Self(child);
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(began.elapsed() < PATIENCE, "the target does not listen");
            thread::sleep(Duration::from_millis(5));
        }
        target
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Bench {
    folder: tempfile::TempDir,
    port: u16,
    target: Option<Target>,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(IMAGE_BYTES).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let target = Some(Target::start(&image, port));
        Self { folder, port, target }
    }

    fn image(&self) -> PathBuf {
        self.folder.path().join("image")
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("v.wlog")
    }

    fn restart_target(&mut self) {
        // The old one must be gone before another can listen on its port.
        drop(self.target.take());
        self.target = Some(Target::start(&self.image(), self.port));
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_addax-perf"));
        command.arg(words[0]).args(["--target", &format!("127.0.0.1:{}", self.port)]);
        command.args(["--nqn", NQN, "--no-pin", "-q", "-o", "json", "--qd", "8"]).args(&words[1..]);
        if words[0] == "verify" {
            command.arg("--log").arg(self.log());
        }
        command
    }

    fn spawn(&self, words: &[&str]) -> Running {
        Running(Some(self.command(words).stdout(Stdio::piped()).spawn().unwrap()))
    }

    fn run(&self, words: &[&str]) -> (i32, Value) {
        finish(self.spawn(words))
    }

    fn read(&self, unit: u64) -> Vec<u8> {
        let mut bytes = vec![0; UNIT as usize];
        std::fs::File::open(self.image()).unwrap().read_exact_at(&mut bytes, unit * UNIT).unwrap();
        bytes
    }

    fn put(&self, unit: u64, offset: u64, bytes: &[u8]) {
        let file = OpenOptions::new().write(true).open(self.image()).unwrap();
        file.write_all_at(bytes, unit * UNIT + offset).unwrap();
        file.sync_all().unwrap();
    }

    fn wait_for_log(&self, bytes: u64) {
        let began = Instant::now();
        while std::fs::metadata(self.log()).map_or(0, |m| m.len()) < bytes {
            assert!(began.elapsed() < PATIENCE, "the log does not grow");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A program that does not outlive a failed test.
struct Running(Option<Child>);

impl Running {
    fn kill(mut self) {
        let mut child = self.0.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn finish(mut running: Running) -> (i32, Value) {
    let output = running.0.take().unwrap().wait_with_output().unwrap();
    let report = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code().unwrap_or(-1), report)
}

#[test]
fn measures_are_reported() {
    let bench = Bench::new();
    let (code, report) = bench.run(&["run", "--rw", "randrw", "--size", "2M", "--connections", "2"]);
    assert_eq!(code, 0, "{report:#}");
    assert_eq!(report["total"]["bytes"], 2 << 20);
    assert_eq!(report["total"]["ios"], 512);
    assert_eq!((&report["errors"], &report["connections"]), (&json!(0), &json!(2)));
    for quantile in ["mean", "p50", "p90", "p99", "p99.9", "p99.99", "max"] {
        assert!(report["read"]["latency_us"][quantile].as_f64().unwrap() > 0.0, "{quantile}");
    }
}

#[test]
fn two_cores_share_an_amount_and_digests_work() {
    let bench = Bench::new();
    let words =
        ["run", "--rw", "write", "--size", "4M", "--bs", "64k", "--cores", "0x3", "--header-digest", "--data-digest"];
    let (code, report) = bench.run(&words);
    assert_eq!(code, 0, "{report:#}");
    assert_eq!(report["write"]["ios"], 64);
    assert!((0..IMAGE_BYTES / UNIT).all(|unit| bench.read(unit).iter().any(|b| *b != 0)));
}

/// The last of 100 has its turn after 99 pauses, however fast the target is.
#[test]
fn a_rate_is_not_exceeded() {
    let bench = Bench::new();
    let (code, report) = bench.run(&["run", "--rw", "randrw", "--size", "400k", "--rate", "200"]);
    assert_eq!((code, &report["total"]["ios"]), (0, &json!(100)), "{report:#}");
    assert!(report["elapsed_s"].as_f64().unwrap() >= 99.0 / 200.0, "{report:#}");
}

#[test]
fn what_is_done_to_the_disk_behind_its_back_is_called_by_its_name() {
    let bench = Bench::new();
    let (code, report) = bench.run(&["verify", "--rw", "write", "--size", "1M", "--unwritten", "zero"]);
    assert_eq!((code, &report["ok"]), (0, &json!(true)), "{report:#}");
    assert_eq!(report["checked_units"], 1024);
    let old: Vec<Vec<u8>> = (0..256).map(|unit| bench.read(unit)).collect();
    let (code, _) = bench.run(&["verify", "--rw", "write", "--size", "1M", "--phase", "write"]);
    assert_eq!(code, 0);
    bench.put(3, 0, &old[3]);
    bench.put(7, 0, &old[7][..1536]);
    bench.put(9, 0, &bench.read(20));
    bench.put(300, 0, &bench.read(21));
    bench.put(11, 700, b"x");
    let (code, report) = bench.run(&["verify", "--phase", "check"]);
    assert_eq!(code, 1, "{report:#}");
    let found: Vec<(String, u64)> = report["mismatch_samples"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| (s["class"].as_str().unwrap().to_owned(), s["unit"].as_u64().unwrap()))
        .collect();
    let mut found: Vec<_> = found.iter().map(|(class, unit)| (*unit, class.as_str())).collect();
    found.sort_unstable();
    assert_eq!(found, [(3, "lost"), (7, "torn"), (9, "misplaced"), (11, "corrupt"), (300, "misplaced")]);
    assert_eq!((&report["mismatches_total"], &report["ok"]), (&json!(5), &json!(false)));
}

#[test]
fn another_copy_is_checked_with_the_same_log() {
    let bench = Bench::new();
    let words = ["verify", "--expect-volume", "data", "--size", "256k"];
    assert_eq!(bench.run(&words).0, 0);
    assert_eq!(bench.run(&["verify", "--phase", "check", "--expect-volume", "data"]).0, 0);
    assert_eq!(bench.run(&["verify", "--phase", "check"]).0, 2, "the log is of another volume than the subsystem");
}

#[test]
fn a_target_that_restarts_costs_a_pause_and_no_error() {
    let mut bench = Bench::new();
    let child = bench.spawn(&["verify", "--size", "8M", "--mix", "20"]);
    for round in 1..=2 {
        bench.wait_for_log(512 + round * 12_000);
        bench.restart_target();
    }
    let (code, report) = finish(child);
    assert_eq!(code, 0, "{report:#}");
    let write = &report["write"];
    assert!(write["reconnects"].as_u64().unwrap() >= 1, "{report:#}");
    assert_eq!(write["outages"].as_array().unwrap().len() as u64, write["reconnects"].as_u64().unwrap());
    assert_eq!((&write["errors"], &report["check"]["errors"]), (&json!(0), &json!(0)));
    assert!(!write["pauses"].as_array().unwrap().is_empty());
}

#[test]
fn a_verifier_that_is_killed_goes_on_from_its_log() {
    let bench = Bench::new();
    let mut size = 0;
    for round in 0..3 {
        let child = bench.spawn(&["verify", "--time", "1h", "--phase", "write"]);
        bench.wait_for_log(size + 6_000);
        child.kill();
        size = std::fs::metadata(bench.log()).unwrap().len();
        let (code, report) = bench.run(&["verify", "--phase", "check", "--settle", "200ms"]);
        assert_eq!(code, 0, "round {round}: {report:#}");
    }
    let (code, report) = bench.run(&["verify", "--size", "256k", "--settle", "0"]);
    assert_eq!(code, 0, "{report:#}");
    assert_eq!(report["run"], 7);
}

#[test]
fn failures_have_codes() {
    let mut bench = Bench::new();
    assert_eq!(bench.run(&["run", "--bs", "1000"]).0, 2);
    assert_eq!(bench.run(&["run", "--bs", "64M"]).0, 2);
    assert_eq!(bench.run(&["run", "--range", "1T"]).0, 2);
    assert_eq!(bench.run(&["run", "--rate", "0"]).0, 2);
    assert_eq!(bench.run(&["run", "--nsid", "2"]).0, 3);
    assert_eq!(bench.run(&["verify", "--phase", "check"]).0, 2, "no log");
    assert_eq!(bench.run(&["verify", "--cores", "0x3"]).0, 2);
    assert_eq!(bench.run(&["verify", "--no-such-option"]).0, 2);
    drop(bench.target.take());
    assert_eq!(bench.run(&["run"]).0, 3);
}

#[test]
fn a_target_that_stays_away_ends_in_errors() {
    let mut bench = Bench::new();
    let words = ["verify", "--time", "1h", "--ctrl-loss-timeout", "300ms"];
    let child = bench.spawn(&words);
    bench.wait_for_log(4_000);
    drop(bench.target.take());
    let (code, report) = finish(child);
    assert_eq!(code, 3, "{report:#}");
    assert_eq!((&report["ok"], &report["mismatches_total"]), (&json!(false), &json!(0)));
    assert!(report["write"]["errors"].as_u64().unwrap() > 0);
}
