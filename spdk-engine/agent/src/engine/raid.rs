//! An engine on a stock data plane: SPDK's own `raid1` in the mirror's place, as best effort.
//!
//! *What it is.* [`Raid`] keeps, for one volume, what a mirror would keep itself: its record and the swap that waits. A
//! task looks at the array every [`POLL`], and [`decide`] says what follows: a swap to ask for, or a base device to add or
//! to take out. To everybody else it looks like a mirror.
//!
//! *What is lost.* The array acknowledges a write as soon as the base devices that it still has have it. A loss is
//! recorded after that, not before (rule 6), and nothing freezes below `minInSync`. So when the array loses a member and
//! then fails itself before the swap, a member without the last acknowledged writes may be opened. `Volume.status` says
//! `consistency: bestEffort`.
//!
//! *What holds all the same.* One engine at a time by epochs and promotes (rules 13 to 15); a joiner counts only after
//! it was rebuilt in full (rule 10); a replica outside the set is never a source; after an unclean stop one member is the
//! source and the others have left the record before any host is served.
//!
//! *When things fail.* A lost base device is forgotten by the array; it is rebuilt when it is added again. A refused swap
//! stops the array, as a newer engine has the volume.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Signals;
use super::build::{mirror_name, parse_leg};
use crate::error::AgentError;
use crate::rpc::{
    Client, LegParams, MirrorConfig, MirrorLeg, MirrorParams, MirrorState, PendingSwap, RaidBdev, RpcError,
};
use crate::state::BLOCK_SIZE;

/// How often an array is looked at. It bounds how long a loss stays unrecorded; the data plane polls anyway.
const POLL: Duration = Duration::from_millis(200);
/// Places of an array beyond those that it begins with: one to rebuild into, one for a move.
const SPARE_PLACES: usize = 2;

/// What is known of one array.
#[derive(Debug)]
struct State {
    config: MirrorConfig,
    pending: Option<PendingSwap>,
    next_swap: u64,
    /// Replicas to be added, with their devices.
    joining: BTreeMap<String, String>,
    /// Replicas to be taken out.
    leaving: BTreeSet<String>,
    closing: bool,
    /// A swap was refused, or the array is gone.
    stopped: bool,
    seen: Option<View>,
}

/// An array as it was last seen, in the words of the volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct View {
    /// Replicas that are part of it, with their devices.
    bases: BTreeMap<String, String>,
    /// The replica that is rebuilt, and blocks done.
    rebuilding: Option<(String, u64)>,
}

impl View {
    fn of(volume: &str, epoch: u64, raid: &RaidBdev) -> Self {
        let replica =
            |bdev: &str| parse_leg(bdev).filter(|leg| leg.0 == volume && leg.2 == epoch).map(|leg| leg.1.to_owned());
        let bases = raid.bases().filter_map(|bdev| Some((replica(bdev)?, bdev.to_owned()))).collect();
        let process = raid.process.as_ref();
        let rebuilding = process.and_then(|process| Some((replica(&process.target)?, process.progress.blocks)));
        Self { bases, rebuilding }
    }
}

/// What follows from what is seen.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
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

/// Decides. Losses go before everything else; one swap at a time.
fn decide(state: &State, seen: Option<&View>) -> Step {
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
    let rebuilt =
        |replica: &&String| present(replica) && view.rebuilding.as_ref().is_none_or(|(busy, _)| busy != *replica);
    if let Some(replica) = config.rebuilding.iter().find(rebuilt) {
        let mut next = without(config, replica);
        next.in_sync.push(replica.clone());
        return Step::Swap(next, "rebuilt");
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
    // The array rebuilds one at a time.
    match view.rebuilding {
        Some(_) => Step::Nothing,
        None => Step::Add(replica.clone(), bdev.clone()),
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
    fn new(config: MirrorConfig, joining: BTreeMap<String, String>) -> Self {
        Self {
            config,
            pending: None,
            next_swap: 1,
            joining,
            leaving: BTreeSet::new(),
            closing: false,
            stopped: false,
            seen: None,
        }
    }

    /// Takes what was seen in; true when anything but progress differs.
    fn see(&mut self, view: Option<View>) -> bool {
        let target = |view: &View| view.rebuilding.as_ref().map(|(replica, _)| replica.clone());
        let shape = |view: &Option<View>| view.as_ref().map(|view| (view.bases.clone(), target(view)));
        let differs = shape(&self.seen) != shape(&view);
        if let Some(view) = &view {
            self.joining.retain(|replica, _| !view.bases.contains_key(replica));
        }
        self.seen = view;
        differs
    }

    fn ask(&mut self, next: MirrorConfig, reason: &str) {
        let expect = Some(self.config.config_number);
        self.pending =
            Some(PendingSwap { swap: self.next_swap, next, expect_config_number: expect, reason: reason.to_owned() });
        self.next_swap += 1;
    }

    fn answer(&mut self, swap: u64, outcome: &str) {
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

    fn describe(&self, name: &str, volume: &str, num_blocks: u64) -> MirrorState {
        let state = match () {
            () if self.stopped => "stopped",
            () if self.config.clean => "closed",
            () if self.closing => "closing",
            () => "open",
        };
        let view = self.seen.clone().unwrap_or_default();
        let leg = |replica: &String, joiner: bool| {
            let copied = view.rebuilding.as_ref().filter(|(busy, _)| busy == replica).map_or(0, |(_, blocks)| *blocks);
            let bdev = view.bases.get(replica).or(self.joining.get(replica))?;
            Some(MirrorLeg {
                replica: replica.clone(),
                bdev_name: bdev.clone(),
                state: if joiner { "rebuilding" } else { "in_sync" }.to_owned(),
                copied_blocks: copied,
                total_blocks: if joiner { num_blocks } else { 0 },
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
        }
    }
}

/// The array of one volume; cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Raid {
    client: Client,
    volume: String,
    num_blocks: u64,
    state: Arc<Mutex<State>>,
    changed: Arc<Notify>,
    end: CancellationToken,
}

impl Raid {
    /// Makes the array of a volume. Legs in the record's `rebuilding` are added one by one.
    pub(super) async fn create(
        client: Client,
        params: &MirrorParams,
        signals: Arc<Signals>,
    ) -> Result<Self, AgentError> {
        let member = |leg: &&LegParams| params.config.in_sync.contains(&leg.replica);
        let (members, joiners): (Vec<&LegParams>, Vec<&LegParams>) = params.legs.iter().partition(|leg| member(leg));
        let num_blocks = params.size_bytes / u64::from(BLOCK_SIZE);
        let mut bases: Vec<String> = members.iter().map(|leg| leg.bdev_name.clone()).collect();
        let places = params.legs.len().max(2) + SPARE_PLACES;
        // An array begins with all its places taken; the spare ones are freed before any host is served.
        let pads: Vec<String> = (bases.len()..places).map(|place| pad_name(&params.volume, place)).collect();
        for pad in &pads {
            client.bdev_null_delete(pad).await?;
            client.bdev_null_create(pad, num_blocks, BLOCK_SIZE).await?;
        }
        bases.extend(pads.iter().cloned());
        client.create_raid1(&params.name, &bases, &params.uuid).await?;
        for pad in &pads {
            client.bdev_raid_remove_base_bdev(pad).await?;
            client.bdev_null_delete(pad).await?;
        }
        let joining = joiners.iter().map(|leg| (leg.replica.clone(), leg.bdev_name.clone())).collect();
        Ok(Self::over(client, &params.volume, num_blocks, State::new(params.config.clone(), joining), signals))
    }

    /// Takes over an array that runs already, under the record that it was made for.
    pub(super) async fn adopt(
        client: Client,
        config: MirrorConfig,
        volume: &str,
        signals: Arc<Signals>,
    ) -> Result<Option<Self>, RpcError> {
        let Some(raid) = client.find_raid(&mirror_name(volume)).await? else { return Ok(None) };
        let view = View::of(volume, config.epoch, &raid);
        if raid.state != "online" || view.bases.is_empty() || config.clean {
            return Ok(None);
        }
        let num_blocks = config.size / u64::from(BLOCK_SIZE);
        let mut state = State::new(config, BTreeMap::new());
        state.see(Some(view));
        Ok(Some(Self::over(client, volume, num_blocks, state, signals)))
    }

    fn over(client: Client, volume: &str, num_blocks: u64, state: State, signals: Arc<Signals>) -> Self {
        let raid = Self {
            client,
            volume: volume.to_owned(),
            num_blocks,
            state: Arc::new(Mutex::new(state)),
            changed: Arc::default(),
            end: CancellationToken::new(),
        };
        tokio::spawn(raid.clone().watch(signals));
        raid
    }

    /// Ends the looking; the array stays.
    pub(super) fn let_go(&self) {
        self.end.cancel();
    }

    async fn watch(self, signals: Arc<Signals>) {
        while !self.client.is_closed() {
            match self.look().await {
                Ok(true) => {
                    signals.swaps.notify_one();
                    signals.stale();
                }
                Ok(false) => {}
                Err(error) => tracing::warn!(volume = %self.volume, %error, "cannot look at the array"),
            }
            tokio::select! {
                () = self.end.cancelled() => return,
                () = self.client.closed() => return,
                () = self.changed.notified() => {}
                () = tokio::time::sleep(POLL) => {}
            }
        }
    }

    /// One look and what follows from it; whether somebody has to be told.
    async fn look(&self) -> Result<bool, RpcError> {
        let found = self.client.find_raid(&mirror_name(&self.volume)).await?;
        let (step, differs) = {
            let mut state = self.lock();
            let epoch = state.config.epoch;
            let view = found.filter(|raid| raid.state == "online").map(|raid| View::of(&self.volume, epoch, &raid));
            let differs = state.see(view);
            let step = decide(&state, state.seen.as_ref());
            match &step {
                Step::Swap(next, reason) => state.ask(next.clone(), reason),
                Step::Stop => state.stopped = true,
                Step::Nothing | Step::Add(..) | Step::Remove(_) => {}
            }
            (step, differs)
        };
        match &step {
            Step::Add(replica, bdev) => {
                let added = self.client.bdev_raid_add_base_bdev(&mirror_name(&self.volume), bdev).await;
                if let Err(error) = added {
                    // Its device may be gone: it leaves the record, and is connected anew when it is asked for.
                    tracing::warn!(volume = %self.volume, replica, %error, "cannot be rebuilt");
                    self.lock().joining.remove(replica);
                }
            }
            Step::Remove(bdev) => self.client.bdev_raid_remove_base_bdev(bdev).await?,
            Step::Stop => tracing::warn!(volume = %self.volume, "the array has no member left"),
            Step::Nothing | Step::Swap(..) => {}
        }
        if matches!(step, Step::Add(..) | Step::Remove(_)) {
            self.changed.notify_one();
        }
        Ok(differs || step != Step::Nothing)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // --- as a mirror ---

    pub(super) fn get(&self) -> MirrorState {
        self.lock().describe(&mirror_name(&self.volume), &self.volume, self.num_blocks)
    }

    pub(super) fn add_leg(&self, leg: &LegParams) {
        let mut state = self.lock();
        state.leaving.remove(&leg.replica);
        state.joining.insert(leg.replica.clone(), leg.bdev_name.clone());
        drop(state);
        self.changed.notify_one();
    }

    pub(super) fn remove_leg(&self, replica: &str) {
        let mut state = self.lock();
        state.joining.remove(replica);
        state.leaving.insert(replica.to_owned());
        drop(state);
        self.changed.notify_one();
    }

    pub(super) fn swap_answer(&self, swap: u64, outcome: &str) {
        self.lock().answer(swap, outcome);
        self.changed.notify_one();
    }

    /// Records the clean stop. Nobody may be connected any more.
    pub(super) async fn close(&self, deadline: Duration) -> Result<(), AgentError> {
        self.lock().closing = true;
        self.changed.notify_one();
        let end = Instant::now() + deadline;
        loop {
            match self.get().state.as_str() {
                "closed" => return Ok(()),
                "stopped" => {
                    return Err(AgentError::Unavailable("the array stopped before it could be closed".to_owned()));
                }
                _ if Instant::now() >= end => {
                    return Err(AgentError::Unavailable(format!("not closed within {deadline:?}")));
                }
                _ => tokio::time::sleep(POLL / 4).await,
            }
        }
    }
}

fn pad_name(volume: &str, place: usize) -> String {
    format!("pad.{volume}.{place}")
}

/// Removes the array of a volume, whatever state it is in.
pub(super) async fn sweep(client: &Client, volume: &str) -> Result<(), RpcError> {
    client.bdev_raid_delete(&mirror_name(volume)).await?;
    let prefix = format!("pad.{volume}.");
    for pad in client.bdev_sizes().await?.into_keys().filter(|name| name.starts_with(&prefix)) {
        client.bdev_null_delete(&pad).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

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
            size: 1 << 20,
            clean: false,
        }
    }

    fn view(bases: &[&str], rebuilding: Option<&str>) -> View {
        View {
            bases: bases.iter().map(|name| ((*name).to_owned(), format!("m.v.{name}.1n1"))).collect(),
            rebuilding: rebuilding.map(|name| (name.to_owned(), 3)),
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
        state.see(Some(view(&["a", "b"], Some("b"))));
        assert!(state.joining.is_empty());
        assert_eq!(step(&state, Some(&view(&["a", "b"], Some("b")))), "nothing");
        assert_eq!(step(&state, Some(&view(&["a", "b"], None))), "ab/");
        // Its device was lost meanwhile: the array has taken it out.
        assert_eq!(step(&state, Some(&view(&["a"], None))), "a/");
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
