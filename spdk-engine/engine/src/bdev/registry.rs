//! The registry of block devices: names, claims, and who has what open. Lives on the control core.
//!
//! *Invariants.* Names, aliases and UUIDs are unique. A device leaves the registry only after every opener was told
//! ([`BdevEvent::Removing`]) and has closed its [`Desc`]; until then it refuses new openers. At most one opener holds
//! [`Access::Exclusive`]; an exclusive claim keeps others from opening for writing.
//!
//! *When things fail.* An opener that never closes keeps an unregister waiting; [`Registry::unregister`] gives up
//! waiting after [`UNREGISTER_DEADLINE_NS`], says so and removes the name, so that a control call cannot hang.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use uuid::Uuid;

use super::{Bdev, BdevError, Chan, IoStats};
use crate::reactor::Core;
use crate::reactor::driver::{NANOS_PER_MS, Nanos};

/// How long an unregister waits for openers to let go.
pub const UNREGISTER_DEADLINE_NS: Nanos = 30_000 * NANOS_PER_MS;

/// What an opener is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BdevEvent {
    /// The device goes away: finish, then close the descriptor.
    Removing,
    /// The number of blocks has changed.
    Resized,
}

/// What an opener wants to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Use it beside other openers.
    Shared,
    /// Be its only user (a virtual device over it), named by the module.
    Exclusive(&'static str),
}

/// A registered device, as any core may hold it.
#[derive(Debug)]
pub struct Entry {
    pub bdev: Arc<dyn Bdev>,
    pub stats: Arc<IoStats>,
    /// Other names; the UUID is one unless the name already is it.
    pub aliases: Vec<String>,
    /// The module that made it.
    pub module: &'static str,
}

impl Entry {
    /// Opens the device on a core.
    pub fn open(&self, core: &Core) -> Result<Chan, BdevError> {
        Chan::open(core, &self.bdev, &self.stats)
    }
}

type Listener = Rc<dyn Fn(BdevEvent)>;

struct Slot {
    entry: Arc<Entry>,
    openers: Vec<(u64, Access, Listener)>,
    removing: bool,
    waiting: Vec<futures::channel::oneshot::Sender<()>>,
    sequence: u64,
}

/// All block devices, by name.
pub struct Registry {
    slots: RefCell<BTreeMap<String, Slot>>,
    next: Cell<u64>,
    watchers: RefCell<Vec<Rc<dyn Fn(&Arc<Entry>)>>>,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.slots.borrow().keys()).finish()
    }
}

/// An open device. Dropping it closes it.
pub struct Desc {
    entry: Arc<Entry>,
    id: u64,
    registry: Weak<Registry>,
}

impl std::fmt::Debug for Desc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desc").field("bdev", &self.entry.bdev.info().name).finish()
    }
}

impl Desc {
    /// The device.
    #[must_use]
    pub fn entry(&self) -> &Arc<Entry> {
        &self.entry
    }
}

impl Drop for Desc {
    fn drop(&mut self) {
        if let Some(registry) = self.registry.upgrade() {
            registry.closed(&self.entry, self.id);
        }
    }
}

impl Registry {
    /// An empty registry.
    #[must_use]
    pub fn new() -> Rc<Self> {
        Rc::new(Self { slots: RefCell::default(), next: Cell::new(0), watchers: RefCell::default() })
    }

    /// Adds a device. `aliases` need not contain the UUID.
    pub fn register(
        &self,
        bdev: Arc<dyn Bdev>,
        mut aliases: Vec<String>,
        module: &'static str,
    ) -> Result<Arc<Entry>, BdevError> {
        let info = bdev.info();
        check_name(&info.name)?;
        let uuid = info.uuid.to_string();
        if info.name != uuid && !aliases.contains(&uuid) {
            aliases.push(uuid);
        }
        for name in aliases.iter().chain([&info.name]) {
            if self.find(name).is_some() {
                return Err(BdevError::Exists(name.clone()));
            }
        }
        let entry = Arc::new(Entry { bdev, stats: Arc::default(), aliases, module });
        self.next.set(self.next.get() + 1);
        let slot = Slot {
            entry: Arc::clone(&entry),
            openers: Vec::new(),
            removing: false,
            waiting: Vec::new(),
            sequence: self.next.get(),
        };
        self.slots.borrow_mut().insert(info.name.clone(), slot);
        tracing::info!(bdev = info.name, product = info.product_name, "block device registered");
        let watchers = self.watchers.borrow().clone();
        for watcher in watchers {
            watcher(&entry);
        }
        Ok(entry)
    }

    /// The device of that name, alias or UUID.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<Arc<Entry>> {
        let slots = self.slots.borrow();
        if let Some(slot) = slots.get(name) {
            return Some(Arc::clone(&slot.entry));
        }
        let lower = name.parse::<Uuid>().map(|u| u.to_string()).ok();
        let matches = |s: &&Slot| s.entry.aliases.iter().any(|a| a == name || Some(a) == lower.as_ref());
        slots.values().find(matches).map(|s| Arc::clone(&s.entry))
    }

    /// All devices, oldest first.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<Entry>> {
        let slots = self.slots.borrow();
        let mut all: Vec<_> = slots.values().map(|s| (s.sequence, Arc::clone(&s.entry))).collect();
        all.sort_by_key(|(sequence, _)| *sequence);
        all.into_iter().map(|(_, entry)| entry).collect()
    }

    /// The module that claims the device for itself, if one does.
    #[must_use]
    pub fn claimed_by(&self, name: &str) -> Option<&'static str> {
        let slots = self.slots.borrow();
        slots.get(name)?.openers.iter().find_map(|(_, access, _)| match access {
            Access::Exclusive(module) => Some(*module),
            Access::Shared => None,
        })
    }

    /// Opens a device; `listener` is called on the control core.
    pub fn open(
        self: &Rc<Self>,
        name: &str,
        access: Access,
        listener: impl Fn(BdevEvent) + 'static,
    ) -> Result<Desc, BdevError> {
        let entry = self.find(name).ok_or_else(|| BdevError::NotFound(name.to_owned()))?;
        let key = entry.bdev.info().name;
        if let (Access::Exclusive(_), Some(by)) = (access, self.claimed_by(&key)) {
            return Err(BdevError::Claimed { name: key, by });
        }
        if let (Access::Shared, Some(by)) = (access, self.claimed_by(&key)) {
            return Err(BdevError::Claimed { name: key, by });
        }
        let mut slots = self.slots.borrow_mut();
        let slot = slots.get_mut(&key).filter(|s| !s.removing).ok_or_else(|| BdevError::NotFound(name.to_owned()))?;
        self.next.set(self.next.get() + 1);
        let id = self.next.get();
        slot.openers.push((id, access, Rc::new(listener)));
        Ok(Desc { entry, id, registry: Rc::downgrade(self) })
    }

    /// Calls `watcher` for every device registered from now on.
    pub fn watch(&self, watcher: impl Fn(&Arc<Entry>) + 'static) {
        self.watchers.borrow_mut().push(Rc::new(watcher));
    }

    /// Tells the openers that the device has another size.
    pub fn resized(&self, name: &str) {
        self.tell(name, BdevEvent::Resized);
    }

    fn tell(&self, name: &str, event: BdevEvent) {
        let listeners: Vec<Listener> = {
            let slots = self.slots.borrow();
            slots.get(name).map(|s| s.openers.iter().map(|(_, _, l)| Rc::clone(l)).collect()).unwrap_or_default()
        };
        for listener in listeners {
            listener(event);
        }
    }

    /// Takes a device out: openers are told and awaited.
    pub async fn unregister(&self, core: &Core, name: &str) -> Result<(), BdevError> {
        let entry = self.find(name).ok_or_else(|| BdevError::NotFound(name.to_owned()))?;
        let key = entry.bdev.info().name;
        let wait = {
            let mut slots = self.slots.borrow_mut();
            let slot = slots.get_mut(&key).ok_or_else(|| BdevError::NotFound(name.to_owned()))?;
            slot.removing = true;
            (!slot.openers.is_empty()).then(|| {
                let (sender, receiver) = futures::channel::oneshot::channel();
                slot.waiting.push(sender);
                receiver
            })
        };
        if let Some(wait) = wait {
            self.tell(&key, BdevEvent::Removing);
            if core.timeout(UNREGISTER_DEADLINE_NS, wait).await.is_none() {
                tracing::error!(bdev = key, "openers did not let go in time; the device is removed under them");
            }
        }
        self.slots.borrow_mut().remove(&key);
        Ok(())
    }

    fn closed(&self, entry: &Arc<Entry>, id: u64) {
        let waiting = {
            let mut slots = self.slots.borrow_mut();
            let name = entry.bdev.info().name;
            let Some(slot) = slots.get_mut(&name).filter(|s| Arc::ptr_eq(&s.entry, entry)) else { return };
            slot.openers.retain(|(opener, _, _)| *opener != id);
            if slot.openers.is_empty() { std::mem::take(&mut slot.waiting) } else { Vec::new() }
        };
        for sender in waiting {
            let _ = sender.send(());
        }
    }
}

/// Longest device name, in bytes.
pub const NAME_BYTES_MAX: usize = 255;

fn check_name(name: &str) -> Result<(), BdevError> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return Err(BdevError::Invalid { field: "name", value: name.to_owned(), allowed: "1 to 255 bytes" });
    }
    Ok(())
}
