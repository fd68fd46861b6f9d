//! Cluster maps, shared between the store's thread and data cores.
//!
//! A [`Map`] says for each cluster of a volume where it lies on the disk, or that it is a hole, and what shows through
//! holes ([`Backing`]). The store's thread alone changes it. Any core reads it through a [`MapView`] of its own, without
//! locks as long as nothing was replaced: one load of a generation and one of an entry.
//!
//! # Invariants
//! * A map keeps its identity while the volume exists. Single entries change in place; size, backing and the exchange of
//!   whole maps (snapshot, deletion) replace the table in it and raise the generation, which views notice.
//! * An entry of 0 is a hole: cluster 0 of the disk is always metadata.
//! * Chunks of 512 entries (one extent page) exist only once an entry in them was set: a hole of any size costs a pointer
//!   per 512 clusters. Tables that follow each other share chunks.
//! * The chain of backings has no cycle; the store checks that before it links two maps.

use std::{
    collections::HashSet,
    sync::{
        Arc, OnceLock, RwLock,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

/// Clusters of one extent page, hence of one chunk.
pub const CHUNK: u64 = 512;

/// Entries of one chunk.
type Chunk = Arc<[AtomicU32]>;

/// Where the data of a cluster is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In this cluster of the disk, which belongs to the volume.
    Own(u32),
    /// In this cluster of the disk, which belongs to a snapshot of the chain: to be read, never written.
    Ancestor(u32),
    /// On the external device at the end of the chain, at the same offset; beyond its size there are zeroes.
    External,
    /// Nowhere: zeroes.
    Zeroes,
}

/// An external device that a chain of clones ends in.
#[derive(Debug)]
pub struct External {
    id: String,
    size: AtomicU64,
}

impl External {
    pub(crate) fn new(id: String) -> Self {
        Self { id, size: AtomicU64::new(0) }
    }

    /// Its identity: the UUID of a bdev.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Its size in bytes; 0 while it is absent.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    pub(crate) fn set_size(&self, bytes: u64) {
        self.size.store(bytes, Ordering::Release);
    }
}

/// What shows through the holes of a map.
#[derive(Clone, Debug)]
pub enum Backing {
    /// Zeroes.
    Zeroes,
    /// The map of the parent snapshot.
    Parent(Arc<Map>),
    /// An external device.
    External(Arc<External>),
}

/// One state of a map: its size, its chunks, what is behind.
#[derive(Debug)]
pub(crate) struct Table {
    clusters: u64,
    chunks: Box<[OnceLock<Chunk>]>,
    backing: Backing,
}

impl Table {
    pub(crate) fn new(clusters: u64, backing: Backing) -> Self {
        Self { clusters, chunks: (0..clusters.div_ceil(CHUNK)).map(|_| OnceLock::new()).collect(), backing }
    }

    /// The same entries over another backing.
    pub(crate) fn with_backing(&self, backing: Backing) -> Self {
        Self { clusters: self.clusters, chunks: self.chunks.clone(), backing }
    }

    /// The same entries and backing for another number of clusters: cut off, or holes added.
    pub(crate) fn resized(&self, clusters: u64) -> Self {
        let new = Self::new(clusters, self.backing.clone());
        for (n, (from, to)) in self.chunks.iter().zip(&new.chunks).enumerate() {
            let Some(from) = from.get() else { continue };
            let len = new.chunk_len(n);
            let chunk = if from.len() == len {
                from.clone()
            } else {
                (0..len).map(|i| AtomicU32::new(from.get(i).map_or(0, |e| e.load(Ordering::Relaxed)))).collect()
            };
            let _ = to.set(chunk);
        }
        new
    }

    /// The same with other entries, leaving this table as it is.
    pub(crate) fn patched(&self, entries: &[(u64, u32)]) -> Self {
        let mut new = Self::new(self.clusters, self.backing.clone());
        let touched: HashSet<u64> = entries.iter().map(|(n, _)| n / CHUNK).collect();
        for (n, (from, to)) in self.chunks.iter().zip(&mut new.chunks).enumerate() {
            let Some(from) = from.get() else { continue };
            let copy = || from.iter().map(|e| AtomicU32::new(e.load(Ordering::Acquire))).collect();
            let _ = to.set(if touched.contains(&(n as u64)) { copy() } else { from.clone() });
        }
        entries.iter().for_each(|(n, at)| {
            new.set(*n, *at);
        });
        new
    }

    pub(crate) fn clusters(&self) -> u64 {
        self.clusters
    }

    pub(crate) fn backing(&self) -> &Backing {
        &self.backing
    }

    /// Number of chunks, which is the number of extent pages.
    pub(crate) fn chunk_count(&self) -> usize {
        self.chunks.len()
    }

    /// Number of entries of one chunk.
    pub(crate) fn chunk_len(&self, chunk: usize) -> usize {
        CHUNK.min(self.clusters.saturating_sub(chunk as u64 * CHUNK)) as usize
    }

    /// The entry; 0 for a hole and beyond the end.
    pub(crate) fn get(&self, cluster: u64) -> u32 {
        match self.chunks.get((cluster / CHUNK) as usize).and_then(OnceLock::get) {
            Some(chunk) => chunk.get((cluster % CHUNK) as usize).map_or(0, |e| e.load(Ordering::Acquire)),
            None => 0,
        }
    }

    /// Sets the entry and returns the former one. Beyond the end nothing happens.
    pub(crate) fn set(&self, cluster: u64, to: u32) -> u32 {
        let n = cluster / CHUNK;
        let Some(cell) = self.chunks.get(n as usize) else { return 0 };
        let chunk = match cell.get() {
            Some(chunk) => chunk,
            None if to == 0 => return 0,
            None => cell.get_or_init(|| (0..self.chunk_len(n as usize)).map(|_| AtomicU32::new(0)).collect()),
        };
        chunk.get((cluster % CHUNK) as usize).map_or(0, |e| e.swap(to, Ordering::AcqRel))
    }

    /// The entries of one chunk, in order; all holes when it has none.
    pub(crate) fn chunk(&self, chunk: usize) -> Vec<u32> {
        match self.chunks.get(chunk) {
            Some(cell) => match cell.get() {
                Some(entries) => entries.iter().map(|e| e.load(Ordering::Acquire)).collect(),
                None => vec![0; self.chunk_len(chunk)],
            },
            None => Vec::new(),
        }
    }

    /// Whether the chunk holds no cluster.
    pub(crate) fn chunk_is_empty(&self, chunk: usize) -> bool {
        match self.chunks.get(chunk).and_then(OnceLock::get) {
            Some(entries) => entries.iter().all(|e| e.load(Ordering::Acquire) == 0),
            None => true,
        }
    }

    /// Every allocated cluster: (cluster of the volume, cluster of the disk), ascending.
    pub(crate) fn allocated(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        self.chunks.iter().enumerate().filter_map(|(n, cell)| cell.get().map(|chunk| (n as u64, chunk))).flat_map(
            |(n, chunk)| {
                chunk.iter().enumerate().filter_map(move |(i, entry)| {
                    let at = entry.load(Ordering::Acquire);
                    (at != 0).then_some((n * CHUNK + i as u64, at))
                })
            },
        )
    }
}

/// The cluster map of one volume.
#[derive(Debug)]
pub struct Map {
    generation: AtomicU64,
    table: RwLock<Arc<Table>>,
}

impl Map {
    pub(crate) fn new(table: Table) -> Self {
        Self { generation: AtomicU64::new(0), table: RwLock::new(Arc::new(table)) }
    }

    /// A view for one core.
    pub fn view(self: &Arc<Self>) -> MapView {
        let (generation, table) = self.snapshot();
        MapView { map: self.clone(), generation, table, parent: None }
    }

    /// The external device behind this map, however far down the chain.
    pub fn external(self: &Arc<Self>) -> Option<Arc<External>> {
        let mut table = self.table();
        loop {
            table = match table.backing() {
                Backing::Zeroes => return None,
                Backing::External(external) => return Some(external.clone()),
                Backing::Parent(map) => map.table(),
            };
        }
    }

    pub(crate) fn table(&self) -> Arc<Table> {
        self.table.read().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    pub(crate) fn replace(&self, table: Table) {
        *self.table.write().unwrap_or_else(|poisoned| poisoned.into_inner()) = Arc::new(table);
        self.generation.fetch_add(1, Ordering::Release);
    }

    fn snapshot(&self) -> (u64, Arc<Table>) {
        // The generation first: a replacement in between then only makes the view refresh once more.
        let generation = self.generation.load(Ordering::Acquire);
        (generation, self.table())
    }
}

/// One core's view of a map. Cheap to use, not to be shared; made by [`Map::view`].
///
/// What a lookup answers is valid for I/O that the engine counts as in flight (see [`crate::Hooks`]): the store waits for
/// such I/O before it gives a cluster to others.
#[derive(Debug)]
pub struct MapView {
    map: Arc<Map>,
    generation: u64,
    table: Arc<Table>,
    parent: Option<Box<MapView>>,
}

impl MapView {
    /// Clusters of the volume.
    pub fn clusters(&mut self) -> u64 {
        self.refresh();
        self.table.clusters
    }

    /// The volume's own cluster on the disk; `None` for a hole and beyond the end.
    #[inline]
    pub fn own(&mut self, cluster: u64) -> Option<u32> {
        self.refresh();
        match self.table.get(cluster) {
            0 => None,
            at => Some(at),
        }
    }

    /// Where the data of a cluster is to be read.
    pub fn place(&mut self, cluster: u64) -> Place {
        if let Some(at) = self.own(cluster) {
            return Place::Own(at);
        }
        if cluster >= self.table.clusters {
            return Place::Zeroes;
        }
        let mut view = match self.behind() {
            Ok(view) => view,
            Err(place) => return place,
        };
        loop {
            if let Some(at) = view.own(cluster) {
                return Place::Ancestor(at);
            }
            if cluster >= view.table.clusters {
                return Place::Zeroes;
            }
            view = match view.behind() {
                Ok(view) => view,
                Err(place) => return place,
            };
        }
    }

    /// The view of the parent, or what ends the chain here.
    fn behind(&mut self) -> Result<&mut MapView, Place> {
        match self.table.backing() {
            Backing::Zeroes => Err(Place::Zeroes),
            Backing::External(_) => Err(Place::External),
            Backing::Parent(map) => Ok(self.parent.get_or_insert_with(|| Box::new(map.view()))),
        }
    }

    #[inline]
    fn refresh(&mut self) {
        if self.map.generation.load(Ordering::Acquire) != self.generation {
            (self.generation, self.table) = self.map.snapshot();
            self.parent = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_show_the_parent_up_to_its_end() {
        let parent = Arc::new(Map::new(Table::new(600, Backing::Zeroes)));
        parent.table().set(5, 50);
        parent.table().set(599, 60);
        let child = Arc::new(Map::new(Table::new(2000, Backing::Parent(parent.clone()))));
        child.table().set(1999, 70);
        let mut view = child.view();
        assert_eq!(view.place(5), Place::Ancestor(50));
        assert_eq!(view.place(599), Place::Ancestor(60));
        assert_eq!(view.place(600), Place::Zeroes);
        assert_eq!(view.place(1999), Place::Own(70));
        assert_eq!(view.place(2000), Place::Zeroes);
        assert_eq!(child.table().set(5, 51), 0);
        assert_eq!(view.place(5), Place::Own(51));
    }

    #[test]
    fn a_view_notices_a_replaced_table_and_a_replaced_parent() {
        let external = Arc::new(External::new("e".into()));
        let parent = Arc::new(Map::new(Table::new(10, Backing::External(external))));
        let child = Arc::new(Map::new(Table::new(10, Backing::Parent(parent.clone()))));
        let mut view = child.view();
        assert_eq!(view.place(3), Place::External);
        assert_eq!(child.external().unwrap().id(), "e");
        parent.replace(Table::new(10, Backing::Zeroes));
        assert_eq!(view.place(3), Place::Zeroes);
        child.replace(child.table().with_backing(Backing::Zeroes));
        assert!(child.external().is_none());
    }

    #[test]
    fn resizing_keeps_entries_and_their_chunks() {
        let table = Table::new(1000, Backing::Zeroes);
        for n in [0, 511, 512, 999] {
            table.set(n, n as u32 + 1);
        }
        let grown = table.resized(5000);
        assert_eq!(grown.allocated().collect::<Vec<_>>(), [(0, 1), (511, 512), (512, 513), (999, 1000)]);
        assert_eq!(grown.chunk(1).len(), 512);
        let cut = grown.resized(512);
        assert_eq!(cut.allocated().collect::<Vec<_>>(), [(0, 1), (511, 512)]);
        assert_eq!(cut.chunk_count(), 1);
        assert_eq!(Table::new(0, Backing::Zeroes).chunk_count(), 0);
    }

    #[test]
    fn a_patched_table_leaves_the_old_one_alone() {
        let table = Table::new(2000, Backing::Zeroes);
        table.set(3, 7);
        table.set(600, 8);
        let new = table.patched(&[(3, 0), (4, 9), (1999, 10)]);
        assert_eq!(new.allocated().collect::<Vec<_>>(), [(4, 9), (600, 8), (1999, 10)]);
        assert_eq!(table.allocated().collect::<Vec<_>>(), [(3, 7), (600, 8)]);
    }
}
