//! Carries the data plane's events to the engines they are about.
//!
//! *What it is.* One task per agent. While a data plane with mirrors is up it long-polls `addax_wait_events` on a
//! connection of its own and wakes the engines.
//!
//! *Invariants.* Events wake; state is read. So lost, repeated and late events do no harm: whenever some may be lost,
//! and at each new data plane, all engines are woken. Only the progress of rebuilds is taken from the events themselves.
//!
//! *When things fail.* A broken connection is made anew while the data plane is up.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::Engines;
use super::build::volume_of;
use crate::rpc::{Client, Event, RpcError};
use crate::supervise::{Plane, PlaneStatus};

/// How long one poll waits. It bounds how late a broken connection is noticed, and costs one wake-up each.
const WAIT: Duration = Duration::from_secs(30);
/// Pause before a broken connection is made anew.
const PAUSE: Duration = Duration::from_millis(200);

pub(super) async fn run(engines: Engines, mut status: watch::Receiver<PlaneStatus>, shutdown: CancellationToken) {
    loop {
        let plane = status.borrow_and_update().plane.clone().filter(|plane| plane.has_mirror());
        let pump = async {
            match plane {
                Some(plane) => pump(&engines, &plane).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = shutdown.cancelled() => return,
            changed = status.changed() => if changed.is_err() { return },
            () = pump => {}
        }
    }
}

/// Runs until the data plane is gone, which its status will tell.
async fn pump(engines: &Engines, plane: &Arc<Plane>) {
    let mut after = 0;
    while !plane.client.is_closed() {
        if let Err(error) = poll(engines, plane, &mut after).await {
            tracing::warn!(%error, "events of the data plane are interrupted");
        }
        engines.wake_all();
        tokio::time::sleep(PAUSE).await;
    }
    std::future::pending().await
}

async fn poll(engines: &Engines, plane: &Plane, after: &mut u64) -> Result<(), RpcError> {
    let client = Client::connect(&plane.socket).await?;
    loop {
        let batch = client.addax_wait_events(*after, WAIT).await?;
        *after = batch.next;
        if batch.lost {
            engines.wake_all();
        }
        for event in &batch.events {
            dispatch(engines, event);
        }
    }
}

fn dispatch(engines: &Engines, event: &Event) {
    let Some(signals) = event.mirror().and_then(volume_of).and_then(|volume| engines.signals(volume)) else { return };
    match event {
        Event::Progress { replica, copied_blocks, total_blocks, .. } => {
            signals.set_progress(replica, *copied_blocks, *total_blocks);
        }
        Event::Swap { .. } => signals.swaps.notify_one(),
        _ => {
            // A leg that is lost may be followed by a swap; looking costs one call.
            signals.swaps.notify_one();
            signals.stale();
        }
    }
}
