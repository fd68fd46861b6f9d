//! The application: what every control-core module shares.
//!
//! *What it is.* [`App`] is a cheap handle, valid on the control core only: the core, the registry of devices, the
//! network seam, the event ring, and the state of the start-up. Modules keep their own state by [`App::module`] and add
//! their RPC methods and saved configuration through [`crate::rpc::Methods`].

use std::cell::Cell;
use std::rc::Rc;

use uuid::Uuid;

use crate::bdev::registry::Registry;
use crate::events::EventRing;
use crate::reactor::Core;
use crate::reactor::net::Net;

/// How far the start has come (SPDK's two RPC states).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Only methods that set options, until `framework_start_init`.
    Startup,
    Runtime,
}

/// Command-line facts that modules need.
#[derive(Debug, Clone)]
pub struct Options {
    pub rpc_socket: std::path::PathBuf,
    pub cpus: Vec<u32>,
    pub interrupt_mode: bool,
}

struct AppInner {
    core: Core,
    registry: Rc<Registry>,
    net: Rc<dyn Net>,
    events: Rc<EventRing>,
    instance: Uuid,
    phase: Cell<Phase>,
    options: Options,
}

/// The application; see the module.
#[derive(Clone)]
pub struct App(Rc<AppInner>);

impl std::fmt::Debug for App {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("App").field("instance", &self.0.instance).finish()
    }
}

impl App {
    /// An application on the control core `core`.
    #[must_use]
    pub fn new(core: Core, net: Rc<dyn Net>, options: Options) -> Self {
        let events = core.local(|| EventRing::new(core.clone()));
        Self(Rc::new(AppInner {
            core,
            registry: Registry::new(),
            net,
            events,
            instance: Uuid::new_v4(),
            phase: Cell::new(Phase::Startup),
            options,
        }))
    }

    #[must_use]
    pub fn core(&self) -> &Core {
        &self.0.core
    }

    #[must_use]
    pub fn registry(&self) -> &Rc<Registry> {
        &self.0.registry
    }

    #[must_use]
    pub fn net(&self) -> &Rc<dyn Net> {
        &self.0.net
    }

    /// Events for `addax_wait_events`.
    #[must_use]
    pub fn events(&self) -> &Rc<EventRing> {
        &self.0.events
    }

    /// New at every start of the process.
    #[must_use]
    pub fn instance(&self) -> Uuid {
        self.0.instance
    }

    #[must_use]
    pub fn options(&self) -> &Options {
        &self.0.options
    }

    #[must_use]
    pub fn phase(&self) -> Phase {
        self.0.phase.get()
    }

    pub fn set_phase(&self, phase: Phase) {
        self.0.phase.set(phase);
    }

    /// A module's state on the control core, made at the first call.
    pub fn module<T: 'static>(&self, make: impl FnOnce() -> T) -> Rc<T> {
        self.0.core.local(make)
    }
}
