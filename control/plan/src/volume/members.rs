//! Which replicas are in use: what the engine and the record say is written into the replicas' specs.
//!
//! *Rules.* A replica that the record calls in sync is healthy. One that the engine has put out, and that the record
//! names no more, has failed. One that was given to the engine but went down before the engine took it has failed too,
//! and so has a rebuild that ended outside: those count against its retries.
//!
//! *Invariant.* A replica fails only while the engine has it; a failed one leaves the engine's list, and only when the
//! engine has let it go may it be used again. So one failure is never counted twice.

use addax_api::engine::Mode;
use addax_api::volume::VolumeConfig;
use addax_api::{InstanceState, Replica, Time};

use super::{Pass, state_of};

pub(super) fn step(pass: &mut Pass<'_>, config: &VolumeConfig) {
    let serving = serving(pass);
    let now = pass.now;
    let names: Vec<String> = pass.replicas.keys().cloned().collect();
    for name in names {
        let failed = serving && has_failed(pass, config, &name);
        let Some(replica) = pass.replicas.get_mut(&name) else {
            continue;
        };
        if config.is_in_sync(&name) {
            mark_healthy(replica, Time(now));
        } else if failed && replica.spec.failed_at.is_none() {
            mark_failed(replica, Time(now));
        }
    }
}

/// Whether the engine is running and its status is therefore worth something.
pub(crate) fn serving(pass: &Pass<'_>) -> bool {
    let status = pass.engine.and_then(|engine| engine.status.as_ref());
    status.is_some_and(|status| status.current_state == InstanceState::Running)
}

fn has_failed(pass: &Pass<'_>, config: &VolumeConfig, name: &str) -> bool {
    let Some(engine) = pass.engine.filter(|engine| engine.spec.replica_addresses.contains_key(name)) else {
        return false;
    };
    let mode = engine.status.as_ref().and_then(|status| status.replica_modes.get(name)).map(|mode| mode.mode);
    match mode {
        _ if config.names(name) => false,
        Some(mode) => mode == Mode::ERR,
        None => pass.replicas.get(name).is_some_and(|replica| state_of(replica) != InstanceState::Running),
    }
}

fn mark_healthy(replica: &mut Replica, now: Time) {
    let spec = &mut replica.spec;
    let news = spec.failed_at.is_some() || spec.last_healthy_at.is_none() || spec.last_healthy_at < spec.last_failed_at;
    if news {
        spec.last_healthy_at = Some(now);
    }
    spec.failed_at = None;
    spec.rebuild_retry_count = 0;
}

fn mark_failed(replica: &mut Replica, now: Time) {
    let spec = &mut replica.spec;
    // It was not in sync since its last failure, or never: so it was a rebuild that failed.
    let was_rebuilt = spec.last_healthy_at.is_none() || spec.last_failed_at >= spec.last_healthy_at;
    if was_rebuilt {
        spec.rebuild_retry_count = spec.rebuild_retry_count.saturating_add(1);
    }
    spec.failed_at = Some(now.clone());
    spec.last_failed_at = Some(now);
}
