//! Virtual devices over one base that may come later: what `passthru` and `crypto` have in common.
//!
//! *Invariants.* A device is there exactly while its base is, and claims it. Its name is known from the call that makes it
//! to the one that deletes it: when the base goes and comes back, so does the device.
//!
//! *When things fail.* A call that is refused leaves nothing behind. A device that cannot be made over a base that
//! appears later is said in the log, and stays awaited.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use serde_json::Value;

use super::registry::{Access, BdevEvent, Desc, Entry};
use super::{Bdev, BdevError};
use crate::app::App;
use crate::rpc::RpcError;

/// Makes the device over its base.
pub type Make = Rc<dyn Fn(&Arc<Entry>) -> Result<Arc<dyn Bdev>, BdevError>>;

/// A device that a call asked for.
pub struct Over {
    pub name: String,
    /// Name, alias or UUID of the base.
    pub base: String,
    pub module: &'static str,
    pub make: Make,
    /// The call's method and parameters, for saved configuration.
    pub config: (&'static str, Value),
}

#[derive(Default)]
struct Overs {
    /// In the order of the calls.
    list: RefCell<Vec<Rc<Over>>>,
    /// Claims of the bases, by the device's name.
    claims: RefCell<HashMap<String, Desc>>,
    watching: Cell<bool>,
}

/// Makes a device now or as soon as its base is there.
///
/// # Errors
/// EEXIST for a name that is taken, EPERM for a base that is claimed, and what keeps the device from being made.
pub fn create(app: &App, over: Over) -> Result<(), RpcError> {
    let overs = app.module(Overs::default);
    let taken = overs.list.borrow().iter().any(|o| o.name == over.name) || app.registry().find(&over.name).is_some();
    if taken {
        return Err(RpcError::errno(libc::EEXIST));
    }
    watch(app, &overs);
    let over = Rc::new(over);
    match app.registry().find(&over.base) {
        Some(base) => raise(app, &overs, &over, &base)?,
        None => tracing::info!(bdev = over.name, base = over.base, "made as soon as its base is there"),
    }
    overs.list.borrow_mut().push(over);
    Ok(())
}

/// Takes a device away and forgets it.
///
/// # Errors
/// ENODEV when the module has none of that name.
pub async fn delete(app: &App, module: &'static str, name: &str) -> Result<(), RpcError> {
    let overs = app.module(Overs::default);
    let at = overs.list.borrow().iter().position(|o| o.module == module && o.name == name);
    let Some(at) = at else { return Err(RpcError::errno(libc::ENODEV)) };
    let over = overs.list.borrow_mut().remove(at);
    if overs.claims.borrow().contains_key(&over.name) {
        app.registry().unregister(app.core(), &over.name).await?;
        let claim = overs.claims.borrow_mut().remove(&over.name);
        drop(claim);
    }
    Ok(())
}

/// The calls that make a module's devices again.
#[must_use]
pub fn saved(app: &App, module: &'static str) -> Vec<(String, Value)> {
    let overs = app.module(Overs::default);
    let list = overs.list.borrow();
    list.iter().filter(|o| o.module == module).map(|o| (o.config.0.to_owned(), o.config.1.clone())).collect()
}

fn raise(app: &App, overs: &Rc<Overs>, over: &Rc<Over>, base: &Arc<Entry>) -> Result<(), BdevError> {
    let (on_app, name) = (app.clone(), over.name.clone());
    let listener = move |event| match event {
        BdevEvent::Removing => on_app.core().spawn(base_goes(on_app.clone(), name.clone())),
        BdevEvent::Resized => on_app.registry().resized(&name),
    };
    let claim = app.registry().open(&base.bdev.info().name, Access::Exclusive(over.module), listener)?;
    let device = (over.make)(base)?;
    // Before the device is registered: whoever then looks at it finds its base claimed.
    overs.claims.borrow_mut().insert(over.name.clone(), claim);
    if let Err(error) = app.registry().register(device, Vec::new(), over.module) {
        let claim = overs.claims.borrow_mut().remove(&over.name);
        drop(claim);
        return Err(error);
    }
    Ok(())
}

async fn base_goes(app: App, name: String) {
    if let Err(error) = app.registry().unregister(app.core(), &name).await {
        tracing::warn!(bdev = name, %error, "a device over a removed base did not go");
    }
    let claim = app.module(Overs::default).claims.borrow_mut().remove(&name);
    drop(claim);
}

fn watch(app: &App, overs: &Rc<Overs>) {
    if overs.watching.replace(true) {
        return;
    }
    let (on_app, overs) = (app.clone(), Rc::clone(overs));
    app.registry().watch(move |entry| {
        let waits = |o: &&Rc<Over>| entry.is_called(&o.base) && !overs.claims.borrow().contains_key(&o.name);
        let found = overs.list.borrow().iter().find(waits).cloned();
        let Some(over) = found else { return };
        if let Err(error) = raise(&on_app, &overs, &over, entry) {
            tracing::error!(bdev = over.name, %error, "a device could not be made over its base");
        }
    });
}
