//! JSON-RPC 2.0 as SPDK speaks it: method table, errors, parameters.
//!
//! *What it is.* [`Methods`] is the table that every module adds its methods to, with the phases in which each may be
//! called. Handlers are `async` and run on the control core. [`server`] has the socket and the framing.
//!
//! *Invariants.* Parameters are decoded strictly (unknown, duplicate, missing or mistyped members refuse the call) but
//! for the methods that SPDK decodes leniently. A refused call has changed nothing.
//! Source: SPDK v26.09: its schema, and its socket as it behaves.

pub mod bdev;
pub mod config;
pub mod framework;
pub mod params;
pub mod server;

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use futures::future::LocalBoxFuture;
use serde_json::Value;

use crate::app::{App, Phase};
use crate::bdev::BdevError;
use crate::bdev::examine::Examiner;
use crate::bdev::registry::Entry;

/// An error answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RpcError {
    pub code: i64,
    pub message: String,
}

impl RpcError {
    pub const PARSE: i64 = -32700;
    pub const INVALID_REQUEST: i64 = -32600;
    pub const METHOD_NOT_FOUND: i64 = -32601;
    pub const INVALID_PARAMS: i64 = -32602;
    pub const INTERNAL: i64 = -32603;
    pub const WRONG_PHASE: i64 = -1;

    #[must_use]
    pub fn new(code: i64, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    #[must_use]
    pub fn invalid_params(message: impl Into<String>) -> Self {
        Self::new(Self::INVALID_PARAMS, message)
    }

    #[must_use]
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Self::INTERNAL, message)
    }

    /// A negated errno with its text, as SPDK answers failed device calls.
    #[must_use]
    pub fn errno(errno: i32) -> Self {
        let text = nix::errno::Errno::from_raw(errno).desc();
        Self::new(-i64::from(errno), text)
    }
}

impl From<BdevError> for RpcError {
    fn from(error: BdevError) -> Self {
        tracing::warn!(%error, "device call refused");
        Self::errno(error.errno())
    }
}

/// What a handler gives back.
pub type RpcResult = Result<Value, RpcError>;

/// A method's code: application and parameters (`None` when absent or null).
pub type Handler = Rc<dyn Fn(App, Option<Value>) -> LocalBoxFuture<'static, RpcResult>>;

/// When a method may be called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    Startup,
    Runtime,
    Always,
}

impl When {
    /// Whether a call is allowed in `phase`.
    #[must_use]
    pub fn allows(self, phase: Phase) -> bool {
        match self {
            Self::Always => true,
            Self::Startup => phase == Phase::Startup,
            Self::Runtime => phase == Phase::Runtime,
        }
    }
}

/// One line of the table.
#[derive(Clone)]
pub struct Method {
    pub when: When,
    pub handler: Handler,
    /// The name of which this is a deprecated alias.
    pub alias_of: Option<&'static str>,
}

/// Gives a subsystem's saved configuration: `(method, params)` entries in replay order.
pub type SaveFn = Rc<dyn Fn(&App) -> Vec<(String, Value)>>;

/// All methods, and the saved configuration by subsystem.
#[derive(Default)]
pub struct Methods {
    pub table: BTreeMap<&'static str, Method>,
    /// Names in order of registration.
    pub order: Vec<&'static str>,
    /// `(subsystem, save)`; several modules may add to one subsystem, in order.
    pub save: Vec<(&'static str, SaveFn)>,
    /// Modules that look for their metadata on new devices, in order.
    pub examiners: Vec<(&'static str, Examiner)>,
}

impl std::fmt::Debug for Methods {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.table.keys()).finish()
    }
}

impl Methods {
    /// Adds a method.
    pub fn add<F>(&mut self, name: &'static str, when: When, handler: impl Fn(App, Option<Value>) -> F + 'static)
    where
        F: Future<Output = RpcResult> + 'static,
    {
        let handler: Handler = Rc::new(move |app, params| Box::pin(handler(app, params)));
        self.table.insert(name, Method { when, handler, alias_of: None });
        self.order.push(name);
    }

    /// Adds configuration entries to what `save_config` gives for `subsystem`.
    pub fn add_config(&mut self, subsystem: &'static str, save: impl Fn(&App) -> Vec<(String, Value)> + 'static) {
        self.save.push((subsystem, Rc::new(save)));
    }

    /// Adds a module's look at new devices (see [`crate::bdev::examine`]).
    pub fn add_examiner<F>(&mut self, module: &'static str, examine: impl Fn(App, Arc<Entry>) -> F + 'static)
    where
        F: Future<Output = ()> + 'static,
    {
        self.examiners.push((module, Rc::new(move |app, entry| Box::pin(examine(app, entry)))));
    }
}
