//! What is seen of an array, and what follows from it: no I/O, no clock of its own.
//!
//! *What it is.* [`State`] is what is known of one volume's `raid1`; [`State::see`] takes a look in, and [`decide`] says
//! what to do next.
//!
//! *Invariants.*
//! - A joiner counts as rebuilt only when it has rested in the array for [`SETTLE`], and as many bytes were written to its
//!   device as the volume has. SPDK shows a base device as part of the array, and no rebuild, also before the rebuild
//!   begins, and after it has *failed*, until the device was reset and taken out.
//! - Only time in which the array was looked at counts: two looks far apart prove no more than two looks.
//! - Losses go before everything else; one swap at a time; the last member is never given up.
//!
//! *When things fail.* A joiner that rests without having been written in full leaves the record; so does a member that
//! the array rebuilds, unless it is the last.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use super::build::parse_leg;
use crate::rpc::{MirrorConfig, MirrorLeg, MirrorState, PendingSwap, RaidBdev};
use crate::state::BLOCK_SIZE;

/// How often an array is looked at. It bounds how long a loss stays unrecorded; the data plane polls anyway.
pub(super) const POLL: Duration = Duration::from_millis(200);
/// How long a joiner has to rest. A rebuild that failed lets it rest until I/O to lost members ended, which takes as long as
/// their controllers are waited for (2 s), and its own device was reset, which takes a few attempts to connect.
const SETTLE: Duration = Duration::from_secs(10);
/// The most that one look adds to a rest.
const LOOK_COUNTS: Duration = Duration::from_millis(400);

/// What is known of one array.
#[derive(Debug)]
pub(super) struct State {
    pub(super) config: MirrorConfig,
    pub(super) pending: Option<PendingSwap>,
    next_swap: u64,
    /// Replicas to be added, with their devices.
    pub(super) joining: BTreeMap<String, String>,
    /// Replicas to be taken out.
    pub(super) leaving: BTreeSet<String>,
    pub(super) closing: bool,
    /// A swap was refused, or the array is gone.
    pub(super) stopped: bool,
    pub(super) seen: Option<View>,
    looked: Option<Instant>,
    /// For how long joiners have been seen in the array without a rebuild.
    rests: BTreeMap<String, Duration>,
}

/// An array as it was last seen, in the words of the volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct View {
    /// Replicas that are part of it, with their devices.
    pub(super) bases: BTreeMap<String, String>,
    /// Devices that are part of it and are no replicas of this volume and epoch: places that an opening did not free.
    strangers: usize,
    /// The replica that is rebuilt, and blocks done.
    rebuilding: Option<(String, u64)>,
    /// Bytes written to the devices of joiners that rest.
    written: BTreeMap<String, u64>,
}

impl View {
    pub(super) fn of(volume: &str, epoch: u64, raid: &RaidBdev) -> Self {
        let replica =
            |bdev: &str| parse_leg(bdev).filter(|leg| leg.0 == volume && leg.2 == epoch).map(|leg| leg.1.to_owned());
        let bases: BTreeMap<String, String> =
            raid.bases().filter_map(|bdev| Some((replica(bdev)?, bdev.to_owned()))).collect();
        let strangers = raid.bases().count() - bases.len();
        let process = raid.process.as_ref();
        let rebuilding = process.and_then(|process| Some((replica(&process.target)?, process.progress.blocks)));
        Self { bases, strangers, rebuilding, written: BTreeMap::new() }
    }

    /// Whether the array may be taken over under this record: it serves, and from replicas alone. One that an interrupted
    /// opening left has null devices for members, and reads of them give anything.
    pub(super) fn may_be_adopted(&self, config: &MirrorConfig) -> bool {
        self.strangers == 0 && !config.clean && config.in_sync.iter().any(|replica| self.bases.contains_key(replica))
    }

    fn rests(&self, replica: &str) -> bool {
        self.bases.contains_key(replica) && self.rebuilding.as_ref().is_none_or(|(busy, _)| busy != replica)
    }

    /// Joiners that rest, with their devices.
    pub(super) fn resting(&self, config: &MirrorConfig) -> Vec<(String, String)> {
        let joiners = config.rebuilding.iter().filter(|replica| self.rests(replica));
        joiners.filter_map(|replica| Some((replica.clone(), self.bases.get(replica)?.clone()))).collect()
    }

    /// Bytes written to a joiner's device since it was connected.
    pub(super) fn set_written(&mut self, replica: &str, bytes: u64) {
        self.written.insert(replica.to_owned(), bytes);
    }
}

/// What follows from what is seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Nothing,
    /// Ask for this swap.
    Swap(MirrorConfig, &'static str),
    /// Put this replica's device in; it is rebuilt.
    Add(String, String),
    /// Take this device out.
    Remove(String),
    /// There is no array any more, or none with a member.
    Stop,
}

/// How far a joiner in the array is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rebuild {
    /// It is rebuilt, or it cannot be told yet how that ended.
    Runs,
    Done,
    Failed,
}

fn rebuild_of(state: &State, view: &View, joiner: &str) -> Rebuild {
    let rest = state.rests.get(joiner).copied().unwrap_or_default();
    if !view.rests(joiner) || rest < SETTLE {
        return Rebuild::Runs;
    }
    let written = view.written.get(joiner).copied().unwrap_or(0);
    if written >= state.config.size { Rebuild::Done } else { Rebuild::Failed }
}

/// Decides. Losses go before everything else; one swap at a time.
pub(super) fn decide(state: &State, seen: Option<&View>) -> Step {
    if state.stopped || state.pending.is_some() || state.config.clean {
        return Step::Nothing;
    }
    let config = &state.config;
    let member = |replica: &str| config.in_sync.iter().any(|name| name == replica);
    let joiner = |replica: &str| config.rebuilding.iter().any(|name| name == replica);
    let Some(view) = seen.filter(|view| config.in_sync.iter().any(|name| view.bases.contains_key(name))) else {
        return Step::Stop;
    };
    let present = |replica: &String| view.bases.contains_key(replica);
    if let Some(lost) = config.in_sync.iter().find(|replica| !present(replica)) {
        return Step::Swap(without(config, lost), "a member was lost");
    }
    if let Some((busy, _)) = view.rebuilding.as_ref().filter(|(busy, _)| member(busy) && config.in_sync.len() > 1) {
        return Step::Swap(without(config, busy), "a member is being rebuilt");
    }
    if let Some(lost) = config.rebuilding.iter().find(|r| !present(r) && !state.joining.contains_key(*r)) {
        return Step::Swap(without(config, lost), "a rebuild failed");
    }
    if let Some(replica) = state.leaving.iter().find(|replica| member(replica) || joiner(replica)) {
        let last = config.in_sync.len() == 1 && member(replica);
        if !last {
            return Step::Swap(without(config, replica), "asked for");
        }
    }
    // Whatever the record does not name has nothing to do in the array.
    if let Some((_, bdev)) = view.bases.iter().find(|(replica, _)| !member(replica) && !joiner(replica)) {
        return Step::Remove(bdev.clone());
    }
    if state.closing {
        return Step::Swap(MirrorConfig { clean: true, ..config.clone() }, "closing");
    }
    let joined: Vec<(&String, Rebuild)> =
        config.rebuilding.iter().filter(|replica| present(replica)).map(|r| (r, rebuild_of(state, view, r))).collect();
    match joined.iter().find(|(_, rebuild)| *rebuild != Rebuild::Runs) {
        Some((replica, Rebuild::Done)) => {
            let mut next = without(config, replica);
            next.in_sync.push((*replica).clone());
            return Step::Swap(next, "rebuilt");
        }
        Some((replica, _)) => return Step::Swap(without(config, replica), "a rebuild failed"),
        None => {}
    }
    let Some((replica, bdev)) = state.joining.iter().find(|(replica, _)| !present(replica)) else {
        return Step::Nothing;
    };
    if !joiner(replica) {
        let mut next = config.clone();
        next.rebuilding.push(replica.clone());
        next.config_number += 1;
        return Step::Swap(next, "rebuild");
    }
    // The array rebuilds one at a time, and whether it does cannot be seen at every moment.
    match joined.is_empty() && view.rebuilding.is_none() {
        true => Step::Add(replica.clone(), bdev.clone()),
        false => Step::Nothing,
    }
}

fn without(config: &MirrorConfig, replica: &str) -> MirrorConfig {
    let mut next = config.clone();
    next.in_sync.retain(|name| name != replica);
    next.rebuilding.retain(|name| name != replica);
    next.config_number += 1;
    next
}

impl State {
    pub(super) fn new(config: MirrorConfig, joining: BTreeMap<String, String>) -> Self {
        Self {
            config,
            pending: None,
            next_swap: 1,
            joining,
            leaving: BTreeSet::new(),
            closing: false,
            stopped: false,
            seen: None,
            looked: None,
            rests: BTreeMap::new(),
        }
    }

    /// Takes what was seen in; true when anything but progress differs.
    pub(super) fn see(&mut self, view: Option<View>, now: Instant) -> bool {
        let target = |view: &View| view.rebuilding.as_ref().map(|(replica, _)| replica.clone());
        let shape = |view: &Option<View>| view.as_ref().map(|view| (view.bases.clone(), target(view)));
        let differs = shape(&self.seen) != shape(&view);
        if let Some(view) = &view {
            self.joining.retain(|replica, _| !view.bases.contains_key(replica));
        }
        let passed = self.looked.replace(now).map_or(Duration::ZERO, |before| now.saturating_duration_since(before));
        self.rest(view.as_ref(), passed.min(LOOK_COUNTS));
        self.seen = view;
        differs
    }

    fn rest(&mut self, view: Option<&View>, passed: Duration) {
        let resting = view.map(|view| view.resting(&self.config)).unwrap_or_default();
        let rests = resting.into_iter().map(|(replica, _)| {
            // The first look at a rest proves nothing of the time before.
            let rest = self.rests.get(&replica).map_or(Duration::ZERO, |rest| *rest + passed);
            (replica, rest)
        });
        self.rests = rests.collect();
    }

    pub(super) fn ask(&mut self, next: MirrorConfig, reason: &str) {
        let expect = Some(self.config.config_number);
        self.pending =
            Some(PendingSwap { swap: self.next_swap, next, expect_config_number: expect, reason: reason.to_owned() });
        self.next_swap += 1;
    }

    pub(super) fn answer(&mut self, swap: u64, outcome: &str) {
        let Some(pending) = self.pending.take_if(|pending| pending.swap == swap) else { return };
        match outcome {
            "committed" => {
                let named = |replica: &String| {
                    pending.next.in_sync.contains(replica) || pending.next.rebuilding.contains(replica)
                };
                self.leaving.retain(named);
                self.config = pending.next;
            }
            "refused" => self.stopped = true,
            // Unknown: asked for again, under another number.
            _ => self.ask(pending.next, &pending.reason),
        }
    }

    pub(super) fn describe(&self, name: &str, volume: &str, num_blocks: u64) -> MirrorState {
        let state = match () {
            () if self.stopped => "stopped",
            () if self.config.clean => "closed",
            () if self.closing => "closing",
            () => "open",
        };
        let view = self.seen.clone().unwrap_or_default();
        let leg = |replica: &String, joiner: bool| {
            let rested = view.written.get(replica).map_or(0, |bytes| num_blocks.min(bytes / u64::from(BLOCK_SIZE)));
            let running = view.rebuilding.as_ref().filter(|(busy, _)| busy == replica);
            let copied = running.map_or(rested, |(_, blocks)| *blocks);
            let bdev = view.bases.get(replica).or(self.joining.get(replica))?;
            Some(MirrorLeg {
                replica: replica.clone(),
                bdev_name: bdev.clone(),
                state: if joiner { "rebuilding" } else { "in_sync" }.to_owned(),
                copied_blocks: copied,
                total_blocks: if joiner { num_blocks } else { 0 },
                instance: String::new(),
            })
        };
        let members = self.config.in_sync.iter().filter_map(|replica| leg(replica, false));
        let joiners: BTreeSet<&String> = self.config.rebuilding.iter().chain(self.joining.keys()).collect();
        let joiners = joiners.into_iter().filter_map(|replica| leg(replica, true));
        MirrorState {
            name: name.to_owned(),
            volume: volume.to_owned(),
            state: state.to_owned(),
            config: self.config.clone(),
            legs: members.chain(joiners).collect(),
            pending_swap: self.pending.clone(),
            frozen: false,
            equalising: false,
            hosts_must_detach: false,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    const SIZE: u64 = 1 << 20;

    fn config(in_sync: &[&str], rebuilding: &[&str]) -> MirrorConfig {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        MirrorConfig {
            lineage: "l".to_owned(),
            epoch: 1,
            engine_instance: "e".to_owned(),
            config_number: 5,
            in_sync: names(in_sync),
            rebuilding: names(rebuilding),
            min_in_sync: 1,
            size: SIZE,
            clean: false,
            snapshots: Default::default(),
        }
    }

    fn view(bases: &[&str], rebuilding: Option<&str>) -> View {
        View {
            bases: bases.iter().map(|name| ((*name).to_owned(), format!("m.v.{name}.1n1"))).collect(),
            rebuilding: rebuilding.map(|name| (name.to_owned(), 3)),
            ..View::default()
        }
    }

    /// As [`view`], with a joiner to which that many bytes were written.
    fn written(bases: &[&str], joiner: &str, bytes: u64) -> View {
        let mut view = view(bases, None);
        view.set_written(joiner, bytes);
        view
    }

    /// Looks for a while at what does not change.
    fn watch(state: &mut State, view: &View, now: &mut Instant, during: Duration) {
        let end = *now + during;
        while *now < end {
            *now += POLL;
            state.see(Some(view.clone()), *now);
        }
    }

    fn state(in_sync: &[&str], rebuilding: &[&str]) -> State {
        State::new(config(in_sync, rebuilding), BTreeMap::new())
    }

    /// The sets of a swap, or the step in a word.
    fn step(state: &State, seen: Option<&View>) -> String {
        match decide(state, seen) {
            Step::Nothing => "nothing".to_owned(),
            Step::Stop => "stop".to_owned(),
            Step::Add(_, bdev) => format!("add {bdev}"),
            Step::Remove(bdev) => format!("remove {bdev}"),
            Step::Swap(next, _) => {
                let clean = if next.clean { " clean" } else { "" };
                format!("{}/{}{clean}", next.in_sync.join(""), next.rebuilding.join(""))
            }
        }
    }

    #[test]
    fn a_loss_is_recorded_before_anything_else_and_never_the_last() {
        let mut all = state(&["a", "b", "c"], &[]);
        assert_eq!(step(&all, Some(&view(&["a", "b", "c"], None))), "nothing");
        all.closing = true;
        assert_eq!(step(&all, Some(&view(&["a", "c"], None))), "ac/");
        assert_eq!(step(&all, Some(&view(&["a", "b", "c"], None))), "abc/ clean");
        assert_eq!(step(&all, Some(&view(&[], None))), "stop");
        assert_eq!(step(&all, None), "stop");
        // A joiner alone is no source.
        assert_eq!(step(&state(&["a"], &["b"]), Some(&view(&["b"], None))), "stop");
    }

    #[test]
    fn a_joiner_is_recorded_then_rebuilt_then_a_member() {
        let mut state = state(&["a"], &[]);
        state.joining.insert("b".to_owned(), "m.v.b.1n1".to_owned());
        assert_eq!(step(&state, Some(&view(&["a"], None))), "a/b");
        state.config = config(&["a"], &["b"]);
        assert_eq!(step(&state, Some(&view(&["a"], None))), "add m.v.b.1n1");
        assert_eq!(step(&state, Some(&view(&["a"], Some("c")))), "nothing");
        let mut now = Instant::now();
        state.see(Some(view(&["a", "b"], Some("b"))), now);
        assert!(state.joining.is_empty());
        assert_eq!(step(&state, Some(&view(&["a", "b"], Some("b")))), "nothing");
        let rebuilt = written(&["a", "b"], "b", SIZE);
        watch(&mut state, &rebuilt, &mut now, SETTLE + 2 * POLL);
        assert_eq!(step(&state, Some(&rebuilt)), "ab/");
        // Its device was lost meanwhile: the array has taken it out.
        assert_eq!(step(&state, Some(&view(&["a"], None))), "a/");
    }

    /// SPDK shows the same of a rebuild that has not begun, of one that failed, and of one that is done.
    #[test]
    fn a_joiner_without_a_rebuild_is_no_member_before_it_has_rested_and_was_written_in_full() {
        let mut state = state(&["a"], &["b", "c"]);
        state.joining.insert("c".to_owned(), "m.v.c.1n1".to_owned());
        let mut now = Instant::now();
        let begun = written(&["a", "b"], "b", 0);
        watch(&mut state, &begun, &mut now, POLL);
        assert_eq!(step(&state, Some(&begun)), "nothing", "just added");
        watch(&mut state, &view(&["a", "b"], Some("b")), &mut now, SETTLE);
        let rested = written(&["a", "b"], "b", SIZE);
        watch(&mut state, &rested, &mut now, SETTLE - POLL);
        assert_eq!(step(&state, Some(&rested)), "nothing", "it may be taken out yet; and no other one is added");
        // Nobody looked: that is no rest.
        now += 10 * SETTLE;
        let mut unseen = State::new(config(&["a"], &["b"]), BTreeMap::new());
        unseen.see(Some(rested.clone()), now);
        now += 10 * SETTLE;
        unseen.see(Some(rested.clone()), now);
        assert_eq!(step(&unseen, Some(&rested)), "nothing");
        watch(&mut state, &rested, &mut now, 2 * POLL);
        assert_eq!(step(&state, Some(&rested)), "ab/c");
        // It failed half-way and is not taken out.
        let half = written(&["a", "b"], "b", SIZE / 2);
        state.see(Some(half.clone()), now);
        assert_eq!(step(&state, Some(&half)), "a/c");
        assert_eq!(state.describe("v.v", "v", SIZE / 4096).legs[1].copied_blocks, SIZE / 8192);
        // A rebuild that begins after all ends the rest.
        watch(&mut state, &view(&["a", "b"], Some("b")), &mut now, POLL);
        watch(&mut state, &rested, &mut now, SETTLE / 2);
        assert_eq!(step(&state, Some(&rested)), "nothing");
    }

    #[test]
    fn a_member_that_is_being_rebuilt_is_none_unless_it_is_the_last() {
        assert_eq!(step(&state(&["a", "b"], &[]), Some(&view(&["a", "b"], Some("b")))), "a/");
        assert_eq!(step(&state(&["b"], &[]), Some(&view(&["b"], Some("b")))), "nothing");
    }

    #[test]
    fn an_array_of_an_interrupted_opening_is_not_adopted() {
        let raid = |bases: &[&str]| -> RaidBdev {
            let bases: Vec<_> = bases.iter().map(|name| json!({"name": name, "is_configured": true})).collect();
            serde_json::from_value(json!({"name": "v.v", "state": "online", "base_bdevs_list": bases})).unwrap()
        };
        let may = |bases: &[&str], config: &MirrorConfig| View::of("v", 1, &raid(bases)).may_be_adopted(config);
        let record = config(&["a", "b"], &[]);
        assert!(may(&["m.v.a.1n1", "m.v.b.1n1"], &record));
        assert!(may(&["m.v.a.1n1"], &record));
        for bases in [&["m.v.a.1n1", "m.v.b.1n1", "pad.v.3"][..], &["pad.v.2", "pad.v.3"], &["m.v.a.1n1", "m.v.b.0n1"]]
        {
            assert!(!may(bases, &record), "{bases:?}");
        }
        assert!(!may(&["m.v.c.1n1"], &record), "no member");
        assert!(!may(&["m.v.a.1n1"], &MirrorConfig { clean: true, ..record }));
    }

    #[test]
    fn one_that_leaves_is_out_of_the_record_before_the_array() {
        let mut state = state(&["a", "b"], &[]);
        state.leaving.insert("b".to_owned());
        let all = view(&["a", "b"], None);
        assert_eq!(step(&state, Some(&all)), "a/");
        let Step::Swap(next, reason) = decide(&state, Some(&all)) else { panic!() };
        state.ask(next, reason);
        assert_eq!(step(&state, Some(&all)), "nothing");
        state.answer(1, "unknown");
        assert_eq!(state.pending.as_ref().unwrap().swap, 2);
        state.answer(1, "committed");
        assert!(state.pending.is_some(), "an answer to another swap");
        state.answer(2, "committed");
        assert_eq!(step(&state, Some(&all)), "remove m.v.b.1n1");
        assert!(state.leaving.is_empty());
        state.leaving.insert("a".to_owned());
        assert_eq!(step(&state, Some(&view(&["a"], None))), "nothing");
    }

    #[test]
    fn a_refused_swap_stops_it() {
        let mut state = state(&["a", "b"], &[]);
        state.ask(config(&["a"], &[]), "loss");
        state.answer(1, "refused");
        assert_eq!(state.describe("v.v", "v", 256).state, "stopped");
        assert_eq!(step(&state, Some(&view(&["a"], None))), "nothing");
    }
}
