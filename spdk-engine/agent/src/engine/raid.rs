//! An engine on a stock data plane: SPDK's own `raid1` in the mirror's place, as best effort.
//!
//! *What it is.* [`Raid`] keeps, for one volume, what a mirror would keep itself: its record and the swap that waits. A
//! task looks at the array every [`POLL`], and [`decide`] says what follows (see `array`): a swap to ask for, or a base
//! device to add or to take out. To everybody else it looks like a mirror.
//!
//! *What is lost.*
//! - The array acknowledges a write as soon as the base devices that it still has have it. A loss is
//!   recorded after that, not before (rule 6), and nothing freezes below `minInSync`. So when the array loses a member and
//!   then fails itself before the swap, a member without the last acknowledged writes may be opened. `Volume.status` says
//!   `consistency: bestEffort`.
//! - A session that a replica lost comes back for two seconds without a promote (rules 13 and 14 want one). No write of the
//!   lost session is sent again, if the data plane has the options of [`Client::set_stock_options`]: it fails, and the
//!   array gives its base device up. Without them it is a ghost write.
//! - An array cannot be told to flush, so a clean stop is recorded of members that may yet differ when they lose power.
//!
//! *What holds all the same.* One engine at a time by epochs and promotes (rules 13 to 15); a joiner counts only after
//! it was rebuilt in full (rule 10); a replica outside the set is never a source; after an unclean stop one member is the
//! source and the others have left the record before any host is served.
//!
//! *When things fail.* A lost base device is forgotten by the array; it is rebuilt when it is added again. A refused swap
//! stops the array, as a newer engine has the volume.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::Signals;
use super::array::{POLL, State, Step, View, decide};
use super::build::mirror_name;
use crate::error::AgentError;
use crate::rpc::{Client, LegParams, MirrorConfig, MirrorParams, MirrorState, RaidBdev, RpcError};
use crate::state::BLOCK_SIZE;

/// Places of an array beyond those that it begins with: one to rebuild into, one for a move.
const SPARE_PLACES: usize = 2;

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
        // Not the volume's: a guest who knows it could write a superblock that SPDK takes for this array's.
        client.create_raid1(&params.name, &bases, &Uuid::new_v4().to_string()).await?;
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
        if raid.state != "online" || !view.may_be_adopted(&config) {
            // It is swept away before the volume is opened anew.
            return Ok(None);
        }
        let num_blocks = config.size / u64::from(BLOCK_SIZE);
        let mut state = State::new(config, BTreeMap::new());
        state.see(Some(view), Instant::now());
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
        // One that lasts is told once.
        let mut told = String::new();
        while !self.client.is_closed() {
            match self.look().await {
                Ok(true) => {
                    signals.swaps.notify_one();
                    signals.stale();
                }
                Ok(false) => told.clear(),
                Err(error) if error.to_string() == told => {}
                Err(error) => {
                    tracing::warn!(volume = %self.volume, %error, "cannot look at the array");
                    told = error.to_string();
                }
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
        let view = match found.filter(|raid| raid.state == "online") {
            Some(raid) => Some(self.view(&raid).await?),
            None => None,
        };
        let (step, differs) = {
            let mut state = self.lock();
            let differs = state.see(view, Instant::now());
            let step = decide(&state, state.seen.as_ref());
            match &step {
                Step::Swap(next, reason) => {
                    let view = state.seen.as_ref();
                    tracing::info!(volume = %self.volume, reason, ?view, "the array needs a swap");
                    state.ask(next.clone(), reason);
                }
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

    /// An array as it is, with what was written to the joiners that rest in it.
    async fn view(&self, raid: &RaidBdev) -> Result<View, RpcError> {
        let config = self.lock().config.clone();
        let mut view = View::of(&self.volume, config.epoch, raid);
        for (replica, bdev) in view.resting(&config) {
            match self.client.bdev_bytes_written(&bdev).await {
                Ok(bytes) => view.set_written(&replica, bytes),
                // It has just been lost, as the next look will show.
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(view)
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
