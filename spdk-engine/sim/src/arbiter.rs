//! The arbiter: one record, changed by compare-and-swap only. Every accepted record is checked.

use mirror_core::{Config, ConfigVersion, SwapOutcome};

#[derive(Debug)]
pub(crate) struct Arbiter {
    pub(crate) record: Config,
}

impl Arbiter {
    /// Executes a request; the error is a violation of the rules, not a refusal.
    pub(crate) fn swap(&mut self, expect: &ConfigVersion, next: Config) -> Result<SwapOutcome, String> {
        if self.record.version() != *expect {
            return Ok(SwapOutcome::Refused { current: self.record.clone() });
        }
        self.record.check_successor(&next).map_err(|e| format!("the arbiter was given an unlawful record: {e}"))?;
        self.record = next;
        Ok(SwapOutcome::Committed)
    }
}
