//! SPDK's own Python client drives the whole lvol family, calls that succeed and calls that are refused; the same script
//! runs against a stock `spdk_tgt` where there is one, and gives the same answers.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use e2e::engine::{Engine, rpc_at};
use e2e::{python, spdk};
use serde_json::{Value, json};

const SCRIPT: &str = include_str!("lvol_rpc.py");

fn disks(folder: &Path) {
    for (name, mib) in [("disk", 256u64), ("external", 8), ("target", 64)] {
        File::create(folder.join(name)).unwrap().set_len(mib << 20).unwrap();
    }
}

/// Runs the part of the script; gives the answers it printed.
fn run(part: &str, socket: &Path, folder: &Path) -> Value {
    let printed = python::run(SCRIPT, &[part, socket.to_str().unwrap(), folder.to_str().unwrap()]).unwrap();
    serde_json::from_str(&printed).unwrap_or_else(|e| panic!("{e}: {printed}"))
}

#[test]
fn the_lvol_family_answers_as_spdk_does() {
    let mut engine = Engine::start(&["-m", "0x3"]).unwrap();
    disks(engine.folder());
    let ours = [run("calls", &engine.socket(), engine.folder())];
    assert!(engine.terminate().unwrap(), "{}", engine.log());
    engine.restart().unwrap();
    let reopened = run("reopened", &engine.socket(), engine.folder());
    // A kill is a crash: the next start recovers.
    engine.restart().unwrap();
    assert_eq!(run("reopened", &engine.socket(), engine.folder()), reopened);
    let ours = [ours[0].clone(), reopened];

    let Some(tree) = spdk::tree() else { return };
    let folder = tempfile::tempdir().unwrap();
    disks(folder.path());
    let mut target = Target::start(&tree, folder.path());
    let calls = run("calls", &target.socket, folder.path());
    target.stop();
    target = Target::start(&tree, folder.path());
    let theirs = [calls, run("reopened", &target.socket, folder.path())];
    for (ours, theirs) in ours.iter().zip(&theirs) {
        compare(ours, theirs);
    }
    target.stop();
    // What one has made the other opens: a disk moves freely.
    let mut engine = Engine::start(&["-m", "0x3"]).unwrap();
    compare(&run("reopened", &engine.socket(), folder.path()), &theirs[1]);
    assert!(engine.terminate().unwrap(), "{}", engine.log());
    let target = Target::start(&tree, folder.path());
    compare(&run("reopened", &target.socket, folder.path()), &theirs[1]);
}

fn compare(ours: &Value, theirs: &Value) {
    let (ours, theirs) = (ours.as_array().unwrap(), theirs.as_array().unwrap());
    for (index, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        assert_eq!(ours, theirs, "answer {index}: ours on the left, SPDK's on the right");
    }
    assert_eq!(ours.len(), theirs.len());
}

/// A bare `spdk_tgt`.
struct Target {
    process: Child,
    socket: std::path::PathBuf,
}

impl Target {
    fn start(tree: &Path, folder: &Path) -> Self {
        let socket = folder.join("spdk.sock");
        let config = folder.join("spdk.json");
        // Unused here, but its default pools alone are larger than the memory given.
        let iscsi = json!({"subsystem": "iscsi", "config": [{"method": "iscsi_set_options", "params": {
            "max_sessions": 2, "max_connections_per_session": 2, "pdu_pool_size": 64,
            "immediate_data_pool_size": 32, "data_out_pool_size": 32 }}]});
        fs::write(&config, json!({ "subsystems": [iscsi] }).to_string()).unwrap();
        let log = File::create(folder.join("spdk.log")).unwrap();
        let mut process = Command::new(tree.join("build/bin/spdk_tgt"))
            .args(["--no-huge", "-m", "0x1", "-s", "512", "-r"])
            .arg(&socket)
            .arg("-c")
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while rpc_at(&socket, "framework_wait_init", Value::Null).is_err() {
            let log = || fs::read_to_string(folder.join("spdk.log")).unwrap();
            assert!(process.try_wait().unwrap().is_none() && Instant::now() < deadline, "{}", log());
            std::thread::sleep(Duration::from_millis(50));
        }
        Self { process, socket }
    }

    /// Ends it in order, so that its stores are clean.
    fn stop(&mut self) {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.process.id()).unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        assert!(self.process.wait().unwrap().success());
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // Fails only for a process that has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
