//! SPDK's own methods, as far as the agent uses them, typed.
//!
//! *What it is.* One function per method, named like it. Parameters and results have the shapes that SPDK gives them,
//! so a stock `spdk_tgt` and `addax-engine` are driven alike.
//!
//! *Invariants.* `find_*` read lists and look for themselves: SPDK's error texts for absent objects differ by family.
//!
//! *When things fail.* [`RpcError`]; nothing is retried here.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::lvol::absent_is_fine;
use super::{CALL_DEADLINE, Client, RpcError, code};

/// Slack over a timeout that the data plane keeps itself, so that its own answer comes first.
const SLACK: Duration = Duration::from_secs(2);

/// Deadline of the start of a data plane's parts.
const START_DEADLINE: Duration = Duration::from_secs(30);

/// A block device.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Bdev {
    /// Its name.
    pub name: String,
    /// Its kind.
    pub product_name: String,
    /// Bytes of a block.
    pub block_size: u32,
    /// Blocks.
    pub num_blocks: u64,
    /// Its UUID.
    #[serde(default)]
    pub uuid: String,
}

impl Bdev {
    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.num_blocks.saturating_mul(u64::from(self.block_size))
    }
}

/// An address where a subsystem listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listener {
    /// Transport: `TCP`.
    pub trtype: String,
    /// Address family: `IPv4` or `IPv6`.
    pub adrfam: String,
    /// IP address.
    pub traddr: String,
    /// Port.
    pub trsvcid: String,
}

impl Listener {
    /// An NVMe/TCP listener.
    pub fn tcp(address: std::net::SocketAddr) -> Self {
        Self {
            trtype: "TCP".to_owned(),
            adrfam: if address.is_ipv4() { "IPv4" } else { "IPv6" }.to_owned(),
            traddr: address.ip().to_string(),
            trsvcid: address.port().to_string(),
        }
    }

    fn is_same(&self, other: &Self) -> bool {
        self.trtype.eq_ignore_ascii_case(&other.trtype) && self.traddr == other.traddr && self.trsvcid == other.trsvcid
    }
}

/// A namespace of a subsystem.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Namespace {
    /// Its number.
    pub nsid: u32,
    /// The device behind it.
    pub bdev_name: String,
    /// Its UUID.
    #[serde(default)]
    pub uuid: String,
}

/// Whether hosts are to use a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PathUse {
    /// They are.
    Optimized,
    /// They keep their commands for other paths, or until this one may be used again.
    Inaccessible,
}

/// A subsystem that is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewSubsystem<'a> {
    /// Its NQN.
    pub nqn: &'a str,
    /// Serial number, the same on every path.
    pub serial: &'a str,
    /// Model, the same on every path.
    pub model: &'a str,
    /// Highest number of a namespace.
    pub max_namespaces: u32,
    /// Controller numbers of one of several paths, which reports ANA states; none for a subsystem that has no other path.
    pub path: Option<std::ops::RangeInclusive<u16>>,
}

/// A host's entry in an allow-list.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct HostEntry {
    nqn: String,
}

/// A subsystem.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Subsystem {
    /// Its NQN.
    pub nqn: String,
    /// Whether the allow-list is ignored.
    #[serde(default)]
    pub allow_any_host: bool,
    #[serde(default)]
    hosts: Vec<HostEntry>,
    /// Where it listens.
    #[serde(default)]
    pub listen_addresses: Vec<Listener>,
    /// Its namespaces.
    #[serde(default)]
    pub namespaces: Vec<Namespace>,
}

impl Subsystem {
    /// The NQNs of the hosts that may connect.
    pub fn hosts(&self) -> BTreeSet<String> {
        self.hosts.iter().map(|host| host.nqn.clone()).collect()
    }

    /// Whether it listens there.
    pub fn listens(&self, listener: &Listener) -> bool {
        self.listen_addresses.iter().any(|known| known.is_same(listener))
    }
}

/// A session of a host with a subsystem.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Controller {
    /// Its number.
    #[serde(default)]
    pub cntlid: u32,
    /// The host.
    #[serde(default)]
    pub hostnqn: String,
}

/// How to attach a remote namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AttachParams {
    /// Name of the controller; its devices are `<name>n<nsid>`.
    pub name: String,
    /// Transport: `tcp`.
    pub trtype: String,
    /// Address family: `ipv4` or `ipv6`.
    pub adrfam: String,
    /// IP address.
    pub traddr: String,
    /// Port.
    pub trsvcid: String,
    /// Subsystem.
    pub subnqn: String,
    /// Host NQN to connect as.
    pub hostnqn: String,
    /// Seconds until a lost controller is given up; -1 never, 0 at once.
    pub ctrlr_loss_timeout_sec: i32,
    /// Seconds between attempts to reconnect.
    pub reconnect_delay_sec: u32,
    /// Seconds until I/O fails while the connection is lost; 0: not before the controller is given up.
    pub fast_io_fail_timeout_sec: u32,
    /// Only `addax-engine` knows it: I/O of a lost connection is failed at once and never sent again by itself.
    #[serde(skip_serializing_if = "is_false")]
    pub addax_no_replay: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

#[derive(Deserialize)]
struct Version {
    version: String,
}

impl Client {
    /// The names of all methods.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn rpc_get_methods(&self) -> Result<BTreeSet<String>, RpcError> {
        self.call_as("rpc_get_methods", Value::Null, CALL_DEADLINE).await
    }

    /// The names of the methods that can be called in the phase in which it is.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn rpc_get_current_methods(&self) -> Result<BTreeSet<String>, RpcError> {
        self.call_as("rpc_get_methods", json!({"current": true}), CALL_DEADLINE).await
    }

    /// What a stock data plane must be told before it starts. By itself it looks into every device for an lvstore or an
    /// array, those with the data of guests among them, who may write one there. And it sends the writes of a lost
    /// connection again over the next one, when an earlier copy of them may still be on its way.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn set_stock_options(&self) -> Result<(), RpcError> {
        self.call("bdev_set_options", json!({"bdev_auto_examine": false}), CALL_DEADLINE).await?;
        self.call("bdev_nvme_set_options", json!({"bdev_retry_count": 0}), CALL_DEADLINE).await.map(drop)
    }

    /// Whether it has the options of [`Self::set_stock_options`]; of one that does not tell, no.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn has_stock_options(&self) -> Result<bool, RpcError> {
        let config: Value = self.call_as("framework_get_config", json!({"name": "bdev"}), CALL_DEADLINE).await?;
        let option = |method: &str, name: &str| {
            let entries = config.as_array().into_iter().flatten();
            let found = entries.filter(|entry| entry["method"] == method).find_map(|entry| entry["params"].get(name));
            found.cloned().unwrap_or_default()
        };
        Ok(option("bdev_set_options", "bdev_auto_examine") == json!(false)
            && option("bdev_nvme_set_options", "bdev_retry_count") == json!(0))
    }

    /// Ends the phase in which options are set; answered when the runtime phase is reached.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn framework_start_init(&self) -> Result<(), RpcError> {
        self.call("framework_start_init", Value::Null, START_DEADLINE).await.map(drop)
    }

    /// The version text. With `deadline` it is the sign of life that the supervisor asks for.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn spdk_get_version(&self, deadline: Duration) -> Result<String, RpcError> {
        let version: Version = self.call_as("spdk_get_version", Value::Null, deadline).await?;
        Ok(version.version)
    }

    /// Ends when the data plane has reached its runtime state.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn framework_wait_init(&self) -> Result<(), RpcError> {
        self.call("framework_wait_init", Value::Null, CALL_DEADLINE).await.map(drop)
    }

    /// Makes the data plane stop itself in order.
    ///
    /// # Errors
    /// See [`RpcError`]; that it closes the connection instead of answering is no error.
    pub async fn spdk_kill_instance(&self, signal: &str) -> Result<(), RpcError> {
        match self.call("spdk_kill_instance", json!({"sig_name": signal}), CALL_DEADLINE).await {
            Ok(_) | Err(RpcError::Disconnected { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Makes sure that there is a TCP transport.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn ensure_tcp_transport(&self) -> Result<(), RpcError> {
        let transports: Vec<Value> = self.call_as("nvmf_get_transports", Value::Null, CALL_DEADLINE).await?;
        let is_tcp = |t: &Value| t["trtype"].as_str().is_some_and(|name| name.eq_ignore_ascii_case("tcp"));
        if transports.iter().any(is_tcp) {
            return Ok(());
        }
        self.call("nvmf_create_transport", json!({"trtype": "TCP"}), CALL_DEADLINE).await.map(drop)
    }

    /// The device of that name, if it is there.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn find_bdev(&self, name: &str) -> Result<Option<Bdev>, RpcError> {
        let found: Result<Vec<Bdev>, _> = self.call_as("bdev_get_bdevs", json!({"name": name}), CALL_DEADLINE).await;
        match found {
            Ok(list) => Ok(list.into_iter().next()),
            Err(error) if error.code() == Some(code::NO_DEVICE) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Bytes of every device, by name.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn bdev_sizes(&self) -> Result<BTreeMap<String, u64>, RpcError> {
        let all: Vec<Bdev> = self.call_as("bdev_get_bdevs", Value::Null, CALL_DEADLINE).await?;
        Ok(all.into_iter().map(|bdev| (bdev.name.clone(), bdev.size())).collect())
    }

    /// The subsystem of that NQN, if it is there.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn find_subsystem(&self, nqn: &str) -> Result<Option<Subsystem>, RpcError> {
        Ok(self.nvmf_get_subsystems().await?.into_iter().find(|subsystem| subsystem.nqn == nqn))
    }

    /// All subsystems.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn nvmf_get_subsystems(&self) -> Result<Vec<Subsystem>, RpcError> {
        self.call_as("nvmf_get_subsystems", Value::Null, CALL_DEADLINE).await
    }

    /// Makes a subsystem that lets nobody in yet.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn nvmf_create_subsystem(&self, new: &NewSubsystem<'_>) -> Result<(), RpcError> {
        let mut params = json!({"nqn": new.nqn, "serial_number": new.serial, "model_number": new.model,
            "allow_any_host": false, "max_namespaces": new.max_namespaces});
        if let Some(numbers) = &new.path {
            params["ana_reporting"] = json!(true);
            params["min_cntlid"] = json!(numbers.start());
            params["max_cntlid"] = json!(numbers.end());
        }
        self.call("nvmf_create_subsystem", params, CALL_DEADLINE).await.map(drop)
    }

    /// Deletes a subsystem with all its sessions; absent is fine.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn nvmf_delete_subsystem(&self, nqn: &str) -> Result<(), RpcError> {
        absent_is_fine(self.call("nvmf_delete_subsystem", json!({"nqn": nqn}), CALL_DEADLINE).await)
    }

    /// Adds a device as a namespace, under a UUID of its own: a namespace that carried its device's UUID could not be
    /// attached by the same process.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn nvmf_subsystem_add_ns(
        &self,
        nqn: &str,
        nsid: u32,
        bdev: &str,
        uuid: uuid::Uuid,
    ) -> Result<(), RpcError> {
        let nguid = uuid.simple().to_string().to_ascii_uppercase();
        let params = json!({"nqn": nqn, "namespace": {"nsid": nsid, "bdev_name": bdev,
            "uuid": uuid.to_string(), "nguid": nguid}});
        self.call("nvmf_subsystem_add_ns", params, CALL_DEADLINE).await.map(drop)
    }

    /// Opens a listener for a subsystem.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn nvmf_subsystem_add_listener(&self, nqn: &str, listener: &Listener) -> Result<(), RpcError> {
        let params = json!({"nqn": nqn, "listen_address": listener});
        self.call("nvmf_subsystem_add_listener", params, CALL_DEADLINE).await.map(drop)
    }

    /// Says whether hosts are to use the path by a listener of a subsystem that reports ANA states.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn nvmf_subsystem_listener_set_ana_state(
        &self,
        nqn: &str,
        listener: &Listener,
        state: PathUse,
    ) -> Result<(), RpcError> {
        let params = json!({"nqn": nqn, "listen_address": listener, "ana_state": state});
        self.call("nvmf_subsystem_listener_set_ana_state", params, CALL_DEADLINE).await.map(drop)
    }

    /// Lets a host in.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn nvmf_subsystem_add_host(&self, nqn: &str, host: &str) -> Result<(), RpcError> {
        self.call("nvmf_subsystem_add_host", json!({"nqn": nqn, "host": host}), CALL_DEADLINE).await.map(drop)
    }

    /// Takes a host from the allow-list and waits until its sessions are drained, at most `drain`.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn nvmf_subsystem_remove_host(&self, nqn: &str, host: &str, drain: Duration) -> Result<(), RpcError> {
        let timeout_ms = u64::try_from(drain.as_millis()).unwrap_or(u64::MAX);
        let params = json!({"nqn": nqn, "host": host, "timeout_ms": timeout_ms});
        self.call("nvmf_subsystem_remove_host", params, drain + SLACK).await.map(drop)
    }

    /// The sessions of a subsystem.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn nvmf_subsystem_get_controllers(&self, nqn: &str) -> Result<Vec<Controller>, RpcError> {
        self.call_as("nvmf_subsystem_get_controllers", json!({"nqn": nqn}), CALL_DEADLINE).await
    }

    /// The hosts of all queue pairs of a subsystem, admin queues included.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn nvmf_subsystem_qpair_hosts(&self, nqn: &str) -> Result<Vec<String>, RpcError> {
        let qpairs: Vec<Controller> =
            self.call_as("nvmf_subsystem_get_qpairs", json!({"nqn": nqn}), CALL_DEADLINE).await?;
        Ok(qpairs.into_iter().map(|qpair| qpair.hostnqn).collect())
    }

    /// Connects to a remote subsystem; the names of its devices.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn bdev_nvme_attach_controller(
        &self,
        params: &AttachParams,
        deadline: Duration,
    ) -> Result<Vec<String>, RpcError> {
        let method = "bdev_nvme_attach_controller";
        let value = serde_json::to_value(params)
            .map_err(|error| RpcError::Answer { method: method.to_owned(), reason: error.to_string() })?;
        self.call_as(method, value, deadline).await
    }

    /// Ends a connection to a remote subsystem; absent is fine.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn bdev_nvme_detach_controller(&self, name: &str) -> Result<(), RpcError> {
        absent_is_fine(self.call("bdev_nvme_detach_controller", json!({"name": name}), CALL_DEADLINE).await)
    }

    /// Whether a controller has lost its target, by each of its paths; one that is not attached has not.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn nvme_controller_is_lost(&self, name: &str) -> Result<bool, RpcError> {
        let all: Vec<Value> = self.call_as("bdev_nvme_get_controllers", Value::Null, CALL_DEADLINE).await?;
        let found = all.iter().find(|entry| entry["name"] == *name).and_then(|entry| entry["ctrlrs"].as_array());
        let is_lost = |path: &Value| path["state"].as_str().is_some_and(|state| state != "enabled");
        Ok(found.is_some_and(|paths| !paths.is_empty() && paths.iter().all(is_lost)))
    }

    /// The names of all attached controllers.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn nvme_controller_names(&self) -> Result<BTreeSet<String>, RpcError> {
        let all: Vec<Value> = self.call_as("bdev_nvme_get_controllers", Value::Null, CALL_DEADLINE).await?;
        Ok(all.iter().filter_map(|entry| entry["name"].as_str().map(str::to_owned)).collect())
    }
}
