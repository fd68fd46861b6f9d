//! Random programs: what a user, or a mirror, does to a store.
//!
//! A program is a list of operations that name lvols and places by drawn numbers, not by what exists, so that any part
//! of a program is a program again: [`shrink`] leaves out operations as long as the run still fails.
//! [`Op::resolve`] turns an operation into the [`Call`] that it means in a given state.

use super::model::{Call, Model, Parent, VolId};
use super::pattern::Tag;
use super::rng::Rng;

/// One operation; the numbers are drawn, see [`Op::resolve`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Op {
    /// What is done.
    pub kind: Kind,
    /// Draws the lvol.
    pub vol: u64,
    /// Draws a place, size or second lvol.
    pub place: u64,
    /// Draws a length.
    pub len: u64,
    /// I/O that runs at the same time.
    pub beside: Vec<Self>,
}

/// What an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Kind {
    CreateThin,
    CreateThick,
    Write,
    WriteCluster,
    Zero,
    ZeroCluster,
    Unmap,
    UnmapCluster,
    Flush,
    Read,
    Snapshot,
    Clone,
    CloneExternal,
    Delete,
    Resize,
    Inflate,
    Decouple,
    Rename,
    ReadOnly,
    SetParent,
    Attribute,
    ReopenClean,
    ReopenDirty,
}

use Kind::*;

/// How often each kind is drawn.
const WEIGHTS: [(Kind, u64); 23] = [
    (CreateThin, 4),
    (CreateThick, 2),
    (Write, 22),
    (WriteCluster, 6),
    (Zero, 3),
    (ZeroCluster, 3),
    (Unmap, 3),
    (UnmapCluster, 5),
    (Flush, 5),
    (Read, 3),
    (Snapshot, 12),
    (Clone, 6),
    (CloneExternal, 2),
    (Delete, 7),
    (Resize, 6),
    (Inflate, 2),
    (Decouple, 3),
    (Rename, 3),
    (ReadOnly, 1),
    (SetParent, 3),
    (Attribute, 3),
    (ReopenClean, 3),
    (ReopenDirty, 3),
];

/// What runs beside other operations.
const BESIDE: [(Kind, u64); 7] =
    [(Write, 10), (WriteCluster, 3), (Zero, 1), (UnmapCluster, 2), (ZeroCluster, 1), (Flush, 2), (Read, 4)];

fn draw(rng: &mut Rng, weights: &[(Kind, u64)]) -> Kind {
    let mut at = rng.below(weights.iter().map(|(_, weight)| weight).sum());
    for (kind, weight) in weights {
        if at < *weight {
            return *kind;
        }
        at -= weight;
    }
    Flush
}

impl Op {
    fn drawn(rng: &mut Rng, weights: &[(Kind, u64)]) -> Self {
        let kind = draw(rng, weights);
        Self { kind, vol: rng.draw(), place: rng.draw(), len: rng.draw(), beside: Vec::new() }
    }
}

/// How programs are drawn.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Number of operations.
    pub ops: usize,
    /// Up to so many I/Os run beside an operation.
    pub beside: usize,
    /// Up to so many clusters of an lvol.
    pub clusters: u64,
}

impl Default for Shape {
    fn default() -> Self {
        Self { ops: 60, beside: 4, clusters: 24 }
    }
}

/// The program of a seed.
pub fn generate(seed: u64, shape: Shape) -> Vec<Op> {
    let mut rng = Rng::new(seed);
    let mut program = vec![Op { kind: CreateThin, ..Op::drawn(&mut rng, &WEIGHTS) }];
    while program.len() < shape.ops {
        let mut op = Op::drawn(&mut rng, &WEIGHTS);
        if rng.percent(50) {
            let beside = rng.below(shape.beside as u64 + 1);
            op.beside = (0..beside).map(|_| Op::drawn(&mut rng, &BESIDE)).collect();
        }
        program.push(op);
    }
    program
}

/// What names new lvols and writes, so that no two are alike.
#[derive(Debug, Clone, Default)]
pub struct Numbers {
    vols: VolId,
    tags: Tag,
}

impl Numbers {
    fn vol(&mut self) -> (VolId, String) {
        self.vols += 1;
        (self.vols, format!("v{}", self.vols))
    }

    fn tag(&mut self) -> Tag {
        self.tags += 1;
        self.tags
    }

    /// Goes on far from where another run goes on.
    pub fn skip(&mut self) {
        self.vols += 100;
        self.tags += 10_000;
    }
}

impl Op {
    /// What the operation means in this state: `None` when it means nothing there, such as a delete without lvols, or
    /// when it is no call, such as a reopening.
    ///
    /// Now and then the result is a call that must be refused.
    pub fn resolve(&self, model: &Model, numbers: &mut Numbers, shape: Shape) -> Option<Call> {
        let clusters = 1 + self.place % shape.clusters;
        match self.kind {
            CreateThin | CreateThick if model.volumes.len() >= 14 => None,
            CreateThin | CreateThick => {
                let (id, fresh) = numbers.vol();
                let name = self.taken_name(model).unwrap_or(fresh);
                let thin = self.kind == CreateThin;
                Some(Call::Create { id, name, clusters: if thin { clusters } else { clusters.min(8) }, thin })
            }
            CloneExternal => {
                model.external?;
                let (id, name) = numbers.vol();
                Some(Call::CloneExternal { id, name })
            }
            ReopenClean | ReopenDirty | Read => None,
            _ => self.resolve_at(model, numbers, shape, self.picked(model)?),
        }
    }

    /// The lvol that is meant. Writable ones are twice as likely.
    pub fn picked(&self, model: &Model) -> Option<VolId> {
        let writable = model.volumes.iter().filter(|(_, v)| !v.read_only).map(|(id, _)| *id);
        let all: Vec<VolId> = model.volumes.keys().copied().chain(writable.clone()).chain(writable).collect();
        pick(&all, self.vol)
    }

    fn taken_name(&self, model: &Model) -> Option<String> {
        if !self.len.is_multiple_of(16) {
            return None;
        }
        let ids: Vec<VolId> = model.volumes.keys().copied().collect();
        model.volumes.get(&pick(&ids, self.vol)?).map(|volume| volume.name.clone())
    }

    fn resolve_at(&self, model: &Model, numbers: &mut Numbers, shape: Shape, vol: VolId) -> Option<Call> {
        let volume = model.volumes.get(&vol)?;
        let (first, count) = self.range(model, volume.clusters);
        match self.kind {
            Write | WriteCluster | Zero | ZeroCluster | Unmap | UnmapCluster if count == 0 => None,
            Write | WriteCluster => Some(Call::Write { vol, first, count, tag: numbers.tag() }),
            Zero | ZeroCluster => Some(Call::Zero { vol, first, count }),
            Unmap | UnmapCluster => Some(Call::Unmap { vol, first, count }),
            Flush => Some(Call::Flush { vol }),
            Snapshot | Clone if model.volumes.len() >= 16 => None,
            Snapshot => {
                let (id, fresh) = numbers.vol();
                Some(Call::Snapshot { vol, id, name: self.taken_name(model).unwrap_or(fresh) })
            }
            Clone => {
                let vol = self.snapshot_mostly(model, vol);
                let (id, name) = numbers.vol();
                Some(Call::Clone { vol, id, name })
            }
            Delete => Some(Call::Delete { vol }),
            Resize => {
                let most = if volume.thin { shape.clusters } else { shape.clusters.min(10) };
                Some(Call::Resize { vol, clusters: 1 + self.place % most })
            }
            Inflate => Some(Call::Inflate { vol }),
            Decouple => {
                let clones = model.volumes.iter().filter(|(_, v)| v.parent != Parent::None).map(|(id, _)| *id);
                let vol = if self.len.is_multiple_of(8) { vol } else { pick(&clones.collect::<Vec<_>>(), self.vol)? };
                Some(Call::Decouple { vol })
            }
            Rename => {
                let (_, fresh) = numbers.vol();
                Some(Call::Rename { vol, name: self.taken_name(model).unwrap_or(fresh) })
            }
            ReadOnly => Some(Call::ReadOnly { vol }),
            SetParent => {
                let fit = |id: &VolId| {
                    model.volumes.get(id).is_some_and(|p| p.read_only && p.clusters == volume.clusters && *id != vol)
                };
                let fitting: Vec<VolId> = model.volumes.keys().copied().filter(fit).collect();
                let any: Vec<VolId> = model.volumes.keys().copied().collect();
                let parent = pick(&fitting, self.place).or_else(|| pick(&any, self.place))?;
                Some(Call::SetParent { vol, parent })
            }
            Attribute => {
                let name = format!("attribute-{}", self.place % 3);
                Some(Call::Attribute { vol, name, number: self.len })
            }
            _ => None,
        }
    }

    fn snapshot_mostly(&self, model: &Model, otherwise: VolId) -> VolId {
        let snapshots: Vec<VolId> = model.volumes.iter().filter(|(_, v)| v.read_only).map(|(id, _)| *id).collect();
        if self.len.is_multiple_of(12) { otherwise } else { pick(&snapshots, self.vol).unwrap_or(otherwise) }
    }

    /// First block and number of blocks: whole clusters for the `...Cluster` kinds, else up to three clusters long.
    pub fn range(&self, model: &Model, clusters: u64) -> (u64, u64) {
        let size = model.blocks_per_cluster;
        let blocks = clusters * size;
        if blocks == 0 {
            return (0, 0);
        }
        if matches!(self.kind, WriteCluster | ZeroCluster | UnmapCluster) {
            let first = self.place % clusters;
            let count = 1 + self.len % 3.min(clusters - first);
            return (first * size, count * size);
        }
        let first = self.place % blocks;
        let most = if self.len.is_multiple_of(5) { size * 3 } else { 6 };
        let count = 1 + (self.len >> 8) % most;
        (first, count.min(blocks - first))
    }
}

fn pick(ids: &[VolId], number: u64) -> Option<VolId> {
    let index = usize::try_from(number % (ids.len().max(1)) as u64).ok()?;
    ids.get(index).copied()
}

/// The smallest program found that still fails: operations, then I/O beside them, are left out as long as `fails` says
/// so. `budget` bounds the number of runs.
pub fn shrink(program: &[Op], mut budget: usize, mut fails: impl FnMut(&[Op]) -> bool) -> Vec<Op> {
    let mut smallest = program.to_vec();
    let mut chunk = smallest.len().div_ceil(2);
    while chunk > 0 && budget > 0 {
        let mut at = 0;
        let mut removed = false;
        while at < smallest.len() && budget > 0 {
            let mut candidate = smallest.clone();
            candidate.drain(at..(at + chunk).min(candidate.len()));
            budget -= 1;
            if fails(&candidate) {
                smallest = candidate;
                removed = true;
            } else {
                at += chunk;
            }
        }
        if chunk > 1 {
            chunk = chunk.div_ceil(2);
        } else if !removed {
            break;
        }
    }
    for at in 0..smallest.len() {
        while !smallest[at].beside.is_empty() && budget > 0 {
            let mut candidate = smallest.clone();
            candidate[at].beside.pop();
            budget -= 1;
            if !fails(&candidate) {
                break;
            }
            smallest = candidate;
        }
    }
    smallest
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::model::{CloneUnmap, Rules, Verdict};
    use super::*;

    #[test]
    fn a_seed_always_draws_the_same_program_and_every_kind_comes_up() {
        let shape = Shape::default();
        assert_eq!(generate(5, shape), generate(5, shape));
        let mut kinds: Vec<Kind> = (0..20).flat_map(|seed| generate(seed, shape)).map(|op| op.kind).collect();
        kinds.dedup();
        for (kind, _) in WEIGHTS {
            assert!(kinds.contains(&kind), "{kind:?} never comes up");
        }
    }

    #[test]
    fn programs_reach_deep_trees_and_refusals() {
        let shape = Shape::default();
        let (mut deepest, mut refused, mut succeeded) = (0, 0, 0);
        for seed in 0..20 {
            let mut model = Model::new(4, Some((6, 9)), Rules { clone_unmap: CloneUnmap::Zeroes });
            let mut numbers = Numbers::default();
            for op in generate(seed, shape) {
                let Some(call) = op.resolve(&model, &mut numbers, shape) else { continue };
                match model.verdict(&call) {
                    Verdict::Refused(_) => refused += 1,
                    _ => {
                        succeeded += 1;
                        model.apply(&call);
                    }
                }
                let depth = |id: &VolId| model.volumes.keys().filter(|above| model.is_above(**above, *id)).count();
                deepest = deepest.max(model.volumes.keys().map(depth).max().unwrap_or(0));
            }
        }
        assert!(deepest >= 4, "no chain is deeper than {deepest}");
        assert!(refused * 40 > succeeded && refused * 4 < succeeded, "{refused} of {succeeded} calls are refused");
    }

    #[test]
    fn shrinking_finds_the_operation_that_matters() {
        let program = generate(3, Shape::default());
        let matters = program.iter().position(|op| op.kind == Snapshot).unwrap();
        let seen = program[matters].clone();
        let found = shrink(&program, 500, |candidate| candidate.iter().any(|op| op.vol == seen.vol));
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].vol, seen.vol);
        assert!(found[0].beside.is_empty());
    }
}
