//! Allow-lists of hosts.

use nvme_wire::Nqn;
use serde::Deserialize;
use serde_json::json;

use super::{named_subsystem, named_target};
use crate::nvmf::subsystem::SubsystemError;
use crate::reactor::driver::{NANOS_PER_MS, Nanos};
use crate::rpc::params::{decode, decode_relaxed, invalid_parameters};
use crate::rpc::{Methods, RpcError, When};

#[derive(Deserialize)]
struct Add {
    nqn: String,
    host: String,
    tgt_name: Option<String>,
    psk: Option<String>,
    dhchap_key: Option<String>,
    dhchap_ctrlr_key: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Remove {
    nqn: String,
    host: String,
    tgt_name: Option<String>,
    timeout_ms: Option<i64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AllowAny {
    nqn: String,
    tgt_name: Option<String>,
    allow_any_host: bool,
}

/// How long a removal waits when the caller does not say.
const REMOVE_MS: i64 = 15_000;
/// The longest wait: an hour stands for "no limit".
const REMOVE_MS_MAX: i64 = 3_600_000;

fn internal_error() -> RpcError {
    RpcError::internal("Internal error")
}

pub fn register(methods: &mut Methods) {
    methods.add("nvmf_subsystem_add_host", When::Runtime, |app, params| async move {
        let add: Add = decode_relaxed(params, invalid_parameters)?;
        let target = named_target(&app, add.tgt_name.as_deref())?;
        let subsystem = named_subsystem(&target, &add.nqn)?;
        if add.dhchap_key.is_some() || add.dhchap_ctrlr_key.is_some() {
            tracing::warn!("host refused: no such key");
            return Err(invalid_parameters());
        }
        if add.psk.is_some() {
            tracing::warn!("host refused: TLS is not supported");
            return Err(internal_error());
        }
        let host = Nqn::new(&add.host).map_err(|error| {
            tracing::warn!(%error, "host refused");
            internal_error()
        })?;
        target.add_host(&subsystem, host).map_err(|error| {
            tracing::warn!(%error, "host refused");
            internal_error()
        })?;
        Ok(json!(true))
    });
    methods.add("nvmf_subsystem_remove_host", When::Runtime, |app, params| async move {
        let remove: Remove = decode(params, invalid_parameters)?;
        let target = named_target(&app, remove.tgt_name.as_deref())?;
        let subsystem = named_subsystem(&target, &remove.nqn)?;
        let host = Nqn::new(&remove.host).map_err(|_| internal_error())?;
        let limit_ms = match remove.timeout_ms.unwrap_or(REMOVE_MS) {
            ms if ms < 0 => REMOVE_MS_MAX,
            ms => ms.min(REMOVE_MS_MAX),
        };
        let limit = limit_ms as Nanos * NANOS_PER_MS;
        target.remove_host(&subsystem, &host, limit).await.map_err(|error| {
            tracing::warn!(%error, host = %host, "removal of a host");
            match error {
                SubsystemError::DrainTimeout(_) => RpcError::internal("Timeout reached during host removal"),
                _ => internal_error(),
            }
        })?;
        Ok(json!(true))
    });
    methods.add("nvmf_subsystem_allow_any_host", When::Runtime, |app, params| async move {
        let AllowAny { nqn, tgt_name, allow_any_host } = decode(params, invalid_parameters)?;
        let target = named_target(&app, tgt_name.as_deref())?;
        let subsystem = named_subsystem(&target, &nqn)?;
        target.set_allow_any_host(&subsystem, allow_any_host);
        Ok(json!(true))
    });
}
