//! The embedded API server: a Kubernetes-style API for Addax's kinds on one crash-safe file, for machines without a
//! cluster and for tests. Plain `kubectl` and the `kube` crate work against it.
//!
//! ```text
//! socket ─▶ server ─▶ http ─▶ rest ─▶ schema, patch, selector
//!                       │       └───▶ store ─▶ file
//!                       └─▶ watch ─────▲ ▲
//!                       gc ─────────────┘
//! ```
//!
//! What it leaves out of a real API server: authorisation (a client certificate is all or nothing), server-side apply,
//! admission webhooks, protobuf. Everything it serves behaves as kube-apiserver does, so that controllers and tests
//! can move between the two.
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod clock;
pub mod discovery;
pub mod error;
pub mod fault;
mod gc;
pub mod http;
pub mod jsonpath;
pub mod openapi;
pub mod patch;
pub mod registry;
pub mod rest;
pub mod schema;
pub mod selector;
pub mod server;
pub mod store;
pub mod table;
pub mod tls;
pub mod watch;

pub use server::{Embedded, Server, ServerConfig, ServerError};
pub use tls::TlsConfig;
