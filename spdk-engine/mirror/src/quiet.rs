//! The short way through the core while nothing but host I/O happens.
//!
//! *What it is.* Most inputs are host commands and completions that succeed, while every member is connected, no swap is
//! under way, nothing is copied and no deadline has come. Then nothing of what [`Core::run`] looks at after each input
//! can have changed. At the end of each full pass [`Core::become_quiet`] finds out whether that is so, and until when;
//! until then such inputs are handled without it.
//!
//! *Invariants.* Being quiet is only ever an answer of a full pass about the state it left. Whatever is not a host
//! command or a success ends it, and so does each flag by which host I/O can ask for more than its own answer
//! ([`Core::asks_for_more`]).

use crate::core::{Core, Life, LockOwner};
use crate::events::{Action, Input, Nanos, Payload};
use crate::legs::Role;
use crate::quick::Answered;

impl Core {
    /// Handles a host command or a success in the quiet state; gives anything else back.
    pub(crate) fn apply_quiet(&mut self, input: Input, out: &mut Vec<Action>) -> Option<Input> {
        if self.now >= self.quiet_until {
            return Some(input);
        }
        if self.apply_quick(&input, out) {
            return None;
        }
        match input {
            Input::Host { id, op, lba, blocks } => self.apply_host(id, op, lba, blocks, out),
            Input::LegDone { leg, io, result: Ok(()) } => self.apply_leg_done(self.now, leg, io, Ok(()), out),
            other => {
                self.quiet_until = 0;
                return Some(other);
            }
        }
        while let Some(owner) = self.ready.pop_front() {
            match owner {
                LockOwner::Host(slot) => self.start_host(slot, out),
                // There are none in the quiet state; the full pass knows what to do with them.
                other => {
                    self.ready.push_front(other);
                    break;
                }
            }
        }
        if self.asks_for_more() {
            self.quiet_until = 0;
            self.run(self.now, out);
            self.arm(self.now, out);
        }
        None
    }

    /// Handles the usual case (see [`crate::quick`]); false when it is not.
    fn apply_quick(&mut self, input: &Input, out: &mut Vec<Action>) -> bool {
        match *input {
            Input::Host { id, op, lba, blocks } => {
                let Some(sent) = self.quick_host(self.now, id, op, lba, blocks) else { return false };
                let payload = Payload::Host(id);
                out.extend(sent.ios().map(|(leg, io)| Action::LegIo { leg, io, op, lba, blocks, payload }));
            }
            Input::LegDone { leg, io, result: Ok(()) } => match self.quick_done(self.now, leg, io, Nanos::MAX) {
                Some(Answered::Host(id)) => out.push(Action::HostDone { id, result: Ok(()) }),
                Some(Answered::Waits) => {}
                None => return false,
            },
            _ => return false,
        }
        true
    }

    /// Host I/O left something for the full pass.
    fn asks_for_more(&self) -> bool {
        self.rescan
            || self.meta.pump
            || !self.ready.is_empty()
            || !self.repairs.is_idle()
            || !self.marks.is_quiet()
            || self.lease.wants_pump()
    }

    /// Decides whether the state that a full pass left is a quiet one, and until when; `next` is the next deadline.
    pub(crate) fn become_quiet(&mut self, next: Option<Nanos>) {
        let undisturbed = self.life == Life::Running
            && self.gate.pending.is_none()
            && self.barrier.is_none()
            && self.snapshot.is_none()
            && !(self.frozen || self.suspect || self.all_lost)
            && self.abandoned.is_empty()
            && self.inherited_left() == 0
            && self.regions.is_idle()
            && self.copies.has_no_jobs()
            && self.meta.carried
            && !self.asks_for_more()
            && self.legs.iter().all(|l| l.role == Role::Member && l.is_up() && l.eject.is_none() && !l.unequal);
        self.quiet_until = if undisturbed { next.unwrap_or(Nanos::MAX) } else { 0 };
    }
}
