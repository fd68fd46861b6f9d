//! What the single clone of a snapshot looks like once it has inherited the snapshot's clusters. No I/O.

use crate::map::{Backing, CHUNK, Table};

/// A clone with its inheritance.
#[derive(Debug)]
pub(super) struct Merge {
    /// All its clusters.
    pub(super) table: Table,
    /// Its extent pages; 0 also for those of `rewrite`.
    pub(super) pages: Vec<u32>,
    /// Chunks that need a new extent page.
    pub(super) rewrite: Vec<usize>,
    /// Clusters of the snapshot that the clone does not take.
    pub(super) left_clusters: Vec<u32>,
    /// Extent pages of either that the clone does not use any more.
    pub(super) left_pages: Vec<u32>,
}

/// One of the two sides.
#[derive(Clone, Copy)]
pub(super) struct Side<'a> {
    pub(super) table: &'a Table,
    /// Per chunk an extent page or 0; all 0 for a blob that lists its clusters in the chain.
    pub(super) pages: &'a [u32],
}

/// Merges. The clone keeps what it has, takes what only the snapshot has, and shows `backing` where neither has anything.
/// An extent page of the snapshot passes to the clone whole where the clone has none and both are of one length.
pub(super) fn merge(clone: Side<'_>, snapshot: Side<'_>, backing: Backing, table_mode: bool) -> Merge {
    let inherited: Vec<(u64, u32)> =
        snapshot.table.allocated().filter(|(n, _)| *n < clone.table.clusters() && clone.table.get(*n) == 0).collect();
    let table = clone.table.with_backing(backing).patched(&inherited);
    let mut pages = clone.pages.to_vec();
    let (mut rewrite, mut left_pages) = (Vec::new(), Vec::new());
    let mut moved = vec![false; snapshot.pages.len()];
    let mut chunks: Vec<usize> = inherited.iter().map(|(n, _)| (n / CHUNK) as usize).collect();
    chunks.dedup();
    for chunk in chunks.into_iter().filter(|_| table_mode) {
        let theirs = snapshot.pages.get(chunk).copied().unwrap_or(0);
        let mine = std::mem::replace(&mut pages[chunk], 0);
        if mine == 0 && theirs != 0 && snapshot.table.chunk_len(chunk) == clone.table.chunk_len(chunk) {
            pages[chunk] = theirs;
            moved[chunk] = true;
            continue;
        }
        rewrite.push(chunk);
        if mine != 0 {
            left_pages.push(mine);
        }
    }
    let unmoved = snapshot.pages.iter().zip(&moved).filter(|(page, moved)| **page != 0 && !**moved);
    left_pages.extend(unmoved.map(|(page, _)| *page));
    let left_clusters = snapshot.table.allocated().filter(|(n, at)| table.get(*n) != *at).map(|(_, at)| at).collect();
    Merge { table, pages, rewrite, left_clusters, left_pages }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(clusters: u64, entries: &[(u64, u32)]) -> Table {
        Table::new(clusters, Backing::Zeroes).patched(entries)
    }

    #[test]
    fn pages_pass_whole_or_are_rewritten() {
        let clone = table(1600, &[(0, 10), (512, 11), (1599, 12)]);
        let snapshot = table(1600, &[(0, 20), (1, 21), (512, 22), (1024, 23), (1030, 24)]);
        let clone_pages = [1, 2, 3, 4];
        let merged = merge(
            Side { table: &clone, pages: &clone_pages },
            Side { table: &snapshot, pages: &[5, 6, 7, 0] },
            Backing::Zeroes,
            true,
        );
        let all: Vec<_> = merged.table.allocated().collect();
        assert_eq!(all, [(0, 10), (1, 21), (512, 11), (1024, 23), (1030, 24), (1599, 12)]);
        assert_eq!(merged.pages, [0, 2, 0, 4]);
        assert_eq!(merged.rewrite, [0, 2]);
        assert_eq!(merged.left_clusters, [20, 22]);
        assert_eq!(merged.left_pages, [1, 3, 5, 6, 7]);
    }

    #[test]
    fn a_clone_without_page_takes_the_snapshots_if_it_is_as_long() {
        let snapshot = table(600, &[(3, 20), (599, 21)]);
        let clone = table(600, &[]);
        let sides = |clone, pages| (Side { table: clone, pages }, Side { table: &snapshot, pages: &[5, 6] });
        let (a, b) = sides(&clone, &[0, 0]);
        let merged = merge(a, b, Backing::Zeroes, true);
        assert_eq!((merged.pages, merged.rewrite, merged.left_pages), (vec![5, 6], vec![], vec![]));
        let longer = table(700, &[]);
        let (a, b) = sides(&longer, &[0, 0]);
        let merged = merge(a, b, Backing::Zeroes, true);
        assert_eq!((merged.pages, merged.rewrite, merged.left_pages), (vec![5, 0], vec![1], vec![6]));
        let shorter = table(4, &[]);
        let (a, b) = sides(&shorter, &[0]);
        let merged = merge(a, b, Backing::Zeroes, true);
        assert_eq!((merged.pages, merged.rewrite, merged.left_pages), (vec![0], vec![0], vec![5, 6]));
        assert_eq!(merged.left_clusters, [21]);
    }
}
