//! One side of a race: a data plane with a device, exported and filled, that can be measured or frozen.
//!
//! *States.* Frozen except while it is measured, so that it never takes the processor from the other side.
//!
//! *When things fail.* A setup that fails ends the process; the reason names the call.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::generator::{Generator, Length};
use super::matrix::{Cell, Device};
use super::parse::Run;
use super::setup::{self, Abilities, Call, NQN, Place};
use crate::plane::process::{DataPlane, Launch};
use crate::wirehost::{Host, Names};

/// Which data plane.
#[derive(Debug, Clone)]
pub enum Side {
    /// Addax's engine: its path.
    Addax(PathBuf),
    /// The target of a built SPDK tree.
    Spdk(PathBuf),
}

/// What a data plane may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// As it comes, or the least with which it starts.
    Least,
    /// Enough that no load waits for buffers, beside devices of so many MiB.
    Ample {
        /// Memory of devices, in MiB.
        device_mib: u64,
    },
}

/// Memory of the engine for I/O buffers, in MiB.
const ADDAX_MIB: u64 = 128;
/// Memory of the stock target besides devices, in MiB: its pools, and what its allocator loses.
const SPDK_MIB: u64 = 512;
/// Name of the host that fills devices.
const HOST: &str = "nqn.2026-11.io.addax:host:bench";
/// Bytes that are written at once to fill a device.
const FILL_BYTES: usize = 128 << 10;

impl Side {
    /// For messages.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Addax(_) => "addax",
            Self::Spdk(_) => "spdk",
        }
    }

    fn launch(&self, folder: &Path, cpu: u32, memory: Memory) -> Launch {
        let (program, mib) = match (self, memory) {
            (Self::Addax(program), Memory::Least) => (program.clone(), None),
            (Self::Addax(program), Memory::Ample { .. }) => (program.clone(), Some(ADDAX_MIB)),
            (Self::Spdk(tree), Memory::Least) => (tree.join("build/bin/nvmf_tgt"), Some(SPDK_MIB)),
            // An eighth is lost to the allocator.
            (Self::Spdk(tree), Memory::Ample { device_mib }) => {
                (tree.join("build/bin/nvmf_tgt"), Some(SPDK_MIB + device_mib + device_mib / 8))
            }
        };
        let mut args = ["-m", &format!("{:#x}", 1_u64 << cpu), "--no-huge"].map(str::to_owned).to_vec();
        args.extend(mib.into_iter().flat_map(|mib| ["-s".to_owned(), mib.to_string()]));
        Launch {
            program,
            args,
            socket: folder.join(format!("{}.sock", self.name())),
            log: folder.join(format!("{}.log", self.name())),
            cpu: Some(cpu),
        }
    }

    /// Starts it.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn start(&self, folder: &Path, cpu: u32, memory: Memory) -> Result<DataPlane, String> {
        DataPlane::start(self.launch(folder, cpu, memory)).map_err(|e| e.to_string())
    }
}

/// What it says it is.
///
/// # Errors
/// When it does not say.
pub fn version(plane: &DataPlane) -> Result<String, String> {
    let answer = plane.call("spdk_get_version", &Value::Null).map_err(|e| e.to_string())?;
    Ok(answer["version"].as_str().unwrap_or("of unknown version").to_owned())
}

/// Makes some calls.
///
/// # Errors
/// The first that was refused.
pub fn apply(plane: &DataPlane, calls: &[Call]) -> Result<(), String> {
    for Call { method, params } in calls {
        plane.call(method, params).map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// What a data plane can do.
///
/// # Errors
/// When it does not say.
pub fn abilities(plane: &DataPlane) -> Result<Abilities, String> {
    let methods = plane.call("rpc_get_methods", &json!({})).map_err(|e| e.to_string())?;
    Ok(Abilities::new(&methods))
}

/// A data plane ready to be measured; see the module.
#[derive(Debug)]
pub struct Contestant {
    plane: DataPlane,
    device: Device,
    address: SocketAddr,
    has_snapshot: bool,
    version: String,
    stand_in: Option<&'static str>,
}

/// Why there is no contestant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Absence {
    /// It has no such device.
    #[error("it has no such device")]
    Unable,
    /// Something went wrong.
    #[error("{0}")]
    Failed(String),
}

impl From<String> for Absence {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

impl Contestant {
    /// Starts a data plane with a device, in blocks of `lba` bytes, and freezes it.
    ///
    /// # Errors
    /// See [`Absence`].
    pub fn prepare(side: &Side, device: Device, lba: u32, folder: &Path, cpu: u32) -> Result<Self, Absence> {
        let plane = side.start(folder, cpu, Memory::Ample { device_mib: setup::memory_mib(device) })?;
        let able = abilities(&plane)?;
        if !able.can(device) {
            return Err(Absence::Unable);
        }
        let file = folder.join(format!("{}.disk", side.name()));
        if device == Device::Uring {
            make_file(&file).map_err(|e| format!("{}: {e}", file.display()))?;
        }
        let port = free_port()?;
        apply(&plane, &setup::build(device, lba, &able, Place { port, file: &file }))?;
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let (version, stand_in) = (version(&plane)?, able.stand_in(device));
        let contestant = Self { plane, device, address, has_snapshot: false, version, stand_in };
        if setup::is_filled(device) && !device.first_writes() {
            contestant.fill(lba)?;
        }
        contestant.plane.freeze().map_err(|e| e.to_string())?;
        Ok(contestant)
    }

    /// What the data plane says it is.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// What stands in for the device, if something does.
    #[must_use]
    pub const fn stand_in(&self) -> Option<&'static str> {
        self.stand_in
    }

    /// Writes all of the device once: memory never written is not memory yet, and would be read from a single page.
    fn fill(&self, lba: u32) -> Result<(), String> {
        let fail = |e: crate::wirehost::WireError| format!("fill: {e}");
        let host = Host::connect(self.address, Names::new(NQN, HOST), 0).map_err(fail)?;
        let mut queue = host.io_queue(1, 32).map_err(fail)?;
        let mut data = vec![0; FILL_BYTES];
        crate::access::Rng::new(1).fill(&mut data);
        let blocks = (FILL_BYTES / lba as usize) as u32;
        for chunk in 0..setup::bytes(self.device) / FILL_BYTES as u64 {
            queue.write(chunk * u64::from(blocks), blocks, &data).map_err(fail)?;
        }
        Ok(())
    }

    /// Makes a device of first writes as it was.
    fn renew(&mut self, lba: u32) -> Result<(), String> {
        let (before, after) = setup::renew(self.device, self.has_snapshot);
        if before.is_empty() {
            return Ok(());
        }
        apply(&self.plane, &before)?;
        if setup::is_filled(self.device) {
            self.fill(lba)?;
        }
        apply(&self.plane, &after)?;
        self.has_snapshot = !after.is_empty();
        Ok(())
    }

    /// One run of a cell.
    ///
    /// # Errors
    /// What went wrong.
    pub fn measure(&mut self, cell: &Cell, generator: &Generator, seconds: u32, cpu: u32) -> Result<Run, String> {
        self.plane.thaw().map_err(|e| e.to_string())?;
        let run = self.run(cell, generator, seconds, cpu);
        if !self.plane.is_running() {
            return Err(format!("the data plane has ended:\n{}", self.plane.log()));
        }
        self.plane.freeze().map_err(|e| e.to_string())?;
        run
    }

    /// Runs a job while it is not frozen; the job gets the address of the device and the RPC socket.
    ///
    /// # Errors
    /// Those of the job, or when the process is gone.
    pub fn while_loaded<T>(&self, job: impl FnOnce(SocketAddr, &Path) -> Result<T, String>) -> Result<T, String> {
        self.plane.thaw().map_err(|e| e.to_string())?;
        let result = job(self.address, self.plane.socket());
        self.plane.freeze().map_err(|e| e.to_string())?;
        result
    }

    fn run(&mut self, cell: &Cell, generator: &Generator, seconds: u32, cpu: u32) -> Result<Run, String> {
        self.renew(cell.lba())?;
        let length =
            if self.device.first_writes() { Length::Ios(setup::FIRST_WRITES) } else { Length::Seconds(seconds) };
        generator.start(cell, self.address, length, cpu)?.finish()
    }
}

/// A port of 127.0.0.1 that is free now.
///
/// # Errors
/// When the machine has none.
pub fn free_port() -> Result<u16, String> {
    let bound = std::net::TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
    bound.map(|address| address.port()).map_err(|e| format!("no free port: {e}"))
}

/// A file whose every block is there: a file system's first writes are not what is measured.
fn make_file(path: &Path) -> std::io::Result<()> {
    use std::io::Write;
    let mut file = std::fs::File::create(path)?;
    let chunk = vec![0; 1 << 20];
    for _ in 0..setup::DEVICE_BYTES >> 20 {
        file.write_all(&chunk)?;
    }
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_get_the_same_processor_and_enough_memory() {
        let folder = Path::new("/somewhere");
        let ours = Side::Addax("/e".into()).launch(folder, 2, Memory::Ample { device_mib: 384 });
        let stock = Side::Spdk("/s".into()).launch(folder, 2, Memory::Ample { device_mib: 384 });
        assert_eq!((ours.cpu, stock.cpu), (Some(2), Some(2)));
        assert_eq!(ours.args[..3], stock.args[..3]);
        assert_eq!(ours.args[1], "0x4");
        assert_eq!(stock.program, Path::new("/s/build/bin/nvmf_tgt"));
        assert!(stock.args[4].parse::<u64>().unwrap() >= 512 + 384);
        assert!(!Side::Addax("/e".into()).launch(folder, 2, Memory::Least).args.contains(&"-s".to_owned()));
    }
}
