//! The registry of block devices: names, claims, and who has what open. Lives on the control core.
//!
//! *Invariants.* Names, aliases and UUIDs are unique. A device leaves the registry only after every opener was told
//! ([`BdevEvent::Removing`]) and has closed its [`Desc`]; until then it refuses new openers. All claims of a device are
//! of one kind (see [`Access`]); a claimed device is opened by others for reading only.
//!
//! *When things fail.* An opener that never closes keeps an unregister waiting; [`Registry::unregister`] gives up
//! waiting after [`UNREGISTER_DEADLINE_NS`], says so and removes the name, so that a control call cannot hang.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::rc::{Rc, Weak};
use std::sync::{Arc, Mutex, PoisonError};

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

/// What an opener wants to do. A claim names the module that makes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read and write it beside other openers.
    Shared,
    /// Only read it, whoever else does what.
    ReadOnly,
    /// Be its only user (a virtual device over it): SPDK's claim `exclusive_write`.
    Exclusive(&'static str),
    /// Be its only writer, others may read it: SPDK's claim `read_many_write_one`.
    WriteOne(&'static str),
    /// Keep everybody from writing it; several may claim so: SPDK's claim `read_many_write_none`.
    WriteNone(&'static str),
}

impl Access {
    /// The module that claims by it, and SPDK's name of the claim.
    #[must_use]
    pub fn claim(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Shared | Self::ReadOnly => None,
            Self::Exclusive(module) => Some((module, "exclusive_write")),
            Self::WriteOne(module) => Some((module, "read_many_write_one")),
            Self::WriteNone(module) => Some((module, "read_many_write_none")),
        }
    }

    /// Whether it may be granted beside `other`, which is held already.
    fn agrees_with(self, other: Self) -> bool {
        match (self, other) {
            (Self::ReadOnly, _) | (_, Self::ReadOnly) | (Self::Shared, Self::Shared) => true,
            (Self::WriteNone(_), Self::WriteNone(_)) => true,
            // Who has it open for writing from before an exclusive claim goes on; it is told of nothing.
            (Self::Exclusive(_), Self::Shared) => true,
            _ => false,
        }
    }
}

/// A registered device, as any core may hold it.
#[derive(Debug)]
pub struct Entry {
    pub bdev: Arc<dyn Bdev>,
    pub stats: Arc<IoStats>,
    /// Other names; the UUID is one unless the name already is it. Changed by [`Registry::rename_alias`] only.
    aliases: Mutex<Vec<String>>,
    /// The module that made it.
    pub module: &'static str,
}

impl Entry {
    /// Its other names.
    #[must_use]
    pub fn aliases(&self) -> Vec<String> {
        self.aliases.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether it is found by `name`.
    #[must_use]
    pub fn is_called(&self, name: &str) -> bool {
        self.bdev.info().name == name || self.aliases().iter().any(|a| a == name)
    }

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
    /// Names of devices by their aliases.
    by_alias: RefCell<HashMap<String, String>>,
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
        Rc::new(Self {
            slots: RefCell::default(),
            by_alias: RefCell::default(),
            next: Cell::new(0),
            watchers: RefCell::default(),
        })
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
        let to_name = aliases.iter().map(|alias| (alias.clone(), info.name.clone()));
        self.by_alias.borrow_mut().extend(to_name);
        let entry = Arc::new(Entry { bdev, stats: Arc::default(), aliases: Mutex::new(aliases), module });
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
        let by_alias = self.by_alias.borrow();
        let lower = || name.parse::<Uuid>().ok().map(|u| u.to_string());
        let key = by_alias.get(name).cloned().or_else(|| {
            let lower = lower()?;
            by_alias.get(&lower).cloned().or_else(|| slots.contains_key(&lower).then_some(lower))
        })?;
        slots.get(&key).map(|s| Arc::clone(&s.entry))
    }

    /// Gives a device another name in place of the alias `from`.
    ///
    /// # Errors
    /// [`BdevError::Exists`] when another device is called `to`, [`BdevError::NotFound`] when there is no such alias.
    pub fn rename_alias(&self, from: &str, to: &str) -> Result<(), BdevError> {
        if self.find(to).is_some() {
            return Err(BdevError::Exists(to.to_owned()));
        }
        let entry = self.find(from).ok_or_else(|| BdevError::NotFound(from.to_owned()))?;
        let mut aliases = entry.aliases.lock().unwrap_or_else(PoisonError::into_inner);
        let alias = aliases.iter_mut().find(|a| *a == from).ok_or_else(|| BdevError::NotFound(from.to_owned()))?;
        *alias = to.to_owned();
        let mut by_alias = self.by_alias.borrow_mut();
        if let Some(name) = by_alias.remove(from) {
            by_alias.insert(to.to_owned(), name);
        }
        Ok(())
    }

    /// All devices, oldest first.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<Entry>> {
        let slots = self.slots.borrow();
        let mut all: Vec<_> = slots.values().map(|s| (s.sequence, Arc::clone(&s.entry))).collect();
        all.sort_by_key(|(sequence, _)| *sequence);
        all.into_iter().map(|(_, entry)| entry).collect()
    }

    /// The module that claims the device, if one does.
    #[must_use]
    pub fn claimed_by(&self, name: &str) -> Option<&'static str> {
        self.claim(name).map(|(module, _)| module)
    }

    /// The module that claims the device and SPDK's name of the claim.
    #[must_use]
    pub fn claim(&self, name: &str) -> Option<(&'static str, &'static str)> {
        self.slots.borrow().get(name)?.openers.iter().find_map(|(_, access, _)| access.claim())
    }

    /// Whether anybody has the device open.
    #[must_use]
    pub fn is_open(&self, name: &str) -> bool {
        self.slots.borrow().get(name).is_some_and(|s| !s.openers.is_empty())
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
        let mut slots = self.slots.borrow_mut();
        let slot = slots.get_mut(&key).filter(|s| !s.removing).ok_or_else(|| BdevError::NotFound(name.to_owned()))?;
        if let Some((_, held, _)) = slot.openers.iter().find(|(_, held, _)| !access.agrees_with(*held)) {
            let by = held.claim().map_or("a writer", |(module, _)| module);
            return Err(BdevError::Claimed { name: key, by });
        }
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
        let mut by_alias = self.by_alias.borrow_mut();
        for alias in entry.aliases() {
            by_alias.remove(&alias);
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bdev::null::Null;
    use crate::bdev::{BdevInfo, IoTypes};

    fn registry_with(names: &[(&str, &[&str])]) -> Rc<Registry> {
        let registry = Registry::new();
        for (name, aliases) in names {
            let info = BdevInfo {
                name: (*name).to_owned(),
                product_name: "",
                uuid: Uuid::new_v4(),
                block_size: 512,
                num_blocks: 8,
                physical_block_size: 512,
                optimal_io_boundary: 0,
                io_types: IoTypes::READ_WRITE,
                write_cache: false,
            };
            let aliases = aliases.iter().map(|a| (*a).to_owned()).collect();
            registry.register(Arc::new(Null::new(info).unwrap()), aliases, "null").unwrap();
        }
        registry
    }

    #[test]
    fn claims_go_together_as_their_kinds_say() {
        let kinds =
            [Access::Shared, Access::ReadOnly, Access::Exclusive("a"), Access::WriteOne("a"), Access::WriteNone("a")];
        // One row per access held, one column per access asked for.
        let allowed = [
            [true, true, true, false, false],
            [true, true, true, true, true],
            [false, true, false, false, false],
            [false, true, false, false, false],
            [false, true, false, false, true],
        ];
        for (held, row) in kinds.iter().zip(allowed) {
            for (asked, allowed) in kinds.iter().zip(row) {
                let registry = registry_with(&[("n", &[])]);
                let first = registry.open("n", *held, |_| {}).unwrap();
                assert_eq!(registry.open("n", *asked, |_| {}).is_ok(), allowed, "{held:?} then {asked:?}");
                drop(first);
                assert!(registry.open("n", *asked, |_| {}).is_ok(), "{asked:?} alone");
            }
        }
    }

    #[test]
    fn a_device_is_found_by_name_alias_and_uuid_and_by_its_new_alias_after_a_rename() {
        let registry = registry_with(&[("n", &["s/one"]), ("m", &["s/two"])]);
        let uuid = registry.find("n").unwrap().bdev.info().uuid;
        let name_of = |name: &str| registry.find(name).map(|e| e.bdev.info().name);
        for name in ["n", "s/one", &uuid.to_string(), &uuid.to_string().to_uppercase()] {
            assert_eq!(name_of(name).as_deref(), Some("n"), "{name}");
        }
        assert_eq!(registry.rename_alias("s/one", "s/two"), Err(BdevError::Exists("s/two".into())));
        registry.rename_alias("s/one", "s/three").unwrap();
        assert_eq!(name_of("s/one"), None);
        assert_eq!(name_of("s/three").as_deref(), Some("n"));
        assert!(registry.find("n").unwrap().is_called("s/three"));
    }
}
