//! The guest's scenarios against a stock SPDK target: the yardstick for the same scenarios on Addax's engine.
//! Skipped unless `$SPDK_DIR` names a built SPDK tree.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use e2e::guest::scenario::{self, scenario_ext4, scenario_reconnect};
use e2e::guest::{Guest, HOST_ADDRESS};
use e2e::spdk::{self, SpdkTarget};

const NQN: &str = "nqn.2026-11.io.addax:volume:guest";

/// Time without a target: longer than a reconnect delay, far shorter than the loss time-out.
const OUTAGE: Duration = Duration::from_secs(3);

#[test]
fn linux_uses_a_stock_target_and_outlives_its_crash() {
    let Some(tree) = spdk::tree() else { return };
    let mut target = SpdkTarget::start(&tree, NQN, scenario::VOLUME_MIB_MIN).unwrap();
    let port = target.port();
    let guest = Guest::boot(scenario::config().unwrap()).unwrap();

    scenario_ext4(&guest, HOST_ADDRESS, port, NQN).unwrap();

    scenario_reconnect(&guest, HOST_ADDRESS, port, NQN, || {
        target.kill()?;
        std::thread::sleep(OUTAGE);
        target.restart()
    })
    .unwrap();
}
