//! What an lvolstore must contain: the simple model that the real thing is compared with.
//!
//! Per lvol a map of cluster -> (block -> tag of the last write), with the snapshot it is a clone of behind it. There
//! are no pages, masks, caches or orderings here. Each block also remembers which values it may still have after a
//! power cut: the one that was flushed and every later one.
//!
//! [`Model::verdict`] says which calls must be refused, [`Model::apply`] makes the others happen. Names and ids are
//! given by the caller, so that two models that see the same calls are equal.

use std::collections::{BTreeMap, BTreeSet};

use super::pattern::Tag;

/// Names an lvol for its whole life, whatever its name is.
pub type VolId = u32;

/// A block's values: what is durable, and what was written since, each with the number of its acknowledgement.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cell {
    durable: Tag,
    later: Vec<(u64, Tag)>,
}

impl Cell {
    /// A block that holds this for certain.
    pub fn certain(tag: Tag) -> Self {
        Self { durable: tag, later: Vec::new() }
    }

    /// What reads see.
    pub fn latest(&self) -> Tag {
        self.later.last().map_or(self.durable, |(_, tag)| *tag)
    }

    /// Whether a power cut may leave this value.
    pub fn may_be(&self, tag: Tag) -> bool {
        self.durable == tag || self.later.iter().any(|(_, later)| *later == tag)
    }

    fn flushed(&mut self, up_to: u64) {
        if let Some(last) = self.later.iter().rposition(|(number, _)| *number <= up_to) {
            self.durable = self.later[last].1;
            self.later.drain(..=last);
        }
    }
}

/// The blocks of one allocated cluster, by their number within the lvol; those that are not listed are zero.
pub type Cluster = BTreeMap<u64, Cell>;

/// What is read where an lvol has no cluster of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parent {
    /// Zeroes.
    None,
    /// A snapshot.
    Vol(VolId),
    /// The external device.
    External,
}

/// One lvol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// Its name.
    pub name: String,
    /// Its size in clusters.
    pub clusters: u64,
    /// Whether clusters are allocated at their first write.
    pub thin: bool,
    /// Whether it refuses writes.
    pub read_only: bool,
    /// What is behind it.
    pub parent: Parent,
    /// The clusters that it has of its own.
    pub own: BTreeMap<u64, Cluster>,
    /// Clusters that were given back, which read as what is behind them: until the next flush a power cut may bring the
    /// former content back.
    pub given_back: BTreeMap<u64, Cluster>,
    /// Attributes that were set, by name; each holds what [`attribute`] makes of the number.
    pub attributes: BTreeMap<String, u64>,
}

impl Volume {
    fn new(name: &str, clusters: u64, thin: bool, parent: Parent) -> Self {
        Self {
            name: name.to_owned(),
            clusters,
            thin,
            read_only: false,
            parent,
            own: BTreeMap::new(),
            given_back: BTreeMap::new(),
            attributes: BTreeMap::new(),
        }
    }
}

/// The value of an attribute: long enough that a few of them take more than one metadata page.
pub fn attribute(number: u64) -> Vec<u8> {
    let len = 200 + usize::try_from(number % 2500).unwrap_or(0);
    number.to_le_bytes().into_iter().cycle().take(len).collect()
}

/// What becomes of an unmapped range of a clone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloneUnmap {
    /// Unallocated clusters keep showing the parent's data; allocated ones read as zeroes and stay allocated.
    KeepsParent,
    /// The range reads as zeroes.
    Zeroes,
}

/// Rules on which implementations may differ.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// Unmap of a clone.
    pub clone_unmap: CloneUnmap,
}

/// One call, with everything named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// A new lvol.
    Create {
        /// Its id.
        id: VolId,
        /// Its name.
        name: String,
        /// Clusters.
        clusters: u64,
        /// Thin or thick.
        thin: bool,
    },
    /// Writes `count` blocks from `first` on.
    Write {
        /// Where.
        vol: VolId,
        /// First block.
        first: u64,
        /// Blocks.
        count: u64,
        /// What.
        tag: Tag,
    },
    /// Writes zeroes.
    Zero {
        /// Where.
        vol: VolId,
        /// First block.
        first: u64,
        /// Blocks.
        count: u64,
    },
    /// Deallocates.
    Unmap {
        /// Where.
        vol: VolId,
        /// First block.
        first: u64,
        /// Blocks.
        count: u64,
    },
    /// Makes what was acknowledged durable.
    Flush {
        /// By which lvol.
        vol: VolId,
    },
    /// A snapshot.
    Snapshot {
        /// Of which lvol.
        vol: VolId,
        /// The snapshot's id.
        id: VolId,
        /// Its name.
        name: String,
    },
    /// A clone.
    Clone {
        /// Of which snapshot.
        vol: VolId,
        /// The clone's id.
        id: VolId,
        /// Its name.
        name: String,
    },
    /// A clone of the external device.
    CloneExternal {
        /// Its id.
        id: VolId,
        /// Its name.
        name: String,
    },
    /// Removes an lvol.
    Delete {
        /// Which.
        vol: VolId,
    },
    /// Changes a size.
    Resize {
        /// Of which lvol.
        vol: VolId,
        /// Clusters.
        clusters: u64,
    },
    /// Allocates everything and leaves the parent.
    Inflate {
        /// Which lvol.
        vol: VolId,
    },
    /// Takes over what the parent has and leaves it for the grandparent; everything, of an external device.
    Decouple {
        /// Which lvol.
        vol: VolId,
    },
    /// Renames.
    Rename {
        /// Which lvol.
        vol: VolId,
        /// The new name.
        name: String,
    },
    /// Makes read-only.
    ReadOnly {
        /// Which lvol.
        vol: VolId,
    },
    /// Puts another snapshot behind an lvol.
    SetParent {
        /// Which lvol.
        vol: VolId,
        /// Which snapshot.
        parent: VolId,
    },
    /// Sets a user attribute.
    Attribute {
        /// Of which lvol.
        vol: VolId,
        /// Its name.
        name: String,
        /// Draws its value.
        number: u64,
    },
}

impl Call {
    /// Whether it reads or changes data only.
    pub fn is_io(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Zero { .. } | Self::Unmap { .. } | Self::Flush { .. })
    }

    /// The blocks that it changes: lvol, first, count, tag of what is there afterwards.
    pub fn blocks(&self) -> Option<(VolId, u64, u64, Tag)> {
        match self {
            Self::Write { vol, first, count, tag } => Some((*vol, *first, *count, *tag)),
            Self::Zero { vol, first, count } | Self::Unmap { vol, first, count } => Some((*vol, *first, *count, 0)),
            _ => None,
        }
    }
}

/// Why a call is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The name is taken.
    Exists,
    /// The lvol is read-only.
    ReadOnly,
    /// It is not read-only and so no snapshot.
    NotSnapshot,
    /// Others depend on it.
    HasClones,
    /// It has no parent.
    NoParent,
    /// Thick, other size, or already so.
    Unfit,
}

/// What must become of a call, given enough space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It succeeds.
    Succeeds,
    /// It is refused and changes nothing.
    Refused(Refusal),
    /// Implementations differ; if it succeeds it does what [`Model::apply`] does.
    Open,
}

/// Everything in a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    /// Blocks in a cluster.
    pub blocks_per_cluster: u64,
    /// Clusters and tag of the external device.
    pub external: Option<(u64, Tag)>,
    /// The lvols.
    pub volumes: BTreeMap<VolId, Volume>,
    acknowledged: u64,
    clone_unmap_zeroes: bool,
}

impl Model {
    /// An empty store.
    pub fn new(blocks_per_cluster: u64, external: Option<(u64, Tag)>, rules: Rules) -> Self {
        Self {
            blocks_per_cluster,
            external,
            volumes: BTreeMap::new(),
            acknowledged: 0,
            clone_unmap_zeroes: rules.clone_unmap == CloneUnmap::Zeroes,
        }
    }

    /// Another implementation goes on with the store.
    pub fn set_rules(&mut self, rules: Rules) {
        self.clone_unmap_zeroes = rules.clone_unmap == CloneUnmap::Zeroes;
    }

    /// The values that a block may have.
    pub fn cell(&self, vol: VolId, block: u64) -> Cell {
        let cluster = block / self.blocks_per_cluster;
        let mut at = vol;
        loop {
            let Some(volume) = self.volumes.get(&at) else { return Cell::default() };
            if cluster >= volume.clusters {
                return Cell::default();
            }
            if let Some(own) = volume.own.get(&cluster) {
                return own.get(&block).cloned().unwrap_or_default();
            }
            if let Some(was) = volume.given_back.get(&cluster) {
                return was.get(&block).cloned().unwrap_or_default();
            }
            match volume.parent {
                Parent::None => return Cell::default(),
                Parent::External => return Cell::certain(self.external_tag(cluster)),
                Parent::Vol(parent) => at = parent,
            }
        }
    }

    fn external_tag(&self, cluster: u64) -> Tag {
        self.external.map_or(0, |(clusters, tag)| if cluster < clusters { tag } else { 0 })
    }

    /// The clones of a snapshot.
    pub fn clones(&self, vol: VolId) -> Vec<VolId> {
        self.volumes.iter().filter(|(_, v)| v.parent == Parent::Vol(vol)).map(|(id, _)| *id).collect()
    }

    /// The lvol of a name.
    pub fn by_name(&self, name: &str) -> Option<VolId> {
        self.volumes.iter().find(|(_, volume)| volume.name == name).map(|(id, _)| *id)
    }

    /// Clusters that are in use by lvols.
    pub fn used_clusters(&self) -> u64 {
        self.volumes.values().map(|volume| volume.own.len() as u64).sum()
    }

    /// Clusters that a call may allocate at most.
    pub fn clusters_needed(&self, call: &Call) -> u64 {
        let of = |vol: &VolId| self.volumes.get(vol);
        match call {
            Call::Create { clusters, thin: false, .. } => *clusters,
            Call::Write { vol, first, count, .. }
            | Call::Zero { vol, first, count }
            | Call::Unmap { vol, first, count } => {
                let range = first / self.blocks_per_cluster..(first + count).div_ceil(self.blocks_per_cluster);
                of(vol).map_or(0, |v| range.filter(|cluster| !v.own.contains_key(cluster)).count() as u64)
            }
            Call::Resize { vol, clusters } => {
                of(vol).map_or(0, |v| if v.thin { 0 } else { clusters.saturating_sub(v.clusters) })
            }
            Call::Inflate { vol } | Call::Decouple { vol } => {
                of(vol).map_or(0, |v| v.clusters.saturating_sub(v.own.len() as u64))
            }
            _ => 0,
        }
    }

    /// What must become of a call, given enough space.
    pub fn verdict(&self, call: &Call) -> Verdict {
        let judged = match call {
            Call::Create { name, .. } | Call::CloneExternal { name, .. } => self.name_is_free(name),
            Call::Write { vol, .. } | Call::Zero { vol, .. } | Call::Unmap { vol, .. } => self.writable(*vol),
            Call::Flush { .. } | Call::ReadOnly { .. } => Ok(()),
            Call::Attribute { vol, .. } if self.is_read_only(*vol) => return Verdict::Open,
            Call::Attribute { .. } => Ok(()),
            Call::Snapshot { vol, name, .. } => self.name_is_free(name).and_then(|()| self.writable(*vol)),
            Call::Clone { vol, name, .. } => self.name_is_free(name).and_then(|()| self.is_snapshot(*vol)),
            Call::Delete { vol } if self.clones(*vol).len() > 1 => Err(Refusal::HasClones),
            Call::Delete { .. } => Ok(()),
            Call::Resize { vol, .. } => self.writable(*vol),
            Call::Decouple { vol } if self.has_no_parent(*vol) => Err(Refusal::NoParent),
            Call::Inflate { vol } | Call::Decouple { vol } if self.is_read_only(*vol) => return Verdict::Open,
            Call::Inflate { .. } | Call::Decouple { .. } => Ok(()),
            Call::Rename { vol, name } if self.by_name(name) == Some(*vol) => {
                return if self.is_read_only(*vol) { Verdict::Open } else { Verdict::Succeeds };
            }
            Call::Rename { vol, name } => self.writable(*vol).and_then(|()| self.name_is_free(name)),
            Call::SetParent { vol, parent } => return self.may_set_parent(*vol, *parent),
        };
        judged.map_or_else(Verdict::Refused, |()| Verdict::Succeeds)
    }

    fn is_read_only(&self, vol: VolId) -> bool {
        self.volumes.get(&vol).is_some_and(|v| v.read_only)
    }

    fn has_no_parent(&self, vol: VolId) -> bool {
        self.volumes.get(&vol).is_none_or(|v| v.parent == Parent::None)
    }

    fn name_is_free(&self, name: &str) -> Result<(), Refusal> {
        if self.by_name(name).is_some() { Err(Refusal::Exists) } else { Ok(()) }
    }

    fn writable(&self, vol: VolId) -> Result<(), Refusal> {
        if self.is_read_only(vol) { Err(Refusal::ReadOnly) } else { Ok(()) }
    }

    fn is_snapshot(&self, vol: VolId) -> Result<(), Refusal> {
        if self.is_read_only(vol) { Ok(()) } else { Err(Refusal::NotSnapshot) }
    }

    fn may_set_parent(&self, vol: VolId, parent: VolId) -> Verdict {
        let (Some(v), Some(p)) = (self.volumes.get(&vol), self.volumes.get(&parent)) else {
            return Verdict::Refused(Refusal::Unfit);
        };
        let fits = v.thin && v.clusters == p.clusters && v.parent != Parent::Vol(parent) && vol != parent;
        if !fits || !p.read_only || self.is_above(vol, parent) {
            return Verdict::Refused(Refusal::Unfit);
        }
        // A stock SPDK knows as snapshots only what has clones, and lets a read-only lvol change its parent.
        if v.read_only || self.clones(parent).is_empty() { Verdict::Open } else { Verdict::Succeeds }
    }

    /// Whether the chain of parents ends in the external device.
    pub fn is_external(&self, vol: VolId) -> bool {
        match self.volumes.get(&vol).map(|v| v.parent) {
            Some(Parent::External) => true,
            Some(Parent::Vol(parent)) => self.is_external(parent),
            Some(Parent::None) | None => false,
        }
    }

    /// Whether `vol` is in the chain of parents of `below`.
    pub fn is_above(&self, vol: VolId, below: VolId) -> bool {
        let mut at = below;
        while let Some(Parent::Vol(parent)) = self.volumes.get(&at).map(|v| v.parent) {
            if parent == vol {
                return true;
            }
            at = parent;
        }
        false
    }

    /// Makes a call happen that [`Model::verdict`] allows.
    pub fn apply(&mut self, call: &Call) {
        self.acknowledged += 1;
        match call {
            Call::Create { id, name, clusters, thin } => {
                let mut volume = Volume::new(name, *clusters, *thin, Parent::None);
                if !thin {
                    volume.own = (0..*clusters).map(|c| (c, Cluster::new())).collect();
                }
                self.volumes.insert(*id, volume);
            }
            Call::Write { vol, first, count, tag } => self.write(*vol, *first, *count, *tag),
            Call::Zero { vol, first, count } => self.write(*vol, *first, *count, 0),
            Call::Unmap { vol, first, count } => self.unmap(*vol, *first, *count),
            Call::Flush { .. } => {
                let now = self.flush_begins();
                self.flush_ends(now);
            }
            Call::Snapshot { vol, id, name } => self.snapshot(*vol, *id, name),
            Call::Clone { vol, id, name } => {
                let clusters = self.volumes.get(vol).map_or(0, |v| v.clusters);
                self.volumes.insert(*id, Volume::new(name, clusters, true, Parent::Vol(*vol)));
            }
            Call::CloneExternal { id, name } => {
                let clusters = self.external.map_or(0, |(clusters, _)| clusters);
                self.volumes.insert(*id, Volume::new(name, clusters, true, Parent::External));
            }
            Call::Delete { vol } => self.delete(*vol),
            Call::Resize { vol, clusters } => self.resize(*vol, *clusters),
            Call::Inflate { vol } => self.inflate(*vol),
            Call::Decouple { vol } => self.decouple(*vol),
            Call::Rename { vol, name } => self.change(*vol, |v| v.name.clone_from(name)),
            Call::ReadOnly { vol } => self.change(*vol, |v| v.read_only = true),
            Call::SetParent { vol, parent } => self.change(*vol, |v| {
                v.given_back.clear();
                v.parent = Parent::Vol(*parent);
            }),
            Call::Attribute { vol, name, number } => {
                self.change(*vol, |v| {
                    v.attributes.insert(name.clone(), *number);
                });
            }
        }
    }

    /// What was acknowledged so far will be durable when the flush that begins now has ended.
    pub fn flush_begins(&self) -> u64 {
        self.acknowledged
    }

    /// A flush ended: everything acknowledged before it began is durable.
    pub fn flush_ends(&mut self, began: u64) {
        for volume in self.volumes.values_mut() {
            let clusters = volume.own.values_mut().chain(volume.given_back.values_mut());
            for cell in clusters.flat_map(BTreeMap::values_mut) {
                cell.flushed(began);
            }
            volume.given_back.retain(|_, cluster| cluster.values().any(|cell| *cell != Cell::default()));
        }
    }

    /// A write failed half-way and this is what the blocks from `first` on were found to hold.
    pub fn settle(&mut self, vol: VolId, first: u64, found: &[Tag]) {
        self.acknowledged += 1;
        for (block, tag) in (first..).zip(found) {
            if self.cell(vol, block).latest() != *tag {
                self.write(vol, block, 1, *tag);
            }
        }
    }

    /// Takes over which clusters an lvol has of its own: when a hole is filled, and when a zeroed cluster is given back,
    /// is up to the store.
    ///
    /// # Errors
    /// When that would change what is read.
    pub fn take_allocation(&mut self, vol: VolId, own: &BTreeSet<u64>) -> Result<(), String> {
        for cluster in own {
            self.allocate(vol, *cluster);
        }
        let Some(volume) = self.volumes.get(&vol) else { return Ok(()) };
        let missing: Vec<u64> = volume.own.keys().copied().filter(|cluster| !own.contains(cluster)).collect();
        let thick = !volume.thin;
        for cluster in missing {
            let mut was = None;
            self.change(vol, |v| was = v.own.remove(&cluster));
            let blocks = cluster * self.blocks_per_cluster..(cluster + 1) * self.blocks_per_cluster;
            let was = was.unwrap_or_default();
            let before = |block: u64| was.get(&block).map_or(0, Cell::latest);
            if thick || blocks.clone().any(|block| before(block) != self.cell(vol, block).latest()) {
                return Err(format!("cluster {cluster} of lvol {vol} is missing from its map"));
            }
            self.change(vol, |v| drop(v.given_back.insert(cluster, was)));
        }
        Ok(())
    }

    fn change(&mut self, vol: VolId, change: impl FnOnce(&mut Volume)) {
        if let Some(volume) = self.volumes.get_mut(&vol) {
            change(volume);
        }
    }

    /// The content of a cluster as a copy on write would make it.
    fn copied(&self, vol: VolId, cluster: u64) -> Cluster {
        let blocks = cluster * self.blocks_per_cluster..(cluster + 1) * self.blocks_per_cluster;
        let cells = blocks.map(|block| (block, self.cell(vol, block)));
        cells.filter(|(_, cell)| *cell != Cell::default()).collect()
    }

    fn allocate(&mut self, vol: VolId, cluster: u64) {
        if self.volumes.get(&vol).is_some_and(|v| !v.own.contains_key(&cluster)) {
            let content = self.copied(vol, cluster);
            self.change(vol, |v| {
                v.given_back.remove(&cluster);
                v.own.insert(cluster, content);
            });
        }
    }

    fn write(&mut self, vol: VolId, first: u64, count: u64, tag: Tag) {
        let number = self.acknowledged;
        for block in first..first + count {
            let cluster = block / self.blocks_per_cluster;
            self.allocate(vol, cluster);
            self.change(vol, |v| {
                if let Some(own) = v.own.get_mut(&cluster) {
                    own.entry(block).or_default().later.push((number, tag));
                }
            });
        }
    }

    fn unmap(&mut self, vol: VolId, first: u64, count: u64) {
        let Some(volume) = self.volumes.get(&vol) else { return };
        let keeps_parent = volume.parent != Parent::None && !self.clone_unmap_zeroes;
        let releases = volume.thin && volume.parent == Parent::None;
        let size = self.blocks_per_cluster;
        for cluster in first / size..(first + count).div_ceil(size) {
            let from = first.max(cluster * size);
            let to = (first + count).min((cluster + 1) * size);
            let owned = self.volumes.get(&vol).is_some_and(|v| v.own.contains_key(&cluster));
            if owned || !(keeps_parent || releases) {
                self.write(vol, from, to - from, 0);
            }
            if releases && to - from == size {
                self.change(vol, |v| {
                    if let Some(was) = v.own.remove(&cluster) {
                        v.given_back.insert(cluster, was);
                    }
                });
            }
        }
    }

    fn snapshot(&mut self, vol: VolId, id: VolId, name: &str) {
        let Some(original) = self.volumes.get_mut(&vol) else { return };
        let mut snapshot = original.clone();
        snapshot.name = name.to_owned();
        snapshot.read_only = true;
        snapshot.attributes.clear();
        original.own.clear();
        original.given_back.clear();
        original.thin = true;
        original.parent = Parent::Vol(id);
        self.volumes.insert(id, snapshot);
    }

    fn delete(&mut self, vol: VolId) {
        let clones = self.clones(vol);
        let Some(removed) = self.volumes.remove(&vol) else { return };
        if let Some(clone) = clones.first() {
            self.change(*clone, |v| {
                let kept = v.clusters;
                for (cluster, content) in removed.own.into_iter().filter(|(cluster, _)| *cluster < kept) {
                    v.own.entry(cluster).or_insert(content);
                }
                for (cluster, content) in removed.given_back.into_iter().filter(|(cluster, _)| *cluster < kept) {
                    if !v.own.contains_key(&cluster) {
                        v.given_back.entry(cluster).or_insert(content);
                    }
                }
                v.parent = removed.parent;
            });
        }
    }

    fn resize(&mut self, vol: VolId, clusters: u64) {
        self.change(vol, |v| {
            if !v.thin {
                for cluster in v.clusters..clusters {
                    v.own.insert(cluster, Cluster::new());
                }
            }
            v.own.split_off(&clusters);
            v.given_back.split_off(&clusters);
            v.clusters = clusters;
        });
    }

    fn inflate(&mut self, vol: VolId) {
        let clusters = self.volumes.get(&vol).map_or(0, |v| v.clusters);
        for cluster in 0..clusters {
            self.allocate(vol, cluster);
        }
        self.change(vol, |v| {
            v.thin = false;
            v.parent = Parent::None;
        });
    }

    fn decouple(&mut self, vol: VolId) {
        let Some(volume) = self.volumes.get(&vol) else { return };
        let clusters = volume.clusters;
        match volume.parent {
            Parent::None => {}
            Parent::External => {
                for cluster in 0..clusters {
                    self.allocate(vol, cluster);
                }
                self.change(vol, |v| {
                    v.thin = false;
                    v.parent = Parent::None;
                });
            }
            Parent::Vol(parent) => {
                let Some(parent) = self.volumes.get(&parent) else { return };
                let held: BTreeSet<u64> = parent.own.keys().copied().filter(|c| *c < clusters).collect();
                let grandparent = parent.parent;
                for cluster in held {
                    self.allocate(vol, cluster);
                }
                self.change(vol, |v| v.parent = grandparent);
            }
        }
    }
}
