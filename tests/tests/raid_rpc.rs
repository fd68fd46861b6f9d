//! SPDK's own Python client drives the raid, passthru, crypto and keyring families, calls that succeed and calls that are
//! refused; the same script runs against a stock `spdk_tgt` where there is one, and gives the same answers. Disks then
//! move from one to the other and back.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use e2e::engine::Engine;
use e2e::programs::program;
use e2e::{python, spdk};
use serde_json::{Value, json};

const SCRIPT: &str = include_str!("raid_rpc.py");
const NQN: &str = "nqn.2026-11.io.addax:volume:raid";
const TIMEOUT: Duration = Duration::from_secs(60);
const DISK_BYTES: u64 = 48 << 20;
/// Where the data of a member begins.
const DATA_OFFSET: u64 = 1 << 20;

fn disks(folder: &Path) {
    for name in ["d0", "d1", "d2", "d3"] {
        File::create(folder.join(name)).unwrap().set_len(DISK_BYTES).unwrap();
    }
}

/// Runs a part of the script; gives the answers it printed.
fn run(part: &str, socket: &Path, folder: &Path, order: &str) -> Vec<Value> {
    let args = [part, socket.to_str().unwrap(), folder.to_str().unwrap(), order];
    let printed = python::run(SCRIPT, &args).unwrap();
    serde_json::from_str(&printed).unwrap_or_else(|e| panic!("{e}: {printed}"))
}

#[test]
fn the_families_answer_as_spdk_does_and_arrays_are_found_by_either() {
    let mut engine = Engine::start(&["-m", "0x1"]).unwrap();
    let ours = engine.folder().to_owned();
    disks(&ours);
    let stock = spdk::tree().map(|tree| (tree, tempfile::tempdir().unwrap()));
    let mut compare = |part: &str, order: &str, swapped: bool| {
        let theirs = stock.as_ref().map_or(&*ours, |(_, folder)| folder.path());
        let (our_disks, their_disks) = if swapped { (theirs, &*ours) } else { (&*ours, theirs) };
        engine.restart().unwrap();
        let answers = run(part, &engine.socket(), our_disks, order);
        assert!(engine.terminate().unwrap(), "{}", engine.log());
        let Some((tree, _)) = &stock else { return };
        let target = Stock::start(tree);
        let expected = run(part, &target.socket(), their_disks, order);
        for (index, (ours, theirs)) in answers.iter().zip(&expected).enumerate() {
            assert_eq!(ours, theirs, "{part}, answer {index}: ours on the left, SPDK's on the right");
        }
        assert!(answers.len() == expected.len() || !target.has("bdev_crypto_create"), "{part}");
    };
    if let Some((_, folder)) = &stock {
        disks(folder.path());
    }
    compare("calls", "d0,d1,d2,d3", false);
    compare("found", "d2,d1,d0,d3", false);
    compare("found", "d1,d0,d2", true);
    compare("cleared", "d0,d2,d1", true);
}

#[test]
fn a_mirrored_volume_moves_between_spdk_and_the_engine() {
    let Some(tree) = spdk::tree() else { return };
    let folder = tempfile::tempdir().unwrap();
    disks(folder.path());
    let make = json!({"name": "R", "raid_level": "raid1", "base_bdevs": ["d0", "d1"], "superblock": true});

    let plane = Plane::stock(&tree, folder.path());
    plane.disks(&["d0", "d1"]);
    plane.rpc("bdev_raid_create", make);
    plane.export("R");
    plane.verify("write", "first.wlog");
    plane.end();

    let plane = Plane::ours(folder.path());
    plane.disks(&["d1", "d0"]);
    plane.export("R");
    plane.verify("check", "first.wlog");
    plane.rpc("bdev_raid_remove_base_bdev", json!({"name": "d0"}));
    plane.disks(&["d2"]);
    // Rebuilt while it is written.
    let load = plane.start_verify("write", "first.wlog");
    plane.rpc("bdev_raid_add_base_bdev", json!({"raid_bdev": "R", "base_bdev": "d2"}));
    plane.until_rebuilt();
    load.wait();
    plane.verify("check", "first.wlog");
    plane.end();
    assert_same_data(folder.path(), "d1", "d2");

    let plane = Plane::stock(&tree, folder.path());
    plane.disks(&["d0", "d2", "d1"]);
    plane.export("R");
    plane.verify("check", "first.wlog");
    plane.rpc("bdev_raid_remove_base_bdev", json!({"name": "d1"}));
    plane.verify("write", "first.wlog");
    plane.end();

    // What was written without d1 is on d2 alone, and d1 is rebuilt from it, whoever is found first.
    let plane = Plane::ours(folder.path());
    plane.disks(&["d1", "d2"]);
    plane.export("R");
    plane.verify("check", "first.wlog");
    plane.until_rebuilt();
    plane.verify("check", "first.wlog");
    let raids = plane.rpc("bdev_raid_get_bdevs", json!({"category": "online"}));
    assert_eq!(raids[0]["num_base_bdevs_discovered"], 2, "{raids}");
    plane.end();
    assert_same_data(folder.path(), "d1", "d2");
}

#[test]
fn an_encrypted_disk_is_read_by_spdk_and_the_engine_alike() {
    let Some(tree) = spdk::tree() else { return };
    let folder = tempfile::tempdir().unwrap();
    let keys =
        [("00112233445566778899aabbccddeeff", "ffeeddccbbaa99887766554433221100", 1), ("0f1e2d3c", "a5b4c3d2", 8)];
    for (key, key2, times) in keys {
        disks(folder.path());
        let open = |plane: Plane| -> Option<Plane> {
            plane.disks(&["d0"]);
            if !plane.has("bdev_crypto_create") {
                eprintln!("SKIPPED: the SPDK in SPDK_DIR is built without crypto");
                return None;
            }
            let params =
                json!({"cipher": "AES_XTS", "key": key.repeat(times), "key2": key2.repeat(times), "name": "k"});
            plane.rpc("accel_crypto_key_create", params);
            plane.rpc("bdev_crypto_create", json!({"base_bdev_name": "d0", "name": "C", "key_name": "k"}));
            plane.export("C");
            Some(plane)
        };
        let Some(plane) = open(Plane::stock(&tree, folder.path())) else { return };
        plane.verify("write", "crypto.wlog");
        plane.end();
        let plane = open(Plane::ours(folder.path())).unwrap();
        plane.verify("check", "crypto.wlog");
        plane.verify("write", "crypto.wlog");
        plane.end();
        let plane = open(Plane::stock(&tree, folder.path())).unwrap();
        plane.verify("check", "crypto.wlog");
        plane.end();
        fs::remove_file(folder.path().join("crypto.wlog")).unwrap();
    }
}

fn assert_same_data(folder: &Path, one: &str, other: &str) {
    let data = |name: &str| {
        let mut bytes = vec![0; (DISK_BYTES - DATA_OFFSET) as usize];
        File::open(folder.join(name)).unwrap().read_exact_at(&mut bytes, DATA_OFFSET).unwrap();
        bytes
    };
    assert!(data(one) == data(other), "{one} and {other} differ");
}

/// One call. The writing side stays open until the answer is there: SPDK drops late answers to half-closed connections.
fn call(socket: &Path, method: &str, params: Value) -> Result<Value, String> {
    let mut request = json!({"jsonrpc": "2.0", "id": 1, "method": method});
    if !params.is_null() {
        request["params"] = params;
    }
    let mut stream = UnixStream::connect(socket).map_err(|e| e.to_string())?;
    stream.set_read_timeout(Some(TIMEOUT)).map_err(|e| e.to_string())?;
    stream.write_all(request.to_string().as_bytes()).map_err(|e| e.to_string())?;
    let answer = serde_json::Deserializer::from_reader(stream).into_iter::<Value>().next();
    let answer = answer.ok_or("no answer")?.map_err(|e| e.to_string())?;
    answer.get("error").map_or_else(|| Ok(answer["result"].clone()), |error| Err(error.to_string()))
}

enum Process {
    Ours(Engine),
    Stock(Stock),
}

/// A data plane with disks in a folder and one exported device.
struct Plane {
    process: Process,
    folder: PathBuf,
    port: u16,
}

impl Plane {
    fn ours(folder: &Path) -> Self {
        let process = Process::Ours(Engine::start(&["-m", "0x1"]).unwrap());
        Self { process, folder: folder.to_owned(), port: spdk::free_port().unwrap() }
    }

    fn stock(tree: &Path, folder: &Path) -> Self {
        let process = Process::Stock(Stock::start(tree));
        Self { process, folder: folder.to_owned(), port: spdk::free_port().unwrap() }
    }

    fn socket(&self) -> PathBuf {
        match &self.process {
            Process::Ours(engine) => engine.socket(),
            Process::Stock(target) => target.socket(),
        }
    }

    fn rpc(&self, method: &str, params: Value) -> Value {
        call(&self.socket(), method, params).unwrap_or_else(|error| panic!("{method}: {error}\n{}", self.log()))
    }

    fn log(&self) -> String {
        match &self.process {
            Process::Ours(engine) => engine.log(),
            Process::Stock(target) => target.log(),
        }
    }

    fn has(&self, method: &str) -> bool {
        self.rpc("rpc_get_methods", Value::Null).as_array().unwrap().contains(&json!(method))
    }

    /// Adds disks, each under the same UUID wherever it is.
    fn disks(&self, names: &[&str]) {
        for name in names {
            let uuid = format!("6a0d1c5e-0000-4000-8000-00000000000{}", &name[1..]);
            let file = self.folder.join(name);
            self.rpc("bdev_aio_create", json!({"name": name, "filename": file, "block_size": 4096, "uuid": uuid}));
            self.rpc("bdev_wait_for_examine", Value::Null);
        }
    }

    fn export(&self, device: &str) {
        self.rpc("nvmf_create_transport", json!({"trtype": "TCP"}));
        self.rpc("nvmf_create_subsystem", json!({"nqn": NQN, "serial_number": "ADDAX-TEST", "allow_any_host": true}));
        self.rpc("nvmf_subsystem_add_ns", json!({"nqn": NQN, "namespace": {"bdev_name": device}}));
        let port = self.port.to_string();
        let address = json!({"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port});
        self.rpc("nvmf_subsystem_add_listener", json!({"nqn": NQN, "listen_address": address}));
    }

    fn start_verify(&self, phase: &str, log: &str) -> Load {
        let child = Command::new(program("addax-perf").unwrap())
            .args(["verify", "--target", &format!("127.0.0.1:{}", self.port), "--nqn", NQN, "--size", "24M"])
            .args(["--mix", "0", "--phase", phase, "--settle", "0s", "--unwritten", "any", "--log"])
            .arg(self.folder.join(log))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Load(Some(child))
    }

    fn verify(&self, phase: &str, log: &str) {
        self.start_verify(phase, log).wait();
    }

    fn until_rebuilt(&self) {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let raids = self.rpc("bdev_raid_get_bdevs", json!({"category": "all"}));
            if raids.as_array().unwrap().iter().all(|raid| raid.get("process").is_none()) {
                return;
            }
            assert!(Instant::now() < deadline, "{raids}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn end(self) {
        match self.process {
            Process::Ours(mut engine) => assert!(engine.terminate().unwrap(), "{}", engine.log()),
            Process::Stock(target) => target.end(),
        }
    }
}

/// A running `addax-perf`; killed when dropped.
struct Load(Option<Child>);

impl Load {
    fn wait(mut self) {
        let output = self.0.take().unwrap().wait_with_output().unwrap();
        let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{text}");
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            // Fails only for a process that has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A stock `spdk_tgt` without devices; killed when dropped.
struct Stock {
    process: Child,
    folder: tempfile::TempDir,
}

impl Stock {
    fn start(tree: &Path) -> Self {
        let folder = tempfile::tempdir().unwrap();
        // Unused here, but its default pools alone are larger than the memory given.
        let iscsi = json!({"subsystem": "iscsi", "config": [{"method": "iscsi_set_options", "params": {
            "max_sessions": 2, "max_connections_per_session": 2, "pdu_pool_size": 64,
            "immediate_data_pool_size": 32, "data_out_pool_size": 32 }}]});
        fs::write(folder.path().join("config.json"), json!({ "subsystems": [iscsi] }).to_string()).unwrap();
        let log = File::create(folder.path().join("log")).unwrap();
        let process = Command::new(tree.join("build/bin/spdk_tgt"))
            // Other targets may run beside it.
            .args(["--no-huge", "--disable-cpumask-locks", "-m", "0x1", "-s", "512", "-r"])
            .arg(folder.path().join("rpc.sock"))
            .arg("-c")
            .arg(folder.path().join("config.json"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut target = Self { process, folder };
        let deadline = Instant::now() + TIMEOUT;
        while call(&target.socket(), "framework_wait_init", Value::Null).is_err() {
            let ended = target.process.try_wait().unwrap();
            assert!(ended.is_none() && Instant::now() < deadline, "{}", target.log());
            std::thread::sleep(Duration::from_millis(50));
        }
        target
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("rpc.sock")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn has(&self, method: &str) -> bool {
        let methods = call(&self.socket(), "rpc_get_methods", Value::Null).unwrap();
        methods.as_array().unwrap().contains(&json!(method))
    }

    fn end(mut self) {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.process.id()).unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        assert!(self.process.wait().unwrap().success());
    }
}

impl Drop for Stock {
    fn drop(&mut self) {
        // Fails only for a process that has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
