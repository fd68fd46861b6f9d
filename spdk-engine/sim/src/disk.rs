//! A simulated disk: blocks that hold values, perhaps behind a volatile cache.
//!
//! *What it is.* What reads return, and for every block of which a write is not yet durable what a power loss may leave
//! of it: the durable value or any that was written since. Blocks are chosen each for itself, so a write may be kept,
//! lost or torn. The death of a process loses nothing: what was handed to the kernel counts as kept (rule 1).
//!
//! *Invariants.* A disk without a volatile cache has no such blocks. After a flush there are none.

use std::collections::BTreeMap;

use crate::rng::Rng;

/// Most values of one block that a power loss chooses from; older ones but the durable one are forgotten.
const VERSIONS_MAX: usize = 6;

#[derive(Debug, Clone)]
pub(crate) struct Disk {
    blocks: Vec<u64>,
    pub(crate) volatile: bool,
    /// By block: the durable value first, then what was written since.
    cached: BTreeMap<usize, Vec<u64>>,
    /// Times it lost power while something was cached.
    pub(crate) losses: u32,
}

impl Disk {
    pub(crate) fn new(blocks: usize, volatile: bool) -> Self {
        Self { blocks: vec![0; blocks], volatile, cached: BTreeMap::new(), losses: 0 }
    }

    pub(crate) fn blocks(&self) -> &[u64] {
        &self.blocks
    }

    pub(crate) fn read(&self, from: usize, count: usize) -> Vec<u64> {
        self.blocks[from..from + count].to_vec()
    }

    /// Writes one block; with `durable` it survives whatever follows.
    pub(crate) fn write(&mut self, at: usize, value: u64, durable: bool) {
        let before = std::mem::replace(&mut self.blocks[at], value);
        if !self.volatile || durable {
            self.cached.remove(&at);
            return;
        }
        let versions = self.cached.entry(at).or_insert_with(|| vec![before]);
        if versions.len() >= VERSIONS_MAX {
            versions.remove(1);
        }
        versions.push(value);
    }

    pub(crate) fn flush(&mut self) {
        self.cached.clear();
    }

    /// The machine loses power. True when something may be gone.
    pub(crate) fn lose_power(&mut self, rng: &mut Rng) -> bool {
        let lost = !self.cached.is_empty();
        for (at, versions) in std::mem::take(&mut self.cached) {
            // Mostly nothing had been written back yet.
            let kept = if rng.permille(600) { 0 } else { rng.index(versions.len()) };
            self.blocks[at] = versions[kept];
        }
        self.losses += u32::from(lost);
        lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_power_loss_leaves_the_durable_value_or_one_written_since() {
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..200 {
            let mut disk = Disk::new(4, true);
            disk.write(0, 1, false);
            disk.flush();
            disk.write(0, 2, false);
            disk.write(0, 3, false);
            disk.write(1, 4, true);
            assert_eq!(disk.read(0, 2), [3, 4]);
            assert!(disk.lose_power(&mut Rng::new(seed)));
            assert_eq!(disk.read(1, 1), [4], "force unit access");
            seen.insert(disk.read(0, 1)[0]);
            assert!(!disk.lose_power(&mut Rng::new(seed)), "nothing is cached any more");
        }
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn a_disk_without_a_volatile_cache_loses_nothing() {
        let mut disk = Disk::new(1, false);
        disk.write(0, 7, false);
        assert!(!disk.lose_power(&mut Rng::new(1)));
        assert_eq!(disk.blocks(), [7]);
    }
}
