//! The opener's decisions: how long to wait for an older engine's lease, and which sets to go on with (rules 15, 16).

use std::collections::BTreeSet;

use super::{OpenAction, OpenError, OpenEvent, Opener, Phase};
use crate::config::{Config, ReplicaId};
use crate::events::Nanos;

impl Opener {
    /// When an older engine's reads end (rule 16); `None` when none can be answered any more.
    pub(super) fn lease_end(&self, promoted: usize) -> Option<Nanos> {
        let members = self.config.as_ref().map_or(0, |c| c.in_sync.len());
        if promoted == members || self.was_clean || self.follows_dead || self.skips_lease() {
            return None;
        }
        let wait = self.params.options.lease_ns.saturating_add(self.params.waits.lease_margin_ns);
        self.first_promoted_at.map(|at| at.saturating_add(wait))
    }

    /// Rule 16 broken on purpose: the old engine's lease is not waited for.
    fn skips_lease(&self) -> bool {
        #[cfg(feature = "planted-bugs")]
        {
            self.params.options.bug == Some(crate::PlantedBug::Rule16NoWait)
        }
        #[cfg(not(feature = "planted-bugs"))]
        {
            false
        }
    }

    /// Chooses the sets from what was promoted and swaps them in (rule 15).
    pub(super) fn decide(&mut self, out: &mut Vec<OpenAction>) {
        let Some(base) = self.config.clone() else { return };
        let (promoted, dropped) = self.promoted_of(&base);
        let mut next = base.clone();
        if !self.was_clean {
            let sources = self.choose_sources(&base, promoted.clone(), out);
            let unread = self.unread(&promoted);
            if self.hosts_must_detach && !unread.is_empty() {
                return self.fail(OpenError::Unread(unread), out);
            }
            next.rebuilding.extend(promoted.difference(&sources).cloned());
            next.in_sync = sources;
        } else {
            next.in_sync = promoted;
        }
        if self.skips_drop() {
            next = base.clone();
        }
        if next.in_sync == base.in_sync && next.rebuilding == base.rebuilding {
            out.push(OpenAction::Event(OpenEvent::Decided { config: next, dropped }));
            self.ready(out);
            return;
        }
        next.config_number = base.config_number.next();
        out.push(OpenAction::Event(OpenEvent::Decided { config: next.clone(), dropped }));
        let cas = self.send_cas(base, next, out);
        self.phase = Phase::Deciding(cas);
    }

    /// Rule 15 broken on purpose: members that were not promoted stay in `S`.
    fn skips_drop(&self) -> bool {
        #[cfg(feature = "planted-bugs")]
        {
            self.params.options.bug == Some(crate::PlantedBug::Rule15OpenKeepsUnpromoted)
        }
        #[cfg(not(feature = "planted-bugs"))]
        {
            false
        }
    }

    /// Members of `S` that were promoted, and those that were not.
    pub(super) fn promoted_of(&self, config: &Config) -> (BTreeSet<ReplicaId>, BTreeSet<ReplicaId>) {
        let is_promoted = |r: &ReplicaId| self.candidates.get(r).is_some_and(|c| c.promoted);
        config.in_sync.iter().cloned().partition(is_promoted)
    }
}
