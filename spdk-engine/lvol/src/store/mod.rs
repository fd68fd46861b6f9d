//! A store: one lvolstore on one device.
//!
//! A [`Store`] is a handle; clones of it are the same store. It is loaded by [`Store::load`] or made by
//! [`Store::format`], and ends by [`Store::unload`] or [`Store::destroy`]; dropping the last handle is like a crash: the
//! next load recovers. After an end every method answers [`Error::Unloaded`].

use crate::{
    device::{Device, LocalFuture},
    error::Error,
    hooks::Hooks,
    lvol::Lvol,
    types::*,
};
use std::rc::Rc;
use uuid::Uuid;

/// A loaded lvolstore.
#[derive(Clone)]
pub struct Store {
    inner: Rc<Inner>,
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

pub(crate) struct Inner {}

impl Store {
    /// Reads the super block: whether there is an lvolstore at all. `Ok(None)` when the device holds something else;
    /// [`Error::Damaged`] when it is a blobstore whose super block is damaged.
    pub async fn probe(_device: &Rc<dyn Device>) -> Result<Option<Label>, Error> {
        Err(Error::Unloaded)
    }

    /// Makes a new store; what was on the device is lost. The super block comes last, so that a half-made store is none.
    pub async fn format(
        _device: Rc<dyn Device>,
        _hooks: Rc<dyn Hooks>,
        _options: FormatOptions,
    ) -> Result<Self, Error> {
        Err(Error::Unloaded)
    }

    /// Opens the store on a device. After a dirty stop it is recovered first. `progress` is called now and then.
    ///
    /// Errors: [`Error::NotAStore`], [`Error::Damaged`] (nothing was written then).
    pub async fn load(
        _device: Rc<dyn Device>,
        _hooks: Rc<dyn Hooks>,
        _options: LoadOptions,
        _find: FindExternal<'_>,
        _progress: &dyn Fn(LoadProgress),
    ) -> Result<(Self, LoadReport), Error> {
        Err(Error::Unloaded)
    }

    /// Ends the store in order: waits for operations and I/O in flight, writes the masks and marks the store clean.
    pub async fn unload(&self) -> Result<(), Error> {
        Err(Error::Unloaded)
    }

    /// Ends the store at once without a write, as when the device was removed.
    pub fn abandon(&self) {}

    /// Deletes the store with all its volumes. The device holds none afterwards.
    pub async fn destroy(&self) -> Result<(), Error> {
        Err(Error::Unloaded)
    }

    /// Takes the present size of the device into use, without interruption.
    ///
    /// Errors: [`Error::NoSpace`] when the room kept for the cluster mask is too small. A device that did not grow is no
    /// error.
    pub async fn grow(&self) -> Result<(), Error> {
        Err(Error::Unloaded)
    }

    /// The device that the store is on.
    pub fn device(&self) -> Rc<dyn Device> {
        unreachable!("{}", Rc::as_ptr(&self.inner) as usize)
    }

    /// What the store is.
    pub fn info(&self) -> StoreInfo {
        unreachable!()
    }

    /// Gives the store another name.
    pub async fn rename(&self, _name: &str) -> Result<(), Error> {
        Err(Error::Unloaded)
    }

    /// All volumes, in the order of their blob ids.
    pub fn lvols(&self) -> Vec<Lvol> {
        Vec::new()
    }

    /// The volume with this blob id.
    pub fn lvol(&self, _id: BlobId) -> Option<Lvol> {
        None
    }

    /// The volume with this name.
    pub fn lvol_by_name(&self, _name: &str) -> Option<Lvol> {
        None
    }

    /// The volume with this UUID.
    pub fn lvol_by_uuid(&self, _uuid: Uuid) -> Option<Lvol> {
        None
    }

    /// Makes a volume. A thick one has all its clusters at once, reading as zeroes.
    ///
    /// Errors: [`Error::Exists`], [`Error::Invalid`], [`Error::NoSpace`].
    pub async fn create(&self, _options: CreateOptions) -> Result<Lvol, Error> {
        Err(Error::Unloaded)
    }

    /// Makes a clone of an external device: a thin volume of `size_bytes` that shows that device where it was not
    /// written. `external_id` is the UUID of the device, as text; `external` the device itself.
    ///
    /// Errors: [`Error::Exists`]; [`Error::Invalid`] when the size is not a multiple of the cluster size.
    pub async fn clone_external(
        &self,
        _external_id: &str,
        _size_bytes: u64,
        _external: Option<Rc<dyn Device>>,
        _name: &str,
        _uuid: Uuid,
    ) -> Result<Lvol, Error> {
        Err(Error::Unloaded)
    }

    /// An external device appeared: every volume that waits for it can be used again. Returns those volumes.
    pub async fn attach_external(&self, _external_id: &str, _device: Rc<dyn Device>) -> Vec<Lvol> {
        Vec::new()
    }

    /// An external device is being removed: the volumes that need it become degraded. Returns them.
    pub fn detach_external(&self, _external_id: &str) -> Vec<Lvol> {
        Vec::new()
    }
}
