//! Cuts the power after each write or flush of a program and looks at what a load finds.
//!
//! One run of a program serves all its cuts: the disk tells what it would hold, the ledger what may be found, and the
//! program goes on. For each cut that is looked into:
//! 1. The store opens, and no lvol is damaged.
//! 2. Its tree is the one before or the one after the call in flight; each block has a value that it may have.
//! 3. Clusters are counted, owned once and not leaked; the image passes the caller's own check.
//! 4. A further random program runs on it as on any store, ends in order, and is found again by a clean load.
//!
//! Some cuts are followed by a second one, during the recovery or the further program.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::rc::Rc;

use super::exec::Exec;
use super::image::{Fill, Image};
use super::ledger::{AtCut, Ledger};
use super::model::{self, Model, Parent, VolId};
use super::pattern::{Found, Tag};
use super::power::{DiskOp, PowerDisk, PowerOptions, Tear, Unmapped};
use super::program::{Numbers, Op, Shape, generate};
use super::rng::{Rng, mix};
use super::world::{Layout, World, check_tree, fill_external, take_allocation};
use crate::Store;

/// A disk and a store to make on it.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The disk.
    pub disk: PowerOptions,
    /// The store and its programs.
    pub layout: Layout,
}

/// Draws a setup: block, cluster and page sizes, what the disk makes of an unmap, whether it was used before and whether
/// it has a volatile cache, and now and then a store that is too small or so wide that lvols have several extent pages.
pub fn setup(seed: u64) -> Setup {
    let mut rng = Rng::new(mix(seed ^ 0x5E7));
    let wide = rng.percent(15);
    let small = !wide && rng.percent(20);
    let md_page_size = if !wide && rng.percent(15) { 8192 } else { 0 };
    let cluster_size: u32 = if wide { 4096 } else { [8192, 16384, 32768][rng.index(3)] };
    let clusters = match (wide, small) {
        (true, _) => 1600,
        (_, true) => 60,
        _ => 150 + rng.below(100),
    };
    let shape = Shape { clusters: if wide { 1100 } else { 24 }, ..Shape::default() };
    // An odd tail that belongs to no cluster.
    let size = clusters * u64::from(cluster_size) + 4096 * rng.below(2);
    let block_size = if rng.percent(50) { 512 } else { 4096 };
    let disk = PowerOptions {
        size,
        block_size,
        write_cache: rng.percent(85),
        unmapped: [Unmapped::Zeroes, Unmapped::Old, Unmapped::Junk, Unmapped::Unsupported][rng.index(4)],
        fill: if rng.percent(50) { Fill::Zeroes } else { Fill::Junk(seed) },
        tear: Tear { coarse: 4096.max(u64::from(md_page_size)), coarse_until: 0, fine: u64::from(block_size) },
        seed,
    };
    let external_clusters = rng.percent(40).then(|| 3 + rng.below(8));
    let layout = Layout {
        cluster_size,
        md_page_size,
        // Else metadata takes the whole device.
        md_pages_per_cluster_ratio: if cluster_size < 16384 { 25 } else { 100 },
        external_clusters,
        shape,
    };
    Setup { disk, layout }
}

/// What a run did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cuts {
    /// Writes and flushes after which power could have been cut.
    pub possible: u64,
    /// Cuts that were looked into, second ones included.
    pub made: u64,
}

/// What looks at an image after an orderly end, as a checker does; an error when it finds anything.
pub type ImageCheck<'a> = &'a dyn Fn(&Image) -> Result<(), String>;

/// One series of cuts.
pub struct Crash<'a> {
    /// Names the run.
    pub seed: u64,
    /// Disk and store.
    pub setup: Setup,
    /// Cuts are made after every so many operations.
    pub every: u64,
    /// The first of them.
    pub first: u64,
    /// Looks at each image after an orderly end.
    pub check: ImageCheck<'a>,
}

impl std::fmt::Debug for Crash<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Crash").field("seed", &self.seed).finish_non_exhaustive()
    }
}

/// The external device of a layout: durable, full of its tag.
fn external_disk(setup: &Setup, seed: u64) -> Result<Option<PowerDisk>, String> {
    let Some(clusters) = setup.layout.external_clusters else { return Ok(None) };
    let size = clusters * u64::from(setup.layout.cluster_size);
    let disk = PowerDisk::new(PowerOptions { size, fill: Fill::Zeroes, seed, ..setup.disk.clone() });
    Exec::new(seed, &[&disk]).run(fill_external(&disk)).map_err(|error| error.to_string())??;
    Ok(Some(disk))
}

fn disks<'a>(disk: &'a PowerDisk, external: Option<&'a PowerDisk>) -> Vec<&'a PowerDisk> {
    std::iter::once(disk).chain(external).collect()
}

/// Whether power can be cut after this in a way that it could not before.
fn counts(disk: usize, op: &DiskOp) -> bool {
    disk == 0 && !matches!(op, DiskOp::Read { .. })
}

/// Runs a program without cuts and compares after every operation; contents at the end and after a clean load.
///
/// # Errors
/// The first difference.
pub fn run_whole(seed: u64, setup: &Setup, program: &[Op], check: ImageCheck<'_>) -> Result<(), String> {
    let disk = PowerDisk::new(setup.disk.clone());
    let external = external_disk(setup, seed)?;
    let world = World::new(setup.layout.clone(), disk.clone(), external.clone());
    let main = async {
        world.format().await?;
        for op in program {
            world.run(std::slice::from_ref(op)).await.map_err(|error| format!("{:?}: {error}", op.kind))?;
            world.check_contents().await.map_err(|error| format!("after {op:?}: {error}"))?;
        }
        reopened(&world, &disk, check).await
    };
    Exec::new(seed, &disks(&disk, external.as_ref())).run(main).map_err(|error| error.to_string())?
}

/// Ends the store in order, has the image checked, loads it again and compares all.
async fn reopened(world: &Rc<World>, disk: &PowerDisk, check: ImageCheck<'_>) -> Result<(), String> {
    world.unload().await?;
    check(&disk.current()).map_err(|error| format!("after an orderly end: {error}"))?;
    let report = world.load().await.map_err(|error| format!("load after an orderly end: {error}"))?;
    if report.recovered || !report.damaged.is_empty() || !report.repaired.is_empty() {
        return Err(format!("load after an orderly end: {report:?}"));
    }
    world.check_tree().map_err(|error| format!("after an orderly end: {error}"))?;
    world.check_contents().await.map_err(|error| format!("after an orderly end: {error}"))?;
    world.unload().await
}

impl Crash<'_> {
    /// Runs the program and makes the cuts.
    ///
    /// # Errors
    /// The first thing that is not as it must be, with the number of the cut.
    pub fn run(&self, program: &[Op]) -> Result<Cuts, String> {
        let disk = PowerDisk::new(self.setup.disk.clone());
        let external = external_disk(&self.setup, self.seed)?;
        let world = World::new(self.setup.layout.clone(), disk.clone(), external.clone());
        let ready = Cell::new(false);
        let main = async {
            // Before the store is made there is nothing to be found.
            world.format().await?;
            disk.set_tear_border(world.data_offset()?);
            ready.set(true);
            world.run(program).await?;
            world.check_contents().await?;
            reopened(&world, &disk, self.check).await
        };
        let mut cuts = Cuts::default();
        let mut failed = None;
        let mut exec = Exec::new(self.seed, &disks(&disk, external.as_ref()));
        let end = exec.run_with(main, |which, op| {
            if !counts(which, op) || !ready.get() {
                return ControlFlow::Continue(());
            }
            cuts.possible += 1;
            if cuts.possible % self.every != self.first % self.every {
                return ControlFlow::Continue(());
            }
            let at_cut = world.ledger().borrow().at_cut();
            let seed = mix(self.seed ^ cuts.possible << 20);
            let options = disk.options();
            let cut = Cut { crash: self, options, external: external.as_ref(), at_cut, numbers: world.numbers(), seed };
            match cut.look(disk.cut(seed), true) {
                Ok(made) => cuts.made += made,
                Err(error) => failed = Some(format!("cut {} (after {}): {error}", cuts.possible, short(op))),
            }
            if failed.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        if let Some(failed) = failed {
            return Err(failed);
        }
        end.map_err(|error| error.to_string())?.unwrap_or(Ok(()))?;
        Ok(cuts)
    }
}

fn short(op: &DiskOp) -> String {
    match op {
        DiskOp::Write { offset, bytes } => format!("a write of {} bytes at {offset}", bytes.len()),
        other => format!("{other:?}"),
    }
}

struct Cut<'a> {
    crash: &'a Crash<'a>,
    options: PowerOptions,
    external: Option<&'a PowerDisk>,
    at_cut: AtCut,
    numbers: Numbers,
    seed: u64,
}

impl Cut<'_> {
    /// Looks into what a cut left; gives the number of cuts made.
    fn look(&self, image: Image, again: bool) -> Result<u64, String> {
        let setup = &self.crash.setup;
        let disk = PowerDisk::with_image(PowerOptions { seed: self.seed, ..self.options.clone() }, image);
        let mut numbers = self.numbers.clone();
        numbers.skip();
        let first = self.at_cut.candidates[0].clone();
        let external = self.external.cloned();
        let world = World::with_model(setup.layout.clone(), disk.clone(), external, first, numbers);
        let adopted = Cell::new(false);
        let main = self.recover(&world, &disk, &adopted);
        let mut rng = Rng::new(self.seed);
        let second = if again && rng.percent(35) { 1 + rng.below(30) } else { 0 };
        let (mut done, mut made, mut failed) = (0, 1, None);
        let mut exec = Exec::new(self.seed, &disks(&disk, self.external));
        let end = exec.run_with(main, |which, op| {
            done += u64::from(counts(which, op));
            if done != second || !counts(which, op) {
                return ControlFlow::Continue(());
            }
            let at_cut = if adopted.get() { world.ledger().borrow().at_cut() } else { self.at_cut.clone() };
            let options = self.options.clone();
            let seed = mix(self.seed);
            let cut =
                Cut { crash: self.crash, options, external: self.external, at_cut, numbers: world.numbers(), seed };
            match cut.look(disk.cut(cut.seed), false) {
                Ok(more) => made += more,
                Err(error) => failed = Some(format!("second cut {second} (after {}): {error}", short(op))),
            }
            if failed.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        if let Some(failed) = failed {
            return Err(failed);
        }
        end.map_err(|error| error.to_string())?.unwrap_or(Ok(()))?;
        Ok(made)
    }

    async fn recover(&self, world: &Rc<World>, disk: &PowerDisk, adopted: &Cell<bool>) -> Result<(), String> {
        let running = &self.at_cut.running;
        let report = world.load().await.map_err(|error| format!("the store does not open: {error} ({running:?})"))?;
        if !report.damaged.is_empty() {
            return Err(format!("damaged after a cut in {running:?}: {report:?}"));
        }
        let store = world.store()?;
        let model =
            self.matching(&store).map_err(|error| format!("{error}, after a cut in {running:?}: {report:?}"))?;
        let model = self.adopt(world, model).await.map_err(|error| format!("{error}, after a cut in {running:?}"))?;
        *world.ledger().borrow_mut() = Ledger::new(model);
        adopted.set(true);
        self.go_on(world, disk).await.map_err(|error| format!("going on after a cut in {running:?}: {error}"))
    }

    fn matching(&self, store: &Store) -> Result<&Model, String> {
        let mut reasons = Vec::new();
        for candidate in &self.at_cut.candidates {
            match check_tree(store, candidate) {
                Ok(()) => return Ok(candidate),
                Err(reason) => reasons.push(reason),
            }
        }
        Err(reasons.join("; nor: "))
    }

    /// The model of what is found, after comparing it with what may be.
    async fn adopt(&self, world: &World, candidate: &Model) -> Result<Model, String> {
        let mut found: BTreeMap<VolId, Vec<Tag>> = BTreeMap::new();
        for (vol, volume) in &candidate.volumes {
            let mut tags = Vec::new();
            for (block, seen) in world.contents(*vol, volume.clusters).await?.into_iter().enumerate() {
                match seen {
                    Found::Tag(tag) if self.at_cut.may_be(candidate, *vol, block as u64, tag) => tags.push(tag),
                    other => {
                        let cell = candidate.cell(*vol, block as u64);
                        return Err(format!("lvol {vol} block {block} holds {other:?} in place of {cell:?}"));
                    }
                }
            }
            found.insert(*vol, tags);
        }
        let mut model = candidate.clone();
        take_found(&mut model, &found, &world.store()?)?;
        Ok(model)
    }

    async fn go_on(&self, world: &Rc<World>, disk: &PowerDisk) -> Result<(), String> {
        let shape = Shape { ops: 6, ..self.crash.setup.layout.shape };
        world.run(&generate(self.seed, shape)).await?;
        world.check_contents().await?;
        reopened(world, disk, self.crash.check).await
    }
}

/// Makes the model hold what was found, for certain.
fn take_found(model: &mut Model, found: &BTreeMap<VolId, Vec<Tag>>, store: &Store) -> Result<(), String> {
    let per_cluster = model.blocks_per_cluster;
    for volume in model.volumes.values_mut() {
        volume.own.clear();
        volume.given_back.clear();
    }
    for lvol in store.lvols() {
        let vol = lvol.info().uuid.map_or(0, super::world::vol_of);
        let (Some(tags), Some(volume)) = (found.get(&vol), model.volumes.get_mut(&vol)) else { continue };
        let mut view = lvol.map().view();
        for cluster in (0..volume.clusters).filter(|cluster| view.own(*cluster).is_some()) {
            let blocks = cluster * per_cluster..(cluster + 1) * per_cluster;
            let tag = |block: u64| usize::try_from(block).ok().and_then(|at| tags.get(at)).copied().unwrap_or(0);
            let cells = blocks.map(|block| (block, tag(block))).filter(|(_, tag)| *tag != 0);
            volume.own.insert(cluster, cells.map(|(block, tag)| (block, model::Cell::certain(tag))).collect());
        }
    }
    for (vol, tags) in found {
        for (block, tag) in (0..).zip(tags) {
            if model.cell(*vol, block).latest() != *tag {
                let parent = model.volumes.get(vol).map(|volume| volume.parent);
                let behind = if parent == Some(Parent::None) { "nothing" } else { "its parent" };
                return Err(format!("lvol {vol} block {block} holds {tag}, and neither its map nor {behind} has it"));
            }
        }
    }
    take_allocation(store, model)
}

/// What a series of programs did.
#[derive(Debug, Default)]
pub struct Total(RefCell<Cuts>);

impl Total {
    /// Adds one.
    pub fn add(&self, cuts: Cuts) {
        let mut total = self.0.borrow_mut();
        total.possible += cuts.possible;
        total.made += cuts.made;
    }

    /// The sums.
    pub fn get(&self) -> Cuts {
        *self.0.borrow()
    }
}
