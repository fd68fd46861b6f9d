//! One `addax-engine` process, driven by its RPC socket.

use std::fs::Permissions;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use addax_perf::plane::process::{DataPlane, Launch};
use addax_perf::plane::rpc::{self, RpcError};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::programs::program;

/// Bounds an exchange of plain bytes.
const TIMEOUT: Duration = Duration::from_secs(30);

/// An engine in a folder of its own; killed when dropped.
#[derive(Debug)]
pub struct Engine {
    folder: TempDir,
    process: Option<DataPlane>,
    args: Vec<String>,
    /// File of the network namespace in which it runs.
    namespace: Option<PathBuf>,
}

impl Engine {
    /// Starts an engine and waits until it answers.
    ///
    /// # Errors
    /// When it is not built or does not answer; with its log.
    pub fn start(args: &[&str]) -> Result<Self> {
        Self::begin(None, args)
    }

    /// As [`Engine::start`], in a network namespace, by its file.
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub fn start_in(namespace: &Path, args: &[&str]) -> Result<Self> {
        Self::begin(Some(namespace.to_owned()), args)
    }

    fn begin(namespace: Option<PathBuf>, args: &[&str]) -> Result<Self> {
        let args = args.iter().map(|a| (*a).to_owned()).collect();
        let mut engine = Self { folder: tempfile::tempdir()?, process: None, args, namespace };
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
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Whether the process still runs.
    pub fn is_running(&mut self) -> bool {
        self.process.as_mut().is_some_and(DataPlane::is_running)
    }

    /// The process.
    ///
    /// # Errors
    /// When it was ended.
    pub fn pid(&self) -> Result<u32> {
        self.process.as_ref().map(DataPlane::pid).context("the engine was ended")
    }

    /// Kills it where it stands.
    ///
    /// # Errors
    /// When the process cannot be waited for.
    pub fn kill(&mut self) -> Result<()> {
        Ok(self.process.take().map_or(Ok(()), DataPlane::kill)?)
    }

    /// Kills it if it runs, starts it anew and waits until it answers.
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub fn restart(&mut self) -> Result<()> {
        self.kill()?;
        let args = std::iter::once("--no-huge".to_owned()).chain(self.args.clone()).collect();
        let (socket, log) = (self.socket(), self.folder.path().join("log"));
        let launch = Launch { program: self.program()?, args, socket, log, cpu: None };
        self.process = Some(DataPlane::start(launch)?);
        Ok(())
    }

    /// The engine, or a script that starts it in its namespace.
    fn program(&self) -> Result<PathBuf> {
        let (engine, Some(namespace)) = (program("addax-engine")?, &self.namespace) else {
            return program("addax-engine");
        };
        let script = self.folder.path().join("start");
        let text =
            format!("#!/bin/sh\nexec nsenter --net='{}' -- '{}' \"$@\"\n", namespace.display(), engine.display());
        std::fs::write(&script, text)?;
        std::fs::set_permissions(&script, Permissions::from_mode(0o755))?;
        Ok(script)
    }

    /// Ends it by SIGTERM and gives back whether it ended well.
    ///
    /// # Errors
    /// When it does not end.
    pub fn terminate(&mut self) -> Result<bool> {
        Ok(self.process.take().map_or(Ok(true), DataPlane::terminate)?)
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

    /// Exports a device as `nqn` on a port of 127.0.0.1, to any host; where.
    ///
    /// # Errors
    /// The first refused call.
    pub fn export(&self, bdev: &str, nqn: &str, port: u16) -> Result<SocketAddr> {
        self.export_at(bdev, nqn, SocketAddr::from(([127, 0, 0, 1], port)))
    }

    /// Exports a device as `nqn` at an address, to any host; where.
    ///
    /// # Errors
    /// The first refused call.
    pub fn export_at(&self, bdev: &str, nqn: &str, at: SocketAddr) -> Result<SocketAddr> {
        let transports = self.rpc("nvmf_get_transports", Value::Null)?;
        if transports.as_array().is_none_or(Vec::is_empty) {
            self.rpc("nvmf_create_transport", json!({"trtype": "TCP"}))?;
        }
        self.rpc("nvmf_create_subsystem", json!({"nqn": nqn, "serial_number": "ADDAX-TEST", "allow_any_host": true}))?;
        self.rpc("nvmf_subsystem_add_ns", json!({"nqn": nqn, "namespace": {"bdev_name": bdev}}))?;
        let (traddr, trsvcid) = (at.ip().to_string(), at.port().to_string());
        let address = json!({"trtype": "TCP", "adrfam": "IPv4", "traddr": traddr, "trsvcid": trsvcid});
        self.rpc("nvmf_subsystem_add_listener", json!({"nqn": nqn, "listen_address": address}))?;
        Ok(at)
    }
}

/// Calls a method of the data plane at a socket.
///
/// # Errors
/// The data plane's error as `code message`, or what kept the call from being made.
pub fn rpc_at(socket: &Path, method: &str, params: Value) -> Result<Value> {
    match rpc::call(socket, method, &params) {
        Err(RpcError::Method { code, message, .. }) => bail!("{code} {message}"),
        other => Ok(other?),
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
