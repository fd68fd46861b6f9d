//! A store on a [`PowerDisk`] with its [`Ledger`]: runs programs and compares.
//!
//! Half of the I/O goes through the store's own data path, half by the cluster maps, as an engine's cores do it.
//! After every operation the tree, the allocation and the space are compared with the model; contents are compared by
//! [`World::check_contents`].

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use futures::future::join_all;
use uuid::Uuid;

use super::gates::Gates;
use super::ledger::Ledger;
use super::model::{Call, CloneUnmap, Model, Parent, Rules, Verdict, VolId, attribute};
use super::pattern::{self, Found, Tag};
use super::power::PowerDisk;
use super::program::{Kind, Numbers, Op, Shape};
use crate::device::{Device, LocalFuture};
use crate::map::Place;
use crate::{ClearMethod, CreateOptions, Error, FormatOptions, LoadOptions, LoadReport, Lvol, Store};

/// The UUID of the external device.
pub const EXTERNAL_ID: &str = "1f0bd2a4-7c43-4d7c-9c37-5a1b3b1c0e55";

/// What the external device holds in every block.
pub const EXTERNAL_TAG: Tag = 1;

/// What the store and its programs look like.
#[derive(Debug, Clone)]
pub struct Layout {
    /// Bytes of a cluster.
    pub cluster_size: u32,
    /// Least bytes of a metadata page; 0 for the default.
    pub md_page_size: u32,
    /// Metadata pages for each 100 clusters.
    pub md_pages_per_cluster_ratio: u32,
    /// Clusters of the external device; none: no clones of it.
    pub external_clusters: Option<u64>,
    /// The programs.
    pub shape: Shape,
}

/// See the module.
pub struct World {
    layout: Layout,
    disk: PowerDisk,
    external: Option<PowerDisk>,
    ledger: Rc<RefCell<Ledger>>,
    gates: Rc<Gates>,
    numbers: RefCell<Numbers>,
    store: RefCell<Option<Store>>,
    turn: Cell<u64>,
}

impl std::fmt::Debug for World {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("World").field("layout", &self.layout).finish_non_exhaustive()
    }
}

/// The UUID of an lvol.
pub fn uuid_of(vol: VolId) -> Uuid {
    Uuid::from_u128(0xADDA_0000_0000_4000_8000_0000_0000_0000 | u128::from(vol))
}

/// The lvol of a UUID.
pub fn vol_of(uuid: Uuid) -> VolId {
    u32::try_from(uuid.as_u128() & 0xFFFF_FFFF).unwrap_or(0)
}

impl World {
    /// On a disk without a store. The external device must hold [`EXTERNAL_TAG`] (see [`World::external_disk`]).
    pub fn new(layout: Layout, disk: PowerDisk, external: Option<PowerDisk>) -> Rc<Self> {
        let blocks = u64::from(layout.cluster_size / disk.options().block_size);
        let external_clusters = layout.external_clusters.map(|clusters| (clusters, EXTERNAL_TAG));
        let model = Model::new(blocks, external_clusters, Rules { clone_unmap: CloneUnmap::Zeroes });
        Self::with_model(layout, disk, external, model, Numbers::default())
    }

    /// On a disk whose store contains what the model says.
    pub fn with_model(
        layout: Layout,
        disk: PowerDisk,
        external: Option<PowerDisk>,
        model: Model,
        numbers: Numbers,
    ) -> Rc<Self> {
        let ledger = Rc::new(RefCell::new(Ledger::new(model)));
        Rc::new_cyclic(|weak: &std::rc::Weak<Self>| {
            let weak = weak.clone();
            let gates = Gates::new(move |blob| {
                let Some(world) = weak.upgrade() else { return };
                let lvol = world.store.borrow().as_ref().and_then(|store| store.lvol(blob));
                if let Some(uuid) = lvol.and_then(|lvol| lvol.info().uuid) {
                    world.ledger.borrow_mut().frozen(vol_of(uuid));
                }
            });
            Self {
                layout,
                disk,
                external,
                ledger,
                gates,
                numbers: RefCell::new(numbers),
                store: RefCell::new(None),
                turn: Cell::new(0),
            }
        })
    }

    /// The ledger.
    pub fn ledger(&self) -> Rc<RefCell<Ledger>> {
        Rc::clone(&self.ledger)
    }

    /// A copy of what names new lvols.
    pub fn numbers(&self) -> Numbers {
        self.numbers.borrow().clone()
    }

    /// The gates.
    pub fn gates(&self) -> &Gates {
        &self.gates
    }

    /// The store, if it is loaded.
    ///
    /// # Errors
    /// When it is not.
    pub fn store(&self) -> Result<Store, String> {
        self.store.borrow().clone().ok_or_else(|| "the store is not loaded".to_owned())
    }

    /// Where the metadata of the store ends, in bytes.
    ///
    /// # Errors
    /// When it is not loaded.
    pub fn data_offset(&self) -> Result<u64, String> {
        let info = self.store()?.info();
        let cluster_size = u64::from(info.cluster_size);
        Ok((self.disk.options().size / cluster_size - info.total_data_clusters) * cluster_size)
    }

    fn block_size(&self) -> usize {
        usize::try_from(self.disk.options().block_size).unwrap_or(usize::MAX)
    }

    /// Makes the store.
    ///
    /// # Errors
    /// What the store answers.
    pub async fn format(&self) -> Result<(), String> {
        let mut options = FormatOptions::new("store", Uuid::from_u128(0x5702E));
        options.cluster_size = self.layout.cluster_size;
        options.md_page_size = self.layout.md_page_size;
        options.md_pages_per_cluster_ratio = self.layout.md_pages_per_cluster_ratio;
        let store = Store::format(Rc::new(self.disk.clone()), self.gates.clone(), options).await;
        *self.store.borrow_mut() = Some(store.map_err(|error| format!("the store is not made: {error}"))?);
        Ok(())
    }

    /// Opens the store.
    ///
    /// # Errors
    /// What the store answers.
    pub async fn load(&self) -> Result<LoadReport, Error> {
        let find = |id: &str| -> LocalFuture<'_, Option<Rc<dyn Device>>> {
            let found = (id == EXTERNAL_ID).then(|| self.external.clone()).flatten();
            Box::pin(async move { found.map(|disk| Rc::new(disk) as Rc<dyn Device>) })
        };
        let device = Rc::new(self.disk.clone());
        let (store, report) = Store::load(device, self.gates.clone(), LoadOptions::default(), &find, &|_| {}).await?;
        *self.store.borrow_mut() = Some(store);
        Ok(report)
    }

    /// Ends the store in order.
    ///
    /// # Errors
    /// What the store answers, and a gate that was left closed.
    pub async fn unload(&self) -> Result<(), String> {
        let store = self.store()?;
        store.unload().await.map_err(|error| format!("unload: {error}"))?;
        self.drop_store();
        let closed = self.gates.closed();
        if closed.is_empty() { Ok(()) } else { Err(format!("{closed:?} stay paused")) }
    }

    /// Forgets the store, as the death of the process would.
    pub fn drop_store(&self) {
        *self.store.borrow_mut() = None;
    }

    /// Runs a program from a loaded store on.
    ///
    /// # Errors
    /// The first difference between store and model, with the operation.
    pub async fn run(self: &Rc<Self>, program: &[Op]) -> Result<(), String> {
        for (index, op) in program.iter().enumerate() {
            self.step(op).await.map_err(|error| format!("operation {index}, {:?}: {error}", op.kind))?;
        }
        Ok(())
    }

    async fn step(self: &Rc<Self>, op: &Op) -> Result<(), String> {
        match op.kind {
            Kind::ReopenClean => {
                self.unload().await?;
                self.load_again(false).await?;
            }
            Kind::ReopenDirty => {
                self.drop_store();
                self.load_again(true).await?;
            }
            _ => {
                let call = self.resolve(op);
                let beside = self.beside(op, call.as_ref());
                let main = async {
                    match &call {
                        Some(call) if call.is_io() => self.io(call.clone()).await,
                        Some(call) => self.call(call).await,
                        None => Ok(()),
                    }
                };
                let (main, beside) = futures::join!(main, join_all(beside));
                main.map_err(|error| format!("{call:?}: {error}"))?;
                beside.into_iter().collect::<Result<Vec<()>, String>>()?;
            }
        }
        self.check_tree()
    }

    async fn load_again(&self, dirty: bool) -> Result<(), String> {
        let report = self.load().await.map_err(|error| format!("load: {error}"))?;
        // A store that was loaded and not changed is still clean.
        let as_expected = (dirty || !report.recovered) && report.damaged.is_empty() && report.repaired.is_empty();
        if as_expected { Ok(()) } else { Err(format!("after a stop (dirty: {dirty}) the load found {report:?}")) }
    }

    fn resolve(&self, op: &Op) -> Option<Call> {
        op.resolve(self.ledger.borrow().model(), &mut self.numbers.borrow_mut(), self.layout.shape)
    }

    /// The I/O that runs beside a call: none that changes what the call must not meet, none that overlaps.
    fn beside<'a>(self: &'a Rc<Self>, op: &Op, call: Option<&Call>) -> Vec<LocalFuture<'a, Result<(), String>>> {
        let mut taken: Vec<(VolId, u64, u64)> =
            call.and_then(Call::blocks).map(|(v, f, c, _)| (v, f, c)).into_iter().collect();
        let mut running: Vec<LocalFuture<'a, Result<(), String>>> = Vec::new();
        for io in &op.beside {
            let picked = io.picked(self.ledger.borrow().model());
            if picked.is_none_or(|vol| must_not_meet(call, vol)) {
                continue;
            }
            if io.kind == Kind::Read {
                let Some((vol, first, count)) = picked.and_then(|vol| self.read_range(io, vol)) else { continue };
                running.push(Box::pin(self.read(vol, first, count)));
                continue;
            }
            let Some(io) = self.resolve(io) else { continue };
            if let Some((vol, first, count, _)) = io.blocks() {
                let overlaps = |(v, f, c): &(VolId, u64, u64)| *v == vol && *f < first + count && first < f + c;
                let refused = self.ledger.borrow().model().verdict(&io) != Verdict::Succeeds;
                if refused || taken.iter().any(overlaps) {
                    continue;
                }
                taken.push((vol, first, count));
            }
            running.push(Box::pin(self.io(io)));
        }
        running
    }

    fn read_range(&self, op: &Op, vol: VolId) -> Option<(VolId, u64, u64)> {
        let ledger = self.ledger.borrow();
        let (first, count) = op.range(ledger.model(), ledger.model().volumes.get(&vol)?.clusters);
        (count > 0).then_some((vol, first, count))
    }

    fn lvol(&self, vol: VolId) -> Result<Lvol, String> {
        let store = self.store()?;
        store.lvol_by_uuid(uuid_of(vol)).ok_or_else(|| format!("lvol {vol} is missing"))
    }

    async fn call(&self, call: &Call) -> Result<(), String> {
        let (verdict, needed) = {
            let mut ledger = self.ledger.borrow_mut();
            let verdict = ledger.model().verdict(call);
            let needed = ledger.model().clusters_needed(call);
            ledger.begin(call);
            (verdict, needed)
        };
        let (free, pages) = self.free()?;
        let result = self.make(call).await;
        let pages = pages.min(self.free()?.1);
        self.ledger.borrow_mut().end(result.is_ok())?;
        match (verdict, result) {
            (Verdict::Succeeds | Verdict::Open, Ok(())) | (Verdict::Refused(_), Err(_)) => Ok(()),
            (Verdict::Refused(why), Ok(())) => Err(format!("not refused, although {why:?}")),
            // Beside it, other I/O takes clusters too.
            (_, Err(Error::NoSpace(_))) if needed + self.slack() >= free || pages < FEW_PAGES => Ok(()),
            (Verdict::Open, Err(Error::Invalid(_) | Error::NotPermitted(_))) => Ok(()),
            (_, Err(error)) => Err(format!("refused: {error} ({needed} clusters needed, {free} free)")),
        }
    }

    /// Free clusters and metadata pages.
    fn free(&self) -> Result<(u64, u32), String> {
        let info = self.store()?.info();
        Ok((info.free_clusters, info.free_md_pages))
    }

    fn slack(&self) -> u64 {
        self.layout.shape.beside as u64 * 4
    }

    async fn make(&self, call: &Call) -> Result<(), Error> {
        let store = self.store().map_err(Error::Invalid)?;
        let lvol = |vol: &VolId| self.lvol(*vol).map_err(Error::NotFound);
        let cluster = u64::from(self.layout.cluster_size);
        match call {
            Call::Create { id, name, clusters, thin } => {
                let options = CreateOptions {
                    name: name.clone(),
                    uuid: uuid_of(*id),
                    size_bytes: clusters * cluster,
                    thin: *thin,
                    clear_method: ClearMethod::Default,
                };
                store.create(options).await.map(drop)
            }
            Call::Snapshot { vol, id, name } => lvol(vol)?.snapshot(name, uuid_of(*id)).await.map(drop),
            Call::Clone { vol, id, name } => lvol(vol)?.clone_to(name, uuid_of(*id)).await.map(drop),
            Call::CloneExternal { id, name } => {
                let device = self.external.clone().map(|disk| Rc::new(disk) as Rc<dyn Device>);
                let size = self.layout.external_clusters.unwrap_or(0) * cluster;
                store.clone_external(EXTERNAL_ID, size, device, name, uuid_of(*id)).await.map(drop)
            }
            Call::Delete { vol } => lvol(vol)?.delete().await,
            Call::Resize { vol, clusters } => lvol(vol)?.resize(clusters * cluster).await,
            Call::Inflate { vol } => lvol(vol)?.inflate(&|_| {}).await,
            Call::Decouple { vol } => lvol(vol)?.decouple_parent(&|_| {}).await,
            Call::Rename { vol, name } => lvol(vol)?.rename(name).await,
            Call::ReadOnly { vol } => lvol(vol)?.set_read_only().await,
            Call::SetParent { vol, parent } => lvol(vol)?.set_parent(&lvol(parent)?).await,
            Call::Attribute { vol, name, number } => lvol(vol)?.set_xattr(name, &attribute(*number)).await,
            Call::Write { .. } | Call::Zero { .. } | Call::Unmap { .. } | Call::Flush { .. } => Ok(()),
        }
    }

    /// Writes, zeroes, unmaps or flushes and enters it in the ledger.
    async fn io(&self, call: Call) -> Result<(), String> {
        let verdict = self.ledger.borrow().model().verdict(&call);
        let needed = self.ledger.borrow().model().clusters_needed(&call);
        let vol = match call {
            Call::Write { vol, .. } | Call::Zero { vol, .. } | Call::Unmap { vol, .. } | Call::Flush { vol } => vol,
            _ => return Ok(()),
        };
        let lvol = self.lvol(vol)?;
        let inside = self.gates.enter(lvol.id()).await;
        let io = self.ledger.borrow_mut().begin_io(call.clone());
        let result = self.transfer(&lvol, &call).await;
        self.ledger.borrow_mut().end_io(io, result.is_ok());
        let failed = match (verdict, result) {
            (Verdict::Refused(_), Err(Error::NotPermitted(_))) => return Ok(()),
            (Verdict::Refused(why), other) => return Err(format!("{call:?} ended with {other:?}, although {why:?}")),
            (_, Ok(())) => return Ok(()),
            (_, Err(Error::NoSpace(_))) => None,
            (_, Err(error)) => Some(error),
        };
        if let Some(error) = failed {
            return Err(format!("{call:?} fails: {error}"));
        }
        let (free, pages) = self.free()?;
        if free > self.slack() + needed && pages >= FEW_PAGES {
            return Err(format!("{call:?} finds no space while {free} clusters are free"));
        }
        self.settle(&lvol, vol, &call).await?;
        drop(inside);
        Ok(())
    }

    /// After a write that failed half-way: what is there now is what the model goes on with.
    async fn settle(&self, lvol: &Lvol, vol: VolId, call: &Call) -> Result<(), String> {
        let Some((_, first, count, tag)) = call.blocks() else { return Ok(()) };
        let before: Vec<Tag> =
            (first..first + count).map(|block| self.ledger.borrow().model().cell(vol, block).latest()).collect();
        let size = self.block_size();
        let bytes = lvol.read(first * size as u64, usize::try_from(count).unwrap_or(0) * size).await;
        let bytes = bytes.map_err(|error| format!("read after {call:?}: {error}"))?;
        let mut found = Vec::new();
        for ((block, bytes), before) in (first..).zip(bytes.chunks(size)).zip(before) {
            match pattern::read(bytes, block) {
                Found::Tag(seen) if seen == tag || seen == before => found.push(seen),
                other => return Err(format!("after a failed {call:?} block {block} holds {other:?}")),
            }
        }
        self.ledger.borrow_mut().settle(vol, first, &found);
        Ok(())
    }

    async fn transfer(&self, lvol: &Lvol, call: &Call) -> Result<(), Error> {
        let size = self.block_size() as u64;
        match call {
            Call::Write { first, count, tag, .. } => {
                let bytes = pattern::blocks(self.block_size(), *first, *count, *tag);
                self.turn.set(self.turn.get() + 1);
                if self.turn.get().is_multiple_of(2) && !lvol.info().read_only {
                    return self.fast_write(lvol, first * size, &bytes).await;
                }
                lvol.write(first * size, &bytes).await
            }
            Call::Zero { first, count, .. } => lvol.write_zeroes(first * size, count * size).await,
            Call::Unmap { first, count, .. } => lvol.unmap(first * size, count * size).await,
            _ => lvol.flush().await,
        }
    }

    /// Writes by the map, as an engine's core does.
    async fn fast_write(&self, lvol: &Lvol, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let cluster_size = u64::from(self.layout.cluster_size);
        let (mut at, mut rest) = (offset, bytes);
        let mut view = lvol.map().view();
        while !rest.is_empty() {
            let (cluster, within) = (at / cluster_size, at % cluster_size);
            let len = (cluster_size - within).min(rest.len() as u64);
            let guard = self.gates.look_up();
            let Some(own) = view.own(cluster) else {
                drop(guard);
                let last = (at + rest.len() as u64).div_ceil(cluster_size);
                lvol.ensure_allocated(cluster..last).await?;
                continue;
            };
            let (head, tail) = rest.split_at(usize::try_from(len).unwrap_or(rest.len()));
            self.disk.write(u64::from(own) * cluster_size + within, head).await?;
            drop(guard);
            (at, rest) = (at + len, tail);
        }
        Ok(())
    }

    /// Reads and compares.
    async fn read(&self, vol: VolId, first: u64, count: u64) -> Result<(), String> {
        let lvol = self.lvol(vol)?;
        let _inside = self.gates.enter(lvol.id()).await;
        let ticket = self.ledger.borrow().begin_read(vol, first, count);
        let size = self.block_size();
        self.turn.set(self.turn.get() + 1);
        let bytes = if self.turn.get().is_multiple_of(2) {
            self.fast_read(&lvol, first * size as u64, count * size as u64).await
        } else {
            lvol.read(first * size as u64, usize::try_from(count).unwrap_or(0) * size).await
        };
        let bytes = bytes.map_err(|error| format!("read of {vol} at {first}+{count}: {error}"))?;
        let ledger = self.ledger.borrow();
        for (index, bytes) in bytes.chunks(size).enumerate() {
            let block = first + index as u64;
            match self.found(vol, block, bytes) {
                Found::Tag(tag) if ledger.may_have_read(&ticket, index, tag) => {}
                other => return Err(format!("lvol {vol} block {block} reads as {other:?}")),
            }
        }
        Ok(())
    }

    /// Reads by the map, as an engine's core does.
    async fn fast_read(&self, lvol: &Lvol, offset: u64, len: u64) -> Result<Vec<u8>, Error> {
        let cluster_size = u64::from(self.layout.cluster_size);
        let mut bytes = Vec::new();
        let mut view = lvol.map().view();
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let (cluster, within) = (at / cluster_size, at % cluster_size);
            let piece = (cluster_size - within).min(end - at);
            let take = usize::try_from(piece).unwrap_or(usize::MAX);
            let _guard = self.gates.look_up();
            match view.place(cluster) {
                Place::Own(own) | Place::Ancestor(own) => {
                    bytes.extend(self.disk.read(u64::from(own) * cluster_size + within, take).await?);
                }
                Place::Zeroes => bytes.resize(bytes.len() + take, 0),
                Place::External => bytes.extend(self.read_external(at, piece).await?),
            }
            at += piece;
        }
        Ok(bytes)
    }

    async fn read_external(&self, at: u64, len: u64) -> Result<Vec<u8>, Error> {
        let Some(external) = &self.external else { return Err(Error::NoExternal(EXTERNAL_ID.to_owned())) };
        let there = external.size_bytes().saturating_sub(at).min(len);
        let mut bytes =
            if there == 0 { Vec::new() } else { external.read(at, usize::try_from(there).unwrap_or(0)).await? };
        bytes.resize(usize::try_from(len).unwrap_or(0), 0);
        Ok(bytes)
    }

    fn found(&self, _vol: VolId, block: u64, bytes: &[u8]) -> Found {
        pattern::read(bytes, block)
    }

    /// Compares tree, allocation and space with the model.
    ///
    /// # Errors
    /// The first difference.
    pub fn check_tree(&self) -> Result<(), String> {
        let store = self.store()?;
        let mut ledger = self.ledger.borrow_mut();
        check_tree(&store, ledger.model())?;
        take_allocation(&store, ledger.model_mut())
    }

    /// Compares what every block of every lvol holds.
    ///
    /// # Errors
    /// The first difference.
    pub async fn check_contents(&self) -> Result<(), String> {
        let volumes: Vec<(VolId, u64)> =
            self.ledger.borrow().model().volumes.iter().map(|(id, v)| (*id, v.clusters)).collect();
        for (vol, clusters) in volumes {
            let contents = self.contents(vol, clusters).await?;
            let ledger = self.ledger.borrow();
            for (block, found) in contents.into_iter().enumerate() {
                let expected = ledger.model().cell(vol, block as u64).latest();
                if found != Found::Tag(expected) {
                    return Err(format!("lvol {vol} block {block} holds {found:?} in place of {expected}"));
                }
            }
        }
        Ok(())
    }

    /// What every block of an lvol holds.
    ///
    /// # Errors
    /// What the store answers.
    pub async fn contents(&self, vol: VolId, clusters: u64) -> Result<Vec<Found>, String> {
        let lvol = self.lvol(vol)?;
        let cluster_size = u64::from(self.layout.cluster_size);
        let per_cluster = cluster_size / self.block_size() as u64;
        let mut contents = Vec::new();
        let mut view = lvol.map().view();
        for cluster in 0..clusters {
            if clusters > WIDE && view.place(cluster) == Place::Zeroes {
                contents.resize(contents.len() + usize::try_from(per_cluster).unwrap_or(0), Found::Tag(0));
                continue;
            }
            let len = usize::try_from(cluster_size).unwrap_or(usize::MAX);
            let bytes = lvol.read(cluster * cluster_size, len).await;
            let bytes = bytes.map_err(|error| format!("read of lvol {vol}, cluster {cluster}: {error}"))?;
            for (index, bytes) in bytes.chunks(self.block_size()).enumerate() {
                contents.push(self.found(vol, cluster * per_cluster + index as u64, bytes));
            }
        }
        Ok(contents)
    }
}

/// With fewer free metadata pages any call may find none.
const FEW_PAGES: u32 = 8;

/// Lvols with more clusters are not read where their maps say that there is nothing.
const WIDE: u64 = 100;

/// Whether I/O to an lvol beside this call would be a mistake of the caller.
fn must_not_meet(call: Option<&Call>, vol: VolId) -> bool {
    match call {
        Some(Call::Delete { vol: of } | Call::Resize { vol: of, .. } | Call::ReadOnly { vol: of }) => *of == vol,
        Some(Call::SetParent { vol: of, parent }) => *of == vol || *parent == vol,
        _ => false,
    }
}

/// Compares names, sizes, parents and flags.
///
/// # Errors
/// The first difference.
pub fn check_tree(store: &Store, model: &Model) -> Result<(), String> {
    let found: Vec<(VolId, Lvol)> =
        store.lvols().into_iter().map(|lvol| (lvol.info().uuid.map_or(0, vol_of), lvol)).collect();
    let (seen, expected): (BTreeSet<VolId>, BTreeSet<VolId>) =
        (found.iter().map(|(vol, _)| *vol).collect(), model.volumes.keys().copied().collect());
    if seen != expected || found.len() != expected.len() {
        return Err(format!("the lvols are {seen:?} in place of {expected:?}"));
    }
    let id_of = |blob| found.iter().find(|(_, lvol)| lvol.id() == blob).map(|(vol, _)| *vol);
    for (vol, lvol) in &found {
        let (info, Some(volume)) = (lvol.info(), model.volumes.get(vol)) else { continue };
        let parent = match (info.parent.and_then(id_of), &info.external) {
            (Some(parent), _) => Parent::Vol(parent),
            (None, Some(_)) => Parent::External,
            (None, None) => Parent::None,
        };
        let seen = (&info.name, info.num_clusters, info.thin, info.read_only, parent);
        let expected = (&volume.name, volume.clusters, volume.thin, volume.read_only, volume.parent);
        if seen != expected {
            return Err(format!("lvol {vol} is {seen:?} in place of {expected:?}"));
        }
        let clones: BTreeSet<VolId> = info.clones.iter().filter_map(|blob| id_of(*blob)).collect();
        let expected: BTreeSet<VolId> = model.clones(*vol).into_iter().collect();
        if clones != expected || (!expected.is_empty() && !info.is_snapshot) || info.is_degraded {
            return Err(format!("lvol {vol} has clones {clones:?} in place of {expected:?}: {info:?}"));
        }
        for (name, number) in &volume.attributes {
            if lvol.xattr(name) != Some(attribute(*number)) {
                return Err(format!("attribute {name} of lvol {vol} is {:?}", lvol.xattr(name).map(|v| v.len())));
            }
        }
    }
    Ok(())
}

/// Takes over which clusters each lvol owns and checks that none is owned twice and none leaks.
///
/// # Errors
/// The first difference.
pub fn take_allocation(store: &Store, model: &mut Model) -> Result<(), String> {
    let info = store.info();
    let mut owned = BTreeSet::new();
    for lvol in store.lvols() {
        let vol = lvol.info().uuid.map_or(0, vol_of);
        let mut view = lvol.map().view();
        let mut own = BTreeSet::new();
        for cluster in 0..view.clusters() {
            if let Some(at) = view.own(cluster) {
                own.insert(cluster);
                if !owned.insert(at) {
                    return Err(format!("cluster {at} of the disk is in lvol {vol} and in another"));
                }
            }
        }
        if lvol.info().allocated_clusters != own.len() as u64 {
            return Err(format!("lvol {vol} says {} clusters and has {own:?}", lvol.info().allocated_clusters));
        }
        model.take_allocation(vol, &own)?;
    }
    let used = info.total_data_clusters - info.free_clusters;
    if used == owned.len() as u64 {
        Ok(())
    } else {
        Err(format!("{used} clusters are counted as used, {} are in lvols", owned.len()))
    }
}

/// Fills the external device.
///
/// # Errors
/// What the disk answers.
pub async fn fill_external(disk: &PowerDisk) -> Result<(), String> {
    let options = disk.options();
    let size = usize::try_from(options.block_size).unwrap_or(usize::MAX);
    let bytes = pattern::blocks(size, 0, options.size / u64::from(options.block_size), EXTERNAL_TAG);
    disk.write(0, &bytes).await.map_err(|error| error.to_string())?;
    disk.flush().await.map_err(|error| error.to_string())
}
