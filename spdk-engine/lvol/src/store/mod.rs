//! A store: one lvolstore on one device.
//!
//! A [`Store`] is a handle; clones of it are the same store. It is loaded by [`Store::load`] or made by
//! [`Store::format`], and ends by [`Store::unload`] or [`Store::destroy`]; dropping the last handle is like a crash: the
//! next load recovers. After an end every method answers [`Error::Unloaded`].

mod disk;
mod format;
mod grow;
mod inner;

pub(crate) use disk::{READS, check_blocks, read_mask, read_pages, read_super, write_super};
pub(crate) use inner::{IN_FLIGHT, Inner, Phase, State};

use crate::{
    device::{Device, LocalFuture},
    error::Error,
    hooks::Hooks,
    load,
    lvol::Lvol,
    map::External,
    types::*,
};
use blobstore_format::{
    SuperBlock, lvs,
    metadata::Parent,
    superblock::{BsType, SuperError},
};
use std::{collections::HashSet, rc::Rc};
use uuid::Uuid;

/// A loaded lvolstore.
#[derive(Clone)]
pub struct Store {
    pub(crate) inner: Rc<Inner>,
}

/// What a probe of a device found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    /// Whether the store was unloaded in order.
    pub clean: bool,
    /// Bytes of a cluster.
    pub cluster_size: u32,
    /// Bytes of the device as recorded (0 in old stores).
    pub size: u64,
}

/// Finds the external device with an identity (the UUID of a bdev, as text), or `None` while it is absent.
pub type FindExternal<'a> = &'a dyn Fn(&str) -> LocalFuture<'a, Option<Rc<dyn Device>>>;

/// Finds no external device.
pub fn no_external<'a>() -> FindExternal<'a> {
    &|_| Box::pin(std::future::ready(None))
}

impl Store {
    /// Reads the super block: whether there is an lvolstore at all. `Ok(None)` when the device holds something else;
    /// [`Error::Damaged`] when it is a blobstore whose super block is damaged.
    pub async fn probe(device: &Rc<dyn Device>) -> Result<Option<Label>, Error> {
        match read_label(&**device).await {
            Ok(sb) => Ok(Some(Label { clean: sb.clean != 0, cluster_size: sb.cluster_size, size: sb.size })),
            Err(Error::NotAStore(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Opens the store on a device. After a dirty stop it is recovered first. `progress` is called now and then.
    ///
    /// Every external device that a volume needs is asked for by `find`; volumes whose device is absent are degraded until
    /// [`Store::attach_external`].
    ///
    /// Errors: [`Error::NotAStore`], [`Error::Damaged`] (nothing was written then).
    pub async fn load(
        device: Rc<dyn Device>,
        hooks: Rc<dyn Hooks>,
        options: LoadOptions,
        find: FindExternal<'_>,
        progress: &dyn Fn(LoadProgress),
    ) -> Result<(Self, LoadReport), Error> {
        let (inner, report) = load::load(device, hooks, options, progress).await?;
        let store = Self { inner: Rc::new(inner) };
        for id in store.missing_externals() {
            if let Some(device) = find(&id).await {
                store.attach_external(&id, device).await;
            }
        }
        Ok((store, report))
    }

    /// Ends the store in order: waits for operations and I/O in flight, writes the masks and marks the store clean.
    /// Where the outcome of an earlier write is unknown it is left to be recovered by the next load instead.
    ///
    /// After an error the store has ended all the same; it will be recovered.
    pub async fn unload(&self) -> Result<(), Error> {
        self.stop().await?;
        let (dirty, uncertain) = {
            let state = self.inner.state.borrow();
            (state.dirty, state.uncertain)
        };
        let result = match (dirty, uncertain) {
            (false, _) => Ok(()),
            (true, true) => self.inner.flush().await,
            (true, false) => self.inner.write_clean().await,
        };
        self.abandon();
        result
    }

    /// Ends the store at once without a write, as when the device was removed.
    pub fn abandon(&self) {
        self.inner.phase.set(Phase::Ended);
    }

    /// Deletes the store with all its volumes. The device holds none afterwards; the space of the volumes is cleared.
    pub async fn destroy(&self) -> Result<(), Error> {
        self.stop().await?;
        let result = self.wipe().await;
        self.abandon();
        result
    }

    /// No operation and no I/O begins from now on; those in flight end.
    async fn stop(&self) -> Result<(), Error> {
        self.inner.check_loaded()?;
        self.inner.phase.set(Phase::Unloading);
        let _none = self.inner.operations.close().await;
        let blobs: Vec<_> = self.inner.state.borrow().blobs.values().cloned().collect();
        for blob in blobs {
            let _quiet = blob.io.close().await;
        }
        Ok(())
    }

    /// The device that the store is on.
    pub fn device(&self) -> Rc<dyn Device> {
        self.inner.device.clone()
    }

    /// What the store is.
    pub fn info(&self) -> StoreInfo {
        let state = self.inner.state.borrow();
        let geometry = &state.geometry;
        StoreInfo {
            uuid: state.uuid,
            name: state.name.clone(),
            cluster_size: geometry.cluster_size,
            io_unit_size: geometry.io_unit_size,
            md_page_size: geometry.md_page_size,
            total_data_clusters: geometry.data_clusters().into(),
            free_clusters: state.clusters.free().into(),
            total_md_pages: geometry.md_len,
            free_md_pages: state.pages.free(),
            max_growable_size: geometry.max_growable_size(),
        }
    }

    /// Gives the store another name. Whether it is unique among stores is the caller's to know.
    pub async fn rename(&self, name: &str) -> Result<(), Error> {
        let value = lvs::short_name(name).map_err(|e| Error::Invalid(e.to_string()))?;
        let blob = self.inner.state.borrow().super_blob.clone();
        let _operation = self.inner.begin(&[&blob])?;
        self.inner.commit_md(&blob, |md| md.set_xattr(lvs::NAME, value)).await?;
        self.inner.state.borrow_mut().name = name.to_owned();
        Ok(())
    }

    /// All volumes, in the order of their blob ids.
    pub fn lvols(&self) -> Vec<Lvol> {
        let state = self.inner.state.borrow();
        state.blobs.values().map(|blob| Lvol::new(&self.inner, blob)).collect()
    }

    /// The volume with this blob id.
    pub fn lvol(&self, id: BlobId) -> Option<Lvol> {
        self.inner.blob(id).map(|blob| Lvol::new(&self.inner, &blob))
    }

    /// The volume with this name.
    pub fn lvol_by_name(&self, name: &str) -> Option<Lvol> {
        let id = self.inner.state.borrow().names.get(name).copied()?;
        self.lvol(id)
    }

    /// The volume with this UUID.
    pub fn lvol_by_uuid(&self, uuid: Uuid) -> Option<Lvol> {
        let id = self.inner.state.borrow().uuids.get(&uuid).copied()?;
        self.lvol(id)
    }

    /// An external device appeared: every volume that waits for it can be used again. Returns those volumes. A device
    /// whose blocks do not divide the store's I/O unit is not taken.
    pub async fn attach_external(&self, external_id: &str, device: Rc<dyn Device>) -> Vec<Lvol> {
        let slot = self.inner.state.borrow().externals.get(external_id).cloned();
        let block = device.block_size();
        let Some(slot) = slot else { return Vec::new() };
        if block == 0 || !self.inner.geometry().io_unit_size.is_multiple_of(block) {
            tracing::warn!(external_id, block, "the blocks of an external device do not divide the store's I/O unit");
            return Vec::new();
        }
        slot.shared.set_size(device.size_bytes());
        let was_absent = slot.device.replace(Some(device)).is_none();
        if was_absent { self.on_external(&slot.shared) } else { Vec::new() }
    }

    /// An external device is being removed: the volumes that need it become degraded. Returns them.
    pub fn detach_external(&self, external_id: &str) -> Vec<Lvol> {
        let slot = self.inner.state.borrow().externals.get(external_id).cloned();
        let Some(slot) = slot.filter(|slot| slot.device.replace(None).is_some()) else { return Vec::new() };
        slot.shared.set_size(0);
        self.on_external(&slot.shared)
    }

    /// The identities of external devices that volumes wait for.
    pub fn missing_externals(&self) -> Vec<String> {
        let state = self.inner.state.borrow();
        let mut ids: Vec<String> = state
            .externals
            .iter()
            .filter(|(_, slot)| slot.device.borrow().is_none())
            .map(|(id, _)| id.clone())
            .collect();
        ids.sort_unstable();
        ids
    }

    /// The volumes whose chain ends in an external device.
    fn on_external(&self, external: &External) -> Vec<Lvol> {
        let state = self.inner.state.borrow();
        let mut found = HashSet::new();
        let mut next: Vec<BlobId> = state
            .blobs
            .values()
            .filter(|blob| {
                let on = |bytes: &Vec<u8>| lvs::name_text(bytes) == external.id();
                matches!(&blob.state.borrow().parent, Parent::External(id) if on(id))
            })
            .map(|blob| blob.id)
            .collect();
        while let Some(id) = next.pop() {
            if found.insert(id)
                && let Some(blob) = state.blobs.get(&id)
            {
                next.extend(&blob.state.borrow().clones);
            }
        }
        state.blobs.values().filter(|blob| found.contains(&blob.id)).map(|b| Lvol::new(&self.inner, b)).collect()
    }
}

/// Reads and checks the super block of an lvolstore.
pub(crate) async fn read_label(device: &dyn Device) -> Result<SuperBlock, Error> {
    let bytes = read_super(device).await?;
    let super_block = SuperBlock::parse(&bytes).map_err(|error| match error {
        SuperError::Signature(_) | SuperError::Short(_) => Error::NotAStore(error.to_string()),
        SuperError::Version(_) | SuperError::Crc { .. } => Error::Damaged(error.to_string()),
    })?;
    if super_block.bstype != BsType::LVOLSTORE {
        return Err(Error::NotAStore(format!("it is a blobstore of the type {:?}", super_block.bstype)));
    }
    Ok(super_block)
}
