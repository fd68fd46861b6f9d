//! Carries out the swaps that a mirror asks for (rules 6, 7, 8 and 23).
//!
//! *What it is.* One task per open mirror. It looks at the mirror's pending swap, does the compare-and-swap at the
//! arbiter, and gives the truthful answer. Events only wake it; what counts is what the mirror says is pending.
//!
//! *Invariants.* One proposal at a time. A proposal of another lineage, epoch or instance than this engine's is never
//! sent. The record must be the one that the mirror builds on: this engine's, with the configuration number it expects.
//!
//! *When things fail.* An answer that does not reach the mirror does no harm: the swap stays pending there, and judging
//! it again finds the record as proposed. When the data plane goes, the task ends.

use std::sync::Arc;
use std::time::Duration;

use mirror_core::{Config, ConfigNumber, ConfigVersion, SwapOutcome};
use tokio_util::sync::CancellationToken;

use super::Signals;
use super::build::Identity;
use super::device::Device;
use crate::arbiter::{Arbiter, RecordParseError, config_to_mirror, mirror_to_config};
use crate::rpc::{Client, MirrorState, PendingSwap};

/// Pause after a failure that is not the data plane's end.
const PAUSE: Duration = Duration::from_millis(200);

pub(super) struct SwapServer {
    pub(super) client: Client,
    pub(super) device: Device,
    pub(super) arbiter: Arc<dyn Arbiter>,
    pub(super) identity: Identity,
    pub(super) signals: Arc<Signals>,
    pub(super) stop: CancellationToken,
}

impl SwapServer {
    pub(super) async fn run(self) {
        while !self.client.is_closed() {
            let mut pause = None;
            match self.device.get().await {
                Ok(Some(MirrorState { config, pending_swap: Some(pending), .. })) => {
                    match self.serve(&config, &pending).await {
                        Ok(()) => continue,
                        Err(reason) => {
                            tracing::warn!(volume = %self.identity.volume, swap = pending.swap, %reason, "swap not settled");
                            pause = Some(PAUSE);
                        }
                    }
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(volume = %self.identity.volume, %error, "cannot read the mirror");
                    pause = Some(PAUSE);
                }
            }
            let wait = async {
                match pause {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None => self.signals.swaps.notified().await,
                }
            };
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = self.client.closed() => return,
                () = wait => {}
            }
        }
    }

    async fn serve(&self, now: &crate::rpc::MirrorConfig, pending: &PendingSwap) -> Result<(), String> {
        let next = mirror_to_config(&pending.next).map_err(|error| error.to_string())?;
        let expect = expected(now, pending).map_err(|error| error.to_string())?;
        if !self.is_ours(&next) || expect.lineage != next.lineage || expect.epoch != next.epoch {
            return Err(format!("the proposal is not of this engine: {:?}", pending.next));
        }
        let outcome = self.arbiter.swap(&self.identity.volume, &expect, &next).await;
        let (word, config) = match &outcome {
            SwapOutcome::Committed => ("committed", Some(config_to_mirror(&next))),
            SwapOutcome::Refused { current } => ("refused", Some(config_to_mirror(current))),
            SwapOutcome::Unknown => ("unknown", None),
        };
        tracing::info!(volume = %self.identity.volume, swap = pending.swap, reason = %pending.reason, outcome = word,
            config_number = next.config_number.0, in_sync = ?pending.next.in_sync, rebuilding = ?pending.next.rebuilding,
            "swap");
        let answered = self.device.swap_answer(pending.swap, word, config.as_ref()).await;
        self.signals.stale();
        answered.map_err(|error| error.to_string())
    }

    fn is_ours(&self, next: &Config) -> bool {
        next.lineage.as_str() == self.identity.lineage
            && next.epoch.0 == self.identity.epoch
            && next.engine_instance.as_str() == self.identity.instance
    }
}

/// The version that the record must have: the mirror's present record's.
fn expected(now: &crate::rpc::MirrorConfig, pending: &PendingSwap) -> Result<ConfigVersion, RecordParseError> {
    let mut expect = mirror_to_config(now)?.version();
    if let Some(number) = pending.expect_config_number {
        expect.config_number = ConfigNumber(number);
    }
    Ok(expect)
}
