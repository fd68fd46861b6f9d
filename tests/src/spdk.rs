//! A stock SPDK target as a process, to hold tests against: a test that passes here and not on Addax's engine
//! has found a difference in the engine.
//!
//! `$SPDK_DIR` names a built SPDK tree; without it [`tree`] is none and callers skip. The target's whole set-up
//! is one configuration file, so it can be killed and started again as it was. Data lives in a file and survives
//! that. Dropping a target kills it.

use std::fs::{self, File};
use std::io::Write as _;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::engine::rpc_at;

/// Bounds the start of the target until it listens.
const START_TIMEOUT: Duration = Duration::from_secs(60);

const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Memory in MiB. With the pools that [`configuration`] asks for it is enough; the defaults want a gigabyte.
const MEMORY_MIB: u32 = 512;

const DISK_UUID: &str = "0f1c6e0e-63b2-4c0c-8f8b-3a7a2d7c9e55";

/// The built SPDK tree to test against, if there is one. If not, says on stderr that a test is skipped, also where the
/// test harness captures what tests print.
pub fn tree() -> Option<PathBuf> {
    let tree = std::env::var_os("SPDK_DIR").map(PathBuf::from);
    if tree.is_none() {
        // Who has closed stderr wants to read nothing.
        let _ = writeln!(std::io::stderr(), "SKIPPED: a test against a stock SPDK, because SPDK_DIR is not set");
    }
    tree
}

/// A port of 127.0.0.1 that is free now.
///
/// # Errors
/// When the machine has none.
pub fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?.port())
}

/// A target without any device, driven by its RPC socket; killed when dropped.
#[derive(Debug)]
pub struct BareTarget {
    folder: TempDir,
    process: Child,
}

impl BareTarget {
    /// Starts a target and waits until it answers.
    ///
    /// # Errors
    /// When the tree is not built, or the target does not answer in time; with the target's log.
    pub fn start(tree: &Path) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let config = json!({"subsystems": [small_iscsi()]});
        fs::write(folder.path().join("config.json"), config.to_string())?;
        let process = spawn(tree, folder.path())?;
        let mut target = Self { folder, process };
        let deadline = Instant::now() + START_TIMEOUT;
        while rpc_at(&target.socket(), "framework_wait_init", Value::Null).is_err() {
            if target.process.try_wait()?.is_some() || Instant::now() > deadline {
                bail!("the SPDK target does not answer:\n{}", target.log());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(target)
    }

    /// Its RPC socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("rpc.sock")
    }

    /// What it has printed.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Ends it in order, by SIGTERM.
    ///
    /// # Errors
    /// When it does not end.
    pub fn terminate(mut self) -> Result<()> {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.process.id())?);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM)?;
        let deadline = Instant::now() + START_TIMEOUT;
        while self.process.try_wait()?.is_none() {
            if Instant::now() > deadline {
                bail!("the SPDK target does not end by SIGTERM:\n{}", self.log());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for BareTarget {
    fn drop(&mut self) {
        // Fails only for a process that has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts a target whose configuration, log and socket are in a folder.
fn spawn(tree: &Path, folder: &Path) -> Result<Child> {
    let log = File::create(folder.join("log"))?;
    let program = tree.join("build/bin/spdk_tgt");
    Command::new(&program)
        .args(["--no-huge", "-m", "0x1", "-s", &MEMORY_MIB.to_string()])
        .arg("-r")
        .arg(folder.join("rpc.sock"))
        .arg("-c")
        .arg(folder.join("config.json"))
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("cannot start {}", program.display()))
}

/// Unused here, but its default pools alone are larger than the memory given.
fn small_iscsi() -> Value {
    json!({"subsystem": "iscsi", "config": [{"method": "iscsi_set_options", "params": {
        "max_sessions": 2, "max_connections_per_session": 2, "pdu_pool_size": 64,
        "immediate_data_pool_size": 32, "data_out_pool_size": 32,
    }}]})
}

/// A target with one subsystem of one namespace, listening on a port of 127.0.0.1.
#[derive(Debug)]
pub struct SpdkTarget {
    tree: PathBuf,
    folder: TempDir,
    port: u16,
    process: Option<Child>,
}

impl SpdkTarget {
    /// Starts a target that serves `size_mib` MiB of zeros as `nqn`.
    ///
    /// # Errors
    /// When the tree is not built, or the target does not listen in time; with the target's log.
    pub fn start(tree: &Path, nqn: &str, size_mib: u64) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let disk = folder.path().join("disk");
        File::create(&disk)?.set_len(size_mib << 20)?;
        let port = free_port()?;
        fs::write(folder.path().join("config.json"), configuration(nqn, &disk, port).to_string())?;
        let mut target = Self { tree: tree.to_owned(), folder, port, process: None };
        target.restart()?;
        Ok(target)
    }

    /// The port of 127.0.0.1 it listens on.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Kills the target where it stands, as a crash would.
    ///
    /// # Errors
    /// When the process cannot be waited for.
    pub fn kill(&mut self) -> Result<()> {
        if let Some(mut process) = self.process.take() {
            process.kill()?;
            process.wait()?;
        }
        Ok(())
    }

    /// Kills the target if it runs, starts it anew and waits until it listens.
    ///
    /// # Errors
    /// As [`SpdkTarget::start`].
    pub fn restart(&mut self) -> Result<()> {
        self.kill()?;
        let process = spawn(&self.tree, self.folder.path())?;
        self.process = Some(process);
        self.wait_until_listening()
    }

    fn wait_until_listening(&mut self) -> Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        while TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_err() {
            let ended = match &mut self.process {
                Some(process) => process.try_wait()?,
                None => None,
            };
            if ended.is_some() || Instant::now() >= deadline {
                let log = fs::read_to_string(self.folder.path().join("log"))?;
                bail!("the SPDK target does not listen ({ended:?}):\n{log}");
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }
}

impl Drop for SpdkTarget {
    fn drop(&mut self) {
        // Fails only for a process that has ended already.
        let _ = self.kill();
    }
}

fn configuration(nqn: &str, disk: &Path, port: u16) -> Value {
    let call = |method: &str, params: Value| json!({"method": method, "params": params});
    let namespace = json!({"nqn": nqn, "namespace": {"bdev_name": "disk", "nsid": 1}});
    let listener = json!({"nqn": nqn, "listen_address": {
        "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port.to_string(),
    }});
    json!({"subsystems": [
        small_iscsi(),
        {"subsystem": "bdev", "config": [call("bdev_aio_create", json!({
            "name": "disk", "filename": disk, "block_size": 4096,
            // The namespace gets its NGUID and UUID from here; by default they are drawn anew at each start,
            // and a host that reconnects drops a namespace whose identity differs.
            "uuid": DISK_UUID,
        }))]},
        {"subsystem": "nvmf", "config": [
            call("nvmf_create_transport", json!({"trtype": "TCP"})),
            call("nvmf_create_subsystem", json!({
                "nqn": nqn, "allow_any_host": true, "serial_number": "ADDAX-TEST",
            })),
            call("nvmf_subsystem_add_ns", namespace),
            call("nvmf_subsystem_add_listener", listener),
        ]},
    ]})
}
