//! Create, delete and list subsystems.

use nvme_wire::Nqn;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{named_subsystem, named_target};
use crate::nvmf::subsystem::{Namespace, Subsystem, SubsystemConfig};
use crate::rpc::params::{decode, invalid_parameters};
use crate::rpc::{Methods, RpcError, RpcResult, When};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Create {
    nqn: String,
    tgt_name: Option<String>,
    #[serde(default = "default_serial")]
    serial_number: String,
    #[serde(default = "default_model")]
    model_number: String,
    admin_label: Option<String>,
    #[serde(default = "default_namespaces")]
    max_namespaces: u32,
    #[serde(default)]
    allow_any_host: bool,
    #[serde(default)]
    ana_reporting: bool,
    #[serde(default = "default_min_cntlid")]
    min_cntlid: u16,
    #[serde(default = "default_max_cntlid")]
    max_cntlid: u16,
    #[serde(default = "default_dmrsl")]
    dmrsl: u64,
    #[serde(default = "default_wzsl")]
    wzsl: u8,
    #[serde(default)]
    passthrough: bool,
    #[serde(default)]
    enable_nssr: bool,
}

fn default_serial() -> String {
    "00000000000000000000".into()
}
fn default_model() -> String {
    "SPDK bdev Controller".into()
}
fn default_namespaces() -> u32 {
    32
}
fn default_min_cntlid() -> u16 {
    1
}
fn default_max_cntlid() -> u16 {
    65519
}
fn default_dmrsl() -> u64 {
    2_097_152
}
fn default_wzsl() -> u8 {
    12
}

/// Most namespaces of one subsystem.
const NAMESPACES_MAX: u32 = 65_536;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    nqn: String,
    tgt_name: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Get {
    nqn: Option<String>,
    tgt_name: Option<String>,
}

pub fn register(methods: &mut Methods) {
    methods.add("nvmf_create_subsystem", When::Runtime, |app, params| async move {
        let create: Create = decode(params, invalid_parameters)?;
        let target = named_target(&app, create.tgt_name.as_deref())?;
        check(&create)?;
        let refused = || RpcError::internal(format!("Unable to create subsystem {}", create.nqn));
        let nqn = Nqn::new(&create.nqn).map_err(|error| {
            tracing::warn!(%error, "subsystem refused");
            refused()
        })?;
        if create.passthrough || create.enable_nssr {
            tracing::warn!(%nqn, "passthrough and subsystem reset are not supported");
            return Err(refused());
        }
        let config = SubsystemConfig {
            nqn,
            serial_number: create.serial_number.clone(),
            model_number: create.model_number.clone(),
            admin_label: create.admin_label.clone(),
            max_namespaces: create.max_namespaces,
            ana_reporting: create.ana_reporting,
            min_cntlid: create.min_cntlid,
            max_cntlid: create.max_cntlid,
            dmrsl: create.dmrsl,
            wzsl: create.wzsl,
        };
        target.create_subsystem(config, create.allow_any_host).ok_or_else(refused)?;
        Ok(json!(true))
    });
    methods.add("nvmf_delete_subsystem", When::Runtime, |app, params| async move {
        let Named { nqn, tgt_name } = decode(params, invalid_parameters)?;
        let target = named_target(&app, tgt_name.as_deref())?;
        let subsystem = named_subsystem(&target, &nqn)?;
        if subsystem.is_discovery() {
            return Err(invalid_parameters());
        }
        target.delete_subsystem(&subsystem).await.map_err(|error| RpcError::internal(error.to_string()))?;
        Ok(json!(true))
    });
    methods.add("nvmf_get_subsystems", When::Runtime, |app, params| async move {
        let Get { nqn, tgt_name } = decode(params, invalid_parameters)?;
        let target = named_target(&app, tgt_name.as_deref())?;
        list(&match nqn {
            Some(nqn) => vec![named_subsystem(&target, &nqn)?],
            None => target.subsystems(),
        })
    });
}

fn check(create: &Create) -> Result<(), RpcError> {
    let printable = |text: &str| text.bytes().all(|b| (0x20..=0x7e).contains(&b));
    let text_fits = |text: &str, max: usize| text.len() <= max && printable(text);
    let namespaces = (1..=NAMESPACES_MAX).contains(&create.max_namespaces);
    if !text_fits(&create.serial_number, 20) || !text_fits(&create.model_number, 40) || !namespaces {
        return Err(invalid_parameters());
    }
    if let Some(label) = &create.admin_label
        && !((4..=256).contains(&label.len()) && printable(label))
    {
        return Err(RpcError::invalid_params("Invalid admin_label"));
    }
    let (min, max) = (create.min_cntlid, create.max_cntlid);
    if min == 0 || max > nvme_wire::fabrics::CNTLID_MAX || min > max {
        return Err(RpcError::invalid_params(format!("Invalid cntlid range [{min}-{max}]")));
    }
    Ok(())
}

fn list(subsystems: &[std::rc::Rc<Subsystem>]) -> RpcResult {
    Ok(subsystems.iter().map(|s| to_json(s)).collect())
}

fn to_json(subsystem: &Subsystem) -> Value {
    let config = &subsystem.config;
    let listeners: Vec<Value> = subsystem.listeners().iter().map(|l| l.address.to_json()).collect();
    let hosts: Vec<Value> = subsystem.hosts().iter().map(|h| json!({ "nqn": h.nqn.as_str() })).collect();
    let mut out = json!({ "nqn": config.nqn.as_str(),
        "subtype": if subsystem.is_discovery() { "Discovery" } else { "NVMe" },
        "listen_addresses": listeners, "allow_any_host": subsystem.allow_any_host.get(), "hosts": hosts });
    if subsystem.is_discovery() {
        return out;
    }
    let namespaces: Vec<Value> =
        subsystem.with_namespaces(|all| all.values().map(|n| namespace_json(n, config.ana_reporting)).collect());
    out["serial_number"] = json!(config.serial_number);
    out["model_number"] = json!(config.model_number);
    if let Some(label) = &config.admin_label {
        out["admin_label"] = json!(label);
    }
    out["max_namespaces"] = json!(config.max_namespaces);
    out["passthrough"] = json!(false);
    out["min_cntlid"] = json!(config.min_cntlid);
    out["max_cntlid"] = json!(config.max_cntlid);
    out["dmrsl"] = json!(config.dmrsl);
    out["wzsl"] = json!(config.wzsl);
    out["namespaces"] = json!(namespaces);
    out
}

fn namespace_json(namespace: &Namespace, ana: bool) -> Value {
    let name = namespace.info().name;
    let mut out = json!({ "nsid": namespace.nsid, "bdev_name": name, "name": name,
        "nguid": hex_upper(&namespace.nguid) });
    if namespace.eui64 != [0; 8] {
        out["eui64"] = json!(hex_upper(&namespace.eui64));
    }
    out["uuid"] = json!(namespace.uuid.to_string());
    if ana {
        out["anagrpid"] = json!(namespace.ana_group);
    }
    out
}

/// Bytes as upper-case hexadecimal digits.
pub fn hex_upper(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02X}")).collect()
}
