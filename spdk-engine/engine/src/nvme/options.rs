//! Options of the initiator: the module's (`bdev_nvme_set_options`) and one controller's (`bdev_nvme_attach_controller`).
//!
//! All of SPDK's members are taken and given back by `save_config`. Those that name what this initiator does not have
//! (RDMA, polling periods, priorities) have no effect. Where SPDK has "off" for a deadline there is a default here:
//! every command has a deadline.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::reactor::driver::{NANOS_PER_MS, NANOS_PER_S, Nanos};
use crate::rpc::RpcError;

/// Deadline of commands where none is set.
pub const DEFAULT_DEADLINE_NS: Nanos = 30 * NANOS_PER_S;
/// Deadline of a TCP connect and of the initialisation where none is set.
pub const DEFAULT_SOCKET_NS: Nanos = 3 * NANOS_PER_S;

/// Options of the module, in SPDK's order and with SPDK's defaults.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Options {
    pub action_on_timeout: TimeoutAction,
    pub timeout_us: u64,
    pub timeout_admin_us: u64,
    pub keep_alive_timeout_ms: u32,
    pub arbitration_burst: u32,
    pub low_priority_weight: u32,
    pub medium_priority_weight: u32,
    pub high_priority_weight: u32,
    pub nvme_adminq_poll_period_us: u64,
    pub nvme_ioq_poll_period_us: u64,
    pub io_queue_requests: u32,
    pub delay_cmd_submit: bool,
    pub transport_retry_count: u32,
    pub bdev_retry_count: i32,
    pub transport_ack_timeout: u8,
    pub ctrlr_loss_timeout_sec: i32,
    pub reconnect_delay_sec: u32,
    pub fast_io_fail_timeout_sec: u32,
    pub disable_auto_failback: bool,
    pub generate_uuids: bool,
    pub transport_tos: u8,
    pub nvme_error_stat: bool,
    pub rdma_srq_size: u32,
    pub io_path_stat: bool,
    pub allow_accel_sequence: bool,
    pub rdma_max_cq_size: u32,
    pub rdma_cm_event_timeout_ms: u16,
    pub dhchap_digests: Vec<String>,
    pub dhchap_dhgroups: Vec<String>,
    pub rdma_umr_per_io: bool,
    pub tcp_connect_timeout_ms: u32,
    pub enable_flush: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub multipath_opts: Option<Value>,
}

/// What SPDK does when a command takes too long. Here a connection that does not answer is always given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TimeoutAction {
    None,
    Reset,
    Abort,
}

impl Default for Options {
    fn default() -> Self {
        let words = |list: &[&str]| list.iter().map(|w| (*w).to_owned()).collect();
        Self {
            action_on_timeout: TimeoutAction::None,
            timeout_us: 0,
            timeout_admin_us: 0,
            keep_alive_timeout_ms: 10_000,
            arbitration_burst: 0,
            low_priority_weight: 0,
            medium_priority_weight: 0,
            high_priority_weight: 0,
            nvme_adminq_poll_period_us: 10_000,
            nvme_ioq_poll_period_us: 0,
            io_queue_requests: 0,
            delay_cmd_submit: true,
            transport_retry_count: 4,
            bdev_retry_count: 3,
            transport_ack_timeout: 0,
            ctrlr_loss_timeout_sec: 0,
            reconnect_delay_sec: 0,
            fast_io_fail_timeout_sec: 0,
            disable_auto_failback: false,
            generate_uuids: false,
            transport_tos: 0,
            nvme_error_stat: false,
            rdma_srq_size: 0,
            io_path_stat: false,
            allow_accel_sequence: false,
            rdma_max_cq_size: 0,
            rdma_cm_event_timeout_ms: 0,
            dhchap_digests: words(&["sha256", "sha384", "sha512"]),
            dhchap_dhgroups: words(&["null", "ffdhe2048", "ffdhe3072", "ffdhe4096", "ffdhe6144", "ffdhe8192"]),
            rdma_umr_per_io: false,
            tcp_connect_timeout_ms: 0,
            enable_flush: false,
            multipath_opts: None,
        }
    }
}

impl Options {
    /// These options with the members of `change` put in their place.
    ///
    /// # Errors
    /// `None` for members that do not exist or have another type.
    #[must_use]
    pub fn changed(&self, change: &Value) -> Option<Self> {
        let mut merged = serde_json::to_value(self).ok()?;
        let members = merged.as_object_mut()?;
        for (name, value) in change.as_object()? {
            members.insert(name.clone(), value.clone());
        }
        serde_json::from_value(merged).ok()
    }

    /// Whether the values fit together (SPDK answers -22 if not).
    #[must_use]
    pub fn is_valid(&self) -> bool {
        let timeouts = Timeouts {
            ctrlr_loss_sec: self.ctrlr_loss_timeout_sec,
            reconnect_delay_sec: self.reconnect_delay_sec,
            fast_io_fail_sec: self.fast_io_fail_timeout_sec,
        };
        let admin_without_io = self.timeout_us == 0 && self.timeout_admin_us > 0;
        self.bdev_retry_count >= -1 && !admin_without_io && timeouts.is_valid()
    }

    /// Deadline of I/O commands.
    #[must_use]
    pub fn io_ns(&self) -> Nanos {
        micros(self.timeout_us).unwrap_or(DEFAULT_DEADLINE_NS)
    }

    /// Deadline of admin commands; that of I/O commands where none is set.
    #[must_use]
    pub fn admin_ns(&self) -> Nanos {
        micros(self.timeout_admin_us).unwrap_or_else(|| self.io_ns())
    }

    /// Deadline of a TCP connect and of the initialisation.
    #[must_use]
    pub fn socket_ns(&self) -> Nanos {
        match self.tcp_connect_timeout_ms {
            0 => DEFAULT_SOCKET_NS,
            ms => Nanos::from(ms) * NANOS_PER_MS,
        }
    }
}

fn micros(us: u64) -> Option<Nanos> {
    (us > 0).then(|| us.saturating_mul(1000))
}

/// How long a lost controller is waited for, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// Until the controller and its devices are removed; -1 for never, 0 for one attempt.
    pub ctrlr_loss_sec: i32,
    /// Between attempts.
    pub reconnect_delay_sec: u32,
    /// Until I/O fails instead of being held; 0 for as long as the controller exists.
    pub fast_io_fail_sec: u32,
}

impl Timeouts {
    /// SPDK's rule for the three.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        let (delay, fast) = (self.reconnect_delay_sec, self.fast_io_fail_sec);
        match u32::try_from(self.ctrlr_loss_sec) {
            Err(_) => self.ctrlr_loss_sec == -1 && delay > 0 && (fast == 0 || fast >= delay),
            Ok(0) => delay == 0 && fast == 0,
            Ok(loss) => delay > 0 && delay <= loss && (fast == 0 || (fast >= delay && fast <= loss)),
        }
    }
}

/// Parameters of `bdev_nvme_attach_controller`, with ours: `addax_no_replay`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attach {
    pub name: String,
    pub trtype: String,
    pub traddr: String,
    pub adrfam: Option<String>,
    pub trsvcid: Option<String>,
    pub priority: Option<String>,
    pub subnqn: Option<String>,
    pub hostnqn: Option<String>,
    pub hostaddr: Option<String>,
    pub hostsvcid: Option<String>,
    #[serde(default)]
    pub prchk_reftag: bool,
    #[serde(default)]
    pub prchk_guard: bool,
    #[serde(default)]
    pub hdgst: bool,
    #[serde(default)]
    pub ddgst: bool,
    #[serde(default = "connect_timeout_us")]
    pub fabrics_connect_timeout_us: u64,
    #[serde(default)]
    pub multipath: Multipath,
    #[serde(default = "io_queues")]
    pub num_io_queues: u32,
    pub ctrlr_loss_timeout_sec: Option<i32>,
    pub reconnect_delay_sec: Option<u32>,
    pub fast_io_fail_timeout_sec: Option<u32>,
    pub psk: Option<String>,
    #[serde(default = "max_bdevs")]
    pub max_bdevs: u32,
    pub dhchap_key: Option<String>,
    pub dhchap_ctrlr_key: Option<String>,
    #[serde(default)]
    pub allow_unrecognized_csi: bool,
    pub multipath_opts: Option<Value>,
    #[serde(default)]
    pub disable_sq_flow_control: bool,
    /// I/O that a lost connection leaves open fails at once with a path error, and so does new I/O until the next
    /// session is there: for a caller that replays by itself. Without a loss timeout the next session is one that is
    /// asked for by a reset.
    #[serde(default)]
    pub addax_no_replay: bool,
}

fn connect_timeout_us() -> u64 {
    500_000
}

fn io_queues() -> u32 {
    1024
}

fn max_bdevs() -> u32 {
    128
}

/// What to do with a second path to the same subsystem.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Multipath {
    Failover,
    #[default]
    Multipath,
    Disable,
}

impl Attach {
    /// The three timeouts, with the module's in place of those left out.
    ///
    /// # Errors
    /// When they contradict each other.
    pub fn timeouts(&self, options: &Options) -> Result<Timeouts, RpcError> {
        let timeouts = Timeouts {
            ctrlr_loss_sec: self.ctrlr_loss_timeout_sec.unwrap_or(options.ctrlr_loss_timeout_sec),
            reconnect_delay_sec: self.reconnect_delay_sec.unwrap_or(options.reconnect_delay_sec),
            fast_io_fail_sec: self.fast_io_fail_timeout_sec.unwrap_or(options.fast_io_fail_timeout_sec),
        };
        if timeouts.is_valid() { Ok(timeouts) } else { Err(RpcError::errno(libc::EINVAL)) }
    }

    /// The parameters that make the same controller again.
    #[must_use]
    pub fn to_config(&self, timeouts: Timeouts) -> Value {
        let mut config = json!({
            "name": self.name,
            "trtype": "TCP",
            "adrfam": if self.traddr.contains(':') { "IPv6" } else { "IPv4" },
            "traddr": self.traddr,
            "trsvcid": self.trsvcid,
            "subnqn": self.subnqn,
            "prchk_reftag": self.prchk_reftag,
            "prchk_guard": self.prchk_guard,
            "ctrlr_loss_timeout_sec": timeouts.ctrlr_loss_sec,
            "reconnect_delay_sec": timeouts.reconnect_delay_sec,
            "fast_io_fail_timeout_sec": timeouts.fast_io_fail_sec,
            "hdgst": self.hdgst,
            "ddgst": self.ddgst,
            "fabrics_connect_timeout_us": self.fabrics_connect_timeout_us,
            "num_io_queues": self.num_io_queues,
            "max_bdevs": self.max_bdevs,
            "disable_sq_flow_control": self.disable_sq_flow_control,
        });
        let texts = [("hostnqn", &self.hostnqn), ("hostaddr", &self.hostaddr), ("hostsvcid", &self.hostsvcid)];
        for (name, text) in texts {
            if let Some(text) = text {
                config[name] = json!(text);
            }
        }
        if self.addax_no_replay {
            config["addax_no_replay"] = json!(true);
        }
        config
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_three_timeouts_follow_spdks_rule() {
        let valid = |loss, delay, fast| {
            Timeouts { ctrlr_loss_sec: loss, reconnect_delay_sec: delay, fast_io_fail_sec: fast }.is_valid()
        };
        assert!(valid(0, 0, 0) && valid(-1, 1, 0) && valid(-1, 2, 2) && valid(10, 1, 0) && valid(10, 10, 10));
        assert!(!valid(0, 1, 0) && !valid(0, 0, 1) && !valid(-2, 1, 0));
        assert!(!valid(-1, 0, 0) && !valid(-1, 2, 1));
        assert!(!valid(10, 0, 0) && !valid(10, 11, 0) && !valid(10, 2, 1) && !valid(10, 2, 11));
    }

    #[test]
    fn omitted_options_keep_their_value() {
        let first = Options::default().changed(&json!({ "timeout_us": 7, "bdev_retry_count": -1 })).unwrap();
        let second = first.changed(&json!({ "reconnect_delay_sec": 3 })).unwrap();
        assert_eq!((second.timeout_us, second.bdev_retry_count, second.reconnect_delay_sec), (7, -1, 3));
        assert!(second.changed(&json!({ "no_such_option": 1 })).is_none());
        assert!(second.changed(&json!({ "timeout_us": "7" })).is_none());
        assert_eq!(Options::default().changed(&serde_json::to_value(&second).unwrap()).unwrap(), second);
    }

    #[test]
    fn a_saved_controller_is_read_back() {
        let given = json!({ "name": "N", "trtype": "tcp", "traddr": "127.0.0.1", "trsvcid": "4420", "subnqn": "nqn.a:b",
            "hostnqn": "nqn.c:d", "ctrlr_loss_timeout_sec": -1, "reconnect_delay_sec": 1, "addax_no_replay": true });
        let attach: Attach = serde_json::from_value(given).unwrap();
        let timeouts = attach.timeouts(&Options::default()).unwrap();
        let saved = attach.to_config(timeouts);
        let again: Attach = serde_json::from_value(saved.clone()).unwrap();
        assert_eq!(again.to_config(again.timeouts(&Options::default()).unwrap()), saved);
        assert!(again.addax_no_replay && again.hostnqn.as_deref() == Some("nqn.c:d"));
    }
}
