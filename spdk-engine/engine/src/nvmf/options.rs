//! Options of the TCP transport (`nvmf_create_transport`).

use serde::Deserialize;
use serde_json::{Value, json};

use super::session::Limits;
use crate::reactor::driver::{NANOS_PER_MS, Nanos};

/// Most I/O queues of a controller.
pub const IO_QUEUES_MAX: u16 = 127;
/// In-capsule data of admin and Fabrics commands, in bytes.
const IN_CAPSULE_CONTROL_BYTES: u32 = 8192;

/// The options. Those that concern another transport or SPDK's memory are kept and shown, and have no effect here.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct TransportOptions {
    pub max_queue_depth: u16,
    pub max_io_qpairs_per_ctrlr: u16,
    pub in_capsule_data_size: u32,
    pub max_io_size: u32,
    pub max_aq_depth: u16,
    pub iobuf_small_cache_size: u32,
    pub iobuf_large_cache_size: u32,
    pub dif_insert_or_strip: bool,
    pub zcopy: bool,
    pub c2h_success: bool,
    pub sock_priority: u32,
    pub abort_timeout_sec: u32,
    pub ack_timeout: u32,
    pub data_wr_pool_size: u32,
    pub disable_command_passthru: bool,
    pub control_msg_num: u32,
    pub acceptor_poll_rate: u32,
    /// Keep alive granularity in units of 100 ms.
    pub kas: u16,
    /// Shortest keep alive timeout in ms.
    pub min_kato: u32,
}

impl Default for TransportOptions {
    fn default() -> Self {
        Self {
            max_queue_depth: 128,
            max_io_qpairs_per_ctrlr: IO_QUEUES_MAX,
            in_capsule_data_size: 4096,
            max_io_size: 131_072,
            max_aq_depth: 128,
            iobuf_small_cache_size: u32::MAX,
            iobuf_large_cache_size: u32::MAX,
            dif_insert_or_strip: false,
            zcopy: false,
            c2h_success: true,
            sock_priority: 0,
            abort_timeout_sec: 1,
            ack_timeout: 0,
            data_wr_pool_size: 0,
            disable_command_passthru: false,
            control_msg_num: 32,
            acceptor_poll_rate: 10_000,
            kas: 100,
            min_kato: 10_000,
        }
    }
}

impl TransportOptions {
    /// Whether the target can work with them; `max_buffer_bytes` is the longest I/O buffer.
    #[must_use]
    pub fn is_valid(&self, max_buffer_bytes: usize) -> bool {
        let size = self.max_io_size;
        size.is_power_of_two()
            && size >= 8192
            && size as usize <= max_buffer_bytes
            && (2..=4096).contains(&self.max_aq_depth)
            && self.max_queue_depth >= 2
            && self.max_io_qpairs_per_ctrlr >= 1
            && self.sock_priority <= 16
    }

    /// What a session may do.
    #[must_use]
    pub fn limits(&self) -> Limits {
        let in_capsule = self.in_capsule_data_size.min(self.max_io_size);
        Limits {
            depth: self.max_queue_depth.max(self.max_aq_depth),
            max_io: self.max_io_size,
            in_capsule,
            in_capsule_control: in_capsule.max(IN_CAPSULE_CONTROL_BYTES.min(self.max_io_size)),
            c2h_success: self.c2h_success,
        }
    }

    /// I/O queues of one controller.
    #[must_use]
    pub fn io_queues(&self) -> u16 {
        self.max_io_qpairs_per_ctrlr.min(IO_QUEUES_MAX)
    }

    /// The keep alive timeout that a host's wish becomes, in ms; 0 stays 0.
    #[must_use]
    pub fn keep_alive_ms(&self, wish_ms: u32) -> u32 {
        if wish_ms == 0 {
            return 0;
        }
        let granularity = u32::from(self.kas) * 100;
        nvme_wire::features::round_keep_alive(wish_ms.max(self.min_kato), granularity)
    }

    /// The association timeout after a reset or shutdown.
    #[must_use]
    pub fn association_timeout(&self) -> Nanos {
        120_000 * NANOS_PER_MS
    }

    /// The entry of `nvmf_get_transports`.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({ "trtype": "TCP", "max_queue_depth": self.max_queue_depth,
            "max_io_qpairs_per_ctrlr": self.max_io_qpairs_per_ctrlr,
            "in_capsule_data_size": self.in_capsule_data_size, "max_io_size": self.max_io_size,
            "max_aq_depth": self.max_aq_depth, "iobuf_small_cache_size": self.iobuf_small_cache_size,
            "iobuf_large_cache_size": self.iobuf_large_cache_size,
            "dif_insert_or_strip": self.dif_insert_or_strip, "zcopy": self.zcopy, "c2h_success": self.c2h_success,
            "sock_priority": self.sock_priority, "abort_timeout_sec": self.abort_timeout_sec,
            "ack_timeout": self.ack_timeout, "data_wr_pool_size": self.data_wr_pool_size,
            "disable_command_passthru": self.disable_command_passthru, "kas": self.kas,
            "min_kato": self.min_kato })
    }

    /// The parameters that make this transport again.
    #[must_use]
    pub fn config(&self) -> Value {
        let mut params = self.to_json();
        params["control_msg_num"] = json!(self.control_msg_num);
        params["acceptor_poll_rate"] = json!(self.acceptor_poll_rate);
        params
    }
}
