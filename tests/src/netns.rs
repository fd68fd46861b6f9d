//! A network of its own for a local cluster: every node, the API server and the host in a network namespace, so that packets
//! between any two of them can be made to vanish, in one direction or in both.
//!
//! | Place | Address | Runs there |
//! |---|---|---|
//! | `node-N` | 10.91.0.N | a node's manager, agent and data plane |
//! | `host` | 10.91.0.100 | hosts |
//! | `shelf` | 10.91.0.101 | targets whose namespaces are disks of nodes |
//! | `hub` | 10.91.0.254 | the bridge, the API server, verbs |
//!
//! *How.* A veth pair leads from each place to a bridge in the hub. A cut is a routing rule of the *receiver* that sends
//! what comes from an address into a black hole: no reset and no ICMP, so the sender learns nothing. The rules stand before
//! the one for local addresses, which is moved back for it.
//!
//! *Invariants.* Names carry this process's id. A helper process removes the namespaces when this process ends, however it
//! ends, or when the value is dropped.
//!
//! *When things fail.* [`Net::new`] gives none, and says so loudly, where the machine does not let this user make network
//! namespaces. Every other error names the command and what it printed.

use std::collections::BTreeSet;
use std::io::Write;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, ensure};

/// Where the bridge, the API server and verbs are.
pub const HUB: &str = "hub";
/// Where hosts are.
pub const HOST_PLACE: &str = "host";
/// Where targets are whose namespaces are disks of nodes.
pub const SHELF: &str = "shelf";

/// Where a rule comes before every other one.
const CUT_PREFERENCE: &str = "100";
const LOCAL_PREFERENCE: &str = "200";

static MADE: AtomicU32 = AtomicU32::new(0);

/// The network; see the module.
#[derive(Debug)]
pub struct Net {
    prefix: String,
    places: Vec<String>,
    cuts: Mutex<BTreeSet<(String, String)>>,
    _reaper: Reaper,
}

impl Net {
    /// A network with places for so many nodes. None where that is not allowed.
    ///
    /// # Errors
    /// When namespaces can be made, but not joined.
    pub fn new(nodes: u32) -> Result<Option<Self>> {
        let prefix = format!("addax-e2e-{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let mut places: Vec<String> = (1..=nodes).map(|number| format!("node-{number}")).collect();
        places.extend([HOST_PLACE, SHELF, HUB].map(str::to_owned));
        let remove = places.iter().map(|place| format!("ip netns delete {prefix}-{place}\n")).collect::<String>();
        let reaper = Reaper::start(&remove, &[])?;
        let net = Self { prefix, places, cuts: Mutex::default(), _reaper: reaper };
        if let Err(error) = ip(&["netns", "add", &net.namespace(HUB)]) {
            skipped(&format!("tests that cut the network, because no network namespace can be made: {error:#}"));
            return Ok(None);
        }
        net.build()?;
        Ok(Some(net))
    }

    fn build(&self) -> Result<()> {
        let hub = self.namespace(HUB);
        ip(&["-n", &hub, "link", "set", "lo", "up"])?;
        ip(&["-n", &hub, "link", "add", "br0", "type", "bridge"])?;
        ip(&["-n", &hub, "address", "add", &format!("{}/24", address(HUB)?), "dev", "br0"])?;
        ip(&["-n", &hub, "link", "set", "br0", "up"])?;
        for (number, place) in self.places.iter().enumerate().filter(|(_, place)| *place != HUB) {
            let (there, port) = (self.namespace(place), format!("port{number}"));
            ip(&["netns", "add", &there])?;
            ip(&["-n", &hub, "link", "add", &port, "type", "veth", "peer", "name", "eth0", "netns", &there])?;
            ip(&["-n", &hub, "link", "set", &port, "master", "br0", "up"])?;
            ip(&["-n", &there, "link", "set", "lo", "up"])?;
            ip(&["-n", &there, "address", "add", &format!("{}/24", address(place)?), "dev", "eth0"])?;
            ip(&["-n", &there, "link", "set", "eth0", "up"])?;
            ip(&["-n", &there, "rule", "add", "preference", LOCAL_PREFERENCE, "lookup", "local"])?;
            ip(&["-n", &there, "rule", "delete", "preference", "0"])?;
        }
        Ok(())
    }

    /// The namespace of a place, as `ip netns` names it.
    pub fn namespace(&self, place: &str) -> String {
        format!("{}-{place}", self.prefix)
    }

    /// The file by which it is entered.
    pub fn file(&self, place: &str) -> PathBuf {
        Path::new("/run/netns").join(self.namespace(place))
    }

    /// Makes what `from` sends to `to` vanish.
    ///
    /// # Errors
    /// When the rule cannot be set.
    pub fn cut(&self, from: &str, to: &str) -> Result<()> {
        let mut cuts = self.cuts.lock().unwrap_or_else(PoisonError::into_inner);
        if cuts.insert((from.to_owned(), to.to_owned())) {
            self.rule("add", from, to)?;
        }
        Ok(())
    }

    /// Makes what two places send each other vanish.
    ///
    /// # Errors
    /// As [`Self::cut`].
    pub fn part(&self, one: &str, other: &str) -> Result<()> {
        self.cut(one, other)?;
        self.cut(other, one)
    }

    /// Lifts a cut.
    ///
    /// # Errors
    /// When there is none or the rule cannot be removed.
    pub fn lift(&self, from: &str, to: &str) -> Result<()> {
        let mut cuts = self.cuts.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(cuts.remove(&(from.to_owned(), to.to_owned())), "nothing is cut from {from} to {to}");
        self.rule("delete", from, to)
    }

    /// Lifts all cuts.
    ///
    /// # Errors
    /// When a rule cannot be removed.
    pub fn heal(&self) -> Result<()> {
        let mut cuts = self.cuts.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((from, to)) = cuts.pop_first() {
            self.rule("delete", &from, &to)?;
        }
        Ok(())
    }

    /// Lets a place send so many Mbit/s only.
    ///
    /// # Errors
    /// When that cannot be set.
    pub fn narrow(&self, place: &str, mbit: u32) -> Result<()> {
        let (there, rate) = (self.namespace(place), format!("{mbit}mbit"));
        let limit = ["tbf", "rate", &rate, "burst", "64k", "latency", "200ms"];
        tool("tc", &[&["-n", &there, "qdisc", "add", "dev", "eth0", "root"][..], &limit].concat())
    }

    /// Lets it send as much as it can.
    ///
    /// # Errors
    /// When nothing was set.
    pub fn widen(&self, place: &str) -> Result<()> {
        tool("tc", &["-n", &self.namespace(place), "qdisc", "delete", "dev", "eth0", "root"])
    }

    fn rule(&self, verb: &str, from: &str, to: &str) -> Result<()> {
        let (there, source) = (self.namespace(to), format!("{}/32", address(from)?));
        let what = ["preference", CUT_PREFERENCE, "iif", "eth0", "from", &source, "blackhole"];
        ip(&[&["-n", &there, "rule", verb][..], &what].concat())
    }
}

/// The address of a place.
///
/// # Errors
/// When there is no such place.
pub fn address(place: &str) -> Result<Ipv4Addr> {
    let last = match place {
        HOST_PLACE => 100,
        SHELF => 101,
        HUB => 254,
        node => node.strip_prefix("node-").and_then(|number| number.parse().ok()).context(format!("place {node:?}"))?,
    };
    Ok(Ipv4Addr::new(10, 91, 0, last))
}

/// A command that runs in a namespace, by its file; plain without one. The process keeps its pid.
pub fn command_in(namespace: Option<&Path>, program: &Path) -> Command {
    let Some(file) = namespace else { return Command::new(program) };
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", file.display())).arg("--").arg(program);
    command
}

/// Says past the capture of the test harness that something is not tested.
pub fn skipped(what: &str) {
    // Who has closed stderr wants to read nothing.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {what}");
}

/// Runs `ip`.
///
/// # Errors
/// With what it printed.
pub fn ip(args: &[&str]) -> Result<()> {
    tool("ip", args)
}

fn tool(name: &str, args: &[&str]) -> Result<()> {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let done = Command::new(name).env("PATH", path).args(args).stdin(Stdio::null()).output();
    let done = done.with_context(|| name.to_owned())?;
    ensure!(done.status.success(), "{name} {}: {}", args.join(" "), String::from_utf8_lossy(&done.stderr));
    Ok(())
}

/// A shell that waits for the end of this process, or for the drop of this value, and then runs a script.
#[derive(Debug)]
pub struct Reaper {
    shell: Child,
}

impl Reaper {
    /// Starts it, with variables of its environment.
    ///
    /// # Errors
    /// When there is no shell.
    pub fn start(script: &str, variables: &[(&str, &str)]) -> Result<Self> {
        // A signal to the group of the test, as by Ctrl-C, must not end what cleans up after it.
        let script =
            format!("trap '' INT TERM HUP\nPATH=$PATH:/usr/sbin:/sbin\nread -r line\n{{ {script}\n}} 2>/dev/null");
        let mut shell = Command::new("sh");
        shell
            .args(["-c", &script])
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        Ok(Self { shell: shell.spawn().context("sh")? })
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        // It does not fail, and what it could not remove is removed by nobody.
        let _ = self.shell.wait();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::{ErrorKind, Read};
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;
    use crate::door::within;

    #[test]
    fn what_is_cut_vanishes_silently_and_comes_when_the_cut_is_lifted() {
        let Some(net) = Net::new(2).unwrap() else { return };
        let at = SocketAddr::from((address("node-2").unwrap(), 5000));
        let listener = within(&net.file("node-2"), || TcpListener::bind(at)).unwrap().unwrap();
        let mut one = within(&net.file("node-1"), || TcpStream::connect(at)).unwrap().unwrap();
        let (mut two, from) = listener.accept().unwrap();
        assert_eq!(from.ip(), address("node-1").unwrap());
        let short = Some(Duration::from_millis(300));
        one.set_read_timeout(short).unwrap();
        two.set_read_timeout(short).unwrap();
        let mut byte = [0];
        one.write_all(b"a").unwrap();
        two.read_exact(&mut byte).unwrap();

        // One way: what goes the other way arrives.
        net.cut("node-1", "node-2").unwrap();
        one.write_all(b"b").unwrap();
        assert_eq!(two.read(&mut byte).unwrap_err().kind(), ErrorKind::WouldBlock, "it has arrived");
        two.write_all(b"c").unwrap();
        one.read_exact(&mut byte).unwrap();
        let again = within(&net.file("node-1"), || TcpStream::connect_timeout(&at, Duration::from_millis(300)));
        assert_eq!(again.unwrap().unwrap_err().kind(), ErrorKind::TimedOut, "refused instead of dropped");
        net.lift("node-1", "node-2").unwrap();
        two.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        two.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"b");

        net.part("node-1", "node-2").unwrap();
        two.write_all(b"d").unwrap();
        assert_eq!(one.read(&mut byte).unwrap_err().kind(), ErrorKind::WouldBlock, "it has arrived");
        net.heal().unwrap();
        one.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        one.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"d");
        let file = net.file(HUB);
        assert!(file.exists());
        drop(net);
        assert!(!file.exists(), "namespaces are left");
    }
}
