//! The buffer pool from outside: what is handed out never overlaps, always comes back, and is counted right.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::thread;

use addax_hugepages::{Buf, BufPool, BufSlice, ClassConfig, Hugepages, MapPolicy, PoolConfig, PoolError, TakeError};
use proptest::prelude::*;

const SMALL: usize = 8 << 10;
const LARGE: usize = 132 << 10;

fn config(small: u32, large: u32) -> PoolConfig {
    PoolConfig {
        small: ClassConfig { bytes: SMALL, count: small },
        large: ClassConfig { bytes: LARGE, count: large },
        policy: MapPolicy::plain(),
    }
}

fn pool(small: u32, large: u32) -> BufPool {
    BufPool::new(config(small, large)).unwrap()
}

#[test]
fn the_default_pool_works_whatever_pages_the_host_has() {
    for hugepages in [Hugepages::Auto, Hugepages::Never] {
        let policy = MapPolicy { hugepages, ..MapPolicy::default() };
        let pool = BufPool::new(PoolConfig { policy, ..PoolConfig::default() }).unwrap();
        let stats = pool.stats();
        assert_eq!((stats.small.bytes, stats.large.bytes), (SMALL, LARGE));
        assert!(stats.region_bytes >= 1024 * SMALL + 256 * LARGE);
        let buf = pool.take(128 << 10).unwrap();
        assert!(buf.is_direct_io(4096));
        assert!(buf.to_vec().iter().all(|&byte| byte == 0));
    }
}

#[test]
fn a_request_gets_the_smallest_class_that_fits() {
    let pool = pool(2, 2);
    for (len, capacity) in [(0, SMALL), (1, SMALL), (SMALL, SMALL), (SMALL + 1, LARGE), (LARGE, LARGE)] {
        let buf = pool.take(len).unwrap();
        assert_eq!((buf.len(), buf.capacity()), (len, capacity));
    }
    let error = pool.try_take(LARGE + 1).unwrap_err();
    assert_eq!(error, TakeError::TooLong { len: LARGE + 1, max: LARGE });
}

#[test]
fn a_pool_of_one_class_serves_all_lengths_from_it() {
    let large_only = pool(0, 1);
    assert_eq!(large_only.take(1).unwrap().capacity(), LARGE);
    let small_only = pool(1, 0);
    assert_eq!(small_only.max_len(), SMALL);
    assert!(matches!(small_only.try_take(SMALL + 1), Err(TakeError::TooLong { .. })));
}

#[test]
fn an_empty_class_refuses_and_does_not_borrow() {
    let pool = pool(1, 1);
    let held = pool.take(1).unwrap();
    assert_eq!(pool.try_take(1).unwrap_err(), TakeError::Exhausted { class_bytes: SMALL });
    assert!(pool.take(1).is_none());
    let small = pool.stats().small;
    assert_eq!((small.taken, small.free, small.high_water, small.exhausted), (1, 0, 1, 2));
    assert_eq!(pool.stats().large.taken, 0);
    drop(held);
    assert!(pool.take(1).is_some());
}

#[test]
fn the_last_handle_of_any_kind_returns_the_buffer() {
    let pool = pool(1, 1);
    let buf = pool.take(SMALL).unwrap();
    let clone = buf.clone();
    let slice = buf.slice(100..200);
    let inner = slice.slice(..10);
    for handle in [Box::new(buf) as Box<dyn Send>, Box::new(clone), Box::new(slice)] {
        drop(handle);
        assert_eq!(pool.stats().small.taken, 1);
    }
    drop(inner);
    assert_eq!(pool.stats().small.taken, 0);
}

#[test]
fn buffers_outlive_the_pool_handle() {
    let pool = pool(1, 1);
    let buf = pool.take(100).unwrap();
    buf.fill(9);
    drop(pool);
    let slice = buf.slice(50..);
    drop(buf);
    assert_eq!(slice.to_vec(), [9; 50]);
}

#[test]
fn registration_covers_every_buffer_and_no_other() {
    let (pool, other) = (pool(3, 3), pool(1, 1));
    let iovec = pool.region_iovec();
    let base = iovec.iov_base as usize;
    for len in [1, SMALL, LARGE, LARGE] {
        let buf = pool.take(len).unwrap();
        let offset = buf.registered_offset().unwrap();
        assert_eq!(buf.as_ptr() as usize, base + offset);
        assert!(offset + buf.capacity() <= iovec.iov_len);
        assert_eq!(buf.slice(len..).registered_offset(), Some(offset + len));
        assert!(pool.owns(&buf) && !other.owns(&buf));
    }
    let unpooled = Buf::alloc_unpooled(1);
    assert_eq!(unpooled.registered_offset(), None);
    assert!(!pool.owns(&unpooled));
}

#[test]
fn a_reused_buffer_is_cleared_only_on_request() {
    let pool = pool(1, 1);
    pool.take(SMALL).unwrap().fill(0xaa);
    assert_eq!(pool.take(4).unwrap().to_vec(), [0xaa; 4]);
    assert_eq!(pool.take_zeroed(SMALL).unwrap().to_vec(), vec![0; SMALL]);
}

#[test]
fn bad_configurations_are_refused_by_field() {
    let with = |change: fn(&mut PoolConfig)| {
        let mut config = config(1, 1);
        change(&mut config);
        BufPool::new(config).unwrap_err()
    };
    let cases: [(PoolError, &str); 6] = [
        (with(|c| c.small.bytes = 0), "small.bytes 0"),
        (with(|c| c.small.bytes = 4097), "small.bytes 4097"),
        (with(|c| c.large.bytes = SMALL), "large.bytes 8192"),
        (with(|c| (c.small.count, c.large.count) = (0, 0)), "small.count 0"),
        (with(|c| c.large.count = u32::MAX), "large.count 4294967295"),
        (with(|c| (c.large.bytes, c.large.count) = (1 << 40, 1 << 30)), "larger than the address space"),
    ];
    for (error, expected) in cases {
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn unique_bytes_are_lent_only_to_the_only_handle() {
    let pooled = pool(1, 1);
    for mut buf in [pooled.take(16).unwrap(), Buf::alloc_unpooled(16)] {
        buf.get_mut().unwrap().fill(3);
        let clone = buf.clone();
        assert!(buf.get_mut().is_none());
        drop(clone);
        let mut slice = buf.into_slice();
        slice.get_mut().unwrap()[0] = 4;
        assert_eq!(slice.slice(..2).to_vec(), [4, 3]);
    }
}

#[test]
fn copies_go_where_they_are_told() {
    let buf = Buf::copy_of(b"0123456789");
    buf.copy_from(b"ab", 8);
    let mut two = [0; 2];
    buf.copy_to(7, &mut two);
    assert_eq!(&two, b"7a");
    let mut long = [b'-'; 12];
    assert_eq!(buf.read_into(&mut long), 10);
    assert_eq!(&long, b"01234567ab--");
    let slice = buf.slice(2..=5);
    buf.copy_from_memory(&slice, 3);
    assert_eq!(buf.to_vec(), b"012234567ab"[..7].iter().chain(b"7ab").copied().collect::<Vec<_>>());
    let mut rest = buf.slice(..);
    assert_eq!(rest.split_to(3).to_vec(), b"012");
    assert_eq!(rest.len(), 7);
}

#[test]
fn chunks_give_every_byte_once_and_in_order() {
    let bytes: Vec<u8> = (0..10_000_u32).map(|n| n as u8).collect();
    let mut seen = Vec::new();
    Buf::copy_of(&bytes).for_each_chunk(|chunk| seen.extend_from_slice(chunk));
    assert_eq!(seen, bytes);
}

#[test]
fn the_length_can_move_within_the_capacity() {
    let mut buf = Buf::alloc_unpooled(10);
    assert_eq!(buf.capacity(), 4096);
    buf.set_len(4096);
    assert_eq!(buf.to_vec(), vec![0; 4096]);
    buf.set_len(0);
    assert!(buf.is_empty());
}

#[test]
fn ranges_outside_are_refused() {
    let buf = Buf::alloc_unpooled(10);
    assert!(buf.try_slice(0..11).is_none());
    assert!(buf.try_slice(..=usize::MAX).is_none());
    #[expect(clippy::reversed_empty_ranges)]
    let reversed = 5..4;
    assert!(buf.try_slice(reversed).is_none());
    assert_eq!(buf.try_slice(10..).unwrap().len(), 0);
    let slice = buf.slice(2..8);
    assert!(slice.try_slice(..7).is_none());
}

#[test]
#[should_panic(expected = "3 bytes at offset 8 do not fit a buffer of 10 bytes")]
fn a_copy_past_the_end_panics() {
    Buf::alloc_unpooled(10).copy_from(&[0; 3], 8);
}

#[test]
#[should_panic(expected = "do not fit")]
fn an_offset_that_would_wrap_panics() {
    Buf::alloc_unpooled(10).copy_to(usize::MAX, &mut [0; 2]);
}

#[test]
fn buffers_freed_on_other_threads_come_back() {
    const ROUNDS: usize = 2_000;
    let pool = pool(4, 2);
    thread::scope(|scope| {
        let (to_free, free_here) = mpsc::sync_channel::<BufSlice>(3);
        scope.spawn(move || {
            for slice in free_here {
                let bytes = slice.to_vec();
                assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a buffer in flight was overwritten");
            }
        });
        for taker in 0..2 {
            let (pool, to_free) = (pool.clone(), to_free.clone());
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let len = if round % 3 == 0 { LARGE } else { 512 };
                    let Some(buf) = pool.take(len) else {
                        thread::yield_now();
                        continue;
                    };
                    buf.fill((round as u8) << 1 | taker);
                    to_free.send(buf.slice(..512)).unwrap();
                }
            });
        }
    });
    let stats = pool.stats();
    assert_eq!((stats.small.taken, stats.large.taken), (0, 0));
    assert!(stats.small.high_water <= 4 && stats.large.high_water <= 2);
    let all: Vec<Buf> = std::iter::from_fn(|| pool.take(1)).collect();
    assert_eq!(all.len(), 4);
}

#[derive(Debug, Clone)]
enum Step {
    Take(usize),
    Clone(prop::sample::Index),
    Slice(prop::sample::Index, prop::sample::Index),
    Drop(prop::sample::Index),
    DropElsewhere(prop::sample::Index),
}

fn step() -> impl Strategy<Value = Step> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        4 => prop_oneof![0..=SMALL, SMALL..=LARGE + 1].prop_map(Step::Take),
        1 => index().prop_map(Step::Clone),
        1 => (index(), index()).prop_map(|(handle, start)| Step::Slice(handle, start)),
        3 => index().prop_map(Step::Drop),
        1 => index().prop_map(Step::DropElsewhere),
    ]
}

/// A handle with what the model knows about it.
struct Held {
    slice: BufSlice,
    /// Which take it comes from.
    take: u32,
}

/// The outstanding takes: address and length of the buffer, and the mark that its bytes carry.
fn check(pool: &BufPool, held: &[Held]) -> Result<(), TestCaseError> {
    let mut ranges = BTreeMap::new();
    for Held { slice, take } in held {
        let buf = slice.buf();
        prop_assert_eq!(buf.as_ptr() as usize % 4096, 0);
        ranges.insert(*take, (buf.as_ptr() as usize, buf.capacity()));
        let mark = *take as u8;
        prop_assert!(slice.to_vec().iter().all(|&byte| byte == mark), "take {} was overwritten", take);
    }
    let mut sorted: Vec<_> = ranges.values().copied().collect();
    sorted.sort_unstable();
    for pair in sorted.windows(2) {
        prop_assert!(pair[0].0 + pair[0].1 <= pair[1].0, "buffers overlap: {:?}", pair);
    }
    let small = sorted.iter().filter(|(_, capacity)| *capacity == SMALL).count() as u32;
    let stats = pool.stats();
    prop_assert_eq!(stats.small.taken, small);
    prop_assert_eq!(stats.large.taken, sorted.len() as u32 - small);
    prop_assert_eq!(stats.small.free + stats.small.taken, stats.small.count);
    prop_assert!(stats.small.high_water >= stats.small.taken);
    Ok(())
}

fn expected_refusal(pool: &BufPool, len: usize) -> Option<TakeError> {
    let stats = pool.stats();
    let class = if len <= SMALL { stats.small } else { stats.large };
    if len > LARGE {
        Some(TakeError::TooLong { len, max: LARGE })
    } else {
        (class.free == 0).then_some(TakeError::Exhausted { class_bytes: class.bytes })
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn outstanding_buffers_never_overlap_and_all_return(steps in prop::collection::vec(step(), 1..60)) {
        let pool = pool(4, 3);
        let mut held: Vec<Held> = Vec::new();
        for (take, step) in (1..).zip(steps) {
            match step {
                Step::Take(len) => {
                    let refusal = expected_refusal(&pool, len);
                    let taken = pool.try_take(len);
                    prop_assert_eq!(taken.as_ref().err().copied(), refusal);
                    if let Ok(buf) = taken {
                        buf.fill(take as u8);
                        held.push(Held { slice: buf.into_slice(), take });
                    }
                }
                _ if held.is_empty() => {}
                Step::Clone(index) => {
                    let Held { slice, take } = index.get(&held);
                    let copy = Held { slice: slice.clone(), take: *take };
                    held.push(copy);
                }
                Step::Slice(index, start) => {
                    let Held { slice, take } = index.get(&held);
                    let part = Held { slice: slice.slice(start.index(slice.len() + 1)..), take: *take };
                    held.push(part);
                }
                Step::Drop(index) => drop(held.swap_remove(index.index(held.len()))),
                Step::DropElsewhere(index) => {
                    let gone = held.swap_remove(index.index(held.len()));
                    thread::spawn(move || drop(gone)).join().unwrap();
                }
            }
            check(&pool, &held)?;
        }
        held.clear();
        check(&pool, &held)?;
        let all: Vec<Buf> = std::iter::from_fn(|| pool.take(1)).chain(std::iter::from_fn(|| pool.take(LARGE))).collect();
        prop_assert_eq!(all.len(), 7);
    }
}
