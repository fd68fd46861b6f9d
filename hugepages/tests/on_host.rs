//! The whole path on the running kernel: reserve, map, use, release. Needs root and some free memory, and for a moment
//! changes the host's hugepage pool; run it with `cargo test -p addax-hugepages --test on_host -- --ignored`.

#![allow(clippy::unwrap_used)]

use addax_hugepages::{
    BufPool, Hugepages, KernelPages, MapPolicy, PageSize, PoolConfig, PoolId, RegionKind, Reserver, Status,
};

const POOL: PoolId = PoolId { node: 0, page_size: PageSize::MIB_2 };
/// The default buffer pool takes 21 pages; the rest is in use when the reservation is released.
const PAGES: u64 = 24;

#[test]
#[ignore = "changes the hugepage pool of the host"]
fn reserved_pages_back_a_pool_and_are_given_back() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = dir.path().join("ledger.json");
    let reserver = Reserver::host(&ledger).unwrap();
    let before = reserver.kernel().counts(POOL).unwrap();
    assert_eq!(reserver.reserve(POOL, PAGES).unwrap(), PAGES);

    let policy = MapPolicy { hugepages: Hugepages::Require, numa_node: Some(0), ..MapPolicy::default() };
    let pool = BufPool::new(PoolConfig { policy, ..PoolConfig::default() }).unwrap();
    assert_eq!(pool.stats().region_kind, RegionKind::Huge(PageSize::MIB_2));
    assert_eq!(pool.region().numa_node(), Some(0));
    let buf = pool.take_zeroed(4096).unwrap();

    let status = Status::read(&reserver).unwrap();
    let row = status.pools.iter().find(|row| row.pool == POOL).unwrap();
    assert_eq!((row.total, row.reserved_by_us), (before.total + PAGES, PAGES));
    println!("{status}");

    // A new process would find the same reservation.
    let again = Reserver::host(&ledger).unwrap();
    assert_eq!(again.reserve(POOL, PAGES).unwrap(), 0);
    assert_eq!(again.release(POOL).unwrap(), PAGES);
    let in_use = again.kernel().counts(POOL).unwrap();
    assert_eq!(in_use.persistent(), before.persistent());
    assert!(in_use.surplus > before.surplus, "pages in use stay until they are unmapped");

    buf.copy_from(b"still ours", 0);
    drop((pool, buf));
    assert_eq!(again.kernel().counts(POOL).unwrap(), before);
}
