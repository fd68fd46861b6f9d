//! The command line.
//!
//! Everything that can be refused without a connection is refused here, with what is allowed.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use addax_engine::nvme::host::ControllerParams;
use clap::{Args, Parser, Subcommand, ValueEnum};
use uuid::Uuid;

use crate::access::Pattern;
use crate::bench::{BenchArgs, CompareArgs};
use crate::load::Limit;
use crate::session::SessionParams;
use crate::units::{parse_size, parse_target, parse_time};
use addax_engine::cpus::{Cpus, parse_cpus};

const EXAMPLES: &str = "\
Examples:
  Random 4 KiB reads for ten seconds:
    addax-perf run --target 127.0.0.1:4420 --nqn nqn.2026-11.io.addax:volume:data --host-nqn nqn.2026-11.io.example:me
  Mixed load on two cores, as JSON:
    addax-perf run --target 10.0.0.1 --nqn NQN --rw randrw --mix 70 --bs 16k --qd 64 --cores 0x3 --time 1m -o json
  Write 256 MiB under verification, then read everything back:
    addax-perf verify --target 127.0.0.1 --nqn NQN --log data.wlog --size 256M
  Check one replica of that volume with the same log:
    addax-perf verify --target 127.0.0.1:4431 --nqn REPLICA --log data.wlog --expect-volume NQN --phase check

Exit codes: 0 all right; 1 mismatch; 2 usage; 3 I/O error or no connection.";

const BENCH_EXAMPLES: &str = "\
Examples:
  The quick subset against a built SPDK tree, report under target/bench:
    SPDK_DIR=/usr/src/spdk addax-perf bench
  One cell, longer:
    addax-perf bench --cells malloc/read/4k/qd32/c1 --pairs 9 --seconds 5 --rest no
  What a change has done:
    addax-perf bench-compare before.json target/bench/bench.json

Exit codes: 0 all right; 2 usage; 3 a run has failed.";

/// Load and verification for NVMe/TCP namespaces.
#[derive(Debug, Parser)]
#[command(version, after_help = EXAMPLES)]
pub struct Cli {
    #[command(subcommand)]
    pub command: CommandLine,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum CommandLine {
    /// Measure: IOPS, bandwidth and latencies.
    #[command(after_help = EXAMPLES)]
    Run(RunArgs),
    /// Judge: write self-describing blocks, read them back, tell lost, stale, torn and misplaced ones apart.
    #[command(after_help = EXAMPLES)]
    Verify(VerifyArgs),
    /// Race a data plane against a stock SPDK target and the floor, over a matrix of devices and loads.
    #[command(after_help = BENCH_EXAMPLES)]
    Bench(BenchArgs),
    /// Compare two results of bench: what a change has done.
    BenchCompare(CompareArgs),
}

/// Form of the results on standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    Table,
    Json,
}

/// Whom to connect to and how.
#[derive(Debug, Clone, Args)]
pub struct TargetArgs {
    /// Address of the target: address, address:port or [address]:port; the port is 4420 unless given.
    #[arg(long, value_name = "ADDRESS", value_parser = parse_target)]
    pub target: SocketAddr,
    /// Subsystem to connect to.
    #[arg(long)]
    pub nqn: String,
    /// Name of this host, as in the subsystem's list of allowed hosts.
    #[arg(long, default_value = "nqn.2026-11.io.addax:perf")]
    pub host_nqn: String,
    /// Identifier of this host; made from its name unless given.
    #[arg(long, value_name = "UUID")]
    pub host_id: Option<Uuid>,
    /// Namespace.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=0xFFFF_FFFE))]
    pub nsid: u32,
    /// I/O queues (one TCP connection each) on every core.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub connections: u16,
    /// I/Os in flight on every connection.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=1023))]
    pub qd: u16,
    /// Processors to run on: a hexadecimal mask (0x3) or a list in brackets ([0,2-3]).
    #[arg(long, default_value = "0x1", value_parser = parse_cpus)]
    pub cores: Cpus,
    /// Do not pin threads to their processors.
    #[arg(long)]
    pub no_pin: bool,
    /// How long a lost connection is tried again before I/O fails.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_time)]
    pub ctrl_loss_timeout: Duration,
    /// How long an I/O may take on one connection before the connection counts as lost.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_time)]
    pub io_timeout: Duration,
    /// Keep-alive timeout; 0 for none.
    #[arg(long, value_name = "TIME", default_value = "15s", value_parser = parse_time)]
    pub keep_alive: Duration,
    /// Digests of PDU headers.
    #[arg(long)]
    pub header_digest: bool,
    /// Digests of data.
    #[arg(long)]
    pub data_digest: bool,
}

/// The load.
#[derive(Debug, Clone, Args)]
pub struct LoadArgs {
    /// Percentage of reads in rw and randrw.
    #[arg(long, default_value_t = 70, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub mix: u32,
    /// Bytes of one I/O.
    #[arg(long, value_name = "SIZE", default_value = "4k", value_parser = parse_size)]
    pub bs: u64,
    /// How long to run (10s unless --size is given).
    #[arg(long, value_parser = parse_time, conflicts_with = "size")]
    pub time: Option<Duration>,
    /// How much to do: bytes read and written in all by run, bytes written by verify.
    #[arg(long, value_parser = parse_size)]
    pub size: Option<u64>,
    /// I/Os per second in all, at most; as fast as it goes unless given.
    #[arg(long, value_name = "IOPS", value_parser = clap::value_parser!(u32).range(1..))]
    pub rate: Option<u32>,
    /// First byte of the region to use; a multiple of --bs.
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    pub offset: u64,
    /// Bytes of the region to use (up to the end of the namespace unless given).
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub range: Option<u64>,
    /// Seed of the order and of the data of run.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// I/O errors after which to end; 0 for no limit.
    #[arg(long, default_value_t = 100)]
    pub max_errors: u64,
    /// Form of the results.
    #[arg(short, long, value_enum, default_value = "table")]
    pub output: Output,
    /// No progress on standard error.
    #[arg(short, long)]
    pub quiet: bool,
}

/// `addax-perf run`.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    /// Kind of load.
    #[arg(long, value_enum, default_value = "randread")]
    pub rw: Pattern,
    #[command(flatten)]
    pub load: LoadArgs,
}

/// Which phases of a verification to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PhaseChoice {
    /// Writes and judged reads under load.
    Write,
    /// Read everything and judge it.
    Check,
    /// First one, then the other.
    Both,
}

/// What units must hold that the log has never written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Unwritten {
    /// Anything, unless it is a block of this log.
    Any,
    /// Zeroes.
    Zero,
}

/// `addax-perf verify`.
#[derive(Debug, Clone, Args)]
pub struct VerifyArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    /// Write log; made when it does not exist, continued when it does. Takes 8 bytes of memory for each 4 KiB of the
    /// volume (128 MiB for 64 GiB) and is compacted when it has grown beyond 64 MiB and twice its compacted size.
    #[arg(long, value_name = "FILE")]
    pub log: PathBuf,
    /// Phases to run.
    #[arg(long, value_enum, default_value = "both")]
    pub phase: PhaseChoice,
    /// Volume that the blocks name (the subsystem unless given); needed to check a replica by itself.
    #[arg(long, value_name = "NAME")]
    pub expect_volume: Option<String>,
    /// Kind of load in the write phase.
    #[arg(long, value_enum, default_value = "randrw")]
    pub rw: Pattern,
    #[command(flatten)]
    pub load: LoadArgs,
    /// Bytes that a write changes at once: a power of two from 512 (the block size, at most 4k, unless given). Beyond 4k
    /// whole I/Os of up to that size must be atomic.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub atomic: Option<u64>,
    /// What was never written must be: anything, or zeroes.
    #[arg(long, value_enum, default_value = "any")]
    pub unwritten: Unwritten,
    /// Check only what was ever written, instead of the whole region.
    #[arg(long)]
    pub written_only: bool,
    /// Mismatches to describe.
    #[arg(long, value_name = "COUNT", default_value_t = 20)]
    pub samples: usize,
    /// Wait for the disk at every append to the log, so that it outlives a crash of this machine.
    #[arg(long)]
    pub sync_log: bool,
    /// Before anything of unknown fate is read after a restart: time for the target to end what the last run had sent.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_time)]
    pub settle: Duration,
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl TargetArgs {
    /// The parameters of one core's session.
    #[must_use]
    pub fn session(&self) -> SessionParams {
        let hostid = self.host_id.unwrap_or_else(|| Uuid::new_v5(&Uuid::NAMESPACE_OID, self.host_nqn.as_bytes()));
        let controller = ControllerParams {
            address: self.target,
            from: None,
            subnqn: self.nqn.clone(),
            hostnqn: self.host_nqn.clone(),
            hostid: hostid.into_bytes(),
            header_digest: self.header_digest,
            data_digest: self.data_digest,
            keep_alive_ms: u32::try_from(self.keep_alive.as_millis()).unwrap_or(u32::MAX),
            disable_sq_flow_control: true,
            io_queues: self.connections.into(),
            queue_entries: self.qd + 1,
            socket_ns: 5_000_000_000,
            connect_ns: 10_000_000_000,
            admin_ns: 10_000_000_000,
            io_ns: nanos(self.io_timeout),
        };
        SessionParams {
            controller,
            nsid: self.nsid,
            queues: self.connections,
            ctrl_loss_ns: nanos(self.ctrl_loss_timeout),
        }
    }

    /// I/Os in flight on one core.
    #[must_use]
    pub fn depth(&self) -> usize {
        usize::from(self.connections) * usize::from(self.qd)
    }
}

impl LoadArgs {
    /// When to end.
    #[must_use]
    pub fn limit(&self) -> Limit {
        match (self.size, self.time) {
            (Some(bytes), _) => Limit::Bytes(bytes),
            (None, time) => Limit::Time(nanos(time.unwrap_or(Duration::from_secs(10)))),
        }
    }

    /// The region of a namespace of `bytes` bytes: first byte and length, the latter whole I/Os.
    ///
    /// # Errors
    /// What is not allowed, and what is.
    pub fn region(&self, bytes: u64) -> Result<(u64, u64), String> {
        let Self { bs, offset, .. } = *self;
        if !offset.is_multiple_of(bs) {
            return Err(format!("--offset {offset} is not allowed: a multiple of --bs {bs} is needed"));
        }
        let most = bytes.saturating_sub(offset);
        let range = self.range.unwrap_or(most);
        if range > most {
            return Err(format!("--range {range} from --offset {offset} ends beyond the namespace of {bytes} bytes"));
        }
        if range < bs {
            return Err(format!("a region of {range} bytes has no room for one I/O of --bs {bs}"));
        }
        Ok((offset, range))
    }

    /// Checks the size of I/Os against the namespace.
    ///
    /// # Errors
    /// What is not allowed, and what is.
    pub fn check_io_size(&self, unit: u64, most: u64) -> Result<(), String> {
        if self.bs == 0 || !self.bs.is_multiple_of(unit) || self.bs > most {
            return Err(format!("--bs {} is not allowed: a multiple of {unit} up to {most} is needed here", self.bs));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn load(args: &[&str]) -> LoadArgs {
        let base = ["addax-perf", "run", "--target", "127.0.0.1", "--nqn", "nqn.2026-11.io.addax:volume:v"];
        let cli = Cli::try_parse_from(base.iter().chain(args)).unwrap();
        match cli.command {
            CommandLine::Run(run) => run.load,
            _ => unreachable!("run was asked for"),
        }
    }

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn time_and_size_exclude_each_other_and_time_is_the_default() {
        assert_eq!(load(&[]).limit(), Limit::Time(10_000_000_000));
        assert_eq!(load(&["--size", "1M"]).limit(), Limit::Bytes(1 << 20));
        let both = ["addax-perf", "run", "--target", "127.0.0.1", "--nqn", "n", "--size", "1M", "--time", "1s"];
        assert!(Cli::try_parse_from(both).is_err());
    }

    #[test]
    fn the_region_must_fit() {
        let args = load(&["--offset", "1M", "--range", "2M"]);
        assert_eq!(args.region(4 << 20), Ok((1 << 20, 2 << 20)));
        assert!(args.region(2 << 20).is_err());
        assert_eq!(load(&["--offset", "1M"]).region(4 << 20), Ok((1 << 20, 3 << 20)));
        assert!(load(&["--offset", "1k"]).region(4 << 20).is_err());
        assert!(load(&["--bs", "8M"]).region(4 << 20).is_err());
    }

    #[test]
    fn the_size_of_an_io_is_checked() {
        assert!(load(&[]).check_io_size(4096, 131_072).is_ok());
        assert!(load(&["--bs", "512"]).check_io_size(4096, 131_072).is_err());
        assert!(load(&["--bs", "256k"]).check_io_size(4096, 131_072).is_err());
        assert!(load(&["--bs", "0"]).check_io_size(4096, 131_072).is_err());
    }
}
