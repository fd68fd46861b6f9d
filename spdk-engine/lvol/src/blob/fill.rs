//! What a fresh cluster holds before anything names it: the data that shows at its place, or zeroes.
//!
//! Zeroes are written only where they may be missing. A cluster that was cleared durably since it was last used, as all
//! are after a store was made on a device whose unmap reads as zeroes, costs nothing here.

use super::{Blob, Inner};
use crate::{
    alloc::Taken,
    device::Device,
    error::Error,
    map::Place,
    planted::{self, Bug},
    store::IN_FLIGHT,
    sync::all,
};
use std::{cell::Cell, rc::Rc};

/// What a fresh cluster is to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fill {
    /// What shows through the hole.
    Shown,
    /// Zeroes.
    Zeroes,
}

impl Inner {
    /// Fills clusters taken for holes of a blob. Answers whether anything was written that has to be flushed before the
    /// clusters are named.
    pub(crate) async fn fill(&self, blob: &Blob, clusters: &[(u64, Taken)], fill: Fill) -> Result<bool, Error> {
        let wrote = Cell::new(false);
        let mut view = blob.map.view();
        let jobs: Vec<_> = clusters
            .iter()
            .map(|(n, taken)| {
                let place = if fill == Fill::Shown { view.place(*n) } else { Place::Zeroes };
                self.fill_one(blob, *n, *taken, place, &wrote)
            })
            .collect();
        all(IN_FLIGHT, jobs).await?;
        Ok(wrote.get())
    }

    async fn fill_one(&self, blob: &Blob, n: u64, taken: Taken, place: Place, wrote: &Cell<bool>) -> Result<(), Error> {
        let (size, to) = (self.cluster_size(), self.geometry().cluster_offset(taken.cluster));
        match place {
            Place::Own(_) | Place::Ancestor(_) if planted::is(Bug::NoCopy) => {}
            Place::Own(from) | Place::Ancestor(from) => {
                let _access = self.accesses.enter();
                wrote.set(true);
                self.device.copy(self.geometry().cluster_offset(from), to, size).await?;
            }
            Place::External => {
                let (device, shown) = self.external_of(blob, n * size, size)?;
                wrote.set(true);
                if shown > 0 {
                    self.device.copy_from(&*device, n * size, to, shown).await?;
                }
                if shown < size {
                    self.device.write_zeroes(to + shown, size - shown).await?;
                }
            }
            Place::Zeroes if taken.zeroed || planted::is(Bug::NoZeroing) => {}
            Place::Zeroes => {
                wrote.set(true);
                self.make_zero(taken.cluster, 1).await?;
            }
        }
        Ok(())
    }

    /// The external device behind a blob, and how many of `len` bytes at `offset` lie on it.
    pub(crate) fn external_of(&self, blob: &Blob, offset: u64, len: u64) -> Result<(Rc<dyn Device>, u64), Error> {
        let Some(external) = blob.map.external() else {
            return Err(Error::NoExternal("of the volume".into()));
        };
        let device = self.external(external.id()).device.borrow().clone();
        let device = device.ok_or_else(|| Error::NoExternal(external.id().to_owned()))?;
        let shown = device.size_bytes().saturating_sub(offset).min(len);
        Ok((device, shown))
    }

    /// Makes a run of clusters read as zeroes, whatever they held.
    pub(crate) async fn make_zero(&self, first: u32, count: u32) -> Result<(), Error> {
        let (offset, len) = (self.geometry().cluster_offset(first), u64::from(count) * self.cluster_size());
        if self.device.next_data(offset, offset + len).await? >= offset + len {
            return Ok(());
        }
        self.zero_bytes(offset, len).await
    }

    /// Makes a range of the disk read as zeroes, by unmap where that is as good as writing them.
    pub(crate) async fn zero_bytes(&self, offset: u64, len: u64) -> Result<(), Error> {
        if self.device.can_unmap() && self.device.unmap_reads_zeroes() {
            self.device.unmap(offset, len).await?;
        } else {
            self.device.write_zeroes(offset, len).await?;
        }
        Ok(())
    }
}
