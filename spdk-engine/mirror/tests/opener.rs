//! The opener, by rule.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use common::{BLOCKS, MS, REGION, config, regions, replica, set};
use mirror_core::meta::{META_BLOCK_BYTES, ReplicaState, Superblock, encode_bits};
use mirror_core::{
    Config, ConfigNumber, EngineInstance, Epoch, LegId, Lineage, MetaUnreadable, OpenAction, OpenError, OpenEvent,
    OpenInput, OpenParams, OpenWaits, Opener, OpenerParams, Options, PromoteError, RaisedInVain, RecordError,
    ReplicaFacts, SwapId, SwapOutcome, VolumeId,
};

struct Bench {
    opener: Opener,
    now: u64,
    out: Vec<OpenAction>,
    /// Replicas say that they have a meta area.
    meta: bool,
}

impl Bench {
    fn new() -> Self {
        Self::with(false)
    }

    fn with(old_engine_dead: bool) -> Self {
        Self::told(old_engine_dead, None)
    }

    /// Told what the last attempt left behind.
    fn told(old_engine_dead: bool, in_vain: Option<RaisedInVain>) -> Self {
        let params = OpenerParams {
            volume: VolumeId::new("v").unwrap(),
            block_size: 512,
            engine_instance: EngineInstance::new("e6").unwrap(),
            lineage: Some(Lineage::new("l").unwrap()),
            local: [replica("b")].into(),
            old_engine_dead,
            in_vain,
            options: Options { region_blocks: REGION, ..Options::default() },
            waits: OpenWaits::default(),
        };
        let mut bench = Self { opener: Opener::new(params), now: 1, out: Vec::new(), meta: false };
        bench.input(OpenInput::Start);
        assert_eq!(bench.out[0], OpenAction::ReadRecord);
        bench
    }

    /// Up to the raised epoch.
    fn raised(record: &Config) -> Self {
        let mut bench = Self::new();
        bench.record(record.clone());
        bench.cas(SwapOutcome::Committed);
        bench
    }

    fn input(&mut self, input: OpenInput) {
        self.out.clear();
        self.opener.apply(self.now, input, &mut self.out);
    }

    fn record(&mut self, record: Config) {
        self.input(OpenInput::RecordRead { result: Ok(record) });
    }

    fn asked(&self) -> Option<(SwapId, Config)> {
        self.out.iter().find_map(|a| match a {
            OpenAction::DoCas { cas, next, .. } => Some((*cas, next.clone())),
            _ => None,
        })
    }

    fn cas(&mut self, outcome: SwapOutcome) {
        let (cas, _) = self.asked().unwrap();
        self.input(OpenInput::CasAnswer { cas, outcome });
    }

    fn promoted(&mut self, name: &str, result: Result<(), PromoteError>) {
        let result = result.map(|()| ReplicaFacts { meta: self.meta });
        self.input(OpenInput::Promoted { replica: replica(name), result });
    }

    fn promotes(&self) -> Vec<String> {
        self.out
            .iter()
            .filter_map(|a| match a {
                OpenAction::Promote { replica, .. } => Some(replica.to_string()),
                _ => None,
            })
            .collect()
    }

    fn advance(&mut self, by: u64) {
        self.now += by;
        self.input(OpenInput::Tick);
    }

    /// Connects every leg that is asked for, then returns what the core gets.
    fn connect(&mut self) -> OpenParams {
        self.connect_all().unwrap()
    }

    fn connect_all(&mut self) -> Option<OpenParams> {
        let legs: Vec<LegId> = self
            .out
            .iter()
            .filter_map(|a| match a {
                OpenAction::Connect { leg, .. } => Some(*leg),
                _ => None,
            })
            .collect();
        assert!(!legs.is_empty(), "no leg is connected: {:?}", self.out);
        for leg in legs {
            self.input(OpenInput::Connected { leg, up: true });
        }
        self.ready()
    }

    /// The promotes are over.
    fn goes_on(&self) -> bool {
        self.out.iter().any(|a| matches!(a, OpenAction::Connect { .. }))
    }

    /// How many meta areas are asked for.
    fn bits_asked(&self) -> usize {
        self.out.iter().filter(|a| matches!(a, OpenAction::ReadMeta { .. })).count()
    }

    fn bits(&mut self, leg: u32, result: Result<Arc<[u8]>, MetaUnreadable>) {
        self.input(OpenInput::MetaRead { leg: LegId(leg), result });
    }

    fn ready(&self) -> Option<OpenParams> {
        self.out.iter().find_map(|a| match a {
            OpenAction::Ready(params) => Some((**params).clone()),
            _ => None,
        })
    }

    fn failed(&self) -> Option<OpenError> {
        self.out.iter().find_map(|a| match a {
            OpenAction::Failed { reason } => Some(reason.clone()),
            _ => None,
        })
    }
}

fn clean(in_sync: &[&str], rebuilding: &[&str], min: u32) -> Config {
    Config { clean: true, ..config(in_sync, rebuilding, min) }
}

#[test]
fn rule_15_the_epoch_is_raised_before_anybody_is_promoted() {
    let mut b = Bench::new();
    b.record(clean(&["a", "b"], &[], 1));
    let (_, next) = b.asked().unwrap();
    assert_eq!((next.epoch, next.engine_instance.as_str(), next.clean), (Epoch(6), "e6", false));
    assert_eq!(next.config_number, ConfigNumber(10), "no set changed");
    assert!(b.promotes().is_empty());
    b.cas(SwapOutcome::Committed);
    assert_eq!(b.promotes(), ["a", "b"]);
}

#[test]
fn after_a_clean_close_all_promoted_members_stay() {
    let mut b = Bench::raised(&clean(&["a", "b"], &[], 1));
    b.promoted("a", Ok(()));
    b.promoted("b", Ok(()));
    assert!(b.asked().is_none(), "nothing changed, nothing to swap");
    let params = b.connect();
    assert_eq!(params.config.in_sync, set(&["a", "b"]));
    assert!(params.legs.iter().all(|l| l.up) && params.legs[1].local);
    assert_eq!(params.equalise_from, None);
    assert!(b.opener.is_finished());
    mirror_core::Core::open(params).unwrap();
}

#[test]
fn rule_15_members_not_promoted_leave_by_cas_before_anything_is_served() {
    let mut b = Bench::raised(&clean(&["a", "b", "c"], &[], 1));
    b.promoted("a", Ok(()));
    b.promoted("c", Ok(()));
    b.promoted("b", Err(PromoteError::Unreachable));
    b.advance(1_999 * MS);
    assert!(b.asked().is_none() && b.ready().is_none());
    b.advance(MS);
    let ready = b.connect_all();
    assert!(ready.is_none(), "the swap comes first");
    let (_, next) = b.asked().unwrap();
    assert_eq!((next.in_sync, next.config_number), (set(&["a", "c"]), ConfigNumber(11)));
    let waits = b.out.iter().all(|a| !matches!(a, OpenAction::Ready(_)));
    assert!(waits, "the swap comes first");
}

#[test]
fn rule_15_a_replica_outside_the_set_is_never_a_source() {
    let mut b = Bench::raised(&clean(&["a"], &["b"], 1));
    b.promoted("b", Ok(()));
    b.promoted("a", Err(PromoteError::Unreachable));
    b.advance(30_000 * MS);
    assert_eq!(b.promotes(), ["a"], "tried again");
    b.promoted("a", Err(PromoteError::Unreachable));
    b.advance(30_000 * MS);
    assert_eq!(b.failed(), Some(OpenError::NoMember { promoted: 0, needed: 1 }));
}

#[test]
fn after_an_unclean_stop_one_member_is_the_source_and_the_others_are_rebuilt() {
    let mut b = Bench::raised(&config(&["a", "b", "c"], &["d"], 1));
    for name in ["d", "a", "b", "c"] {
        b.promoted(name, Ok(()));
    }
    assert!(b.connect_all().is_none());
    let (_, next) = b.asked().unwrap();
    assert_eq!(
        (&next.in_sync, &next.rebuilding),
        (&set(&["b"]), &set(&["a", "c", "d"])),
        "the local one is the source"
    );
    b.cas(SwapOutcome::Committed);
    let params = b.ready().unwrap();
    assert_eq!(params.legs.len(), 4);
    mirror_core::Core::open(params).unwrap();
}

#[test]
fn strict_mode_keeps_its_members_and_makes_them_equal_first() {
    let mut b = Bench::raised(&config(&["a", "b"], &[], 2));
    b.promoted("a", Ok(()));
    b.advance(10_000 * MS);
    assert!(b.asked().is_none() && b.failed().is_none(), "one is fewer than the minimum");
    b.promoted("b", Ok(()));
    let params = b.connect();
    assert_eq!(params.config.in_sync, set(&["a", "b"]));
    let source = params.legs.iter().find(|l| Some(l.leg) == params.equalise_from).unwrap();
    assert_eq!(source.replica, replica("b"));
    mirror_core::Core::open(params).unwrap();
}

#[test]
fn a_single_member_needs_no_rebuild_after_an_unclean_stop() {
    let mut b = Bench::raised(&config(&["a"], &[], 1));
    b.promoted("a", Ok(()));
    let params = b.connect();
    assert_eq!((params.config.in_sync, params.config.config_number), (set(&["a"]), ConfigNumber(10)));
}

#[test]
fn rule_07_a_cas_of_unknown_outcome_is_settled_unchanged() {
    let mut b = Bench::new();
    b.record(clean(&["a"], &[], 1));
    let (first, next) = b.asked().unwrap();
    b.cas(SwapOutcome::Unknown);
    assert!(b.asked().is_none() && b.promotes().is_empty());
    b.advance(250 * MS);
    let (second, again) = b.asked().unwrap();
    assert_ne!(first, second);
    assert_eq!(next, again);
    b.cas(SwapOutcome::Refused { current: next });
    assert_eq!(b.promotes(), ["a"], "the first attempt had been committed");
}

#[test]
fn rule_15_a_last_change_of_the_old_engine_is_built_upon() {
    let mut b = Bench::new();
    b.record(clean(&["a", "b"], &[], 1));
    let mut current = config(&["a"], &[], 1);
    current.config_number = ConfigNumber(11);
    b.cas(SwapOutcome::Refused { current });
    let (_, next) = b.asked().unwrap();
    assert_eq!((next.epoch, next.in_sync), (Epoch(6), set(&["a"])));
}

/// Up to the moment where one of two members was promoted and the other cannot be.
fn half_promoted(record: &Config, dead: bool) -> Bench {
    let mut b = Bench::with(dead);
    b.record(record.clone());
    b.cas(SwapOutcome::Committed);
    b.promoted("a", Ok(()));
    b.promoted("b", Err(PromoteError::Unusable));
    b
}

#[test]
fn rule_16_the_old_engines_lease_is_waited_for_when_a_member_was_not_promoted() {
    let mut b = half_promoted(&config(&["a", "b"], &[], 1), false);
    assert!(b.out.iter().any(|a| matches!(a, OpenAction::Event(OpenEvent::LeaseWait { .. }))));
    assert!(b.out.contains(&OpenAction::WakeAt { at: b.now + 11_000 * MS }));
    b.advance(10_999 * MS);
    assert!(!b.goes_on(), "the sets are not even swapped: the next engine would not wait for the oldest");
    b.advance(MS);
    assert!(b.connect_all().is_none());
    assert_eq!(b.asked().unwrap().1.in_sync, set(&["a"]));
}

#[test]
fn rule_16_the_last_member_that_is_promoted_ends_the_wait() {
    let mut b = Bench::raised(&config(&["a", "b"], &[], 1));
    b.promoted("a", Ok(()));
    b.promoted("b", Err(PromoteError::Unreachable));
    b.advance(5_000 * MS);
    assert_eq!((b.promotes(), b.goes_on()), (vec!["b".to_owned()], false));
    b.promoted("b", Ok(()));
    assert!(b.goes_on());
}

#[test]
fn rule_16_nothing_is_waited_for_when_all_are_promoted_or_the_old_engine_is_dead_or_closed() {
    let mut b = Bench::raised(&config(&["a", "b"], &[], 1));
    b.promoted("a", Ok(()));
    b.promoted("b", Ok(()));
    assert!(b.goes_on());
    assert!(half_promoted(&config(&["a", "b"], &[], 1), true).goes_on());
    assert!(half_promoted(&clean(&["a", "b"], &[], 1), false).goes_on());
}

#[test]
fn rule_21_a_newer_epoch_a_missing_record_and_another_lineage_end_the_attempt() {
    let mut b = Bench::new();
    b.record(clean(&["a"], &[], 1));
    let mut current = config(&["a"], &[], 1);
    current.epoch = Epoch(6);
    current.engine_instance = EngineInstance::new("other").unwrap();
    b.cas(SwapOutcome::Refused { current });
    assert_eq!(b.failed(), Some(OpenError::Superseded));

    let mut b = Bench::new();
    b.input(OpenInput::RecordRead { result: Err(RecordError::NotFound) });
    assert_eq!(b.failed(), Some(OpenError::NoRecord));

    let mut b = Bench::new();
    b.record(Config { lineage: Lineage::new("other").unwrap(), ..clean(&["a"], &[], 1) });
    assert!(matches!(b.failed(), Some(OpenError::Lineage { .. })));

    let mut b = Bench::raised(&clean(&["a", "b"], &[], 1));
    b.promoted("a", Ok(()));
    b.promoted("b", Err(PromoteError::Newer));
    assert_eq!(b.failed(), Some(OpenError::Superseded));
}

#[test]
fn a_replica_without_usable_data_is_not_waited_for() {
    let mut b = Bench::raised(&clean(&["a", "b"], &[], 1));
    b.promoted("b", Err(PromoteError::Unusable));
    b.promoted("a", Ok(()));
    assert!(b.connect_all().is_none());
    assert_eq!(b.asked().unwrap().1.in_sync, set(&["a"]));
}

#[test]
fn an_arbiter_that_does_not_answer_is_asked_again_and_given_up_at_last() {
    let mut b = Bench::new();
    b.input(OpenInput::RecordRead { result: Err(RecordError::Unavailable) });
    b.advance(250 * MS);
    assert_eq!(b.out[0], OpenAction::ReadRecord);
    b.advance(60_000 * MS);
    assert_eq!(b.failed(), Some(OpenError::ArbiterTimeout));
}

#[test]
fn a_member_that_was_promoted_but_does_not_connect_is_given_to_the_core_as_lost() {
    let mut b = Bench::raised(&clean(&["a", "b"], &["c"], 1));
    for name in ["a", "b", "c"] {
        b.promoted(name, Ok(()));
    }
    b.input(OpenInput::Connected { leg: LegId(0), up: true });
    b.advance(2_000 * MS);
    let params = b.ready().unwrap();
    let legs: Vec<_> = params.legs.iter().map(|l| (l.replica.as_str(), l.up)).collect();
    assert_eq!(legs, [("a", true), ("b", false)], "a replica of R is added later");
    mirror_core::Core::open(params).unwrap();
}

/// A meta area as an engine of that epoch left it.
fn area(name: &str, epoch: u64, dirty: &[u32]) -> Arc<[u8]> {
    let record = config(&["a"], &[], 1);
    let superblock = Superblock {
        volume: VolumeId::new("v").unwrap(),
        replica: replica(name),
        lineage: record.lineage,
        epoch: Epoch(epoch),
        engine_instance: record.engine_instance,
        config_number: record.config_number,
        in_sync: record.in_sync,
        rebuilding: record.rebuilding,
        min_in_sync: 1,
        size_blocks: BLOCKS,
        block_size: 512,
        region_blocks: REGION,
        state: ReplicaState::Member,
        instance: String::new(),
        sequence: 4,
    };
    let mut bytes = superblock.encode().unwrap();
    bytes.extend([0; META_BLOCK_BYTES]);
    encode_bits(&regions(dirty), 0, &mut bytes);
    bytes.into()
}

/// Unclean record, members with meta areas, all promoted and connected: now bits are asked for.
fn asked_for_bits(members: &[&str], min: u32) -> Bench {
    let mut b = Bench::raised(&config(members, &[], min));
    b.meta = true;
    members.iter().for_each(|name| b.promoted(name, Ok(())));
    assert!(b.connect_all().is_none() && b.asked().is_none());
    assert_eq!(b.bits_asked(), members.len());
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
    b.bits(1, Err(MetaUnreadable));
    let params = b.ready().unwrap();
    assert_eq!((inherited(&params).len(), params.config.in_sync.len()), (16, 2));
}

#[test]
fn rule_18_without_any_readable_bits_it_is_the_full_copy() {
    let mut b = asked_for_bits(&["a", "b"], 1);
    (0..2).for_each(|leg| b.bits(leg, Err(MetaUnreadable)));
    let next = b.asked().unwrap().1;
    assert_eq!((next.in_sync, next.rebuilding), (set(&["b"]), set(&["a"])), "the local one is the source");
    let mut b = asked_for_bits(&["a", "b"], 2);
    (0..2).for_each(|leg| b.bits(leg, Err(MetaUnreadable)));
    let params = b.ready().unwrap();
    assert!(params.equalise_from.is_some() && params.meta.is_none());
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
        let mut b = Bench::told(false, told);
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
