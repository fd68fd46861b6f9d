//! A real Linux kernel on Addax's own target: connect, file system, disconnect, and a crash of the engine under writes.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use e2e::engine::Engine;
use e2e::guest::scenario::{self, scenario_ext4, scenario_reconnect};
use e2e::guest::{Guest, HOST_ADDRESS};
use e2e::spdk::free_port;
use serde_json::json;

const NQN: &str = "nqn.2026-11.io.addax:volume:guest";
const UUID: &str = "5c0a2f8e-8d6e-4b8e-9a52-3e1f6a7b9c01";

/// Time without a target: longer than a reconnect delay, far shorter than the loss time-out.
const OUTAGE: Duration = Duration::from_secs(3);

fn export_file(engine: &Engine, port: u16) {
    let disk = engine.folder().join("disk");
    if !disk.exists() {
        std::fs::File::create(&disk).unwrap().set_len(scenario::VOLUME_MIB_MIN << 20).unwrap();
    }
    let file = json!({"name": "disk", "filename": disk, "block_size": 4096, "uuid": UUID});
    engine.rpc("bdev_uring_create", file).unwrap();
    engine.export("disk", NQN, port).unwrap();
}

#[test]
fn linux_uses_the_target_and_outlives_its_crash() {
    let mut engine = Engine::start(&["-m", "0x1"]).unwrap();
    let port = free_port().unwrap();
    export_file(&engine, port);
    let guest = Guest::boot(scenario::config().unwrap()).unwrap();

    scenario_ext4(&guest, HOST_ADDRESS, port, NQN).unwrap();

    scenario_reconnect(&guest, HOST_ADDRESS, port, NQN, || {
        engine.kill()?;
        std::thread::sleep(OUTAGE);
        engine.restart()?;
        export_file(&engine, port);
        Ok(())
    })
    .unwrap();
}
