//! One line on standard error that says how far a long run is.
//!
//! On a terminal the line is rewritten every second; elsewhere a line is added every ten seconds. With `--quiet` there
//! is none.

use std::io::{IsTerminal, Write};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use addax_engine::reactor::Core;
use addax_engine::reactor::driver::NANOS_PER_S;

use crate::units::Bytes;
use crate::worker::Live;

/// Seconds between lines where they are not rewritten.
const PLAIN_EVERY_S: u64 = 10;

/// Shows progress until it is dropped.
#[derive(Debug)]
pub struct Progress {
    /// Only here is it held strongly: when it goes, the ticking ends.
    _shown: Option<Rc<Shown>>,
}

#[derive(Debug)]
struct Shown {
    what: String,
    workers: Vec<Arc<Live>>,
    terminal: bool,
}

impl Drop for Shown {
    fn drop(&mut self) {
        if self.terminal {
            // Progress is a courtesy: a closed standard error is no reason to fail.
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

impl Progress {
    /// Begins to show the sum of `workers`.
    #[must_use]
    pub fn start(core: &Core, what: &str, workers: Vec<Arc<Live>>, quiet: bool) -> Self {
        if quiet {
            return Self { _shown: None };
        }
        let shown = Rc::new(Shown { what: what.to_owned(), workers, terminal: std::io::stderr().is_terminal() });
        core.spawn(tick(core.clone(), Rc::downgrade(&shown)));
        Self { _shown: Some(shown) }
    }
}

async fn tick(core: Core, shown: std::rc::Weak<Shown>) {
    let mut before = (0, 0);
    for second in 1_u64.. {
        core.sleep(NANOS_PER_S).await;
        let Some(shown) = shown.upgrade() else { return };
        let now = sum(&shown.workers);
        let every = if shown.terminal { 1 } else { PLAIN_EVERY_S };
        if second.is_multiple_of(every) {
            shown.print(second, (now.0 - before.0) / every, (now.1 - before.1) / every);
            before = now;
        }
    }
}

fn sum(workers: &[Arc<Live>]) -> (u64, u64) {
    workers.iter().fold((0, 0), |(ios, bytes), live| {
        (
            ios + live.read_ios.load(Ordering::Relaxed) + live.write_ios.load(Ordering::Relaxed),
            bytes + live.read_bytes.load(Ordering::Relaxed) + live.write_bytes.load(Ordering::Relaxed),
        )
    })
}

impl Shown {
    fn print(&self, second: u64, iops: u64, bandwidth: u64) {
        let count = self.workers.len().max(1) as u64;
        let percent = self.workers.iter().map(|l| l.progress_ppm.load(Ordering::Relaxed)).sum::<u64>() / count / 10_000;
        let errors: u64 = self.workers.iter().map(|l| l.errors.load(Ordering::Relaxed)).sum();
        let down = self.workers.iter().any(|l| l.down.load(Ordering::Relaxed));
        let errors = if errors > 0 { format!("  {errors} errors") } else { String::new() };
        let down = if down { "  reconnecting" } else { "" };
        let bar: String = (0..20).map(|i| if i < percent / 5 { '#' } else { '.' }).collect();
        let (begin, end) = if self.terminal { ("\r\x1b[K", "") } else { ("", "\n") };
        let bandwidth = Bytes(bandwidth as f64);
        let mut stderr = std::io::stderr().lock();
        let _ = write!(
            stderr,
            "{begin}{} [{bar}] {percent:3} %  {second} s  {iops} IOPS  {bandwidth}/s{errors}{down}{end}",
            self.what
        );
        let _ = stderr.flush();
    }
}
