//! Disks move freely between Addax's engine and a stock SPDK: random programs begin on one and go on on the other.
//!
//! Needs a built SPDK tree at `$SPDK_DIR`. By default a few programs run; `LVOL_TESTS=full` runs 50,
//! `LVOL_SEEDS=17` or `LVOL_SEEDS=0..9` chooses. `LVOL_PLANES=spdk` runs them on SPDK alone: what fails then is a mistake
//! of the model.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use blobstore_format::check::{Severity, check};
use blobstore_format::read::ReadFn;
use e2e::lvol_plane::{Disk, Kind, Plane, Uuids};
use e2e::spdk::tree;
use lvol_core::testing::Rng;
use lvol_core::testing::model::{Call, Model, Parent, Refusal, Verdict, VolId};
use lvol_core::testing::program::{self, Kind as OpKind, Numbers, Op, Shape};

const EXTERNAL_TAG: u32 = 1;
const EXTERNAL_CLUSTERS: u64 = 5;
const SIZE_MIB: u64 = 320;
/// Operations between two hand-overs.
const LEG: usize = 12;
/// Operations of a program.
const OPERATIONS: usize = 60;
/// So many are drawn: many find nothing to work on, such as an lvol when there is none.
const DRAWN: usize = 600;

fn seeds() -> Range<u64> {
    let full = std::env::var("LVOL_TESTS").is_ok_and(|value| value == "full");
    let Ok(text) = std::env::var("LVOL_SEEDS") else { return 0..if full { 50 } else { 4 } };
    let number = |text: &str| text.trim().parse::<u64>().unwrap_or_else(|_| panic!("LVOL_SEEDS is {text:?}"));
    match text.split_once("..") {
        Some((first, end)) => number(first)..number(end),
        None => number(&text)..number(&text) + 1,
    }
}

/// The two data planes, in the order of their turns.
fn planes(seed: u64) -> (Kind, Kind) {
    match std::env::var("LVOL_PLANES").as_deref() {
        Ok("spdk") => (Kind::Spdk, Kind::Spdk),
        Ok("addax") => (Kind::Addax, Kind::Addax),
        _ if seed.is_multiple_of(2) => (Kind::Addax, Kind::Spdk),
        _ => (Kind::Spdk, Kind::Addax),
    }
}

struct Run {
    disk: Disk,
    plane: Option<Plane>,
    kind: Kind,
    other: Kind,
    model: Model,
    numbers: Numbers,
    uuids: Uuids,
    shape: Shape,
    rng: Rng,
    /// What was done so far, with the data plane that did it.
    calls: Vec<String>,
}

impl Run {
    fn new(tree: &Path, seed: u64) -> Result<Self> {
        let mut rng = Rng::new(seed ^ 0x5EED);
        let block_size = if rng.percent(50) { 512 } else { 4096 };
        let disk = Disk::new(tree, block_size, SIZE_MIB, EXTERNAL_CLUSTERS, EXTERNAL_TAG)?;
        let (kind, other) = planes(seed);
        let external = Some((EXTERNAL_CLUSTERS, EXTERNAL_TAG));
        let model = Model::new((1 << 20) / block_size as u64, external, kind.rules());
        let shape = Shape { ops: DRAWN, beside: 0, clusters: 10 };
        let plane = Plane::open(kind, &disk)?;
        plane.format()?;
        let (numbers, uuids) = (Numbers::default(), Uuids::new());
        Ok(Self { disk, plane: Some(plane), kind, other, model, numbers, uuids, shape, rng, calls: Vec::new() })
    }

    fn plane(&self) -> Result<&Plane> {
        self.plane.as_ref().context("no data plane runs")
    }

    /// Does one operation; false when there is nothing that it could be done to.
    fn step(&mut self, op: &Op) -> Result<bool> {
        match op.kind {
            OpKind::ReopenClean => return self.reopen(self.kind, true).map(|()| true),
            OpKind::ReopenDirty => return self.reopen(self.kind, false).map(|()| true),
            _ => {}
        }
        let Some(call) = op.resolve(&self.model, &mut self.numbers, self.shape) else { return Ok(false) };
        if self.is_beyond_spdk(&call) {
            return Ok(false);
        }
        let verdict = self.verdict(&call);
        let plane = self.plane.as_ref().context("no data plane runs")?;
        let result = plane.call(&call, &mut self.uuids);
        let refused = if result.is_err() { ", refused" } else { "" };
        self.calls.push(format!("{:?}: {call:?}{refused}", self.kind));
        match (verdict, &result) {
            (Verdict::Refused(_), Err(_)) | (Verdict::Open, Err(_)) => Ok(true),
            (Verdict::Refused(why), Ok(())) => Err(anyhow::anyhow!("{call:?} is not refused, although {why:?}")),
            (_, Ok(())) => {
                self.model.apply(&call);
                Ok(true)
            }
            (Verdict::Succeeds, Err(error)) => Err(anyhow::anyhow!("{call:?}: {error:#}")),
        }
    }

    /// The store takes a new name that is the old one; the RPC, which adds the alias first, does not.
    fn verdict(&self, call: &Call) -> Verdict {
        match call {
            Call::Rename { name, .. } if self.model.by_name(name).is_some() => Verdict::Refused(Refusal::Exists),
            _ => self.model.verdict(call),
        }
    }

    /// Attributes have no RPC. SPDK makes a cycle of parents when asked to, and cannot open it again; it fails reads of an
    /// external clone beyond its device; and a clone that is smaller than the snapshot it takes over when that is deleted
    /// gets all of the snapshot's clusters in its extent page, of which it has freed those that are too many: it cannot open
    /// that either. It does not decouple an lvol from a snapshot that is itself an external clone, whose parent it looks
    /// for among the blobs.
    fn is_beyond_spdk(&self, call: &Call) -> bool {
        let clusters = |vol: &VolId| self.model.volumes.get(vol).map_or(0, |v| v.clusters);
        match call {
            Call::Delete { vol } if self.kind == Kind::Spdk => {
                self.model.clones(*vol).iter().any(|clone| clusters(clone) < clusters(vol))
            }
            Call::Decouple { vol } if self.kind == Kind::Spdk => {
                let parent = |vol| self.model.volumes.get(&vol).map(|v| v.parent);
                matches!(parent(*vol), Some(Parent::Vol(above)) if parent(above) == Some(Parent::External))
            }
            Call::Attribute { .. } => true,
            Call::SetParent { vol, parent } => self.model.is_above(*vol, *parent),
            Call::Resize { vol, clusters } => *clusters > EXTERNAL_CLUSTERS && self.model.is_external(*vol),
            _ => false,
        }
    }

    fn reopen(&mut self, kind: Kind, orderly: bool) -> Result<()> {
        self.calls.push(format!("{kind:?} goes on (orderly: {orderly})"));
        let plane = self.plane.take().context("no data plane runs")?;
        let before = plane.check_tree(&self.model, &self.uuids).context("before the end")?;
        if orderly {
            plane.close()?;
            check_image(&self.disk)?;
        } else {
            plane.kill();
        }
        self.kind = kind;
        self.model.set_rules(kind.rules());
        let plane = Plane::open(kind, &self.disk)?;
        let after = plane.check_tree(&self.model, &self.uuids).with_context(|| format!("opened by {kind:?}"))?;
        ensure!(before == after, "allocated and free clusters: {before:?} before, {after:?} in {kind:?}");
        self.plane = Some(plane);
        Ok(())
    }

    /// Hands the disk to the other data plane, and compares every block.
    fn hand_over(&mut self) -> Result<()> {
        let orderly = self.rng.percent(75);
        let before = self.kind;
        self.reopen(self.other, orderly)?;
        self.other = before;
        let handed = format!("handed over to {:?} (orderly: {orderly})", self.kind);
        self.plane()?.check_contents(&self.model, &self.uuids).context(handed)
    }

    fn program(&mut self, ops: &[Op]) -> Result<()> {
        let mut done = 0;
        for op in ops {
            if self.step(op).with_context(|| format!("operation {done} on {:?}", self.kind))? {
                done += 1;
                if done == OPERATIONS {
                    break;
                }
                if done % LEG == 0 {
                    self.hand_over().with_context(|| format!("after operation {done}"))?;
                }
            }
        }
        ensure!(done == OPERATIONS, "only {done} of {DRAWN} drawn operations could be done");
        self.hand_over().context("at the end")?;
        self.hand_over().context("and back")
    }
}

/// What the checker, which shares no code with either data plane, says of the image: nothing is at risk, and every lvol
/// can be opened. SPDK leaks, so that warnings are no failure.
fn check_image(disk: &Disk) -> Result<()> {
    let file = File::open(disk.image())?;
    let size = file.metadata()?.len();
    let report = check(&ReadFn { size, read: |at, buf: &mut [u8]| file.read_exact_at(buf, at) })?;
    ensure!(report.count(Severity::Error) == 0, "after an orderly end: {report}");
    Ok(())
}

#[test]
fn programs_go_on_on_the_other_data_plane_and_back() {
    let Some(tree) = tree() else { return };
    for seed in seeds() {
        let mut run = Run::new(&tree, seed).unwrap();
        let ops = program::generate(seed, run.shape);
        if let Err(error) = run.program(&ops) {
            let log = run.plane.as_ref().map(Plane::log).unwrap_or_default();
            let tail: String = log.lines().rev().take(15).collect::<Vec<_>>().join("\n");
            let folder = run.disk.keep();
            let calls = run.calls.join("\n");
            panic!("LVOL_SEEDS={seed}: {error:#}\n{calls}\nfiles in {}\n{tail}", folder.display());
        }
        println!("seed {seed}: {} calls, {} lvols at the end", run.calls.len(), run.model.volumes.len());
    }
}
