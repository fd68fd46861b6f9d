//! Looks for lvolstores on new devices and opens them.
//!
//! *When things fail.* A device without a store is left alone without a word; one with a damaged or foreign store is left
//! alone, and the log says what is wrong. A device that does not answer is given up after [`PROBE_NS`].

use std::sync::Arc;

use lvol_core::Error;
use serde_json::json;

use super::owner::{self, Open};
use super::stores::{Lvols, OpenError};
use crate::app::App;
use crate::bdev::registry::{Access, Entry};
use crate::reactor::driver::{NANOS_PER_S, Nanos};

/// Longest read of a device's first page.
const PROBE_NS: Nanos = 30 * NANOS_PER_S;

/// Opens the store on a device, if there is one.
pub async fn examine(app: App, entry: Arc<Entry>) {
    let base = entry.bdev.info().name;
    match probe(&app, &entry).await {
        Ok(true) => {}
        Ok(false) => return,
        Err(error) => return refused(&app, &base, &error.into()),
    }
    if app.registry().claimed_by(&base).is_some() {
        // Made into a store, or taken by somebody else, while it was looked at.
        return;
    }
    let lvols = Lvols::of(&app);
    if let Err(error) = lvols.open(&entry, Open::Load).await {
        refused(&app, &base, &error);
    }
}

async fn probe(app: &App, entry: &Arc<Entry>) -> Result<bool, Error> {
    let base = entry.bdev.info().name;
    // Keeps the device while it is read.
    let Ok(_open) = app.registry().open(&base, Access::ReadOnly, |_| {}) else { return Ok(false) };
    let on = app.core().data_cores().first().copied().unwrap_or(crate::reactor::CONTROL);
    let entry = Arc::clone(entry);
    let call = app.core().call_async(on, move |core| owner::probe(core.clone(), entry));
    match app.core().timeout(PROBE_NS, call).await {
        Some(answer) => answer.unwrap_or(Ok(false)),
        None => {
            tracing::error!(base, "the device does not answer: not searched for an lvolstore");
            Ok(false)
        }
    }
}

fn refused(app: &App, base: &str, error: &OpenError) {
    tracing::error!(base, %error, "the lvolstore on this device is not opened");
    app.events().push("lvstore", base, json!({ "base_bdev": base, "state": "refused", "reason": error.to_string() }));
}
