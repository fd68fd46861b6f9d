//! What `save_config` keeps of the target, in SPDK's order: options, transport, then each subsystem with its hosts
//! and namespaces, then all listeners (so that hosts find everything at once), referrals last.

use serde_json::{Value, json};

use super::subsystems::hex_upper;
use crate::nvmf::subsystem::{Namespace, Subsystem};
use crate::nvmf::target::{Target, target};
use crate::rpc::Methods;

type Entry = (String, Value);

pub fn register(methods: &mut Methods) {
    methods.add_config("nvmf", |app| {
        let target = target(app);
        let mut entries = Vec::new();
        entries.extend(target.config().map(|params| entry("nvmf_set_config", params)));
        entries.extend(
            target.max_subsystems().map(|max| entry("nvmf_set_max_subsystems", json!({ "max_subsystems": max }))),
        );
        let [crdt1, crdt2, crdt3] = target.retry_delays();
        if [crdt1, crdt2, crdt3] != [0; 3] {
            entries.push(entry("nvmf_set_crdt", json!({ "crdt1": crdt1, "crdt2": crdt2, "crdt3": crdt3 })));
        }
        entries.extend(target.transport().map(|t| entry("nvmf_create_transport", t.config())));
        for subsystem in target.subsystems().iter().filter(|s| !s.is_deleting()) {
            save_subsystem(subsystem, &mut entries);
        }
        for subsystem in target.subsystems().iter().filter(|s| !s.is_deleting()) {
            save_listeners(subsystem, &mut entries);
        }
        entries.extend(target.referrals().iter().map(|r| {
            entry(
                "nvmf_discovery_add_referral",
                json!({ "address": r.address.to_json(), "secure_channel": r.secure_channel,
                    "subnqn": r.subnqn.as_str() }),
            )
        }));
        entries
    });
}

fn entry(method: &str, params: Value) -> Entry {
    (method.to_owned(), params)
}

fn save_subsystem(subsystem: &Subsystem, entries: &mut Vec<Entry>) {
    let nqn = subsystem.nqn().as_str();
    if !subsystem.is_discovery() {
        let config = &subsystem.config;
        let mut params = json!({ "nqn": nqn, "allow_any_host": subsystem.allow_any_host.get(),
            "serial_number": config.serial_number, "model_number": config.model_number,
            "max_namespaces": config.max_namespaces, "min_cntlid": config.min_cntlid,
            "max_cntlid": config.max_cntlid, "ana_reporting": config.ana_reporting,
            "dmrsl": config.dmrsl, "wzsl": config.wzsl });
        if let Some(label) = &config.admin_label {
            params["admin_label"] = json!(label);
        }
        entries.push(entry("nvmf_create_subsystem", params));
    }
    for host in Target::hosts_in_order(subsystem) {
        entries.push(entry("nvmf_subsystem_add_host", json!({ "nqn": nqn, "host": host.nqn.as_str() })));
    }
    subsystem.with_namespaces(|all| {
        let ana = subsystem.config.ana_reporting;
        entries.extend(all.values().map(|n| entry("nvmf_subsystem_add_ns", namespace_params(nqn, n, ana))));
    });
}

fn save_listeners(subsystem: &Subsystem, entries: &mut Vec<Entry>) {
    let nqn = subsystem.nqn().as_str();
    let mut listeners = subsystem.listeners();
    listeners.reverse();
    for listener in listeners {
        let params = json!({ "nqn": nqn, "listen_address": listener.address.to_json(), "secure_channel": false });
        entries.push(entry("nvmf_subsystem_add_listener", params));
    }
}

fn namespace_params(nqn: &str, namespace: &Namespace, ana: bool) -> Value {
    let mut inner = json!({ "nsid": namespace.nsid, "bdev_name": namespace.info().name,
        "nguid": hex_upper(&namespace.nguid) });
    if namespace.eui64 != [0; 8] {
        inner["eui64"] = json!(hex_upper(&namespace.eui64));
    }
    inner["uuid"] = json!(namespace.uuid.to_string());
    if ana {
        inner["anagrpid"] = json!(namespace.ana_group);
    }
    json!({ "nqn": nqn, "namespace": inner })
}
