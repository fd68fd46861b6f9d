//! The fallback to plain pages is said once per process. This file has one test because the count is per process.

#![allow(clippy::unwrap_used)]

use std::fmt::{self, Write};
use std::sync::{Arc, Mutex};

use addax_hugepages::{MapPolicy, Region, RegionKind};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Keeps the text of every warning.
#[derive(Default, Clone)]
struct Warnings(Arc<Mutex<Vec<String>>>);

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        write!(self.0, "{}={value:?} ", field.name()).unwrap();
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn the_fallback_is_logged_once_with_its_reason_and_its_price() {
    let warnings = Warnings::default();
    let regions: Vec<Region> = tracing::subscriber::with_default(warnings.clone(), || {
        (0..3).map(|_| Region::map(4 << 20, MapPolicy::default()).unwrap()).collect()
    });
    let fell_back = regions.iter().any(|region| region.kind() == RegionKind::Plain);
    let lines = warnings.0.lock().unwrap();
    assert_eq!(lines.len(), usize::from(fell_back), "{lines:?}");
    for line in lines.iter() {
        for part in ["plain pages", "2 MiB hugepages", "reason=", "TLB"] {
            assert!(line.contains(part), "{part:?} is missing in {line}");
        }
    }
}
