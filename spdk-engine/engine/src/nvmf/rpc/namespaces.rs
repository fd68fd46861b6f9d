//! Namespaces of subsystems.

use serde::Deserialize;
use serde_json::json;
use uuid::Uuid;

use super::{named_subsystem, named_target, refused};
use crate::nvmf::subsystem::NamespaceParams;
use crate::rpc::params::{decode, decode_relaxed, invalid_parameters};
use crate::rpc::{Methods, RpcError, When};

#[derive(Deserialize)]
struct Add {
    nqn: String,
    tgt_name: Option<String>,
    namespace: Params,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    #[serde(default)]
    nsid: u32,
    bdev_name: String,
    nguid: Option<String>,
    eui64: Option<String>,
    uuid: Option<Uuid>,
    ptpl_file: Option<String>,
    anagrpid: Option<u32>,
    #[serde(default)]
    no_auto_visible: bool,
    #[serde(default, rename = "hide_metadata")]
    _hide_metadata: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Remove {
    nqn: String,
    tgt_name: Option<String>,
    nsid: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SetGroup {
    nqn: String,
    tgt_name: Option<String>,
    nsid: u32,
    anagrpid: u32,
}

pub fn register(methods: &mut Methods) {
    methods.add("nvmf_subsystem_add_ns", When::Runtime, |app, params| async move {
        let Add { nqn, tgt_name, namespace } = decode_relaxed(params, invalid_parameters)?;
        let target = named_target(&app, tgt_name.as_deref())?;
        let subsystem = named_subsystem(&target, &nqn)?;
        if namespace.ptpl_file.is_some() || namespace.no_auto_visible {
            tracing::warn!("namespace refused: persistent reservations and per-host visibility are not supported");
            return Err(invalid_parameters());
        }
        let params = NamespaceParams {
            nsid: namespace.nsid,
            bdev_name: namespace.bdev_name,
            nguid: identifier(namespace.nguid.as_deref(), "nguid")?,
            eui64: identifier(namespace.eui64.as_deref(), "eui64")?,
            uuid: namespace.uuid,
            ana_group: namespace.anagrpid,
        };
        let nsid = subsystem.add_namespace(app.core(), target.registry(), params).await.map_err(|e| refused(&e))?;
        Ok(json!(nsid))
    });
    methods.add("nvmf_subsystem_remove_ns", When::Runtime, |app, params| async move {
        let Remove { nqn, tgt_name, nsid } = decode(params, invalid_parameters)?;
        let target = named_target(&app, tgt_name.as_deref())?;
        let subsystem = named_subsystem(&target, &nqn)?;
        subsystem.remove_namespace(app.core(), nsid).await.map_err(|e| refused(&e))?;
        Ok(json!(true))
    });
    methods.add("nvmf_subsystem_set_ns_ana_group", When::Runtime, |app, params| async move {
        let SetGroup { nqn, tgt_name, nsid, anagrpid } = decode(params, invalid_parameters)?;
        let target = named_target(&app, tgt_name.as_deref())?;
        let subsystem = named_subsystem(&target, &nqn)?;
        subsystem.set_ana_group(app.core(), nsid, anagrpid).await.map_err(|e| refused(&e))?;
        Ok(json!(true))
    });
}

/// An identifier of `N` bytes given as hexadecimal digits.
fn identifier<const N: usize>(text: Option<&str>, name: &str) -> Result<Option<[u8; N]>, RpcError> {
    let Some(text) = text else { return Ok(None) };
    parse_hex(text).map(Some).ok_or_else(|| RpcError::invalid_params(format!("Invalid {name}")))
}

fn parse_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != 2 * N || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    let mut out = [0; N];
    for (byte, digits) in out.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hexadecimal_identifiers() {
        assert_eq!(parse_hex::<4>("00aAFf10"), Some([0, 0xAA, 0xFF, 0x10]));
        for wrong in ["", "00", "00aaff1", "00aaff100", "00aaff1g", "+0aaff10"] {
            assert_eq!(parse_hex::<4>(wrong), None, "{wrong}");
        }
    }
}
