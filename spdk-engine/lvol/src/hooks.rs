//! What the owner of the data path does when the store must change something under running I/O.
//!
//! The store's own data path ([`crate::Lvol::read`] and its like) keeps these rules by itself. An engine whose cores look
//! into a [`crate::Map`] and send I/O to the disk directly implements them across its cores.

use crate::{device::LocalFuture, types::BlobId};

/// Pauses and barriers that the store asks for.
pub trait Hooks {
    /// Stops new I/O of one volume and waits until all of its I/O in flight has ended, requests to the store included
    /// (such as [`crate::Lvol::ensure_allocated`]). The store does not hold anything these need while it waits. I/O that
    /// arrives meanwhile is kept back until [`Hooks::resume`].
    fn quiesce(&self, lvol: BlobId) -> LocalFuture<'_, ()>;

    /// Lets I/O of the volume go on; it must look the map up anew.
    fn resume(&self, lvol: BlobId);

    /// Waits until every I/O, of any volume of this store, has ended that went to the disk by a map lookup made before
    /// this call. It must not wait for requests that the store itself is serving (unmap, write zeroes, allocation): those
    /// may be what waits here.
    fn grace(&self) -> LocalFuture<'_, ()>;
}

/// For users that do all I/O through [`crate::Lvol`].
#[derive(Clone, Copy, Debug, Default)]
pub struct NoHooks;

impl Hooks for NoHooks {
    fn quiesce(&self, _lvol: BlobId) -> LocalFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    fn resume(&self, _lvol: BlobId) {}

    fn grace(&self) -> LocalFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}
