//! Runs the checker and tells what came out, with counterexamples in the names of their first state.
//!
//! *When things fail.* A violated property comes with the shortest way to it that the search met. The states of that
//! way are in normal form, where replicas change names from step to step; [`story`] walks it again without renaming.

use std::fmt::Write as _;

use stateright::{Checker, HasDiscoveries, Model};

use crate::model::{Mirror, Seen};
use crate::state::State;
use crate::steps::Step;

/// What a check found.
#[derive(Debug)]
pub struct Report {
    /// Different states in normal form.
    pub states: usize,
    /// Steps between them.
    pub steps: usize,
    /// Longest shortest way from the first state.
    pub depth: usize,
    /// Violated properties, each with its story.
    pub violations: Vec<(&'static str, String)>,
    /// Things of [`Seen`] that never happened.
    pub unseen: Vec<Seen>,
}

/// Looks at every state within the model's bounds, or stops at the first violation.
#[must_use]
pub fn check(model: Mirror) -> Report {
    let coverage = model.coverage.clone();
    let teller = model.clone();
    let checker = model.checker().finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let tell = |(name, path): (&'static str, stateright::Path<State, Step>)| {
        let states: Vec<State> = path.into_states();
        (name, story(&teller, &states))
    };
    Report {
        states: checker.unique_state_count(),
        steps: checker.state_count(),
        depth: checker.max_depth(),
        violations: checker.discoveries().into_iter().map(tell).collect(),
        unseen: coverage.unseen(),
    }
}

/// A way through states in normal form, told with names that stay.
#[must_use]
pub fn story(model: &Mirror, states: &[State]) -> String {
    let mut state = model.first();
    let mut told = format!("      {}\n", describe(&state));
    for wanted in states.iter().skip(1) {
        let mut found = None;
        Step::each(&state, &mut |step| {
            if found.is_none() {
                found = model.step(&state, step).filter(|next| next.normal() == *wanted).map(|next| (step, next));
            }
        });
        let Some((step, next)) = found else {
            let _ = writeln!(told, "the way cannot be walked again");
            return told;
        };
        state = next;
        let _ = writeln!(told, "{step:?}\n      {}", describe(&state));
    }
    if let Some(violation) = state.violation {
        let _ = writeln!(told, "violated: {violation:?}");
    }
    told
}

fn describe(state: &State) -> String {
    let mut text = format!(
        "record g{} e{} k{} S{:?} R{:?}",
        state.record.version.epoch,
        state.record.version.owner,
        state.record.version.number,
        state.record.in_sync,
        state.record.rebuilding
    );
    let _ = write!(
        text,
        " queue {} acknowledged {} floor {}",
        state.queue.iter().flatten().count(),
        state.acknowledged,
        state.floor
    );
    for (name, replica) in ["A", "B", "C"].into_iter().zip(&state.replicas) {
        let _ = write!(
            text,
            " | {name}={} disk {} g{} session {}{}",
            replica.data,
            replica.disk,
            replica.promoted,
            replica.session,
            if replica.bit { " bit" } else { "" }
        );
    }
    for (index, engine) in state.engines.iter().enumerate().filter(|(_, e)| e.instance != 0) {
        let _ = write!(
            text,
            "\n      engine {index}: e{} {:?} g{} k{} S{:?} R{:?} {:?} need {:?} done {:?} fresh {:?}",
            engine.instance,
            engine.phase,
            engine.config.version.epoch,
            engine.config.version.number,
            engine.config.in_sync,
            engine.config.rebuilding,
            engine.job,
            engine.need,
            engine.done,
            engine.fresh
        );
        if let Some(pending) = engine.pending {
            let _ =
                write!(text, " wants {:?} S{:?} R{:?}", pending.reason, pending.next.in_sync, pending.next.rebuilding);
        }
    }
    text
}
