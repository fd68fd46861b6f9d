//! SPDK's initiator tools, unmodified, against Addax's target. Skipped unless `$SPDK_DIR` names a built SPDK tree.
#![allow(clippy::unwrap_used)]

use std::process::Command;

use e2e::cluster::LocalCluster;
use e2e::engine::{Engine, rpc_at};
use e2e::spdk;
use serde_json::json;

const NQN: &str = "nqn.2026-11.io.addax:volume:tools";

fn tool(tree: &std::path::Path, name: &str, port: u16, args: &[&str]) -> String {
    tool_at(tree, name, &format!("trtype:TCP adrfam:IPv4 traddr:127.0.0.1 trsvcid:{port} subnqn:{NQN}"), args)
}

fn tool_at(tree: &std::path::Path, name: &str, address: &str, args: &[&str]) -> String {
    let output = Command::new("timeout")
        .arg("60")
        .arg(tree.join("build/bin").join(name))
        .args(["--no-huge", "-s", "256", "-r", address])
        .args(args)
        .output()
        .unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{name} failed:\n{text}");
    text
}

#[test]
fn identify_and_perf_work_and_agree_on_the_numbers() {
    let Some(tree) = spdk::tree() else { return };
    let engine = Engine::start(&["-m", "0x1"]).unwrap();
    engine.rpc("bdev_malloc_create", json!({"name": "M0", "num_blocks": 8192, "block_size": 4096})).unwrap();
    let port = spdk::free_port().unwrap();
    engine.export("M0", NQN, port).unwrap();

    let identity = tool(&tree, "spdk_nvme_identify", port, &[]);
    for line in
        ["ADDAX-TEST", NQN, "Max Number of I/O Queues:              127", "NVMe Specification Version (VS):       2.0"]
    {
        assert!(identity.contains(line), "{line:?} is missing in\n{identity}");
    }
    for (pattern, size) in [("randread", "4096"), ("randwrite", "4096"), ("randrw", "131072")] {
        let mut args = vec!["-q", "16", "-o", size, "-w", pattern, "-t", "2"];
        if pattern == "randrw" {
            args.extend(["-M", "50"]);
        }
        let report = tool(&tree, "spdk_nvme_perf", port, &args);
        assert!(report.contains("Total"), "{report}");
    }
    let statistics = engine.rpc("bdev_get_iostat", json!({"names": ["M0"]})).unwrap();
    let counted = &statistics["bdevs"][0];
    assert!(counted["num_read_ops"].as_u64().unwrap() > 0 && counted["num_write_ops"].as_u64().unwrap() > 0);
    assert_eq!(counted["io_error"], json!({}));
}

#[test]
fn the_tools_use_a_replicated_volume_and_nobody_else_may() {
    let Some(tree) = spdk::tree() else { return };
    let cluster = LocalCluster::up(3).unwrap();
    cluster.create("tools", 128).unwrap();
    let host = "nqn.2026-11.io.addax:host:tools";
    cluster.cli(&["volume", "attach", "tools", "--node", "node-1", "--host-nqn", host]).unwrap();
    let volume = cluster.wait_healthy("tools", 3).unwrap();
    let endpoint = &volume["status"]["endpoint"];
    let (port, nqn) = (endpoint["trsvcid"].as_u64().unwrap(), endpoint["nqn"].as_str().unwrap());
    let address = format!("trtype:TCP adrfam:IPv4 traddr:127.0.0.1 trsvcid:{port} subnqn:{nqn} hostnqn:{host}");

    // This tool draws a host name of its own at every run: for it alone the engine is told to let anybody in.
    let anybody = |yes: bool| {
        let socket = cluster.dir().join("run/node-1.sock");
        rpc_at(&socket, "nvmf_subsystem_allow_any_host", json!({"nqn": nqn, "allow_any_host": yes})).unwrap();
    };
    anybody(true);
    let identity = tool_at(&tree, "spdk_nvme_identify", &address, &[]);
    assert!(identity.contains(nqn), "{identity}");
    anybody(false);
    for (pattern, size) in [("randwrite", "4096"), ("randread", "4096"), ("randrw", "131072")] {
        let mut args = vec!["-q", "16", "-o", size, "-w", pattern, "-t", "2"];
        if pattern == "randrw" {
            args.extend(["-M", "50"]);
        }
        let report = tool_at(&tree, "spdk_nvme_perf", &address, &args);
        assert!(report.contains("Total"), "{report}");
    }
    let foreign = address.replace(host, "nqn.2026-11.io.addax:host:stranger");
    let output = Command::new("timeout")
        .arg("30")
        .arg(tree.join("build/bin/spdk_nvme_identify"))
        .args(["--no-huge", "-s", "256", "-r", &foreign])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(!text.contains("Model Number"), "a host that is not allowed got in:\n{text}");
    cluster.cli(&["volume", "detach", "tools"]).unwrap();
    assert!(cluster.equal_images(3).unwrap(), "the replicas differ");
}
