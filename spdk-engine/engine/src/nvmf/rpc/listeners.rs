//! Listeners of subsystems, their ANA states, and discovery referrals.

use nvme_wire::Nqn;
use nvme_wire::ana::AnaState;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{named_subsystem, named_target, refused};
use crate::nvmf::address::{Address, TransportId};
use crate::nvmf::ana::state_name;
use crate::nvmf::target::Referral;
use crate::rpc::params::{decode, decode_relaxed, invalid_parameters};
use crate::rpc::{Methods, RpcError, When};

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "snake_case")]
enum State {
    Optimized,
    NonOptimized,
    Inaccessible,
}

impl From<State> for AnaState {
    fn from(state: State) -> Self {
        match state {
            State::Optimized => Self::Optimized,
            State::NonOptimized => Self::NonOptimized,
            State::Inaccessible => Self::Inaccessible,
        }
    }
}

#[derive(Deserialize)]
struct Add {
    nqn: String,
    listen_address: TransportId,
    tgt_name: Option<String>,
    #[serde(default)]
    secure_channel: bool,
    ana_state: Option<State>,
    sock_impl: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Remove {
    nqn: String,
    listen_address: TransportId,
    tgt_name: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SetState {
    nqn: String,
    listen_address: TransportId,
    tgt_name: Option<String>,
    ana_state: State,
    #[serde(default)]
    anagrpid: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Get {
    nqn: String,
    tgt_name: Option<String>,
}

#[derive(Deserialize)]
struct Refer {
    address: TransportId,
    tgt_name: Option<String>,
    #[serde(default)]
    secure_channel: bool,
    subnqn: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Unrefer {
    address: TransportId,
    tgt_name: Option<String>,
    subnqn: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TargetOnly {
    tgt_name: Option<String>,
}

fn address(id: &TransportId) -> Result<Address, RpcError> {
    id.parse().map_err(|error| {
        tracing::warn!(%error, "address refused");
        invalid_parameters()
    })
}

/// Socket implementations that mean plain TCP here.
fn is_plain(sock_impl: Option<&str>) -> bool {
    matches!(sock_impl, None | Some("posix" | "uring"))
}

pub fn register(methods: &mut Methods) {
    methods.add("nvmf_subsystem_add_listener", When::Runtime, |app, params| async move {
        let add: Add = decode_relaxed(params, invalid_parameters)?;
        let target = named_target(&app, add.tgt_name.as_deref())?;
        let subsystem = named_subsystem(&target, &add.nqn)?;
        if add.secure_channel && subsystem.allow_any_host.get() {
            return Err(RpcError::internal("Cannot establish secure channel, when 'allow_any_host' is set"));
        }
        if add.secure_channel || !is_plain(add.sock_impl.as_deref()) || target.transport().is_none() {
            tracing::warn!("listener refused: it needs a TCP transport without TLS");
            return Err(invalid_parameters());
        }
        let state = add.ana_state.map_or(AnaState::Optimized, AnaState::from);
        target.add_listener(&subsystem, address(&add.listen_address)?, state).map_err(|e| refused(&e))?;
        Ok(json!(true))
    });
    methods.add("nvmf_subsystem_remove_listener", When::Runtime, |app, params| async move {
        let remove: Remove = decode(params, invalid_parameters)?;
        let target = named_target(&app, remove.tgt_name.as_deref())?;
        let subsystem = named_subsystem(&target, &remove.nqn)?;
        let address = address(&remove.listen_address)?;
        target.remove_listener(&subsystem, address).await.map_err(|e| refused(&e))?;
        Ok(json!(true))
    });
    methods.add("nvmf_subsystem_listener_set_ana_state", When::Runtime, |app, params| async move {
        let set: SetState = decode(params, invalid_parameters)?;
        let target = named_target(&app, set.tgt_name.as_deref())?;
        let subsystem = named_subsystem(&target, &set.nqn)?;
        let address = address(&set.listen_address)?;
        let done = subsystem.set_ana_state(app.core(), address, set.anagrpid, set.ana_state.into());
        done.map_err(|error| {
            tracing::warn!(%error, "ANA state refused");
            RpcError::internal("error setting ANA state: -22")
        })?;
        Ok(json!(true))
    });
    methods.add("nvmf_subsystem_get_listeners", When::Runtime, |app, params| async move {
        let Get { nqn, tgt_name } = decode(params, invalid_parameters)?;
        let target = named_target(&app, tgt_name.as_deref())?;
        let subsystem = named_subsystem(&target, &nqn)?;
        let ana = subsystem.config.ana_reporting;
        let listeners = subsystem.listeners().into_iter().map(|listener| {
            let mut out = json!({ "address": listener.address.to_json() });
            if ana {
                let state = |(group, state)| json!({ "ana_group": group, "ana_state": state_name(state) });
                out["ana_states"] = listener.ana.iter().map(state).collect();
            }
            out
        });
        Ok(listeners.collect())
    });
    register_referrals(methods);
}

fn register_referrals(methods: &mut Methods) {
    methods.add("nvmf_discovery_add_referral", When::Runtime, |app, params| async move {
        let refer: Refer = decode_relaxed(params, invalid_parameters)?;
        let target = named_target(&app, refer.tgt_name.as_deref())?;
        if refer.address.lacks_port() {
            return Err(RpcError::internal("Service ID is required."));
        }
        let address = address(&refer.address)?;
        let subnqn = referral_nqn(refer.subnqn.as_deref())?;
        target.add_referral(Referral { address, subnqn, secure_channel: refer.secure_channel });
        Ok(json!(true))
    });
    methods.add("nvmf_discovery_remove_referral", When::Runtime, |app, params| async move {
        let refer: Unrefer = decode(params, invalid_parameters)?;
        let target = named_target(&app, refer.tgt_name.as_deref())?;
        let (address, subnqn) = (address(&refer.address)?, referral_nqn(refer.subnqn.as_deref())?);
        match target.remove_referral(address, &subnqn) {
            true => Ok(json!(true)),
            false => Err(RpcError::internal("Unable to remove a referral.")),
        }
    });
    methods.add("nvmf_discovery_get_referrals", When::Runtime, |app, params| async move {
        let TargetOnly { tgt_name } = decode(params, invalid_parameters)?;
        let target = named_target(&app, tgt_name.as_deref())?;
        Ok(target.referrals().iter().map(referral_json).collect())
    });
}

fn referral_nqn(given: Option<&str>) -> Result<Nqn, RpcError> {
    given.map_or_else(|| Ok(Nqn::discovery()), |text| Nqn::new(text).map_err(|_| invalid_parameters()))
}

fn referral_json(referral: &Referral) -> Value {
    json!({ "address": referral.address.to_json(), "secure_channel": referral.secure_channel,
        "subnqn": referral.subnqn.as_str() })
}
