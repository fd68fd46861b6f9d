//! A short soak: everything that can happen to processes, networks and disks, by a seed, to volumes under a load that judges.
//! `make soak` is the long one.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use e2e::chaos::{Config, run};
use e2e::cluster::Random;

#[test]
fn volumes_come_through_chaos() {
    let seed = Random::seeded().seed();
    let config =
        Config { seed, volumes: 3, mib: 32, rate: 100, round: Duration::from_secs(40), time: Duration::from_secs(60) };
    if let Some(outcome) = run(&config).unwrap() {
        println!("{}", outcome.report());
        assert!(outcome.ios > 0 && outcome.rounds >= 2, "{outcome:?}");
    }
}
