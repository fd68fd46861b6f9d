//! One `addax-engine` process, driven by its RPC socket.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::programs::program;

/// Bounds the start and the stop of the engine, and each call.
const TIMEOUT: Duration = Duration::from_secs(30);

/// An engine in a folder of its own; killed when dropped.
#[derive(Debug)]
pub struct Engine {
    folder: TempDir,
    process: Option<Child>,
    args: Vec<String>,
}

impl Engine {
    /// Starts an engine and waits until it answers.
    ///
    /// # Errors
    /// When it is not built or does not answer; with its log.
    pub fn start(args: &[&str]) -> Result<Self> {
        let args = args.iter().map(|a| (*a).to_owned()).collect();
        let mut engine = Self { folder: tempfile::tempdir()?, process: None, args };
        engine.restart()?;
        Ok(engine)
    }

    /// Its RPC socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("rpc.sock")
    }

    /// The folder that lives as long as it.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// What it has printed.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Whether the process still runs.
    pub fn is_running(&mut self) -> bool {
        self.process.as_mut().is_some_and(|p| matches!(p.try_wait(), Ok(None)))
    }

    /// Kills it where it stands.
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

    /// Kills it if it runs, starts it anew and waits until it answers.
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub fn restart(&mut self) -> Result<()> {
        self.kill()?;
        let log = File::create(self.folder.path().join("log"))?;
        let program = program("addax-engine")?;
        let process = Command::new(&program)
            .arg("-r")
            .arg(self.socket())
            .args(["--no-huge", "-s", "64"])
            .args(&self.args)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        self.process = Some(process);
        let deadline = Instant::now() + TIMEOUT;
        while self.rpc("framework_wait_init", Value::Null).is_err() {
            if !self.is_running() || Instant::now() > deadline {
                bail!("the engine does not answer:\n{}", self.log());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Ends it by SIGTERM and gives back whether it ended well.
    ///
    /// # Errors
    /// When it does not end.
    pub fn terminate(&mut self) -> Result<bool> {
        let Some(mut process) = self.process.take() else { return Ok(true) };
        let pid = nix::unistd::Pid::from_raw(i32::try_from(process.id())?);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM)?;
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = process.try_wait()? {
                return Ok(status.success());
            }
            if Instant::now() > deadline {
                process.kill()?;
                bail!("the engine does not end by SIGTERM:\n{}", self.log());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Calls a method.
    ///
    /// # Errors
    /// As [`rpc_at`].
    pub fn rpc(&self, method: &str, params: Value) -> Result<Value> {
        rpc_at(&self.socket(), method, params)
    }

    /// Sends bytes, ends the writing side, and gives back all that comes.
    ///
    /// # Errors
    /// When the socket fails.
    pub fn raw(&self, bytes: &[u8]) -> Result<Vec<u8>> {
        raw_at(&self.socket(), bytes)
    }

    /// Exports a device as `nqn` on a port of 127.0.0.1, to any host.
    ///
    /// # Errors
    /// The first refused call.
    pub fn export(&self, bdev: &str, nqn: &str, port: u16) -> Result<()> {
        let transports = self.rpc("nvmf_get_transports", Value::Null)?;
        if transports.as_array().is_none_or(Vec::is_empty) {
            self.rpc("nvmf_create_transport", json!({"trtype": "TCP"}))?;
        }
        self.rpc("nvmf_create_subsystem", json!({"nqn": nqn, "serial_number": "ADDAX-TEST", "allow_any_host": true}))?;
        self.rpc("nvmf_subsystem_add_ns", json!({"nqn": nqn, "namespace": {"bdev_name": bdev}}))?;
        let address = json!({"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port.to_string()});
        self.rpc("nvmf_subsystem_add_listener", json!({"nqn": nqn, "listen_address": address}))?;
        Ok(())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Fails only for a process that has ended already.
        let _ = self.kill();
    }
}

/// Calls a method of the data plane at a socket.
///
/// # Errors
/// The data plane's error as `code message`, or what kept the call from being made.
pub fn rpc_at(socket: &Path, method: &str, params: Value) -> Result<Value> {
    let mut request = json!({"jsonrpc": "2.0", "id": 1, "method": method});
    if !params.is_null() {
        request["params"] = params;
    }
    let answer = raw_at(socket, request.to_string().as_bytes())?;
    let answer: Value = serde_json::from_slice(&answer).context("the answer is not JSON")?;
    match answer.get("error") {
        Some(error) => bail!("{} {}", error["code"], error["message"].as_str().unwrap_or_default()),
        None => Ok(answer["result"].clone()),
    }
}

fn raw_at(socket: &Path, bytes: &[u8]) -> Result<Vec<u8>> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(bytes)?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(answer)
}
