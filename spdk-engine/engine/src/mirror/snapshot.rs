//! The RPC methods of snapshots: `addax_mirror_snapshot_begin`, `_commit` and `_abort`.
//!
//! *What it is.* Parameters and answers. The device and the core behind it decide.
//!
//! *Invariants.* A name is given to one attempt only. Between a successful begin and the answer to the commit no host
//! changes a block, unless the hold ended before.
//!
//! *When things fail.* `EBUSY` with the reason when there is no snapshot, and the attempt is over; `ENODEV` when there is
//! no such mirror, or it went away meanwhile, and then the record tells whether the snapshot counts.

use std::collections::BTreeSet;

use futures::channel::oneshot;
use mirror_core::{ReplicaId, SnapshotError, SnapshotId};
use serde::Deserialize;
use serde_json::{Value, json};

use super::device::Table;
use super::{Mirrors, refuse};
use crate::app::App;
use crate::reactor::driver::NANOS_PER_MS;
use crate::rpc::params::{decode, invalid_parameters};
use crate::rpc::{RpcError, RpcResult};

/// Longest hold: hosts give their commands up some time after.
const HOLD_MS_MAX: u64 = 20_000;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Begin {
    name: String,
    snapshot: String,
    /// Longest time for which hosts are held back, at most [`HOLD_MS_MAX`].
    hold_ms: u64,
}

fn snapshot_id(name: &str) -> Result<SnapshotId, RpcError> {
    SnapshotId::new(name).map_err(|error| refuse(error.to_string()))
}

/// What a device says in its time; none when there is no device, or it goes away meanwhile.
async fn answer<T>(waiting: Option<oneshot::Receiver<T>>) -> Option<T> {
    waiting?.await.ok()
}

/// What a device has said, or why there is no snapshot.
fn told<T>(answer: Option<Result<T, SnapshotError>>) -> Result<T, RpcError> {
    let answer = answer.ok_or_else(|| RpcError::errno(libc::ENODEV))?;
    answer.map_err(|error| RpcError::new(-i64::from(libc::EBUSY), error.to_string()))
}

pub(super) async fn begin(app: &App, params: Option<Value>) -> RpcResult {
    let request: Begin = decode(params, invalid_parameters)?;
    let mirror = Mirrors::find(app, &request.name)?;
    let id = snapshot_id(&request.snapshot)?;
    if !(1..=HOLD_MS_MAX).contains(&request.hold_ms) {
        return Err(refuse(format!("hold_ms: {} is not allowed: 1 to {HOLD_MS_MAX}", request.hold_ms)));
    }
    let (name, hold_ns) = (request.name, request.hold_ms * NANOS_PER_MS);
    let held = app.core().call_async(mirror.home, move |core| {
        answer(Table::find(core, &name).map(|device| device.snapshot_begin(core, id, hold_ns)))
    });
    let members = told(held.await.flatten())?;
    let members: Vec<String> = members.iter().map(ToString::to_string).collect();
    Ok(json!({ "members": members }))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Commit {
    name: String,
    snapshot: String,
    /// Who has taken it.
    replicas: Vec<String>,
}

pub(super) async fn commit(app: &App, params: Option<Value>) -> RpcResult {
    let request: Commit = decode(params, invalid_parameters)?;
    let mirror = Mirrors::find(app, &request.name)?;
    let id = snapshot_id(&request.snapshot)?;
    let replicas = request.replicas.iter().map(|name| ReplicaId::new(name)).collect::<Result<BTreeSet<_>, _>>();
    let replicas = replicas.map_err(|error| refuse(error.to_string()))?;
    let name = request.name;
    let done = app.core().call_async(mirror.home, move |core| {
        answer(Table::find(core, &name).map(|device| device.snapshot_commit(core, id, replicas)))
    });
    let version = told(done.await.flatten())?;
    Ok(json!({ "version": version.0 }))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Abort {
    name: String,
    snapshot: String,
}

pub(super) async fn abort(app: &App, params: Option<Value>) -> RpcResult {
    let request: Abort = decode(params, invalid_parameters)?;
    let mirror = Mirrors::find(app, &request.name)?;
    let id = snapshot_id(&request.snapshot)?;
    let name = request.name;
    let done = app
        .core()
        .call(mirror.home, move |core| Table::find(core, &name).map(|device| device.snapshot_abort(core, id)));
    match done.await.flatten() {
        Some(()) => Ok(json!(true)),
        None => Err(RpcError::errno(libc::ENODEV)),
    }
}
