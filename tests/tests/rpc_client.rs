//! SPDK's own Python client, unmodified, drives the engine: devices, subsystems, errors, saved configuration.
#![allow(clippy::unwrap_used)]

use e2e::engine::Engine;
use e2e::python;

const SCRIPT: &str = r#"
import json, sys
from spdk.rpc.client import JSONRPCClient, JSONRPCException

client = JSONRPCClient(sys.argv[1], timeout=20)

def refused(code, text, method, **params):
    try:
        client.call(method, params)
    except JSONRPCException as error:
        assert str(code) in str(error) and text in str(error), (method, str(error))
    else:
        raise AssertionError(f"{method} {params} was not refused")

assert "bdev_malloc_create" in client.call("rpc_get_methods")
assert client.call("spdk_get_version")["fields"]["major"] >= 26
assert client.call("bdev_malloc_create", {"name": "M0", "num_blocks": 16384, "block_size": 512}) == "M0"
refused(-17, "File exists", "bdev_malloc_create", name="M0", num_blocks=16384, block_size=512)
refused(-22, "Invalid argument", "bdev_malloc_create", name="M1", num_blocks=0, block_size=512)
refused(-32603, "spdk_json_decode_object failed", "bdev_malloc_create", name="M1", num_blocks=8, block_size=512, colour=1)
refused(-19, "No such device", "bdev_malloc_delete", name="M9")
refused(-32601, "Method not found", "bdev_nonsense")
(m0,) = client.call("bdev_get_bdevs", {"name": "M0"})
assert list(m0)[:5] == ["name", "aliases", "product_name", "block_size", "num_blocks"]
assert m0["product_name"] == "Malloc disk" and m0["supported_io_types"]["unmap"]
for name in ["R0", "R1"]:
    client.call("bdev_malloc_create", {"name": name, "num_blocks": 16384, "block_size": 512})
assert client.call("bdev_raid_create", {"name": "R", "raid_level": "raid1", "base_bdevs": ["R0", "R1"]}) is True
(raid,) = client.call("bdev_raid_get_bdevs", {"category": "online"})
assert raid["num_base_bdevs_discovered"] == 2 and raid["state"] == "online"
assert client.call("bdev_raid_remove_base_bdev", {"name": "R1"}) is True
(raid,) = client.call("bdev_raid_get_bdevs", {"category": "all"})
assert raid["num_base_bdevs_discovered"] == 1 and raid["base_bdevs_list"][1]["name"] is None
assert client.call("bdev_delay_create", {"name": "D", "base_bdev_name": "later", "avg_read_latency": 1,
    "p99_read_latency": 1, "avg_write_latency": 1, "p99_write_latency": 1}) == "D"
client.call("bdev_null_create", {"name": "later", "num_blocks": 100, "block_size": 4096})
assert client.call("bdev_get_bdevs", {"name": "D"})[0]["product_name"] == "delay"
assert client.call("bdev_error_create", {"base_name": "M0"}) is True
assert client.call("bdev_error_inject_error", {"name": "EE_M0", "io_type": "read", "error_type": "failure"}) is True

nqn = "nqn.2016-06.io.spdk:cnode1"
assert client.call("nvmf_create_transport", {"trtype": "TCP"}) is True
refused(-32603, "Transport type 'TCP' already exists", "nvmf_create_transport", trtype="TCP")
assert client.call("nvmf_create_subsystem", {"nqn": nqn, "serial_number": "SPDK001"}) is True
refused(-32603, "Unable to create subsystem", "nvmf_create_subsystem", nqn=nqn)
assert client.call("nvmf_subsystem_add_ns", {"nqn": nqn, "namespace": {"bdev_name": "D"}}) == 1
refused(-32602, "Invalid parameters", "nvmf_subsystem_add_ns", nqn=nqn, namespace={"bdev_name": "nothing"})
listen = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": sys.argv[2]}
assert client.call("nvmf_subsystem_add_listener", {"nqn": nqn, "listen_address": listen}) is True
assert client.call("nvmf_subsystem_add_host", {"nqn": nqn, "host": "nqn.2026-11.io.addax:host-1"}) is True
discovery, mine = client.call("nvmf_get_subsystems")
assert discovery["subtype"] == "Discovery" and mine["hosts"] == [{"nqn": "nqn.2026-11.io.addax:host-1"}]
assert mine["allow_any_host"] is False and mine["namespaces"][0]["bdev_name"] == "D"
assert client.call("nvmf_subsystem_remove_host", {"nqn": nqn, "host": "nqn.2026-11.io.addax:host-1"}) is True
refused(-32602, "not found", "nvmf_delete_subsystem", nqn="nqn.2016-06.io.spdk:cnode9")

names = [s["subsystem"] for s in client.call("framework_get_subsystems")]
saved = {"subsystems": [{"subsystem": n, "config": client.call("framework_get_config", {"name": n})} for n in names]}
print(json.dumps(saved))
"#;

#[test]
fn the_unmodified_client_drives_the_engine_and_its_saved_configuration_comes_back() {
    let mut engine = Engine::start(&["-m", "0x1"]).unwrap();
    let socket = engine.socket();
    let port = e2e::spdk::free_port().unwrap().to_string();
    let saved = python::run(SCRIPT, &[socket.to_str().unwrap(), &port]).unwrap();
    assert!(engine.terminate().unwrap(), "{}", engine.log());

    let file = engine.folder().join("config.json");
    std::fs::write(&file, &saved).unwrap();
    let again = Engine::start(&["-m", "0x1", "-c", file.to_str().unwrap()]).unwrap();
    let names = |engine: &Engine| -> Vec<String> {
        let list = engine.rpc("bdev_get_bdevs", serde_json::Value::Null).unwrap();
        let mut names: Vec<String> =
            list.as_array().unwrap().iter().map(|b| b["name"].as_str().unwrap().to_owned()).collect();
        names.sort();
        names
    };
    for name in ["D", "EE_M0", "M0", "R0", "later"] {
        assert!(names(&again).contains(&name.to_owned()), "{name} is missing in {:?}", names(&again));
    }
    let subsystems = again.rpc("nvmf_get_subsystems", serde_json::Value::Null).unwrap();
    assert_eq!(subsystems[1]["nqn"], "nqn.2016-06.io.spdk:cnode1");
}

#[test]
fn malformed_requests_are_answered_and_change_nothing() {
    let mut engine = Engine::start(&["-m", "0x1"]).unwrap();
    for (sent, expected) in [
        (&b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":}"[..], "-32700"),
        (b"nonsense", "-32700"),
        (b"[]", "-32600"),
        (b"{\"jsonrpc\":\"1.0\",\"id\":1,\"method\":\"spdk_get_version\"}", "-32600"),
        (b"{\"id\":1}", "-32600"),
        (b"{\"id\":1,\"method\":\"spdk_get_version\",\"params\":{}}", "-32602"),
        (b"{\"id\":1,\"method\":\"bdev_malloc_create\",\"params\":{\"name\":\"a\",\"name\":\"b\",\"num_blocks\":8,\"block_size\":512}}", "-32603"),
    ] {
        let answer = String::from_utf8(engine.raw(sent).unwrap()).unwrap();
        assert!(answer.contains(expected), "{} gave {answer}", String::from_utf8_lossy(sent));
    }
    let long = vec![b'['; 300 << 10];
    let answer = String::from_utf8(engine.raw(&long).unwrap_or_default()).unwrap();
    assert!(answer.is_empty() || answer.contains("-32700"), "{answer}");
    assert_eq!(engine.rpc("bdev_get_bdevs", serde_json::Value::Null).unwrap(), serde_json::json!([]));
    assert!(engine.is_running());
}

#[test]
fn a_bad_configuration_file_ends_the_start_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bad.json");
    for (text, expected) in [
        ("{", "EOF"),
        (r#"{"subsystems":[{"subsystem":"bdev","config":[{"method":"bdev_nonsense"}]}]}"#, "bdev_nonsense"),
        (
            r#"{"subsystems":[{"subsystem":"bdev","config":[{"method":"bdev_malloc_create","params":{"name":"M","num_blocks":0,"block_size":512}}]}]}"#,
            "bdev_malloc_create",
        ),
    ] {
        std::fs::write(&file, text).unwrap();
        let error = Engine::start(&["-c", file.to_str().unwrap()]).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
