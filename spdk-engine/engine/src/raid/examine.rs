//! Finding the raid that a device belongs to.
//!
//! *Flow.* The superblock on a new device, if it has one, is judged against the raid of its UUID; a newer one makes the
//! raid anew. A device without one joins a raid that awaits it by name.
//!
//! *Invariants.* Whatever the order in which members appear, the newest superblock decides who is one. A member that the
//! newest lists as lost is never read: it is rebuilt in full.
//!
//! *When things fail.* A device that cannot be read, or that contradicts its raid, is left alone and the log says why.

use std::rc::Rc;
use std::sync::Arc;

use blobstore_format::raid::{MemberState, RaidSuperblock};
use futures::FutureExt;
use futures::future::LocalBoxFuture;

use super::array::{Array, Judgement, State, judge};
use super::control::{Raid, Raids};
use super::io;
use crate::app::App;
use crate::bdev::registry::{Access, Entry};

/// Looks at a device.
pub async fn examine(app: App, entry: Arc<Entry>) {
    let raids = app.module(Raids::default);
    let info = entry.bdev.info();
    if raids.of_member(&entry).is_some() {
        return;
    }
    // Keeps the device from going while it is read.
    let Ok(desc) = app.registry().open(&info.name, Access::ReadOnly, |_| {}) else { return };
    let loaded = io::load(app.core(), &entry).await;
    drop(desc);
    let outcome = match loaded {
        Ok(Some(superblock)) => found(app.clone(), superblock, Arc::clone(&entry)).await,
        Ok(None) => awaited(&app, &entry).await,
        Err(errno) => Err(errno),
    };
    if let Err(errno) = outcome {
        let reason = nix::errno::Errno::from_raw(errno).desc();
        tracing::warn!(bdev = info.name, reason, "the device does not join a raid");
    }
}

/// Lets a device that has a superblock join its raid.
///
/// # Errors
/// Why it does not: EINVAL when it is no member (any more), EEXIST when it is one already, EBUSY when its superblock is
/// newer than that of a raid that is online.
pub fn found(app: App, superblock: RaidSuperblock, entry: Arc<Entry>) -> LocalBoxFuture<'static, Result<(), i32>> {
    async move {
        let raids = app.module(Raids::default);
        let info = entry.bdev.info();
        loop {
            let known = raids.by_uuid(superblock.uuid);
            let judgement = judge(&superblock, &info, known.as_ref().map(|raid| raid.array.borrow()).as_deref());
            match (judgement, known) {
                (Judgement::Leave(errno), _) => return Err(errno),
                (Judgement::Make { .. }, Some(known)) => {
                    if known.deleting.replace(true) {
                        return Err(libc::EBUSY);
                    }
                    tracing::info!(raid = known.name(), bdev = info.name, "a newer superblock was found");
                    let gone = known.job(async move |raid| {
                        raid.go_away(false).await;
                        Ok(())
                    });
                    gone.await?;
                }
                (Judgement::Make { slot }, None) => return make(&app, &superblock, slot, &entry).await,
                (Judgement::Join { .. } | Judgement::Rejoin { .. }, Some(known)) => {
                    return known.job(async move |raid| join(raid, superblock, entry).await).await;
                }
                (Judgement::Join { .. } | Judgement::Rejoin { .. }, None) => return Err(libc::EINVAL),
            }
        }
    }
    .boxed_local()
}

async fn make(app: &App, superblock: &RaidSuperblock, slot: Option<usize>, entry: &Arc<Entry>) -> Result<(), i32> {
    let raid = Raid::enter(app, Array::from_superblock(superblock)?)?;
    tracing::info!(raid = superblock.name, seq_number = superblock.seq_number, "raid found");
    let outcome = match slot {
        Some(_) => {
            let (superblock, entry) = (superblock.clone(), Arc::clone(entry));
            raid.job(async move |raid| join(raid, superblock, entry).await).await
        }
        None => Err(libc::EINVAL),
    };
    look_for_members(&raid).await;
    outcome
}

/// Judges once more, as things may have changed since, and claims the device; part of a job.
async fn join(raid: Rc<Raid>, superblock: RaidSuperblock, entry: Arc<Entry>) -> Result<(), i32> {
    let info = entry.bdev.info();
    let judgement = judge(&superblock, &info, Some(&raid.array.borrow()));
    let slot = match judgement {
        _ if raid.deleting.get() => return Err(libc::EBUSY),
        Judgement::Leave(errno) => return Err(errno),
        Judgement::Make { .. } => return Err(libc::EBUSY),
        Judgement::Join { slot } => slot,
        Judgement::Rejoin { slot } => {
            if raid.process.borrow().is_some() {
                tracing::info!(raid = raid.name(), bdev = info.name, "rejoins when the present rebuild has ended");
                raid.later.borrow_mut().push(entry);
                return Ok(());
            }
            tracing::warn!(raid = raid.name(), bdev = info.name, slot, "a lost member is back");
            slot
        }
    };
    raid.claim(slot, &info.name)?;
    raid.came(slot).await
}

/// Lets the other members that are there join a raid that has just been made.
async fn look_for_members(raid: &Rc<Raid>) {
    let count = raid.array.borrow().slots.len();
    for slot in 0..count {
        let uuid = raid.array.borrow().slots.get(slot).filter(|s| !s.configured).map(|s| s.uuid);
        let Some(uuid) = uuid.filter(|uuid| !uuid.is_nil()) else { continue };
        let Some(entry) = raid.app.registry().find(&uuid.to_string()) else { continue };
        if let Ok(Some(superblock)) = io::load(raid.app.core(), &entry).await {
            // What it says is in the log of the device's own examination, or follows from the raid's state.
            let _ = found(raid.app.clone(), superblock, entry).await;
        }
        if !raid.is_entered() {
            return;
        }
    }
}

/// Looks again at devices that the superblock lists as lost: one that was examined before the raid was known to be
/// without it would otherwise stay out, depending on the order.
pub fn look_for_lost_members(raid: &Rc<Raid>) {
    let Some(superblock) = raid.array.borrow().superblock.clone() else { return };
    let lost = superblock.members.iter().filter(|member| member.state != MemberState::Configured);
    for entry in lost.filter_map(|member| raid.app.registry().find(&member.uuid.to_string())) {
        raid.app.core().spawn(examine(raid.app.clone(), entry));
    }
}

/// Lets a device join a raid that awaits it by name.
async fn awaited(app: &App, entry: &Arc<Entry>) -> Result<(), i32> {
    let info = entry.bdev.info();
    let raids = app.module(Raids::default);
    let all = raids.list.borrow().clone();
    for raid in all {
        let waits = raid.array.borrow().awaits(|name| entry.is_called(name), info.uuid).is_some();
        if !waits || raid.deleting.get() {
            continue;
        }
        let (entry, name) = (Arc::clone(entry), info.name.clone());
        let taken = raid.job(async move |raid| {
            let slot = raid.array.borrow().awaits(|name| entry.is_called(name), entry.bdev.info().uuid);
            let Some(slot) = slot else { return Ok(()) };
            raid.claim(slot, &name)?;
            raid.came(slot).await
        });
        taken.await?;
    }
    Ok(())
}

/// Whether some raid awaits a device by name: then it is looked at even if devices of its kind are not examined.
pub fn is_awaited(app: &App, entry: &Entry) -> bool {
    let uuid = entry.bdev.info().uuid;
    let raids = app.module(Raids::default);
    let list = raids.list.borrow();
    list.iter().any(|raid| {
        let array = raid.array.borrow();
        array.state == State::Configuring && array.awaits(|name| entry.is_called(name), uuid).is_some()
    })
}
