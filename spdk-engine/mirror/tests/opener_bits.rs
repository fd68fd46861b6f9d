//! The opener and write-intent bits, by rule.
#![allow(clippy::unwrap_used)]

mod common;

use common::opening::{Bench, clean};

use std::sync::Arc;

use common::{MS, config, regions, replica, set, superblock};
use mirror_core::meta::{META_BLOCK_BYTES, Superblock, encode_bits};
use mirror_core::{
    Config, ConfigNumber, Epoch, LegId, Lineage, MetaUnreadable, OpenAction, OpenError, OpenInput, OpenParams,
    RaisedInVain, SwapOutcome,
};

/// A meta area as an engine of that epoch left it.
fn area(name: &str, epoch: u64, dirty: &[u32]) -> Arc<[u8]> {
    let mut bytes = superblock(name, epoch, "").encode().unwrap();
    bytes.extend([0; META_BLOCK_BYTES]);
    encode_bits(&regions(dirty), 0, &mut bytes);
    bytes.into()
}

/// Unclean record, members with meta areas, all promoted and connected: now bits are asked for.
fn asked_for_bits(members: &[&str], min: u32) -> Bench {
    asked_but(members, min, &[])
}

/// The same, but these have no meta area.
fn asked_but(members: &[&str], min: u32, without: &[&'static str]) -> Bench {
    let mut b = Bench::raised(&config(members, &[], min));
    (b.meta, b.without_meta) = (true, without.to_vec());
    members.iter().for_each(|name| b.promoted(name, Ok(())));
    assert!(b.connect_all().is_none() && b.asked().is_none());
    assert_eq!(b.bits_asked(), members.len() - without.len());
    b
}

fn inherited(params: &OpenParams) -> Vec<u32> {
    params.meta.as_ref().unwrap().inherited.iter().collect()
}

#[test]
fn rule_15_bits_are_read_only_after_every_promote_and_connect() {
    let mut b = Bench::raised(&config(&["a", "b"], &[], 1));
    b.meta = true;
    b.promoted("a", Ok(()));
    assert_eq!(b.bits_asked(), 0);
    b.promoted("b", Ok(()));
    assert_eq!(b.bits_asked(), 0);
    b.input(OpenInput::Connected { leg: LegId(0), up: true });
    assert_eq!(b.bits_asked(), 0);
    b.input(OpenInput::Connected { leg: LegId(1), up: true });
    let asked = [0, 1].map(|leg| OpenAction::ReadMeta { leg: LegId(leg), block: 0, blocks: 3 });
    assert!(asked.iter().all(|a| b.out.contains(a)));
}

#[test]
fn rule_18_the_union_of_all_members_is_inherited_and_nobody_leaves() {
    let mut b = asked_for_bits(&["a", "b", "c"], 1);
    b.bits(0, Ok(area("a", 5, &[1])));
    b.bits(1, Ok(area("b", 5, &[1, 4])));
    assert!(b.ready().is_none(), "one is missing");
    b.bits(2, Ok(area("c", 5, &[])));
    let params = b.ready().unwrap();
    assert_eq!((inherited(&params), params.config.in_sync.len()), (vec![1, 4], 3));
    assert!(params.equalise_from.is_none() && params.legs.iter().all(|l| l.meta));
    mirror_core::Core::open(params).unwrap();
}

#[test]
fn rule_18_bits_that_are_not_the_last_engines_count_as_all_set() {
    let good = area("a", 5, &[]);
    let mut torn = good.to_vec();
    torn[2 * META_BLOCK_BYTES + 9] ^= 1;
    let strangers = [
        area("a", 4, &[]),
        area("b", 5, &[]),
        Arc::from(vec![0; 3 * META_BLOCK_BYTES]),
        Arc::from(torn),
        Arc::from([]),
    ];
    for bytes in strangers {
        let mut b = asked_for_bits(&["a", "b"], 1);
        b.bits(1, Ok(area("b", 5, &[])));
        b.bits(0, Ok(bytes));
        assert_eq!(inherited(&b.ready().unwrap()).len(), 16);
    }
    let mut b = asked_for_bits(&["a", "b"], 1);
    b.bits(1, Ok(area("b", 5, &[])));
    b.bits(0, Ok(good));
    assert_eq!(inherited(&b.ready().unwrap()).len(), 0);
}

#[test]
fn rule_18_a_member_whose_bits_cannot_be_read_is_copied_in_full() {
    let mut b = asked_for_bits(&["a", "b", "c"], 1);
    b.bits(0, Ok(area("a", 5, &[3])));
    b.bits(1, Err(MetaUnreadable));
    b.advance(5_000 * MS); // The third does not answer.
    let next = b.asked().unwrap().1;
    assert_eq!((next.in_sync, next.rebuilding), (set(&["a"]), set(&["b", "c"])));
    b.cas(SwapOutcome::Committed);
    assert_eq!(inherited(&b.ready().unwrap()), [3]);
}

#[test]
fn rule_18_strict_mode_takes_every_region_for_unequal_when_too_few_bits_can_be_read() {
    let mut b = asked_for_bits(&["a", "b"], 2);
    b.bits(0, Ok(area("a", 5, &[3])));
    b.unreadable(&[(1, "b")]);
    let params = b.ready().unwrap();
    assert_eq!((inherited(&params).len(), params.config.in_sync.len()), (16, 2));
}

#[test]
fn rule_18_without_any_readable_bits_one_is_copied_to_the_others() {
    let mut b = asked_for_bits(&["a", "b"], 1);
    b.unreadable(&[(0, "a"), (1, "b")]);
    let next = b.asked().unwrap().1;
    assert_eq!((next.in_sync, next.rebuilding), (set(&["b"]), set(&["a"])), "the local one is the source");
    let mut b = asked_for_bits(&["a", "b"], 2);
    b.unreadable(&[(0, "a"), (1, "b")]);
    let params = b.ready().unwrap();
    assert!(params.equalise_from.is_none(), "superblocks have to carry the record (rule 6)");
    assert_eq!((inherited(&params).len(), params.config.in_sync.len()), (16, 2));
}

#[test]
fn rule_06_strict_mode_keeps_superblocks_where_there_are_meta_areas() {
    let mut b = asked_but(&["a", "b"], 2, &["b"]);
    b.unreadable(&[(0, "a")]);
    let params = b.ready().unwrap();
    assert!(params.equalise_from.is_none() && params.legs.iter().any(|l| !l.meta));
    assert_eq!((inherited(&params).len(), params.config.in_sync.len()), (16, 2));
    mirror_core::Core::open(params).unwrap();
}

/// A meta area whose superblock carries configuration `k` of some lineage.
fn carries(name: &str, k: u64, lineage: &str) -> Arc<[u8]> {
    let mut superblock = Superblock::decode(&area(name, 5, &[])[..META_BLOCK_BYTES]).unwrap();
    superblock.record.config_number = ConfigNumber(k);
    superblock.record.lineage = Lineage::new(lineage).unwrap();
    let mut bytes = superblock.encode().unwrap();
    bytes.extend([0; META_BLOCK_BYTES]);
    encode_bits(&regions(&[]), 0, &mut bytes);
    bytes.into()
}

#[test]
fn rule_21_a_replica_that_carries_a_later_record_shows_that_it_is_an_old_copy() {
    let mut b = asked_for_bits(&["a", "b"], 1);
    b.bits(0, Ok(carries("a", 10, "l")));
    b.bits(1, Ok(carries("b", 11, "l")));
    let (found, recorded) = (ConfigNumber(11), ConfigNumber(10));
    assert_eq!(b.failed(), Some(OpenError::RecordOld { replica: replica("b"), found, recorded }));
}

#[test]
fn rule_11_numbers_of_another_lineage_are_not_compared() {
    let mut b = asked_for_bits(&["a", "b"], 1);
    b.bits(0, Ok(carries("a", 99, "before")));
    b.bits(1, Ok(carries("b", 10, "l")));
    assert_eq!(inherited(&b.ready().unwrap()).len(), 16, "nor are its bits");
}

#[test]
fn rule_21_a_record_that_went_back_while_it_was_raised_ends_the_attempt() {
    let mut b = Bench::new();
    b.record(config(&["a", "b"], &[], 1));
    let restored = Config { config_number: ConfigNumber(9), ..config(&["a", "b", "c"], &[], 1) };
    b.cas(SwapOutcome::Refused { current: restored });
    assert_eq!(b.failed(), Some(OpenError::Superseded));
}

#[test]
fn rule_18_after_a_clean_close_nothing_is_read_or_inherited() {
    let mut b = Bench::raised(&clean(&["a", "b"], &[], 1));
    b.meta = true;
    b.promoted("a", Ok(()));
    b.promoted("b", Ok(()));
    let params = b.connect();
    assert_eq!((inherited(&params).len(), b.bits_asked()), (0, 0));
}

#[test]
fn rule_18_attempts_that_never_served_do_not_make_bits_untrusted() {
    let mut b = Bench::raised(&config(&["a", "b"], &[], 1));
    b.advance(60_000 * MS);
    assert!(matches!(b.failed(), Some(OpenError::NoMember { .. })));
    let in_vain = b.opener.raised_in_vain();
    assert_eq!(in_vain, Some(RaisedInVain { served: Epoch(5), raised: Epoch(6) }));
    let record = Config { epoch: Epoch(6), ..config(&["a", "b"], &[], 1) };
    for (told, expected) in [(in_vain, 1), (None, 16)] {
        let mut b = Bench::told(&[], told);
        b.record(record.clone());
        b.cas(SwapOutcome::Committed);
        b.meta = true;
        ["a", "b"].iter().for_each(|name| b.promoted(name, Ok(())));
        b.connect_all();
        b.bits(0, Ok(area("a", 5, &[3])));
        b.bits(1, Ok(area("b", 5, &[3])));
        assert_eq!(inherited(&b.ready().unwrap()).len(), expected);
    }
}
