//! Methods about the process: `rpc_get_methods`, `spdk_get_version`, `framework_*`, `thread_get_stats`, logging, signals,
//! buffers, and Addax's own `addax_get_info` and `addax_wait_events`.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;
use std::sync::atomic::Ordering;

use futures::channel::oneshot;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Methods, RpcError, RpcResult, When, params};
use crate::app::App;
use crate::reactor::{CONTROL, Peer};

/// Ticks per second in every answer that has a `tick_rate`: ticks are nanoseconds here.
pub const TICK_RATE: u64 = 1_000_000_000;

/// The SPDK release whose interfaces this engine has.
const SPDK_COMPATIBLE: (u64, u64, u64) = (26, 9, 0);

/// Tasks that wait for the run-time phase, and the one that starts it.
#[derive(Default)]
pub struct InitGate {
    start: RefCell<Option<oneshot::Sender<()>>>,
    waiting: RefCell<Vec<oneshot::Sender<()>>>,
    started: Cell<bool>,
}

impl InitGate {
    /// Resolves when `framework_start_init` is called.
    pub fn wait_for_start(&self) -> oneshot::Receiver<()> {
        let (sender, receiver) = oneshot::channel();
        *self.start.borrow_mut() = Some(sender);
        receiver
    }

    /// Everything is started: answers all who wait.
    pub fn finished(&self) {
        self.started.set(true);
        for waiter in self.waiting.borrow_mut().drain(..) {
            let _ = waiter.send(());
        }
    }

    async fn reached(&self) -> bool {
        if self.started.get() {
            return true;
        }
        let (sender, receiver) = oneshot::channel();
        self.waiting.borrow_mut().push(sender);
        receiver.await.is_ok()
    }
}

/// Adds this module's methods; `methods` is filled in after all modules have registered.
pub fn register(m: &mut Methods, methods: Rc<OnceCell<Rc<Methods>>>) {
    m.add("rpc_get_methods", When::Always, move |app, params| {
        let methods = methods.get().cloned();
        async move { get_methods(&app, methods.as_deref(), params) }
    });
    m.add("spdk_get_version", When::Always, |_, params| async move {
        params::none(params.as_ref(), "spdk_get_version method")?;
        Ok(version())
    });
    m.add("framework_start_init", When::Startup, |app, params| async move {
        params::none(params.as_ref(), "framework_start_init")?;
        let gate = app.module(InitGate::default);
        let Some(start) = gate.start.borrow_mut().take() else {
            return Err(RpcError::internal("framework_initialization failed"));
        };
        let _ = start.send(());
        if gate.reached().await { Ok(json!(true)) } else { Err(RpcError::internal("framework_initialization failed")) }
    });
    m.add("framework_wait_init", When::Always, |app, params| async move {
        params::none(params.as_ref(), "framework_wait_init")?;
        let gate = app.module(InitGate::default);
        gate.reached().await;
        Ok(json!(true))
    });
    m.add("framework_get_reactors", When::Runtime, |app, params| async move {
        params::none(params.as_ref(), "`framework_get_reactors`")?;
        Ok(reactors(&app))
    });
    m.add("framework_set_scheduler", When::Always, |_, params| async move {
        let request: SetScheduler = params::decode(params, params::invalid_parameters)?;
        // Work stays on the core it began on: that is SPDK's static scheduler, and the only one here.
        if request.name == "static" { Ok(json!(true)) } else { Err(RpcError::errno(libc::EINVAL)) }
    });
    m.add("framework_get_scheduler", When::Always, |_, params| async move {
        params::none(params.as_ref(), "framework_get_scheduler")?;
        Ok(json!({ "scheduler_name": "static", "scheduler_period": 0 }))
    });
    m.add("thread_get_stats", When::Runtime, |app, params| async move {
        if params.is_some() {
            return Err(RpcError::invalid_params("'thread_get_stats' requires no arguments"));
        }
        let threads: Vec<_> = app.core().peers().iter().map(thread).collect();
        Ok(json!({ "tick_rate": TICK_RATE, "threads": threads }))
    });
    m.add("spdk_kill_instance", When::Runtime, |_, params| async move { kill(params) });
    register_logging(m);
    m.add("iobuf_get_stats", When::Runtime, |app, params| async move {
        params::none(params.as_ref(), "iobuf_get_stats")?;
        Ok(buffers(&app))
    });
    m.add("addax_get_info", When::Always, |app, params| async move {
        params::none(params.as_ref(), "addax_get_info")?;
        Ok(json!({ "engine_instance": app.instance().to_string(), "version": env!("CARGO_PKG_VERSION"),
            "pid": std::process::id(), "features": ["mirror"] }))
    });
    m.add("addax_wait_events", When::Runtime, |app, params| async move {
        let request: WaitEvents = params::decode(params, params::invalid_parameters)?;
        Ok(app.events().wait(request.after, request.timeout_ms).await)
    });
}

/// Decoded leniently, as in SPDK.
#[derive(Deserialize)]
struct SetScheduler {
    name: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WaitEvents {
    after: u64,
    timeout_ms: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GetMethods {
    #[serde(default)]
    current: bool,
    #[serde(default)]
    include_aliases: bool,
}

fn get_methods(app: &App, methods: Option<&Methods>, params: Option<Value>) -> RpcResult {
    let request: GetMethods = params::decode(params, params::invalid_parameters)?;
    let names: Vec<_> = methods
        .iter()
        .flat_map(|m| m.order.iter().rev().filter_map(|name| m.table.get(name).map(|method| (name, method))))
        .filter(|(_, method)| request.include_aliases || method.alias_of.is_none())
        .filter(|(_, method)| !request.current || method.when.allows(app.phase()))
        .map(|(name, _)| *name)
        .collect();
    Ok(json!(names))
}

/// Clients read the fields to know which interfaces they can use; the text says whose they are.
fn version() -> Value {
    let (major, minor, patch) = SPDK_COMPATIBLE;
    json!({ "version": format!("Addax v{} (SPDK v{major}.{minor:02} interfaces)", env!("CARGO_PKG_VERSION")),
        "fields": { "major": major, "minor": minor, "patch": patch, "suffix": "-addax" } })
}

fn thread_name(peer: &Peer) -> String {
    if peer.id == CONTROL { "app_thread".to_owned() } else { format!("nvmf_tgt_poll_group_{:03}", peer.id.0 - 1) }
}

fn cpu_mask(peer: &Peer) -> String {
    peer.cpu.map_or_else(|| "1".to_owned(), |cpu| format!("{:x}", 1u128 << (cpu % 128)))
}

fn thread(peer: &Peer) -> Value {
    let busy = peer.stats.busy_ns.load(Ordering::Relaxed);
    let idle = peer.stats.spin_ns.load(Ordering::Relaxed) + peer.stats.parked_ns.load(Ordering::Relaxed);
    json!({ "name": thread_name(peer), "id": peer.id.0 + 1, "cpumask": cpu_mask(peer), "busy": busy, "idle": idle,
        "active_pollers_count": 0, "timed_pollers_count": 0, "paused_pollers_count": 0 })
}

fn reactors(app: &App) -> Value {
    let list: Vec<_> = app
        .core()
        .peers()
        .iter()
        .map(|peer| {
            let stats = &peer.stats;
            let busy = stats.busy_ns.load(Ordering::Relaxed);
            let spin = stats.spin_ns.load(Ordering::Relaxed);
            let parked = stats.parked_ns.load(Ordering::Relaxed);
            json!({ "lcore": peer.cpu.unwrap_or(0), "numa_id": 0, "tid": stats.tid.load(Ordering::Relaxed),
                "busy": busy, "idle": spin + parked, "in_interrupt": spin == 0 || peer.id == CONTROL,
                "spinning": spin, "blocked": parked, "irq": 0, "sys": 0, "usr": 0,
                "lw_threads": [{ "name": thread_name(peer), "id": peer.id.0 + 1, "cpumask": cpu_mask(peer),
                    "elapsed": busy + spin + parked }] })
        })
        .collect();
    json!({ "tick_rate": TICK_RATE, "pid": std::process::id(), "reactors": list })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Kill {
    sig_name: String,
}

fn kill(params: Option<Value>) -> RpcResult {
    use nix::sys::signal::{Signal, kill};
    let request: Kill = params::decode(params, params::invalid_parameters)?;
    let signal = match request.sig_name.as_str() {
        "SIGINT" => Signal::SIGINT,
        "SIGTERM" => Signal::SIGTERM,
        "SIGQUIT" => Signal::SIGQUIT,
        "SIGHUP" => Signal::SIGHUP,
        "SIGKILL" => Signal::SIGKILL,
        "SIGUSR1" => Signal::SIGUSR1,
        _ => return Err(params::invalid_parameters()),
    };
    // To the process: this thread leaves signals to the one that waits for them.
    kill(nix::unistd::Pid::this(), signal).map_err(|errno| RpcError::errno(errno as i32))?;
    Ok(json!(true))
}

/// The log levels of SPDK's names.
pub const LOG_LEVELS: [&str; 5] = ["ERROR", "WARNING", "NOTICE", "INFO", "DEBUG"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LogLevel {
    level: String,
}

/// Changes the log level of the process; set by `main`, which owns the subscriber.
pub type SetLevel = Rc<dyn Fn(&str)>;

/// The present levels.
pub struct Logging {
    pub level: RefCell<String>,
    pub print_level: RefCell<String>,
    pub apply: RefCell<Option<SetLevel>>,
}

impl Default for Logging {
    fn default() -> Self {
        Self {
            level: RefCell::new("NOTICE".into()),
            print_level: RefCell::new("INFO".into()),
            apply: RefCell::default(),
        }
    }
}

fn register_logging(m: &mut Methods) {
    fn checked(params: Option<Value>) -> Result<String, RpcError> {
        let request: LogLevel = params::decode(params, params::decode_failed)?;
        LOG_LEVELS.contains(&request.level.as_str()).then_some(request.level).ok_or_else(params::decode_failed)
    }
    m.add("log_set_level", When::Always, |app, params| async move {
        let level = checked(params)?;
        let logging = app.module(Logging::default);
        if let Some(apply) = logging.apply.borrow().as_ref() {
            apply(&level);
        }
        *logging.level.borrow_mut() = level;
        Ok(json!(true))
    });
    m.add("log_get_level", When::Always, |app, params| async move {
        params::none(params.as_ref(), "log_get_level")?;
        Ok(json!(*app.module(Logging::default).level.borrow()))
    });
    m.add("log_set_print_level", When::Always, |app, params| async move {
        let level = checked(params)?;
        *app.module(Logging::default).print_level.borrow_mut() = level;
        Ok(json!(true))
    });
    m.add("log_get_print_level", When::Always, |app, params| async move {
        params::none(params.as_ref(), "log_get_print_level")?;
        Ok(json!(*app.module(Logging::default).print_level.borrow()))
    });
}

fn buffers(app: &App) -> Value {
    let stats = app.core().pool().stats();
    let class =
        |s: &addax_hugepages::ClassStats| json!({ "cache": 0, "main": s.taken, "retry": s.exhausted, "cache_size": 0 });
    json!([{ "module": "bdev", "small_pool": class(&stats.small), "large_pool": class(&stats.large) }])
}
