//! One raid on the control core: its members, and the sequences that change it.
//!
//! *What it is.* [`Raid`] carries out what [`Array`] decides: it claims members, writes superblocks, registers the
//! device, and publishes to the cores how I/O goes. Whatever changes a raid is a job in its queue; jobs run one after
//! another, so that a sequence may wait for I/O without another one coming in between.
//!
//! *Invariants.* A member is claimed while it belongs to a raid. A member leaves under a hold of all I/O, after the
//! superblocks of the others say so; then writes that it failed are answered. The last whole member never leaves for
//! having failed.
//!
//! *When things fail.* A superblock that cannot be written to a member makes that member fail. One that can be written
//! nowhere is said in the log, and writes that depended on it fail. I/O that does not end holds up a change for
//! [`HOLD_DEADLINE_NS`]; then the change goes on without it.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use futures::channel::oneshot;
use futures::future::LocalBoxFuture;
use uuid::Uuid;

use super::array::{Array, Came, State};
use super::core_raid::{CoreRaid, Verdict, apply_everywhere};
use super::device::RaidBdev;
use super::rebuild::Process;
use super::shared::{Held, Hold, Member, MemberId, Shared, next_number};
use super::{examine, io, rebuild};
use crate::app::App;
use crate::bdev::BdevInfo;
use crate::bdev::registry::{Access, BdevEvent, Desc, Entry};
use crate::reactor::driver::{NANOS_PER_S, Nanos};
use crate::reactor::{Core, CoreId};

/// How long a change waits for I/O to end.
pub const HOLD_DEADLINE_NS: Nanos = 30 * NANOS_PER_S;
/// Most blocks being corrected at once, in one raid.
const CORRECTIONS_MAX: usize = 16;

/// Options of all raids; they steer rebuilds.
#[derive(Debug, Clone, Copy, serde::Deserialize, serde::Serialize)]
#[serde(deny_unknown_fields)]
pub struct Options {
    pub process_window_size_kb: u32,
    /// 0 for no limit.
    pub process_max_bandwidth_mb_sec: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { process_window_size_kb: 1024, process_max_bandwidth_mb_sec: 0 }
    }
}

/// All raids, oldest first.
#[derive(Default)]
pub struct Raids {
    pub list: RefCell<Vec<Rc<Raid>>>,
    pub options: Cell<Options>,
    /// Whether new devices are looked at for raids that await them by name.
    pub watching: Cell<bool>,
}

impl Raids {
    /// The raid of that name.
    pub fn by_name(&self, name: &str) -> Option<Rc<Raid>> {
        self.list.borrow().iter().find(|raid| raid.array.borrow().name == name).cloned()
    }

    /// The raid with that UUID.
    pub fn by_uuid(&self, uuid: Uuid) -> Option<Rc<Raid>> {
        self.list.borrow().iter().find(|raid| raid.array.borrow().uuid == uuid).cloned()
    }

    /// The raid that has claimed a device, and where.
    pub fn of_member(&self, entry: &Arc<Entry>) -> Option<(Rc<Raid>, MemberId)> {
        self.list.borrow().iter().find_map(|raid| {
            let claims = raid.claims.borrow();
            let claim = claims.iter().flatten().find(|claim| Arc::ptr_eq(claim.desc.entry(), entry))?;
            Some((Rc::clone(raid), claim.member))
        })
    }

    fn by_id(&self, id: u64) -> Option<Rc<Raid>> {
        let is_it = |raid: &&Rc<Raid>| raid.shared().is_some_and(|shared| shared.id == id);
        self.list.borrow().iter().find(is_it).cloned()
    }
}

struct Claim {
    desc: Desc,
    member: MemberId,
}

/// Why a member leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// It failed an I/O.
    Failed,
    /// Its device is removed.
    Gone,
    /// A call asks so.
    Asked,
}

type Job = Box<dyn FnOnce() -> LocalBoxFuture<'static, ()>>;

/// One raid.
pub struct Raid {
    pub app: App,
    pub array: RefCell<Array>,
    claims: RefCell<Vec<Option<Claim>>>,
    device: RefCell<Option<Arc<RaidBdev>>>,
    pub process: RefCell<Option<Rc<Process>>>,
    /// At most one job per member and event, and one per call that waits.
    jobs: RefCell<VecDeque<Job>>,
    working: Cell<bool>,
    /// It goes, or is to go: nothing joins any more.
    pub deleting: Cell<bool>,
    /// What became of the members that left last, by slot.
    verdicts: RefCell<Vec<Option<(MemberId, Verdict)>>>,
    corrections: Cell<usize>,
    /// Devices that belong here and have to wait for a rebuild to end.
    pub later: RefCell<Vec<Arc<Entry>>>,
}

impl Raid {
    /// A raid without members, entered into [`Raids`].
    ///
    /// # Errors
    /// EEXIST when there is one of that name.
    pub fn enter(app: &App, array: Array) -> Result<Rc<Self>, i32> {
        let raids = app.module(Raids::default);
        let count = array.slots.len();
        if raids.by_name(&array.name).is_some() {
            return Err(libc::EEXIST);
        }
        let raid = Rc::new(Self {
            app: app.clone(),
            array: RefCell::new(array),
            claims: RefCell::new((0..count).map(|_| None).collect()),
            device: RefCell::new(None),
            process: RefCell::new(None),
            jobs: RefCell::default(),
            working: Cell::new(false),
            deleting: Cell::new(false),
            verdicts: RefCell::new(vec![None; count]),
            corrections: Cell::new(0),
            later: RefCell::default(),
        });
        raids.list.borrow_mut().push(Rc::clone(&raid));
        Ok(raid)
    }

    /// Its name.
    pub fn name(&self) -> String {
        self.array.borrow().name.clone()
    }

    /// What the cores share, once it is online.
    pub fn shared(&self) -> Option<Arc<Shared>> {
        self.device.borrow().as_ref().map(|device| Arc::clone(device.shared()))
    }

    /// The member in a slot.
    pub fn member(&self, slot: usize) -> Option<MemberId> {
        self.claims.borrow().get(slot)?.as_ref().map(|claim| claim.member)
    }

    /// Whether it still is one of the app's raids.
    pub fn is_entered(self: &Rc<Self>) -> bool {
        self.app.module(Raids::default).list.borrow().iter().any(|raid| Rc::ptr_eq(raid, self))
    }

    /// Queues a job and gives back its outcome.
    pub async fn job<T: 'static, F>(self: &Rc<Self>, work: impl FnOnce(Rc<Self>) -> F + 'static) -> Result<T, i32>
    where
        F: Future<Output = Result<T, i32>> + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        let raid = Rc::clone(self);
        self.queue(async move || {
            let _ = sender.send(work(raid).await);
        });
        receiver.await.unwrap_or(Err(libc::ECANCELED))
    }

    fn queue(self: &Rc<Self>, job: impl AsyncFnOnce() + 'static) {
        self.jobs.borrow_mut().push_back(Box::new(move || Box::pin(async move { job().await })));
        if self.working.replace(true) {
            return;
        }
        let raid = Rc::clone(self);
        self.app.core().spawn(async move {
            loop {
                let next = raid.jobs.borrow_mut().pop_front();
                let Some(job) = next else { break };
                job().await;
            }
            raid.working.set(false);
        });
    }

    /// Claims a device for a slot; the caller goes on with [`Self::came`].
    ///
    /// # Errors
    /// The errno of SPDK: ENODEV, EPERM for one that is claimed, EINVAL for one that does not fit.
    pub fn claim(self: &Rc<Self>, slot: usize, name: &str) -> Result<Arc<Entry>, i32> {
        if self.deleting.get() {
            return Err(libc::ENODEV);
        }
        let member = MemberId { slot: slot as u8, generation: next_number() };
        let raid = Rc::downgrade(self);
        let listener = move |event| {
            let Some(raid) = raid.upgrade() else { return };
            let in_job = Rc::clone(&raid);
            raid.queue(async move || match event {
                BdevEvent::Removing => {
                    let _ = in_job.remove(member, Why::Gone).await;
                }
                BdevEvent::Resized => resized(&in_job).await,
            });
        };
        let desc = self.app.registry().open(name, Access::Exclusive("raid"), listener).map_err(|e| e.errno())?;
        let entry = Arc::clone(desc.entry());
        self.array.borrow_mut().claimed(slot, &entry.bdev.info())?;
        self.claims.borrow_mut()[slot] = Some(Claim { desc, member });
        Ok(entry)
    }

    /// Lets a member go that does not count yet, or that no core uses any more.
    pub fn unclaim(&self, slot: usize) {
        self.array.borrow_mut().free(slot);
        let claim = self.claims.borrow_mut()[slot].take();
        drop(claim);
    }

    /// A claimed member counts from now on: the raid goes online with the last one, or rebuilds a late one.
    ///
    /// # Errors
    /// What keeps the raid from going online, or the rebuild from starting.
    pub async fn came(self: &Rc<Self>, slot: usize) -> Result<(), i32> {
        let came = self.array.borrow_mut().configured(slot);
        match came {
            Came::Waiting => Ok(()),
            Came::Complete => self.go_online().await,
            Came::Rebuild => rebuild::start(self, slot).await,
        }
    }

    async fn go_online(self: &Rc<Self>) -> Result<(), i32> {
        self.array.borrow_mut().start()?;
        let failed = self.write_superblock().await;
        if let Some(failed) = failed.first() {
            tracing::error!(raid = self.name(), slot = failed, "the raid cannot start: no superblock on a member");
            return Err(libc::EIO);
        }
        let members: Vec<Option<Member>> = (0..self.claims.borrow().len()).map(|slot| self.as_member(slot)).collect();
        let infos: Vec<BdevInfo> = members.iter().flatten().map(|m| m.entry.bdev.info()).collect();
        let guest = members.iter().flatten().any(|m| m.entry.bdev.holds_guest_data());
        let device = {
            let array = self.array.borrow();
            let shared = Shared::new(array.name.clone(), array.block_size, array.num_blocks, members);
            Arc::new(RaidBdev::new(&array, &infos, guest, shared))
        };
        *self.device.borrow_mut() = Some(Arc::clone(&device));
        self.array.borrow_mut().state = State::Online;
        if let Err(error) = self.app.registry().register(device, Vec::new(), "raid") {
            tracing::error!(raid = self.name(), %error, "the raid cannot be registered");
            self.array.borrow_mut().state = State::Configuring;
            *self.device.borrow_mut() = None;
            return Err(error.errno());
        }
        examine::look_for_lost_members(self);
        Ok(())
    }

    /// The member of a slot as the cores need it.
    pub fn as_member(&self, slot: usize) -> Option<Member> {
        let claims = self.claims.borrow();
        let claim = claims.get(slot)?.as_ref()?;
        let data_offset = self.array.borrow().slots[slot].data_offset;
        Some(Member { id: claim.member, entry: Arc::clone(claim.desc.entry()), data_offset })
    }

    /// Writes the superblock, with a new number, to all members that stay; gives back the slots where it failed.
    pub async fn write_superblock(&self) -> Vec<usize> {
        let bytes = {
            let mut array = self.array.borrow_mut();
            let Some(superblock) = &mut array.superblock else { return Vec::new() };
            superblock.seq_number += 1;
            superblock.emit()
        };
        let staying = self.staying();
        match bytes {
            Ok(bytes) => self.store(&staying, &bytes).await,
            Err(error) => {
                tracing::error!(raid = self.name(), %error, "the superblock cannot be made");
                staying
            }
        }
    }

    fn staying(&self) -> Vec<usize> {
        let array = self.array.borrow();
        let stays = |slot: &usize| array.slots[*slot].configured && !array.slots[*slot].removing;
        (0..array.slots.len()).filter(stays).collect()
    }

    async fn store(&self, slots: &[usize], bytes: &[u8]) -> Vec<usize> {
        let writes = slots.iter().filter_map(|slot| {
            let entry = Arc::clone(self.claims.borrow().get(*slot)?.as_ref()?.desc.entry());
            Some(async move { io::store(self.app.core(), entry, bytes.to_vec()).await.err().map(|_| *slot) })
        });
        futures::future::join_all(writes).await.into_iter().flatten().collect()
    }

    /// As [`Self::write_superblock`]; members that cannot be written are treated as failed. Whether any could be.
    pub async fn record(self: &Rc<Self>) -> bool {
        let failed = self.write_superblock().await;
        for slot in &failed {
            if let Some(member) = self.member(*slot) {
                self.fail(member);
            }
        }
        self.array.borrow().superblock.is_none() || failed.len() < self.staying().len()
    }

    /// Queues the removal of a member that has failed.
    pub fn fail(self: &Rc<Self>, member: MemberId) {
        let raid = Rc::clone(self);
        self.queue(async move || {
            let _ = raid.remove(member, Why::Failed).await;
        });
    }

    /// Holds all I/O and waits until none is in flight; the number of the hold.
    pub async fn hold(&self, shared: &Arc<Shared>, what: Held) -> (u64, bool) {
        let id = next_number();
        shared.publish(|layout| layout.holds.push(Hold { id, what: what.clone() }));
        let core = self.app.core();
        let held = core.timeout(HOLD_DEADLINE_NS, apply_everywhere(core, shared, Some(what))).await.is_some();
        if !held {
            tracing::error!(raid = self.name(), "I/O in flight does not end");
        }
        (id, held)
    }

    /// Lifts a hold, together with other changes.
    pub async fn release(&self, shared: &Arc<Shared>, hold: u64, change: impl FnOnce(&mut super::shared::Layout)) {
        shared.publish(|layout| {
            layout.holds.retain(|h| h.id != hold);
            change(layout);
        });
        if let Err(error) = apply_everywhere(self.app.core(), shared, None).await {
            tracing::error!(raid = self.name(), %error, "a core cannot open a member");
        }
    }

    /// Takes a member out; part of a job.
    ///
    /// # Errors
    /// ENODEV when it is not there (any more), EPERM when it has failed and is the last.
    pub async fn remove(self: &Rc<Self>, member: MemberId, why: Why) -> Result<(), i32> {
        let slot = usize::from(member.slot);
        if self.member(slot) != Some(member) || self.array.borrow().slots[slot].removing {
            return Err(libc::ENODEV);
        }
        if self.array.borrow().state != State::Online {
            self.unclaim(slot);
            return Ok(());
        }
        if why == Why::Failed && !self.array.borrow().can_lose(slot) {
            tracing::error!(raid = self.name(), slot, "the last whole member has failed; it is kept");
            return Err(libc::EPERM);
        }
        self.array.borrow_mut().slots[slot].removing = true;
        self.stop_process_for(slot).await;
        if self.member(slot) != Some(member) {
            // The rebuild's end has taken it out.
            return Ok(());
        }
        let Some(shared) = self.shared() else { return Err(libc::ENODEV) };
        let name = self.array.borrow().slots[slot].name.clone().unwrap_or_default();
        tracing::warn!(raid = self.name(), slot, member = name, ?why, "a member leaves the raid");
        let (hold, _) = self.hold(&shared, Held::Everything).await;
        let changed = self.array.borrow_mut().book_leaving(slot, why == Why::Failed);
        let recorded = !changed || self.record().await || self.staying().is_empty();
        self.release(&shared, hold, |layout| layout.members[slot] = None).await;
        self.unclaim(slot);
        let verdict = if recorded { Verdict::Out } else { Verdict::Unrecorded };
        self.remember(member, verdict);
        let enough = self.array.borrow_mut().lost();
        if !enough {
            self.go_away(false).await;
        }
        Ok(())
    }

    /// Keeps what became of a member, for cores that ask late.
    pub fn remember(&self, member: MemberId, verdict: Verdict) {
        self.verdicts.borrow_mut()[usize::from(member.slot)] = Some((member, verdict));
    }

    /// Ends the rebuild when the member in `slot` is its target, or its only source.
    async fn stop_process_for(self: &Rc<Self>, slot: usize) {
        let process = self.process.borrow().clone();
        if let Some(process) = process
            && (process.slot == slot || self.array.borrow().staying() < 2)
        {
            rebuild::stop(self, &process, libc::ENODEV).await;
        }
    }

    /// Ends the raid: takes the device away, lets all members go, forgets the raid; part of a job.
    pub async fn go_away(self: &Rc<Self>, clear: bool) {
        self.deleting.set(true);
        let process = self.process.borrow().clone();
        if let Some(process) = process {
            rebuild::stop(self, &process, libc::ECANCELED).await;
        }
        let core = self.app.core().clone();
        let was_online = self.array.borrow().state == State::Online;
        self.array.borrow_mut().state = State::Offline;
        if let (true, Some(shared)) = (was_online, self.shared()) {
            if let Err(error) = self.app.registry().unregister(&core, &shared.name).await {
                tracing::warn!(raid = shared.name, %error, "the raid's device did not go in order");
            }
            // Whoever still has it open must not hold the members open.
            self.release(&shared, 0, |layout| *layout = super::shared::Layout::default()).await;
            for peer in core.peers().iter() {
                let id = shared.id;
                core.post(peer.id, move |core| CoreRaid::give_up(core, id));
            }
        }
        if clear && let Some(length) = self.superblock_bytes() {
            let failed = self.store(&self.staying(), &vec![0; length]).await;
            if !failed.is_empty() {
                tracing::error!(raid = self.name(), ?failed, "superblocks could not be cleared");
            }
        }
        let count = self.claims.borrow().len();
        (0..count).for_each(|slot| self.unclaim(slot));
        self.app.module(Raids::default).list.borrow_mut().retain(|raid| !Rc::ptr_eq(raid, self));
    }

    fn superblock_bytes(&self) -> Option<usize> {
        self.array.borrow().superblock.as_ref()?.emit().ok().map(|bytes| bytes.len())
    }
}

/// A job: the device of a member has another size.
async fn resized(raid: &Rc<Raid>) {
    let blocks: Vec<Option<u64>> =
        raid.claims.borrow().iter().map(|c| c.as_ref().map(|c| c.desc.entry().bdev.num_blocks())).collect();
    if raid.array.borrow().state != State::Online {
        return;
    }
    let (Some(grown), Some(shared)) = (raid.array.borrow_mut().resize(&blocks), raid.shared()) else { return };
    // Recorded first: after a crash nobody may find data beyond the size that the superblock gives.
    raid.record().await;
    shared.set_num_blocks(grown);
    tracing::info!(raid = shared.name, blocks = grown, "the raid has grown");
    raid.app.registry().resized(&shared.name);
}

/// A core reports a member that failed; it is answered whatever comes of it. Called on the control core.
pub fn member_failed(core: &Core, raid: u64, member: MemberId, from: CoreId) {
    let found = core.local(Raids::default).by_id(raid);
    let core_here = core.clone();
    let answer = move |verdict| core_here.post(from, move |core| CoreRaid::judged(core, raid, member, verdict));
    let Some(found) = found else { return answer(Verdict::Unrecorded) };
    let queue_of = Rc::clone(&found);
    queue_of.queue(async move || {
        let _ = found.remove(member, Why::Failed).await;
        let known = found.verdicts.borrow()[usize::from(member.slot)];
        answer(known.filter(|(id, _)| *id == member).map_or(Verdict::Unrecorded, |(_, verdict)| verdict));
    });
}

/// A core could read some blocks only from another member: they are written where they could not be read. Called on the
/// control core.
pub fn could_not_read(core: &Core, raid: u64, member: MemberId, lba: u64, blocks: u64) {
    let Some(found) = core.local(Raids::default).by_id(raid) else { return };
    if found.corrections.get() >= CORRECTIONS_MAX {
        tracing::debug!(
            raid = found.name(),
            lba,
            blocks,
            "too many blocks are being corrected; these are left for now"
        );
        return;
    }
    found.corrections.set(found.corrections.get() + 1);
    core.spawn(async move {
        rebuild::correct(&found, member, lba, blocks).await;
        found.corrections.set(found.corrections.get() - 1);
    });
}
