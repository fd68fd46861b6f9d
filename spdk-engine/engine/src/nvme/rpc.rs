//! `bdev_nvme_*` methods and the saved configuration of the initiator.

use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;

use nvme_wire::Nqn;
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::ctrl::{Controllers, Ctrl, Plan, State};
use super::host::ControllerParams;
use super::options::{Attach, Multipath, Options};
use super::queue;
use crate::app::App;
use crate::bdev::Bdev;
use crate::rpc::params::{decode, decode_failed};
use crate::rpc::{Methods, RpcError, RpcResult, When};

/// Entries of an I/O queue, as SPDK's initiator asks for.
const QUEUE_ENTRIES: u16 = 128;
/// I/O queues that can be asked for.
const IO_QUEUES_MAX: u32 = 65536;
/// Longest subsystem or host name in bytes.
const NQN_BYTES_MAX: usize = 223;

/// Adds this module's methods.
pub fn register(m: &mut Methods) {
    m.add("bdev_nvme_set_options", When::Always, |app, p| async move { set_options(&app, p) });
    m.add("bdev_nvme_set_hotplug", When::Runtime, |_, p| async move { set_hotplug(p) });
    m.add("bdev_nvme_attach_controller", When::Runtime, |app, p| async move { attach(&app, p).await });
    m.add("bdev_nvme_get_controllers", When::Runtime, |app, p| async move { get_controllers(&app, p) });
    m.add("bdev_nvme_detach_controller", When::Runtime, |app, p| async move { detach(&app, p).await });
    m.add("bdev_nvme_reset_controller", When::Runtime, |app, p| async move { reset(&app, p).await });
    m.add("bdev_nvme_get_io_paths", When::Runtime, |app, p| async move { get_io_paths(&app, p).await });
    m.add_config("bdev", |app| {
        let table = Controllers::of(app.core());
        let options = serde_json::to_value(&*table.options.borrow()).unwrap_or_default();
        let mut entries = vec![("bdev_nvme_set_options".to_owned(), options)];
        for ctrl in table.by_name.borrow().values().filter(|c| c.is_attached()) {
            entries.push(("bdev_nvme_attach_controller".to_owned(), ctrl.attach.to_config(ctrl.timeouts)));
        }
        entries
    });
}

fn set_options(app: &App, params: Option<Value>) -> RpcResult {
    let table = Controllers::of(app.core());
    let change = params.unwrap_or_else(|| json!({}));
    let options = table.options.borrow().changed(&change).ok_or_else(decode_failed)?;
    if !options.is_valid() {
        return Err(RpcError::errno(libc::EINVAL));
    }
    if !table.by_name.borrow().is_empty() {
        return Err(RpcError::new(-1, "RPC not permitted with nvme controllers already attached"));
    }
    *table.options.borrow_mut() = options;
    Ok(json!(true))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Hotplug {
    #[serde(rename = "enable")]
    _enable: bool,
    #[serde(default, rename = "period_us")]
    _period_us: u64,
}

/// Accepted for the sake of saved configurations: there is no local bus to look for drives on.
fn set_hotplug(params: Option<Value>) -> RpcResult {
    let _: Hotplug = decode(params, decode_failed)?;
    Ok(json!(true))
}

fn invalid(message: String) -> RpcError {
    RpcError::new(-i64::from(libc::EINVAL), message)
}

/// The transport of an attach: TCP is what there is.
fn check_transport(trtype: &str) -> Result<(), RpcError> {
    if trtype.eq_ignore_ascii_case("tcp") {
        return Ok(());
    }
    if ["rdma", "fc", "pcie", "vfiouser"].iter().any(|known| trtype.eq_ignore_ascii_case(known)) {
        return Err(RpcError::errno(libc::ENODEV));
    }
    Err(invalid(format!("Failed to parse trtype: {trtype}")))
}

fn parse_ip(field: &str, text: &str) -> Result<IpAddr, RpcError> {
    text.parse().map_err(|_| invalid(format!("{field} {text}: an IP address is allowed")))
}

fn parse_port(field: &str, text: Option<&str>) -> Result<u16, RpcError> {
    let text = text.unwrap_or_default();
    let port = text.parse().ok().filter(|port| *port != 0);
    port.ok_or_else(|| invalid(format!("{field} {text:?}: a port from 1 to 65535 is allowed")))
}

fn address(request: &Attach) -> Result<SocketAddr, RpcError> {
    check_transport(&request.trtype)?;
    let ip = parse_ip("traddr", &request.traddr)?;
    if let Some(adrfam) = &request.adrfam {
        let right = if ip.is_ipv4() { "ipv4" } else { "ipv6" };
        if !adrfam.eq_ignore_ascii_case(right) {
            return Err(invalid(format!("Failed to parse adrfam: {adrfam}")));
        }
    }
    Ok(SocketAddr::new(ip, parse_port("trsvcid", request.trsvcid.as_deref())?))
}

fn source(request: &Attach) -> Result<Option<SocketAddr>, RpcError> {
    let Some(hostaddr) = &request.hostaddr else { return Ok(None) };
    let port = match request.hostsvcid.as_deref() {
        None => 0,
        some => parse_port("hostsvcid", some)?,
    };
    Ok(Some(SocketAddr::new(parse_ip("hostaddr", hostaddr)?, port)))
}

/// Name of a host or subsystem; SPDK bounds only its length.
fn check_nqn(field: &str, nqn: &str) -> Result<(), RpcError> {
    if nqn.is_empty() || nqn.len() > NQN_BYTES_MAX {
        return Err(invalid(format!("{field} {nqn:?}: 1 to {NQN_BYTES_MAX} bytes are allowed")));
    }
    Ok(())
}

fn plan(app: &App, request: Attach) -> Result<Plan, RpcError> {
    let table = Controllers::of(app.core());
    let options: Options = table.options.borrow().clone();
    let (address, from) = (address(&request)?, source(&request)?);
    let subnqn = request.subnqn.clone().unwrap_or_default();
    check_nqn("subnqn", &subnqn)?;
    let hostnqn = request.hostnqn.clone().unwrap_or_else(|| Nqn::from_uuid(app.instance()).as_str().to_owned());
    check_nqn("hostnqn", &hostnqn)?;
    if !(1..=IO_QUEUES_MAX).contains(&request.num_io_queues) {
        return Err(invalid(format!("num_io_queues {}: 1 to {IO_QUEUES_MAX} is allowed", request.num_io_queues)));
    }
    if request.psk.is_some() || request.dhchap_key.is_some() || request.dhchap_ctrlr_key.is_some() {
        return Err(RpcError::errno(libc::ENOTSUP));
    }
    let timeouts = request.timeouts(&options)?;
    // Hosts of different names are different hosts to a target, and so are different processes.
    let hostid = Uuid::new_v5(&app.instance(), hostnqn.as_bytes()).into_bytes();
    let params = ControllerParams {
        address,
        from,
        subnqn: subnqn.clone(),
        hostnqn,
        hostid,
        header_digest: request.hdgst,
        data_digest: request.ddgst,
        keep_alive_ms: options.keep_alive_timeout_ms,
        disable_sq_flow_control: request.disable_sq_flow_control,
        io_queues: request.num_io_queues,
        queue_entries: QUEUE_ENTRIES,
        socket_ns: options.socket_ns(),
        connect_ns: request.fabrics_connect_timeout_us.max(1).saturating_mul(1000),
        admin_ns: options.admin_ns(),
        io_ns: options.io_ns(),
    };
    let trid = json!({ "trtype": "TCP", "adrfam": if address.is_ipv4() { "IPv4" } else { "IPv6" },
        "traddr": address.ip().to_string(), "trsvcid": address.port().to_string(), "subnqn": subnqn });
    let (retries, generate_uuids) = (options.bdev_retry_count, options.generate_uuids);
    Ok(Plan { attach: request, params, timeouts, trid, retries, generate_uuids })
}

/// Why a second attach under a name is refused.
fn refuse_second(existing: &Ctrl, plan: &Plan) -> RpcError {
    let name = &plan.attach.name;
    let already = |text: String| RpcError::new(-i64::from(libc::EALREADY), text);
    if plan.attach.multipath == Multipath::Disable {
        return already(format!("A controller named {name} already exists and multipath is disabled"));
    }
    if existing.params.subnqn != plan.params.subnqn {
        return invalid(format!(
            "A controller named {name} already exists, but uses a different subnqn ({})",
            existing.params.subnqn
        ));
    }
    if existing.params.hostnqn != plan.params.hostnqn {
        return invalid(format!(
            "A controller named {name} already exists, but uses a different hostnqn ({})",
            existing.params.hostnqn
        ));
    }
    if existing.params.address == plan.params.address {
        return already(format!("A controller named {name} already exists with the specified network path"));
    }
    tracing::warn!(controller = name, "a second path to a controller is not supported");
    RpcError::errno(libc::ENOTSUP)
}

async fn attach(app: &App, params: Option<Value>) -> RpcResult {
    let request: Attach = decode(params, decode_failed)?;
    if request.name.is_empty() {
        return Err(invalid("name \"\": at least one character is needed".to_owned()));
    }
    let plan = plan(app, request)?;
    if let Some(existing) = Controllers::of(app.core()).find(&plan.attach.name) {
        return Err(refuse_second(&existing, &plan));
    }
    let name = plan.attach.name.clone();
    match Ctrl::attach(app, plan).await {
        Ok(ctrl) => {
            // What is not examined by itself need not wait for what is.
            if !ctrl.attach.addax_no_replay {
                crate::bdev::examine::settled(app).await;
            }
            Ok(json!(ctrl.device_names()))
        }
        Err(error) => {
            tracing::error!(controller = name, %error, "cannot attach");
            Err(RpcError::errno(libc::EIO))
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Get {
    name: Option<String>,
}

fn get_controllers(app: &App, params: Option<Value>) -> RpcResult {
    let request: Get = decode(params, decode_failed)?;
    let table = Controllers::of(app.core());
    if let Some(name) = &request.name
        && table.find(name).is_none()
    {
        return Err(invalid(format!("Controller {name} does not exist")));
    }
    let by_name = table.by_name.borrow();
    let wanted = by_name.iter().filter(|(n, _)| request.name.as_ref().is_none_or(|name| name == *n));
    Ok(wanted.map(|(name, ctrl)| json!({ "name": name, "ctrlrs": [describe(ctrl)] })).collect())
}

fn describe(ctrl: &Ctrl) -> Value {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    json!({
        "state": ctrl.state().word(),
        "trid": ctrl.trid,
        "cntlid": ctrl.cntlid().unwrap_or_default(),
        "host": {
            "nqn": ctrl.params.hostnqn,
            "addr": text(&ctrl.attach.hostaddr),
            "svcid": text(&ctrl.attach.hostsvcid),
            "no_shn_notification": false,
        },
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Detach {
    name: String,
    trtype: Option<String>,
    traddr: Option<String>,
    adrfam: Option<String>,
    trsvcid: Option<String>,
    subnqn: Option<String>,
    hostaddr: Option<String>,
    hostsvcid: Option<String>,
}

impl Detach {
    /// Whether the members that are given are those of the controller.
    fn names(&self, ctrl: &Ctrl) -> bool {
        let same = |given: &Option<String>, has: &str| given.as_ref().is_none_or(|g| g.eq_ignore_ascii_case(has));
        let member = |name: &str| ctrl.trid[name].as_str().unwrap_or_default().to_owned();
        same(&self.trtype, "TCP")
            && same(&self.adrfam, &member("adrfam"))
            && same(&self.traddr, &member("traddr"))
            && same(&self.trsvcid, &member("trsvcid"))
            && self.subnqn.as_ref().is_none_or(|n| *n == ctrl.params.subnqn)
            && same(&self.hostaddr, ctrl.attach.hostaddr.as_deref().unwrap_or_default())
            && same(&self.hostsvcid, ctrl.attach.hostsvcid.as_deref().unwrap_or_default())
    }
}

async fn detach(app: &App, params: Option<Value>) -> RpcResult {
    let request: Detach = decode(params, decode_failed)?;
    let found = Controllers::of(app.core()).find(&request.name).filter(|c| c.state() != State::Deleting);
    let ctrl = found.ok_or_else(|| RpcError::errno(libc::ENODEV))?;
    if !request.names(&ctrl) {
        return Err(RpcError::errno(libc::ENXIO));
    }
    ctrl.detach().await;
    Ok(json!(true))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Reset {
    name: String,
    cntlid: Option<u16>,
}

async fn reset(app: &App, params: Option<Value>) -> RpcResult {
    let request: Reset = decode(params, decode_failed)?;
    let ctrl = Controllers::of(app.core()).find(&request.name);
    let ctrl = ctrl.filter(|c| request.cntlid.is_none_or(|id| c.cntlid() == Some(id)));
    let ctrl = ctrl.ok_or_else(|| RpcError::errno(libc::ENODEV))?;
    if ctrl.reset().await { Ok(json!(true)) } else { Err(RpcError::errno(libc::EIO)) }
}

async fn get_io_paths(app: &App, params: Option<Value>) -> RpcResult {
    let request: Get = decode(params, decode_failed)?;
    let core = app.core();
    let ctrls: Vec<Rc<Ctrl>> = Controllers::of(core).by_name.borrow().values().cloned().collect();
    let mut groups = Vec::new();
    for peer in core.peers().iter() {
        let mut paths = Vec::new();
        for ctrl in ctrls.iter().filter(|c| c.cores().contains(&peer.id)) {
            let id = ctrl.shared.id;
            let found = core.call(peer.id, move |core| queue::describe(core, id)).await.flatten();
            let Some((connected, _)) = found else { continue };
            for device in ctrl.bdevs.borrow().values() {
                let bdev_name = device.info().name;
                if request.name.as_ref().is_none_or(|name| *name == bdev_name) {
                    let transport = json!({ "trtype": "TCP", "traddr": ctrl.trid["traddr"],
                        "trsvcid": ctrl.trid["trsvcid"], "adrfam": ctrl.trid["adrfam"] });
                    paths.push(json!({ "bdev_name": bdev_name, "cntlid": ctrl.cntlid().unwrap_or_default(),
                        "current": true, "connected": connected, "accessible": connected, "transport": transport }));
                }
            }
        }
        if !paths.is_empty() {
            groups.push(json!({ "thread": format!("reactor_{}", peer.id.0), "io_paths": paths }));
        }
    }
    Ok(json!({ "poll_groups": groups }))
}
