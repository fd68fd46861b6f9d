//! Rules about reading and writing, by number.
#![allow(clippy::unwrap_used)]

mod common;

use common::{BLOCKS, Bench, MS, params, set};
use mirror_core::{
    Core, CoreError, DropReason, Event, HostError, HostId, Input, LegError, LegId, Op, Payload, StopReason, SwapReason,
};

#[test]
fn rule_01_a_write_is_acknowledged_when_every_member_has_it() {
    let mut b = Bench::of(&["a", "b", "c"]);
    let w = b.write(0, 4);
    assert_eq!(b.legs_of(w), [0, 1, 2]);
    b.reply(w, 2, Ok(()));
    b.reply(w, 0, Ok(()));
    assert_eq!(b.result_of(w), None);
    b.reply(w, 1, Ok(()));
    assert_eq!(b.result_of(w), Some(Ok(())));
}

#[test]
fn rule_01_a_flush_is_acknowledged_when_every_member_flushed() {
    let mut b = Bench::of(&["a", "b"]);
    let f = b.host(Op::Flush, 0, 0);
    b.reply(f, 0, Ok(()));
    assert_eq!(b.result_of(f), None);
    b.reply(f, 1, Ok(()));
    assert_eq!(b.result_of(f), Some(Ok(())));
}

#[test]
fn rule_01_fua_unmap_and_zeroes_go_to_every_member_as_they_are() {
    let mut b = Bench::of(&["a", "b"]);
    for op in [Op::Write { fua: true }, Op::Unmap, Op::WriteZeroes] {
        let id = b.host(op, 8, 8);
        assert!(b.ios_of(id).iter().all(|io| (io.op, io.lba, io.blocks) == (op, 8, 8)));
        assert_eq!(b.legs_of(id), [0, 1]);
        b.reply_all(id);
    }
}

#[test]
fn rule_01_a_member_whose_cache_lost_unflushed_writes_leaves() {
    let mut b = Bench::of(&["a", "b"]);
    let w = b.write(0, 1);
    b.reply_all(w);
    b.lose(1);
    b.input(Input::LegBack { leg: LegId(1), cache_lost: true });
    assert_eq!(b.asked().next.in_sync, set(&["a"]));
    let r = b.read(0, 1);
    assert_eq!(b.legs_of(r), [0]);
}

#[test]
fn rule_01_a_lost_cache_is_harmless_after_a_flush() {
    let mut b = Bench::of(&["a", "b"]);
    let w = b.write(0, 1);
    b.reply_all(w);
    let f = b.host(Op::Flush, 0, 0);
    b.reply_all(f);
    b.lose(1);
    b.input(Input::LegBack { leg: LegId(1), cache_lost: true });
    assert!(b.swaps.is_empty());
}

#[test]
fn rule_01_a_flush_does_not_cover_writes_in_flight() {
    let mut b = Bench::of(&["a", "b"]);
    let w = b.write(0, 1);
    let f = b.host(Op::Flush, 0, 0);
    b.reply_all(f);
    b.reply_all(w);
    b.lose(1);
    b.input(Input::LegBack { leg: LegId(1), cache_lost: true });
    assert_eq!(b.asked().reason, SwapReason::Leave);
}

#[test]
fn rule_01_the_last_member_with_a_lost_cache_stops_the_engine() {
    let mut b = Bench::of(&["a"]);
    let w = b.write(0, 1);
    b.reply_all(w);
    b.lose(0);
    b.input(Input::LegBack { leg: LegId(0), cache_lost: true });
    assert_eq!(b.stopped, Some(StopReason::CacheLost { leg: LegId(0) }));
}

#[test]
fn rule_02_overlapping_changes_run_one_at_a_time_in_order() {
    let mut b = Bench::of(&["a", "b"]);
    let first = b.write(0, 8);
    let second = b.host(Op::Unmap, 7, 2);
    let third = b.host(Op::WriteZeroes, 8, 1);
    let apart = b.write(20, 4);
    assert_eq!(b.legs_of(apart), [0, 1]);
    assert!(b.ios_of(second).is_empty() && b.ios_of(third).is_empty());
    b.reply(first, 0, Ok(()));
    assert!(b.ios_of(second).is_empty(), "one member alone does not let the next one start");
    b.reply(first, 1, Ok(()));
    assert_eq!(b.legs_of(second), [0, 1]);
    assert!(b.ios_of(third).is_empty());
    b.reply_all(second);
    assert_eq!(b.legs_of(third), [0, 1]);
}

#[test]
fn rule_03_a_read_waits_for_an_overlapping_unacknowledged_write() {
    let mut b = Bench::of(&["a", "b"]);
    let w = b.write(0, 4);
    let r = b.read(3, 4);
    b.reply(w, 0, Ok(()));
    assert!(b.ios_of(r).is_empty());
    b.reply(w, 1, Ok(()));
    assert_eq!(b.ios_of(r).len(), 1);
}

#[test]
fn rule_03_a_write_waits_for_an_overlapping_read() {
    // Else the read returns new data of a write that is never acknowledged and not on the next source.
    let mut b = Bench::of(&["a", "b"]);
    let r = b.read(0, 4);
    let w = b.write(0, 1);
    assert!(b.ios_of(w).is_empty());
    b.reply_all(r);
    assert_eq!(b.legs_of(w), [0, 1]);
}

#[test]
fn rule_03_a_read_waits_while_the_write_waits_for_its_swap() {
    let mut b = Bench::of(&["a", "b"]);
    let w = b.write(0, 4);
    b.reply(w, 0, Ok(()));
    b.reply(w, 1, Err(LegError::Media));
    let r = b.read(0, 4);
    let elsewhere = b.read(8, 4);
    assert!(b.ios_of(r).is_empty());
    assert_eq!(b.legs_of(elsewhere), [0], "reads from the remaining member go on");
    b.commit();
    assert_eq!(b.result_of(w), Some(Ok(())));
    assert_eq!(b.legs_of(r), [0]);
}

#[test]
fn reads_are_spread_over_members_and_a_local_one_is_preferred() {
    let mut b = Bench::of(&["a", "b", "c"]);
    let ids: Vec<_> = (0..6).map(|i| b.read(i, 1)).collect();
    let mut legs: Vec<u32> = ids.iter().flat_map(|id| b.legs_of(*id)).collect();
    legs.sort_unstable();
    assert_eq!(legs, [0, 0, 1, 1, 2, 2]);
    let mut local = params(&["a", "b", "c"], &[], 1);
    local.legs[1].local = true;
    let mut b = Bench::new(local);
    let ids: Vec<_> = (0..4).map(|i| b.read(i, 1)).collect();
    assert!(ids.iter().all(|id| b.legs_of(*id) == [1]));
}

#[test]
fn a_read_that_fails_is_tried_on_every_other_member() {
    let mut b = Bench::of(&["a", "b"]);
    let r = b.read(0, 1);
    let first = b.ios_of(r)[0].leg.0;
    b.reply(r, first, Err(LegError::Media));
    assert_eq!(b.legs_of(r), [1 - first]);
    b.reply(r, 1 - first, Err(LegError::Media));
    assert_eq!(b.result_of(r), Some(Err(HostError::Media)));
    assert!(b.swaps.is_empty(), "a read error ejects nobody");
}

#[test]
fn a_read_on_a_lost_connection_goes_to_another_member_or_waits() {
    let mut b = Bench::of(&["a", "b"]);
    let w = b.write(8, 1);
    b.reply_all(w); // Both have confirmed (rule 16).
    let r = b.read(0, 1);
    let first = b.ios_of(r)[0].leg.0;
    b.lose(first);
    assert_eq!(b.legs_of(r), [1 - first]);
    b.lose(1 - first);
    assert!(b.ios_of(r).is_empty());
    b.back(first);
    assert_eq!(b.legs_of(r), [first]);
    b.reply_all(r);
    assert_eq!(b.result_of(r), Some(Ok(())));
}

#[test]
fn no_space_on_one_member_reaches_the_host_after_the_range_is_equal_again() {
    let mut b = Bench::of(&["a", "b", "c"]);
    let w = b.write(0, 20);
    b.reply(w, 0, Ok(()));
    b.reply(w, 1, Err(LegError::NoSpace));
    b.reply(w, 2, Ok(()));
    assert_eq!(b.result_of(w), None);
    let r = b.read(0, 1);
    // From the member that failed, in two windows of at most 16 blocks.
    for (lba, blocks) in [(0, 16), (16, 4)] {
        let read = b.copies();
        assert_eq!(
            read.iter().map(|c| (c.leg.0, c.op, c.lba, c.blocks)).collect::<Vec<_>>(),
            [(1, Op::Read, lba, blocks)]
        );
        b.finish(read[0], Ok(()));
        let writes = b.copies();
        assert_eq!(
            writes.iter().map(|c| (c.leg.0, c.lba, c.blocks)).collect::<Vec<_>>(),
            [(0, lba, blocks), (2, lba, blocks)]
        );
        assert!(b.ios_of(r).is_empty(), "readers wait until the range is equal");
        writes.into_iter().for_each(|io| b.finish(io, Ok(())));
    }
    assert_eq!(b.result_of(w), Some(Err(HostError::NoSpace)));
    assert!(b.swaps.is_empty(), "lack of space ejects nobody");
    assert_eq!(b.ios_of(r).len(), 1);
}

#[test]
fn several_full_members_are_made_equal_from_the_one_that_has_room_for_the_least() {
    let mut b = Bench::of(&["a", "b", "c"]);
    let w = b.write(0, 4);
    b.reply(w, 0, Ok(()));
    b.reply(w, 1, Err(LegError::NoSpace));
    b.reply(w, 2, Err(LegError::NoSpace));
    let read = b.copies();
    let first = read[0].leg;
    assert!(read.len() == 1 && read[0].op == Op::Read && first != LegId(0));
    b.finish(read[0], Ok(()));
    // The other full one has no room for what this one holds: it is the source then.
    let other = LegId(3 - first.0);
    for io in b.copies() {
        let result = if io.leg == other { Err(LegError::NoSpace) } else { Ok(()) };
        b.finish(io, result);
    }
    let read = b.copies();
    assert_eq!(read.iter().map(|c| (c.leg, c.op)).collect::<Vec<_>>(), [(other, Op::Read)]);
    b.finish(read[0], Ok(()));
    let writes = b.copies();
    assert_eq!(writes.iter().map(|c| c.leg).collect::<Vec<_>>(), [LegId(0), first]);
    writes.into_iter().for_each(|io| b.finish(io, Ok(())));
    assert_eq!(b.result_of(w), Some(Err(HostError::NoSpace)));
    assert!(b.swaps.is_empty(), "lack of space ejects nobody");
}

/// A swap under way keeps a member that is lost from being taken out; meanwhile a range of 20 blocks is made equal without it.
fn repaired_without_b() -> (Bench, HostId) {
    let mut b = Bench::of(&["a", "b"]);
    b.input(Input::AddLeg { leg: LegId(2), replica: common::replica("c"), local: false, meta: false });
    assert_eq!(b.asked().reason, SwapReason::StartRebuild);
    let w = b.write(0, 20);
    b.reply(w, 0, Err(LegError::NoSpace));
    b.lose(1);
    b.advance(2_000 * MS);
    assert!(b.copies().is_empty(), "there is nobody to be made equal");
    assert_eq!(b.result_of(w), None);
    (b, w)
}

#[test]
fn rule_18_a_member_that_is_welcome_again_gets_what_was_repaired_without_it() {
    let (mut b, w) = repaired_without_b();
    b.back(1);
    for (lba, blocks) in [(0, 16), (16, 4)] {
        assert_eq!(b.result_of(w), None, "b does not have the range");
        let read = b.copies();
        assert_eq!(read.iter().map(|c| (c.leg.0, c.op, c.lba)).collect::<Vec<_>>(), [(0, Op::Read, lba)]);
        b.finish(read[0], Ok(()));
        let writes = b.copies();
        assert_eq!(writes.iter().map(|c| (c.leg.0, c.lba, c.blocks)).collect::<Vec<_>>(), [(1, lba, blocks)]);
        b.finish(writes[0], Ok(()));
    }
    assert_eq!(b.result_of(w), Some(Err(HostError::NoSpace)));
}

#[test]
fn rule_18_a_member_that_leaves_does_not_get_what_was_repaired_without_it() {
    let (mut b, w) = repaired_without_b();
    b.commit();
    assert_eq!(b.asked().next.in_sync, set(&["a"]));
    b.commit();
    assert_eq!(b.result_of(w), Some(Err(HostError::NoSpace)));
}

#[test]
fn no_space_on_a_joiner_ends_its_rebuild_and_the_host_hears_nothing_of_it() {
    let mut b = Bench::new(params(&["a"], &["b"], 1));
    let w = b.write(60, 1);
    b.reply(w, 1, Err(LegError::NoSpace));
    b.reply(w, 0, Ok(()));
    assert_eq!(b.result_of(w), Some(Ok(())));
    assert_eq!(b.drops, [(LegId(1), DropReason::WriteFailed(LegError::NoSpace))]);
}

#[test]
fn a_member_that_cannot_be_made_equal_leaves_before_the_host_hears() {
    let mut b = Bench::of(&["a", "b"]);
    let w = b.write(0, 4);
    b.reply(w, 0, Ok(()));
    b.reply(w, 1, Err(LegError::NoSpace));
    let read = b.copies()[0];
    b.finish(read, Ok(()));
    let write = b.copies()[0];
    assert_eq!(write.leg.0, 0);
    b.finish(write, Err(LegError::Media));
    assert_eq!(b.asked().next.in_sync, set(&["b"]));
    assert_eq!(b.result_of(w), None);
    b.commit();
    assert_eq!(b.result_of(w), Some(Err(HostError::NoSpace)));
}

#[test]
fn a_write_that_fails_everywhere_is_an_error_and_keeps_all_members() {
    let mut b = Bench::of(&["a", "b"]);
    let w = b.write(0, 4);
    b.reply(w, 0, Err(LegError::Media));
    b.reply(w, 1, Err(LegError::Media));
    b.settle_io();
    assert_eq!(b.result_of(w), Some(Err(HostError::Media)));
    assert!(b.swaps.is_empty());
    assert!(b.has_event(|e| matches!(e, Event::RangeRepaired { lba: 0, blocks: 4 })));
}

#[test]
fn a_range_that_nobody_can_read_leaves_one_member() {
    let mut b = Bench::of(&["a", "b"]);
    let w = b.write(0, 4);
    b.reply(w, 0, Err(LegError::Media));
    b.reply(w, 1, Err(LegError::Media));
    for _ in 0..2 {
        let read = b.copies()[0];
        assert_eq!(read.op, Op::Read);
        b.finish(read, Err(LegError::Media));
    }
    assert_eq!(b.asked().next.in_sync.len(), 1);
    b.commit();
    assert_eq!(b.result_of(w), Some(Err(HostError::Media)));
}

#[test]
fn a_single_member_answers_errors_at_once() {
    let mut b = Bench::of(&["a"]);
    let w = b.write(0, 4);
    b.reply(w, 0, Err(LegError::NoSpace));
    assert_eq!(b.result_of(w), Some(Err(HostError::NoSpace)));
    let f = b.host(Op::Flush, 0, 0);
    b.reply(f, 0, Err(LegError::Other));
    assert_eq!(b.result_of(f), Some(Err(HostError::Media)));
}

#[test]
fn commands_out_of_range_and_beyond_the_bound_are_refused() {
    let mut b = Bench::of(&["a"]);
    for (lba, blocks) in [(BLOCKS, 1), (BLOCKS - 1, 2), (0, 0), (u64::MAX, 2)] {
        let id = b.write(lba, blocks);
        assert_eq!(b.result_of(id), Some(Err(HostError::OutOfRange)));
    }
    for _ in 0..32 {
        b.write(0, 1);
    }
    assert!(!b.core.has_room());
    let id = b.write(1, 1);
    assert_eq!(b.result_of(id), Some(Err(HostError::Busy)));
    b.settle_io();
    assert!(b.core.has_room());
    assert_eq!(b.done.len(), 4 + 32 + 1);
}

#[test]
fn a_late_answer_of_an_old_life_is_ignored() {
    let mut b = Bench::of(&["a", "b"]);
    let w = b.write(0, 1);
    let old = b.ios_of(w)[1];
    b.lose(1);
    b.back(1);
    let again = b.ios_of(w).into_iter().find(|io| io.leg.0 == 1).unwrap();
    assert_ne!(old.io, again.io);
    b.reply(w, 0, Ok(()));
    b.input(Input::LegDone { leg: old.leg, io: old.io, result: Ok(()) });
    assert_eq!(b.result_of(w), None);
    b.finish(again, Ok(()));
    assert_eq!(b.result_of(w), Some(Ok(())));
}

#[test]
fn a_leg_number_used_again_inherits_nothing() {
    let mut b = Bench::of(&["a", "b"]);
    let stuck = b.write(0, 1);
    b.reply(stuck, 1, Err(LegError::Media));
    b.lose(0); // Keeps the write from being settled.
    b.back(0);
    b.reply_all(stuck);
    b.commit();
    assert_eq!(b.drops, [(LegId(1), DropReason::WriteFailed(LegError::Media))]);
    let open = b.write(4, 1);
    b.input(Input::AddLeg { leg: LegId(1), replica: common::replica("b"), local: false, meta: false });
    b.commit();
    b.reply_all(open);
    b.settle_io();
    assert_eq!(b.asked().reason, SwapReason::Join);
}

#[test]
fn close_drains_flushes_every_member_and_records_it() {
    let mut b = Bench::of(&["a", "b"]);
    let w = b.write(0, 1);
    b.input(Input::Close);
    let late = b.write(1, 1);
    assert_eq!(b.result_of(late), Some(Err(HostError::Closing)));
    assert!(b.ios.iter().all(|io| io.op != Op::Flush));
    b.reply_all(w);
    let flushes: Vec<_> = b.ios.clone();
    assert_eq!(
        flushes.iter().map(|io| (io.leg.0, io.op, io.payload)).collect::<Vec<_>>(),
        [(0, Op::Flush, Payload::None), (1, Op::Flush, Payload::None)]
    );
    b.settle_io();
    assert!(b.asked().next.clean && b.asked().reason == SwapReason::Close);
    assert!(!b.closed);
    b.commit();
    assert!(b.closed && b.core.is_finished());
}

#[test]
fn close_waits_for_a_lost_member_and_goes_on_without_it() {
    let mut b = Bench::of(&["a", "b"]);
    b.lose(1);
    b.input(Input::Close);
    b.settle_io();
    assert!(b.swaps.is_empty());
    b.advance(1000 * MS);
    assert_eq!(b.asked().reason, SwapReason::Leave);
    b.commit();
    assert_eq!(b.asked().reason, SwapReason::Close);
}

#[test]
fn close_with_a_last_member_that_cannot_flush_is_not_clean() {
    let mut b = Bench::of(&["a"]);
    b.input(Input::Close);
    let flush = b.ios[0];
    b.finish(flush, Err(LegError::Media));
    assert_eq!(b.stopped, Some(StopReason::CloseFailed { leg: LegId(0) }));
    assert!(!b.closed);
}

#[test]
fn parameters_that_contradict_each_other_are_refused() {
    let good = || params(&["a", "b"], &["c"], 1);
    let refused = |change: &dyn Fn(&mut mirror_core::OpenParams)| {
        let mut bad = good();
        change(&mut bad);
        Core::open(bad).err()
    };
    assert_eq!(Core::open(good()).err(), None);
    assert!(matches!(refused(&|p| p.block_size = 500), Some(CoreError::BlockSize(500))));
    assert!(matches!(refused(&|p| p.num_blocks = 3), Some(CoreError::Size { .. })));
    assert!(matches!(
        refused(&|p| {
            p.legs.remove(0);
        }),
        Some(CoreError::MemberWithoutLeg(_))
    ));
    assert!(matches!(refused(&|p| p.legs[1].leg = LegId(0)), Some(CoreError::Leg { leg: 0, .. })));
    assert!(matches!(refused(&|p| p.legs[1].leg = LegId(16)), Some(CoreError::Leg { leg: 16, .. })));
    assert!(matches!(refused(&|p| p.config.in_sync.clear()), Some(CoreError::Config(_))));
    assert!(matches!(refused(&|p| p.options.max_inflight = 0), Some(CoreError::Bound { .. })));
    assert!(matches!(refused(&|p| p.options.copy_queue_depth = 65), Some(CoreError::Bound { .. })));
    assert!(matches!(refused(&|p| p.equalise_from = Some(LegId(2))), Some(CoreError::EqualiseFrom(2))));
}
