//! What is connected: controllers, queue pairs, counters.

use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::{named_subsystem, named_target};
use crate::nvmf::address::socket_json;
use crate::nvmf::controller::Controller;
use crate::nvmf::poll_group;
use crate::reactor::{CONTROL, CoreId};
use crate::rpc::params::{decode, invalid_parameters};
use crate::rpc::{Methods, When};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    nqn: String,
    tgt_name: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TargetOnly {
    tgt_name: Option<String>,
}

/// Time is counted in nanoseconds.
const TICK_RATE: u64 = 1_000_000_000;

/// The poll group of a core; admin queues live on the control core, beside them all.
fn group_name(core: CoreId) -> String {
    match core {
        CONTROL => "app_thread".into(),
        CoreId(index) => format!("nvmf_tgt_poll_group_{:03}", index - 1),
    }
}

pub fn register(methods: &mut Methods) {
    methods.add("nvmf_subsystem_get_controllers", When::Runtime, |app, params| async move {
        let Named { nqn, tgt_name } = decode(params, invalid_parameters)?;
        let target = named_target(&app, tgt_name.as_deref())?;
        let subsystem = named_subsystem(&target, &nqn)?;
        Ok(subsystem.controllers().iter().map(|c| controller_json(c)).collect())
    });
    methods.add("nvmf_subsystem_get_qpairs", When::Runtime, |app, params| async move {
        let Named { nqn, tgt_name } = decode(params, invalid_parameters)?;
        let target = named_target(&app, tgt_name.as_deref())?;
        let subsystem = named_subsystem(&target, &nqn)?;
        Ok(subsystem.controllers().iter().flat_map(|c| queue_pairs(c)).collect())
    });
    methods.add("nvmf_get_stats", When::Runtime, |app, params| async move {
        let TargetOnly { tgt_name } = decode(params, invalid_parameters)?;
        let target = named_target(&app, tgt_name.as_deref())?;
        let admin = target.stats();
        let current_admin: usize = target.subsystems().iter().map(|s| s.controllers().len()).sum();
        let transports: Vec<Value> = target.transport().iter().map(|_| json!({ "trtype": "TCP" })).collect();
        let mut groups = Vec::new();
        for (index, core) in app.core().data_cores().into_iter().enumerate() {
            let stats = app.core().call(core, poll_group::stats).await.unwrap_or_default();
            // Admin queues are counted with the first group.
            let first = index == 0;
            groups.push(json!({ "name": group_name(core), "admin_qpairs": if first { admin.admin_qpairs } else { 0 },
                "io_qpairs": stats.io_qpairs, "current_admin_qpairs": if first { current_admin } else { 0 },
                "current_io_qpairs": stats.current_io_qpairs,
                "current_unassociated_qpairs": if first { admin.unassociated } else { 0 },
                "pending_bdev_io": 0, "completed_nvme_io": stats.completed_nvme_io, "transports": transports }));
        }
        Ok(json!({ "tick_rate": TICK_RATE, "poll_groups": groups }))
    });
}

fn controller_json(controller: &Controller) -> Value {
    json!({ "cntlid": controller.cntlid(), "cntrltype": if controller.is_discovery() { "discovery" } else { "io" },
        "hostnqn": controller.host(), "hostid": Uuid::from_bytes(controller.hostid()).to_string(),
        "num_io_qpairs": controller.queues().len() + 1 })
}

fn queue_pairs(controller: &Controller) -> Vec<Value> {
    let state = if controller.is_ending() { "deactivating" } else { "enabled" };
    let row = |qid: u16, core, listen, peer: Option<std::net::SocketAddr>| {
        let mut out = json!({ "cntlid": controller.cntlid(), "qid": qid, "state": state, "thread": group_name(core),
            "hostnqn": controller.host(), "listen_address": socket_json(listen) });
        if let Some(peer) = peer {
            out["peer_address"] = socket_json(peer);
        }
        out
    };
    let admin = row(0, CONTROL, controller.listen().0, controller.conn().peer);
    let io = controller.queues().into_iter().map(|(qid, q)| row(qid, q.core, q.listen, q.peer));
    std::iter::once(admin).chain(io).collect()
}
