//! The device against a stock `spdk_tgt`, taken from `$SPDK_DIR/build/bin`; without it these tests say so and pass.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use super::{HOST, NQN, engine, exercise, get, pattern, put};

/// A running `spdk_tgt` with one subsystem, stopped when dropped.
struct Spdk {
    child: Child,
    socket: PathBuf,
    _dir: tempfile::TempDir,
    port: u16,
}

impl Drop for Spdk {
    fn drop(&mut self) {
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
        let _ = self.child.wait();
    }
}

impl Spdk {
    /// Starts it; none where there is no SPDK.
    fn start() -> Option<Self> {
        let Some(root) = std::env::var_os("SPDK_DIR") else {
            let text = "SKIPPED: SPDK_DIR is not set, so nothing is tested against a stock spdk_tgt";
            // Past the capture of the test harness, so that it is seen.
            let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("{text}\n").as_bytes());
            return None;
        };
        let binary = PathBuf::from(root).join("build/bin/spdk_tgt");
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("rpc.sock");
        let mut command = Command::new(&binary);
        command
            .args(["-m", "0x1", "--no-huge", "-s", "1024", "--no-pci", "--disable-cpumask-locks", "-r"])
            .arg(&socket);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let child = child.unwrap_or_else(|e| panic!("{}: {e}", binary.display()));
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let spdk = Self { child, socket, _dir: dir, port };
        // It takes its time to start; the bound only ends a test that would hang.
        for _ in 0..600 {
            if UnixStream::connect(&spdk.socket).is_ok() {
                return Some(spdk);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("spdk_tgt does not open its RPC socket");
    }

    fn rpc(&self, method: &str, params: Value) -> Value {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        let mut call = json!({ "jsonrpc": "2.0", "id": 1, "method": method });
        if params != json!({}) {
            call["params"] = params.clone();
        }
        stream.write_all(call.to_string().as_bytes()).unwrap();
        let mut text = Vec::new();
        let mut part = [0; 4096];
        loop {
            let count = stream.read(&mut part).unwrap();
            assert!(count > 0, "spdk_tgt has closed its RPC socket");
            text.extend_from_slice(&part[..count]);
            if let Ok(answer) = serde_json::from_slice::<Value>(&text) {
                assert!(answer.get("error").is_none(), "{method} {params}: {answer}");
                return answer["result"].clone();
            }
        }
    }

    fn listener(&self, on: bool) {
        let method = if on { "nvmf_subsystem_add_listener" } else { "nvmf_subsystem_remove_listener" };
        let address =
            json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": self.port.to_string() });
        self.rpc(method, json!({ "nqn": NQN, "listen_address": address }));
    }

    fn serve(&self) {
        self.rpc("framework_wait_init", json!({}));
        self.rpc("nvmf_create_transport", json!({ "trtype": "TCP" }));
        self.rpc("bdev_malloc_create", json!({ "name": "M0", "num_blocks": 32768, "block_size": 512 }));
        self.rpc("nvmf_create_subsystem", json!({ "nqn": NQN, "serial_number": "SPDK1" }));
        self.rpc("nvmf_subsystem_add_host", json!({ "nqn": NQN, "host": HOST }));
        self.rpc("nvmf_subsystem_add_ns", json!({ "nqn": NQN, "namespace": { "bdev_name": "M0" } }));
        self.listener(true);
    }

    fn attach_params(&self, more: &Value) -> Value {
        let mut params = json!({ "name": "S", "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1",
            "trsvcid": self.port.to_string(), "subnqn": NQN, "hostnqn": HOST });
        for (name, value) in more.as_object().unwrap() {
            params[name.as_str()] = value.clone();
        }
        params
    }
}

#[test]
fn every_kind_of_io_reaches_an_spdk_target() {
    let Some(spdk) = Spdk::start() else { return };
    spdk.serve();
    engine(|engine| async move {
        let variants = [
            json!({}),
            json!({ "hdgst": true, "ddgst": true }),
            json!({ "disable_sq_flow_control": true }),
            json!({ "disable_sq_flow_control": true, "hdgst": true, "ddgst": true, "num_io_queues": 1 }),
        ];
        for more in variants {
            let names = engine.ok("bdev_nvme_attach_controller", spdk.attach_params(&more)).await;
            assert_eq!(names, json!(["Sn1"]));
            let there = spdk.rpc("bdev_get_bdevs", json!({ "name": "M0" }));
            assert_eq!(there[0]["uuid"], engine.entry("Sn1").bdev.info().uuid.to_string());
            engine.on_channel("Sn1", |core, chan| exercise(core, chan, 512)).await;
            engine.ok("bdev_nvme_detach_controller", json!({ "name": "S" })).await;
        }
    });
}

#[test]
fn sessions_with_an_spdk_target_are_restored_and_namespaces_followed() {
    let Some(spdk) = Spdk::start() else { return };
    spdk.serve();
    engine(|engine| async move {
        let times = json!({ "ctrlr_loss_timeout_sec": -1, "reconnect_delay_sec": 1 });
        engine.ok("bdev_nvme_attach_controller", spdk.attach_params(&times)).await;
        engine.on_channel("Sn1", |core, chan| async move { put(&core, &chan, 0, &pattern(1, 4096), 512).await }).await;
        spdk.listener(false);
        engine.until_state(|state| state != "enabled").await;
        spdk.listener(true);
        let read = engine.on_channel("Sn1", |core, chan| async move { get(&core, &chan, 0, 4096, 512).await }).await;
        assert_eq!(read.unwrap(), pattern(1, 4096));
        spdk.rpc("bdev_null_create", json!({ "name": "Z0", "num_blocks": 2048, "block_size": 512 }));
        spdk.rpc("nvmf_subsystem_add_ns", json!({ "nqn": NQN, "namespace": { "bdev_name": "Z0" } }));
        let registry = std::rc::Rc::clone(engine.app.registry());
        let there = std::rc::Rc::clone(&registry);
        engine.until(move || there.find("Sn2").is_some()).await;
        spdk.rpc("bdev_null_resize", json!({ "name": "Z0", "new_size": 2 }));
        let grown = engine.entry("Sn2");
        engine.until(move || grown.bdev.num_blocks() == 4096).await;
        spdk.rpc("nvmf_subsystem_remove_ns", json!({ "nqn": NQN, "nsid": 2 }));
        engine.until(move || registry.find("Sn2").is_none()).await;
    });
}
