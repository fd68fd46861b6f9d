//! Transport and target-wide options.

use serde::Deserialize;
use serde_json::{Value, json};

use super::named_target;
use crate::nvmf::options::TransportOptions;
use crate::rpc::params::{decode, decode_relaxed, invalid_parameters};
use crate::rpc::{Methods, RpcError, When};

#[derive(Deserialize)]
struct Create {
    trtype: String,
    tgt_name: Option<String>,
    #[serde(flatten)]
    options: TransportOptions,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Get {
    trtype: Option<String>,
    tgt_name: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MaxSubsystems {
    max_subsystems: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RetryDelays {
    #[serde(default)]
    crdt1: u16,
    #[serde(default)]
    crdt2: u16,
    #[serde(default)]
    crdt3: u16,
}

/// Members that `nvmf_set_config` may have. They steer what this target does not have: passthrough to local drives,
/// masks of poll groups, authentication. They are kept and saved.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SetConfig {
    #[serde(rename = "acceptor_poll_rate")]
    _acceptor_poll_rate: Option<u32>,
    #[serde(rename = "admin_cmd_passthru")]
    _admin_cmd_passthru: Option<Value>,
    #[serde(rename = "poll_groups_mask")]
    _poll_groups_mask: Option<String>,
    #[serde(rename = "discovery_filter")]
    _discovery_filter: Option<String>,
    #[serde(rename = "discovery_filters")]
    _discovery_filters: Option<Vec<String>>,
    #[serde(rename = "dhchap_digests")]
    _dhchap_digests: Option<Vec<String>>,
    #[serde(rename = "dhchap_dhgroups")]
    _dhchap_dhgroups: Option<Vec<String>>,
    #[serde(rename = "dup_host_policy")]
    _dup_host_policy: Option<String>,
}

pub fn register(methods: &mut Methods) {
    methods.add("nvmf_create_transport", When::Runtime, |app, params| async move {
        let Create { trtype, tgt_name, options } = decode_relaxed(params, invalid_parameters)?;
        let target = named_target(&app, tgt_name.as_deref())?;
        if !trtype.eq_ignore_ascii_case("tcp") {
            return Err(RpcError::invalid_params(format!("Invalid transport type '{trtype}'")));
        }
        if target.transport().is_some() {
            return Err(RpcError::internal("Transport type 'TCP' already exists"));
        }
        if !options.is_valid(app.core().pool().max_len()) {
            tracing::warn!(?options, "transport options refused");
            return Err(RpcError::internal("Failed to create transport."));
        }
        target.set_transport(options);
        Ok(json!(true))
    });
    methods.add("nvmf_get_transports", When::Runtime, |app, params| async move {
        let Get { trtype, tgt_name } = decode(params, invalid_parameters)?;
        let target = named_target(&app, tgt_name.as_deref())?;
        let transport = target.transport();
        match trtype {
            Some(name) if !name.eq_ignore_ascii_case("tcp") || transport.is_none() => {
                Err(RpcError::errno(libc::ENODEV))
            }
            _ => Ok(transport.iter().map(TransportOptions::to_json).collect()),
        }
    });
    methods.add("nvmf_set_config", When::Startup, |app, params| async move {
        let value = params.clone().unwrap_or_else(|| json!({}));
        let _: SetConfig = decode(params, invalid_parameters)?;
        named_target(&app, None)?.set_config(value);
        Ok(json!(true))
    });
    methods.add("nvmf_set_max_subsystems", When::Startup, |app, params| async move {
        let MaxSubsystems { max_subsystems } = decode(params, invalid_parameters)?;
        if max_subsystems == 0 {
            return Err(invalid_parameters());
        }
        match named_target(&app, None)?.set_max_subsystems(max_subsystems) {
            true => Ok(json!(true)),
            false => Err(RpcError::internal("Must not call more than once")),
        }
    });
    methods.add("nvmf_set_crdt", When::Startup, |app, params| async move {
        let RetryDelays { crdt1, crdt2, crdt3 } = decode(params, invalid_parameters)?;
        named_target(&app, None)?.set_retry_delays([crdt1, crdt2, crdt3]);
        Ok(json!(true))
    });
}
