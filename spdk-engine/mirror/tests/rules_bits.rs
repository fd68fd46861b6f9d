//! Rules about write-intent bits and superblocks, by number.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Bench, MS, REGION, opened, set, warm, with_bits};
use mirror_core::{DropReason, Event, HostError, Input, LegError, LegId, Op};

fn flushes(b: &Bench) -> Vec<u32> {
    b.ios.iter().filter(|io| io.op == Op::Flush).map(|io| io.leg.0).collect()
}

#[test]
fn rule_18_bits_are_durable_on_every_member_before_data_goes_to_any() {
    let mut b = opened(&["a", "b"], &[]);
    let w = b.write(9, 1);
    assert!(b.ios.is_empty());
    assert_eq!(b.bit_writes(), [(0, vec![2]), (1, vec![2])]);
    let metas = b.metas.clone();
    b.finish_meta(&metas[0], Ok(()));
    assert!(b.ios.is_empty(), "one member alone is not enough");
    b.finish_meta(&metas[1], Ok(()));
    assert_eq!(b.legs_of(w), [0, 1]);
}

#[test]
fn rule_18_a_command_over_several_regions_waits_for_all_of_their_bits() {
    let mut b = opened(&["a", "b"], &[]);
    warm(&mut b, 1);
    let w = b.host(Op::Unmap, 6, 4);
    assert!(b.ios_of(w).is_empty());
    assert_eq!(b.bit_writes(), [(0, vec![1, 2]), (1, vec![1, 2])]);
    b.settle_meta();
    assert_eq!(b.legs_of(w), [0, 1]);
}

#[test]
fn rule_18_a_hot_region_costs_no_meta_write() {
    let mut b = opened(&["a", "b", "c"], &[]);
    warm(&mut b, 5);
    let before = b.core.status();
    for i in 0..1000 {
        let w = b.write(5 * REGION + i % REGION, 1);
        assert_eq!(b.legs_of(w), [0, 1, 2], "data goes at once");
        b.reply_all(w);
        b.now += MS;
    }
    assert_eq!((b.core.status().meta_writes, b.metas.len()), (before.meta_writes, 0));
    assert_eq!(b.core.status().full_passes, before.full_passes, "nothing but the I/O itself is looked at");
    assert_eq!(b.done.len(), 1001);
}

#[test]
fn rule_18_reads_need_no_bits() {
    let mut b = opened(&["a", "b"], &[]);
    let r = b.read(9, 1);
    assert_eq!((b.legs_of(r).len(), b.metas.len()), (1, 0));
}

#[test]
fn many_cold_regions_share_one_meta_write_per_leg() {
    let mut b = opened(&["a", "b"], &[]);
    let before = b.core.status().meta_writes;
    let writes: Vec<_> = (0..12).map(|region| b.write(region * REGION, 1)).collect();
    // The first is on its way; all others wait for the next one.
    assert_eq!(b.bit_writes(), [(0, vec![0]), (1, vec![0])]);
    b.settle_meta();
    assert_eq!(b.core.status().meta_writes - before, 4, "two for each leg");
    assert!(writes.iter().all(|w| b.legs_of(*w) == [0, 1]));
}

#[test]
fn rule_18_idle_regions_are_flushed_on_all_and_then_cleared() {
    let mut b = opened(&["a", "b"], &[]);
    warm(&mut b, 3);
    assert_eq!(b.core.status().live_regions, 1);
    b.advance(4_999 * MS);
    assert!(b.ios.is_empty());
    b.advance(MS);
    assert_eq!(flushes(&b), [0, 1]);
    let first = b.ios[0];
    b.finish(first, Ok(()));
    assert!(b.metas.is_empty(), "not before all have flushed");
    b.settle_io();
    assert_eq!(b.bit_writes(), [(0, vec![]), (1, vec![])]);
    assert_eq!(b.core.status().live_regions, 0);
    b.settle_meta();
    b.advance(60_000 * MS);
    assert!(b.ios.is_empty() && b.metas.is_empty(), "an idle volume does nothing");
}

#[test]
fn rule_18_a_bit_does_not_clear_when_a_write_began_since_the_flush() {
    let mut b = opened(&["a", "b"], &[]);
    warm(&mut b, 3);
    warm(&mut b, 4);
    b.advance(5_000 * MS);
    let w = b.write(3 * REGION, 1);
    assert_eq!(b.legs_of(w), [0, 1], "its bit is still durable");
    b.reply_all(w);
    b.settle_io();
    assert_eq!(b.bit_writes(), [(0, vec![3]), (1, vec![3])]);
}

#[test]
fn rule_18_a_write_in_flight_keeps_its_bit() {
    let mut b = opened(&["a", "b"], &[]);
    let w = b.write(0, 1);
    b.settle_meta();
    b.reply(w, 0, Ok(()));
    b.advance(20_000 * MS);
    assert!(flushes(&b).is_empty());
    b.reply(w, 1, Ok(()));
    b.advance(20_000 * MS);
    assert_eq!(flushes(&b), [0, 1]);
}

#[test]
fn rule_18_a_region_cleared_and_written_at_once_waits_for_its_bit_again() {
    let mut b = opened(&["a"], &[]);
    warm(&mut b, 3);
    b.advance(5_000 * MS);
    b.settle_io();
    let clearing = b.metas[0].clone();
    let w = b.write(3 * REGION, 1);
    b.finish_meta(&clearing, Ok(()));
    assert!(b.ios_of(w).is_empty(), "what was written is the cleared bit");
    assert_eq!(b.bit_writes(), [(0, vec![3])]);
    b.settle_meta();
    assert_eq!(b.legs_of(w), [0]);
}

#[test]
fn rule_18_a_flush_that_fails_clears_nothing_and_its_member_leaves() {
    let mut b = opened(&["a", "b"], &[]);
    warm(&mut b, 3);
    b.advance(5_000 * MS);
    let (first, second) = (b.ios[0], b.ios[1]);
    b.finish(first, Err(LegError::Media));
    b.finish(second, Ok(()));
    assert!(b.bit_writes().is_empty() && b.core.status().live_regions == 1);
    assert_eq!(b.asked().next.in_sync, set(&["b"]));
    b.commit();
    assert!(b.bit_writes().is_empty(), "rule 9: not before its stamp says that it changed");
    let metas = b.metas.clone();
    metas.iter().for_each(|meta| b.finish_meta(meta, Ok(())));
    assert_eq!(b.bit_writes(), [(1, vec![])]);
}

#[test]
fn the_table_of_live_regions_is_bounded_and_the_oldest_go_first() {
    let mut p = with_bits(&["a", "b"], &[], 1, &[]);
    p.options.live_regions_max = 4;
    let mut b = Bench::new(p);
    b.settle_meta();
    for region in 0..4 {
        warm(&mut b, region);
        b.advance(MS);
    }
    let hot = b.write(1, 1); // Region 0 is the youngest now.
    b.reply_all(hot);
    let w = b.write(9 * REGION, 1);
    assert!(b.bit_writes().is_empty(), "no room");
    assert_eq!(flushes(&b), [0, 1]);
    b.settle_io();
    assert_eq!(b.bit_writes()[0].1, [0, 2, 3, 9]);
    b.settle_meta();
    assert_eq!(b.legs_of(w), [0, 1]);
    assert_eq!(b.core.status().live_regions, 4);
}

#[test]
fn a_command_larger_than_the_table_gets_all_its_regions() {
    let mut p = with_bits(&["a"], &[], 1, &[]);
    p.options.live_regions_max = 4;
    let mut b = Bench::new(p);
    b.settle_meta();
    let trim = b.host(Op::Unmap, 0, 64);
    b.settle_meta();
    assert_eq!((b.legs_of(trim), b.core.status().live_regions), (vec![0], 16));
    let next = b.write(0, 1);
    b.reply_all(trim);
    b.reply_all(next);
    assert_eq!(b.result_of(next), Some(Ok(())));
}

#[test]
fn rule_18_an_inherited_region_is_made_equal_before_it_is_read() {
    let mut b = Bench::new(with_bits(&["a", "b", "c"], &[], 1, &[2]));
    let (touches, apart) = (b.read(8, 1), b.read(0, 1));
    assert!(b.ios_of(touches).is_empty());
    assert_eq!(b.legs_of(apart).len(), 1, "other regions are served at once");
    assert!(b.copies().is_empty(), "not before the bits are durable everywhere");
    b.settle_meta();
    let read = b.copies()[0];
    assert_eq!((b.copies().len(), read.op, read.lba, read.blocks), (1, Op::Read, 8, 4));
    b.finish(read, Ok(()));
    let writes = b.copies();
    assert_eq!(writes.len(), 2);
    assert!(writes.iter().all(|w| w.op == Op::Write { fua: false } && w.leg != read.leg && w.lba == 8));
    assert!(writes.iter().all(|w| w.payload == read.payload));
    b.finish(writes[0], Ok(()));
    assert!(b.ios_of(touches).is_empty(), "one is not equal yet");
    b.finish(writes[1], Ok(()));
    assert_eq!(b.legs_of(touches).len(), 1);
    assert!(b.has_event(|e| *e == Event::Equalised) && b.bit_writes().is_empty(), "the bit stays until the flush");
    b.reply_all(touches);
    b.advance(5_000 * MS);
    assert_eq!(flushes(&b), [0, 1, 2]);
    b.settle_io();
    assert_eq!(b.bit_writes(), [(0, vec![]), (1, vec![]), (2, vec![])]);
}

#[test]
fn rule_18_a_write_to_an_inherited_region_waits_too_and_needs_no_new_bit() {
    let mut b = opened(&["a", "b"], &[0]);
    let w = b.write(0, 1);
    assert!(b.ios_of(w).is_empty());
    while let Some(copy) = b.copies().first().copied() {
        b.finish(copy, Ok(()));
    }
    assert_eq!((b.legs_of(w), b.metas.len()), (vec![0, 1], 0));
}

#[test]
fn rule_18_the_rest_is_made_equal_in_the_background() {
    let mut b = opened(&["a", "b"], &[1, 4, 5, 15]);
    let mut copied = Vec::new();
    while let Some(copy) = b.copies().first().copied() {
        if copy.op != Op::Read {
            copied.push(copy.lba / REGION);
        }
        b.finish(copy, Ok(()));
    }
    copied.sort_unstable();
    assert_eq!(copied, [1, 4, 5, 15], "just those");
    assert_eq!(b.core.status().inherited_regions, 0);
}

#[test]
fn rule_18_large_regions_are_copied_window_by_window() {
    let mut p = with_bits(&["a", "b"], &[], 1, &[]);
    p.options.region_blocks = 64;
    p.options.copy_window_blocks = 24;
    p.meta = Some(mirror_core::MetaInit { inherited: mirror_core::meta::RegionBits::full(1), served: None });
    let mut b = Bench::new(p);
    b.settle_meta();
    let r = b.read(63, 1);
    let mut windows = Vec::new();
    while let Some(copy) = b.copies().first().copied() {
        if copy.op == Op::Read {
            windows.push((copy.lba, copy.blocks));
        }
        b.finish(copy, Ok(()));
    }
    assert_eq!((windows, b.legs_of(r).len()), (vec![(0, 24), (24, 24), (48, 16)], 1));
}

#[test]
fn rule_18_making_equal_waits_for_a_lost_member_or_its_leaving() {
    let mut b = opened(&["a", "b"], &[0]);
    let r = b.read(0, 1);
    b.lose(1);
    b.settle_io();
    assert!(b.result_of(r).is_none() && b.copies().is_empty());
    b.advance(1000 * MS);
    b.commit();
    b.settle_meta();
    b.settle_io();
    assert_eq!(b.result_of(r), Some(Ok(())), "the last one is equal to itself");
}

#[test]
fn rule_18_a_source_that_cannot_be_read_is_replaced_and_one_that_cannot_be_written_leaves() {
    let mut b = opened(&["a", "b"], &[0]);
    let first = b.copies()[0];
    b.finish(first, Err(LegError::Media));
    let second = b.copies()[0];
    assert!(second.op == Op::Read && second.leg != first.leg);
    b.finish(second, Ok(()));
    let write = b.copies()[0];
    assert_eq!(write.leg, first.leg);
    b.finish(write, Err(LegError::Media));
    let r = b.read(0, 1);
    assert!(b.ios_of(r).is_empty(), "the record still counts it in");
    b.commit();
    b.settle_meta();
    b.settle_io();
    assert_eq!(b.result_of(r), Some(Ok(())));
    assert_eq!(b.drops, [(first.leg, DropReason::WriteFailed(LegError::Media))]);
}

#[test]
fn rule_18_a_region_that_nobody_can_read_leaves_one_member() {
    let mut b = opened(&["a", "b"], &[0]);
    for _ in 0..2 {
        let read = b.copies()[0];
        b.finish(read, Err(LegError::Media));
    }
    assert_eq!(b.asked().next.in_sync.len(), 1);
    b.commit();
    b.settle_meta();
    assert_eq!(b.core.status().inherited_regions, 0);
}

#[test]
fn rule_18_a_full_member_becomes_the_source() {
    let mut b = opened(&["a", "b"], &[0]);
    let read = b.copies()[0];
    b.finish(read, Ok(()));
    let write = b.copies()[0];
    b.finish(write, Err(LegError::NoSpace));
    let again = b.copies()[0];
    assert_eq!((again.op, again.leg), (Op::Read, write.leg));
    b.finish(again, Ok(()));
    let back = b.copies()[0];
    assert_eq!(back.leg, read.leg);
    b.finish(back, Ok(()));
    assert!(b.swaps.is_empty() && b.core.status().inherited_regions == 0, "lack of space ejects nobody");
}

#[test]
fn a_bit_that_a_lost_member_lacks_is_sent_again_when_it_is_back() {
    let mut b = opened(&["a", "b"], &[]);
    let w = b.write(0, 1);
    b.lose(1);
    b.settle_meta();
    assert!(b.ios_of(w).is_empty());
    b.back(1);
    assert_eq!(b.bit_writes(), [(1, vec![0])]);
    b.settle_meta();
    assert_eq!(b.legs_of(w), [0, 1]);
}

#[test]
fn rule_18_close_with_inherited_regions_left_keeps_their_bits_and_the_record_unclean() {
    let mut b = Bench::new(with_bits(&["a", "b"], &[], 1, &[3, 9]));
    b.lose(1);
    b.settle_meta();
    b.input(Input::Close);
    b.back(1);
    for _ in 0..20 {
        b.settle_io();
        b.settle_meta();
    }
    assert!(b.closed && b.swaps.is_empty());
    assert!(!b.core.config().clean);
    assert_eq!(b.core.dirty_regions().unwrap().iter().collect::<Vec<_>>(), [3, 9]);
}

#[test]
fn rule_18_a_single_member_only_flushes_what_it_inherits() {
    let mut b = Bench::new(with_bits(&["a"], &["b"], 1, &[2, 3]));
    b.settle_meta();
    let mut read = 0;
    while let Some(copy) = b.copies().first().copied() {
        read += if copy.op == Op::Read { copy.blocks } else { 0 };
        b.finish(copy, Ok(()));
    }
    assert_eq!((read, b.core.status().inherited_regions), (64, 0), "only the rebuild copies");
    assert_eq!(b.core.dirty_regions().unwrap().iter().collect::<Vec<_>>(), [2, 3]);
    b.settle_io();
    b.advance(5_000 * MS);
    assert_eq!(flushes(&b), [0, 1]);
}

#[test]
fn a_stopped_core_answers_those_that_wait_for_bits() {
    let mut b = opened(&["a", "b"], &[1]);
    let (parked, marking) = (b.read(4, 1), b.write(0, 1));
    b.input(Input::LegFenced { leg: LegId(0) });
    assert!([parked, marking].iter().all(|id| b.result_of(*id) == Some(Err(HostError::PathGone))));
}
