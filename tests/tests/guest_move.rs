//! A real Linux kernel with native multipath keeps a file system mounted and written while the volume's engine dies, and
//! while another node takes the engine over: it sees pauses, and no error.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use anyhow::Context;
use e2e::cluster::LocalCluster;
use e2e::guest::forward::Forwarder;
use e2e::guest::nvme::{self, Target};
use e2e::guest::scenario::{self, Outage, scenario_outages};
use e2e::guest::{Guest, HOST_ADDRESS};
use nix::sys::signal::Signal;
use serde_json::Value;

const VOLUME: &str = "moving";
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn a_mounted_file_system_sees_the_death_and_the_move_of_its_engine_as_pauses() {
    let cluster = LocalCluster::up(3).unwrap();
    let guest = Guest::boot(scenario::config().unwrap()).unwrap();
    nvme::load_modules(&guest).unwrap();
    let multipath = guest.check("cat /sys/module/nvme_core/parameters/multipath", COMMAND_TIMEOUT).unwrap();
    assert_eq!(multipath.trim(), "Y", "the guest's kernel has no native multipath");
    cluster.create(VOLUME, 256).unwrap();
    let host = guest.check("cat /etc/nvme/hostnqn", COMMAND_TIMEOUT).unwrap();
    let attach = ["volume", "attach", VOLUME, "--node", "node-1", "--host-nqn", host.trim()];
    let first = Path::to(&cluster.json(&attach).unwrap()[0]);
    let before = cluster.epoch(VOLUME).unwrap();
    let (mut second, mut third) = (None, None);
    let pauses = scenario_outages(
        &guest,
        &first.target,
        &mut [
            Outage::new("engine killed", || kill_engine(&cluster, "node-1", before)),
            Outage::moved("engine moved to another node", || move_to(&cluster, "node-2", &mut second)),
            Outage::new("moved engine killed", || kill_engine(&cluster, "node-2", cluster.epoch(VOLUME)?)),
            Outage::moved("engine moved back", || move_to(&cluster, "node-1", &mut third)),
        ],
    );
    assert_eq!(pauses.unwrap().len(), 4);
    drop(guest);
    cluster.wait_healthy(VOLUME, 3).unwrap();
    cluster.cli(&["volume", "detach", VOLUME]).unwrap();
    assert!(cluster.equal_images(3).unwrap(), "the copies differ");
}

/// A way from the guest to an engine; it lasts as long as this lives.
struct Path {
    target: Target,
    _forwarder: Forwarder,
}

impl Path {
    fn to(endpoint: &Value) -> Self {
        let text = |name: &str| endpoint[name].as_str().unwrap();
        let address = format!("{}:{}", text("traddr"), endpoint["trsvcid"]).parse().unwrap();
        let forwarder = Forwarder::start(address).unwrap();
        let target = Target { traddr: HOST_ADDRESS.to_owned(), port: forwarder.port(), nqn: text("nqn").to_owned() };
        Self { target, _forwarder: forwarder }
    }
}

fn kill_engine(cluster: &LocalCluster, node: &str, epoch: u64) -> anyhow::Result<()> {
    LocalCluster::signal(&[cluster.engine(node)?], Signal::SIGKILL)?;
    let again = |found: &Value| {
        let status = &found["status"];
        status["config"]["epoch"].as_u64() > Some(epoch) && status["state"] == "attached"
    };
    cluster.wait(VOLUME, "open again with a new epoch", again).map(drop).context("after the engine's death")
}

fn move_to(cluster: &LocalCluster, node: &str, path: &mut Option<Path>) -> anyhow::Result<Target> {
    let endpoint = cluster.json(&["volume", "move", VOLUME, "--node", node])?;
    Ok(path.insert(Path::to(&endpoint[0])).target.clone())
}
