//! NVMe over TCP as the guest's kernel does it: connect by `nvme-cli`, find the device by NQN, watch its paths.
//!
//! Everything about a device is read from sysfs, never guessed from its number: a guest may have several
//! connections, and the kernel hands out numbers in its own order.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::{Guest, HOST_ADDRESS};

/// Bounds each short command in the guest; emulation on a busy machine is slow, so it is generous.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

/// Where a subsystem listens, as the guest sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// IP address, for example [`HOST_ADDRESS`].
    pub traddr: String,
    /// TCP port.
    pub port: u16,
    /// The subsystem's name.
    pub nqn: String,
}

impl Target {
    /// A subsystem that listens on `port` of this machine's 127.0.0.1.
    pub fn on_host(port: u16, nqn: &str) -> Self {
        Self { traddr: HOST_ADDRESS.to_owned(), port, nqn: nqn.to_owned() }
    }
}

/// How a connection behaves. The default is what the CSI node uses: short keep-alives, quick reconnects.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    /// Seconds without a connection after which the kernel gives the controller up; -1 for never.
    pub ctrl_loss_tmo_s: i32,
    /// Seconds between attempts to reconnect.
    pub reconnect_delay_s: u32,
    /// Seconds without an answer after which the connection counts as lost.
    pub keep_alive_tmo_s: u32,
    /// Further options of `nvme connect`, such as `--hdr-digest`.
    pub extra: Vec<String>,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self { ctrl_loss_tmo_s: 60, reconnect_delay_s: 1, keep_alive_tmo_s: 5, extra: Vec::new() }
    }
}

/// One path to a subsystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Controller {
    /// Name in sysfs, such as `nvme0`.
    pub name: String,
    /// State in sysfs, such as `live` or `connecting`.
    pub state: String,
}

/// A connected subsystem.
#[derive(Debug)]
pub struct Connection<'guest> {
    guest: &'guest Guest,
    nqn: String,
}

/// Loads the transport's module; harmless when it is loaded.
///
/// # Errors
/// When the module cannot be loaded, or the guest is gone.
pub fn load_modules(guest: &Guest) -> Result<()> {
    guest.check("modprobe nvme-tcp", COMMAND_TIMEOUT)?;
    Ok(())
}

/// Connects to `target`.
///
/// # Errors
/// When the kernel refuses; the error has `nvme-cli`'s message and the kernel's.
pub fn connect<'guest>(guest: &'guest Guest, target: &Target, options: &ConnectOptions) -> Result<Connection<'guest>> {
    load_modules(guest)?;
    let command = connect_command(target, options);
    guest
        .check(&format!("{command} || {{ code=$?; dmesg | tail -n 5 >&2; exit $code; }}"), COMMAND_TIMEOUT)
        .with_context(|| format!("cannot connect to {}", target.nqn))?;
    Ok(Connection { guest, nqn: target.nqn.clone() })
}

fn connect_command(target: &Target, options: &ConnectOptions) -> String {
    let mut command = format!(
        "nvme connect -t tcp -a {} -s {} -n '{}' --ctrl-loss-tmo={} --reconnect-delay={} \
         --keep-alive-tmo={}",
        target.traddr,
        target.port,
        target.nqn,
        options.ctrl_loss_tmo_s,
        options.reconnect_delay_s,
        options.keep_alive_tmo_s,
    );
    for option in &options.extra {
        command.push(' ');
        command.push_str(option);
    }
    command
}

impl Connection<'_> {
    /// Waits until the subsystem has a namespace and returns its device, such as `/dev/nvme0n1`.
    ///
    /// # Errors
    /// When there is none within `timeout`.
    pub fn device(&self, timeout: Duration) -> Result<String> {
        let report = self.wait_for("^device ", timeout).context("no namespace")?;
        let name =
            report.lines().find_map(|line| line.strip_prefix("device ")).context("the report names no device")?;
        Ok(format!("/dev/{name}"))
    }

    /// The paths to the subsystem, in the order of their names.
    ///
    /// # Errors
    /// When the guest is gone.
    pub fn controllers(&self) -> Result<Vec<Controller>> {
        let report = self.guest.check(&format!("nvme-device '{}'", self.nqn), COMMAND_TIMEOUT)?;
        Ok(parse_controllers(&report))
    }

    /// Waits until some path is in `state`.
    ///
    /// # Errors
    /// When none is within `timeout`.
    pub fn wait_for_state(&self, state: &str, timeout: Duration) -> Result<()> {
        self.wait_for(&format!("^controller .* {state}$"), timeout)
            .with_context(|| format!("no path became {state}"))?;
        Ok(())
    }

    /// Ends one path to the subsystem, by its controller's name.
    ///
    /// # Errors
    /// When the kernel does not let go of it.
    pub fn drop_path(&self, controller: &str) -> Result<()> {
        self.guest.check(&format!("nvme disconnect -d {controller}"), COMMAND_TIMEOUT)?;
        if let Some(left) = self.controllers()?.into_iter().find(|path| path.name == controller) {
            bail!("{} still has path {left:?} after disconnecting it", self.nqn);
        }
        Ok(())
    }

    /// Ends every path to the subsystem.
    ///
    /// # Errors
    /// When the kernel does not let go of it.
    pub fn disconnect(self) -> Result<()> {
        let nqn = &self.nqn;
        self.guest.check(&format!("nvme disconnect -n '{nqn}'"), COMMAND_TIMEOUT)?;
        let left = self.controllers()?;
        if !left.is_empty() {
            bail!("{nqn} still has paths after disconnecting: {left:?}");
        }
        Ok(())
    }

    /// Waits until a line of the subsystem's report matches `pattern`; returns that report.
    fn wait_for(&self, pattern: &str, timeout: Duration) -> Result<String> {
        let nqn = &self.nqn;
        let script = format!(
            "report=/tmp/report.$$\n\
             until nvme-device '{nqn}' >$report; grep -q '{pattern}' $report; do sleep 0.1; done\n\
             cat $report; rm $report"
        );
        self.guest.check(&script, timeout)
    }
}

fn parse_controllers(report: &str) -> Vec<Controller> {
    report
        .lines()
        .filter_map(|line| line.strip_prefix("controller ")?.split_once(' '))
        .map(|(name, state)| Controller { name: name.to_owned(), state: state.to_owned() })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controllers_are_read_from_the_report() {
        let report = "controller nvme0 live\ncontroller nvme1 connecting\ndevice nvme0n1\n";
        let states: Vec<String> = parse_controllers(report)
            .into_iter()
            .map(|controller| format!("{}={}", controller.name, controller.state))
            .collect();
        assert_eq!(states, ["nvme0=live", "nvme1=connecting"]);
    }

    #[test]
    fn options_reach_the_command() {
        let options =
            ConnectOptions { ctrl_loss_tmo_s: -1, extra: vec!["--hdr-digest".into()], ..ConnectOptions::default() };
        let command = connect_command(&Target::on_host(4420, "nqn.a:b"), &options);
        assert!(command.contains("-a 10.0.2.2 -s 4420 -n 'nqn.a:b'"), "{command}");
        assert!(command.contains("--ctrl-loss-tmo=-1"), "{command}");
        assert!(command.ends_with("--hdr-digest"), "{command}");
    }
}
