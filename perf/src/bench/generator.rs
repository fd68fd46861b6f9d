//! The load generators: what to start for a cell, and what it has measured.
//!
//! *Which.* `spdk_nvme_perf` of a built SPDK tree drives both data planes of a race; without one, this program does. A
//! report has figures of one generator only, since they are comparable only then.
//!
//! *When things fail.* A generator that ends with an error or prints something else than figures fails its run, with
//! the end of what it printed.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::matrix::{Cell, MIX, Pattern};
use super::parse::{self, Run};
use super::setup::NQN;
use crate::plane::process::spawn_on;

/// How much longer than asked a run may take.
const GRACE: Duration = Duration::from_secs(120);
/// Memory of the stock generator, in MiB: a depth of 128 at 1 MiB, and its own.
const MEMORY_MIB: u32 = 512;
/// Most seconds of a run of a number of I/Os.
const LONGEST_S: u32 = 60;
/// How many bytes of output an error carries.
const TAIL: usize = 600;

/// A load generator.
#[derive(Debug, Clone)]
pub enum Generator {
    /// This program: its path.
    Addax(PathBuf),
    /// The stock one: its path.
    Spdk(PathBuf),
}

/// How long a run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    /// So many seconds.
    Seconds(u32),
    /// So many I/Os.
    Ios(u64),
}

impl Generator {
    /// For reports.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Addax(_) => "addax-perf run",
            Self::Spdk(_) => "spdk_nvme_perf",
        }
    }

    /// Why it cannot drive a cell, if so.
    #[must_use]
    pub fn refuses(&self, cell: &Cell) -> Option<&'static str> {
        match self {
            Self::Addax(_) if cell.block > 128 << 10 => {
                Some("addax-perf does not split I/Os beyond the target's 128 KiB; SPDK's generator (SPDK_DIR) does")
            }
            _ => None,
        }
    }

    /// The arguments for a run.
    #[must_use]
    pub fn args(&self, cell: &Cell, target: SocketAddr, length: Length, cpu: u32) -> Vec<String> {
        let pairs = match self {
            Self::Addax(_) => addax_args(cell, target, length, cpu),
            Self::Spdk(_) => spdk_args(cell, target, length, cpu),
        };
        let first = match self {
            Self::Addax(_) => vec!["run".to_owned(), "--quiet".to_owned()],
            Self::Spdk(_) => vec!["--no-huge".to_owned(), "-L".to_owned()],
        };
        first.into_iter().chain(pairs.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value])).collect()
    }

    /// Starts a run on a processor.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn start(&self, cell: &Cell, target: SocketAddr, length: Length, cpu: u32) -> Result<Running, String> {
        let (Self::Addax(program) | Self::Spdk(program)) = self;
        let mut command = Command::new(program);
        command.args(self.args(cell, target, length, cpu));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = spawn_on(Some(cpu), command).map_err(|e| format!("cannot start {}: {e}", program.display()))?;
        let wanted = match length {
            Length::Seconds(seconds) => Duration::from_secs(u64::from(seconds)),
            Length::Ios(_) => Duration::from_secs(u64::from(LONGEST_S)),
        };
        Ok(Running { child: Some(child), deadline: Instant::now() + wanted + GRACE, generator: self.clone() })
    }

    fn read(&self, output: &Output) -> Result<Run, String> {
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let parsed = match self {
            _ if !output.status.success() => Err(output.status.to_string()),
            Self::Addax(_) => parse::addax_perf(&out),
            Self::Spdk(_) => parse::spdk_nvme_perf(&out),
        };
        parsed.map_err(|why| format!("{}: {why}\n{}", self.name(), tail(&format!("{out}{err}"))))
    }
}

fn addax_args(cell: &Cell, target: SocketAddr, length: Length, cpu: u32) -> Vec<(&'static str, String)> {
    vec![
        ("--target", target.to_string()),
        ("--nqn", NQN.to_owned()),
        ("--rw", cell.pattern.rw().to_owned()),
        ("--mix", MIX.to_string()),
        ("--bs", cell.block.to_string()),
        ("--qd", (cell.depth / cell.connections).to_string()),
        ("--connections", cell.connections.to_string()),
        ("--cores", format!("[{cpu}]")),
        ("--output", "json".to_owned()),
        match length {
            Length::Seconds(seconds) => ("--time", format!("{seconds}s")),
            Length::Ios(ios) => ("--size", (ios * u64::from(cell.block)).to_string()),
        },
    ]
}

fn spdk_args(cell: &Cell, target: SocketAddr, length: Length, cpu: u32) -> Vec<(&'static str, String)> {
    let family = if target.is_ipv4() { "IPv4" } else { "IPv6" };
    let (ip, port) = (target.ip(), target.port());
    let mut args = vec![
        ("-s", MEMORY_MIB.to_string()),
        ("-c", format!("{:#x}", 1_u64 << cpu)),
        ("-q", cell.depth.to_string()),
        ("-P", cell.connections.to_string()),
        ("-o", cell.block.to_string()),
        ("-w", cell.pattern.rw().to_owned()),
        ("-r", format!("trtype:TCP adrfam:{family} traddr:{ip} trsvcid:{port} subnqn:{NQN}")),
    ];
    if cell.pattern == Pattern::Mixed {
        args.push(("-M", MIX.to_string()));
    }
    match length {
        Length::Seconds(seconds) => args.push(("-t", seconds.to_string())),
        // It must have a time as well: one that is never reached.
        Length::Ios(ios) => args.extend([("-d", ios.to_string()), ("-t", LONGEST_S.to_string())]),
    }
    args
}

fn tail(text: &str) -> &str {
    let start = text.len().saturating_sub(TAIL);
    (start..text.len()).find(|at| text.is_char_boundary(*at)).map_or("", |at| &text[at..])
}

/// A run that goes on; killed when dropped.
#[derive(Debug)]
pub struct Running {
    child: Option<Child>,
    deadline: Instant,
    generator: Generator,
}

impl Running {
    /// Whether it has ended.
    #[must_use]
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.child.as_mut().map(Child::try_wait), Some(Ok(None)))
    }

    /// Waits for the end; what it has measured.
    ///
    /// # Errors
    /// What went wrong.
    pub fn finish(mut self) -> Result<Run, String> {
        let Some(child) = self.child.take() else { return Err("the run has ended before".to_owned()) };
        let pid = child.id();
        // Its output is read while it runs: a full pipe would stop it.
        let reader = thread::spawn(move || child.wait_with_output());
        while !reader.is_finished() {
            if Instant::now() > self.deadline {
                let raw = i32::try_from(pid).unwrap_or(i32::MAX);
                let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(raw), nix::sys::signal::Signal::SIGKILL);
                let _ = reader.join();
                return Err(format!("{} does not end", self.generator.name()));
            }
            thread::sleep(Duration::from_millis(10));
        }
        match reader.join() {
            Ok(Ok(output)) => self.generator.read(&output),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("the thread that reads the output has died".to_owned()),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Fails only for a process that has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(generator: &Generator, cell: &str, length: Length) -> String {
        let target = SocketAddr::from(([127, 0, 0, 1], 4420));
        generator.args(&cell.parse().unwrap(), target, length, 1).join(" ")
    }

    #[test]
    fn both_generators_are_asked_for_the_same_load() {
        let (ours, stock) = (Generator::Addax("p".into()), Generator::Spdk("p".into()));
        let text = args(&ours, "malloc/mixed/4k/qd32/c4", Length::Seconds(2));
        for part in ["--rw randrw --mix 70", "--bs 4096", "--qd 8 --connections 4", "--cores [1]", "--time 2s"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let text = args(&stock, "malloc/mixed/4k/qd32/c4", Length::Seconds(2));
        for part in ["-w randrw", "-M 70", "-o 4096", "-q 32 -P 4", "-c 0x2", "-t 2", "--no-huge -L"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn our_arguments_are_ones_this_program_takes() {
        use clap::Parser;
        let generator = Generator::Addax("p".into());
        for length in [Length::Seconds(1), Length::Ios(2048)] {
            let text = args(&generator, "lvol-thin/write/4k/qd32/c1", length);
            let parsed = crate::cli::Cli::try_parse_from(std::iter::once("addax-perf").chain(text.split(' ')));
            assert!(parsed.is_ok(), "{text}: {parsed:?}");
        }
    }

    #[test]
    fn a_number_of_ios_bounds_a_run() {
        let (ours, stock) = (Generator::Addax("p".into()), Generator::Spdk("p".into()));
        assert!(args(&ours, "lvol-cow/write/4k/qd32/c1", Length::Ios(10)).contains("--size 40960"));
        assert!(args(&stock, "lvol-cow/write/4k/qd32/c1", Length::Ios(10)).contains("-d 10 -t 60"));
        let large: Cell = "null/read/1m/qd8/c1".parse().unwrap();
        assert!(ours.refuses(&large).is_some() && stock.refuses(&large).is_none());
    }

    #[test]
    fn a_failed_run_tells_what_was_printed() {
        let target = SocketAddr::from(([127, 0, 0, 1], 1));
        let cell = "null/read/4k/qd8/c1".parse().unwrap();
        let error = Generator::Spdk("/bin/false".into()).start(&cell, target, Length::Seconds(1), 0).unwrap().finish();
        assert!(error.unwrap_err().contains("spdk_nvme_perf: exit status: 1"));
        assert!(Generator::Addax("/nowhere".into()).start(&cell, target, Length::Seconds(1), 0).is_err());
    }
}
