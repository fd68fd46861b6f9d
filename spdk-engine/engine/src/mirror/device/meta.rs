//! The meta areas of a mirror's legs.
//!
//! *What it is.* A leg may have a second channel, to the namespace beside its data. It uses the same queue of the same
//! session, so it is fenced and lost with that, and only the data's channel is watched.
//!
//! *Invariants.* A meta write is answered when it is durable: it goes out with force unit access and, where the device
//! has a volatile cache, is followed by a flush, since not every target heeds the former.
//!
//! *When things fail.* A leg without a meta area answers "other", which makes it leave or go on without.

use std::rc::Rc;

use addax_hugepages::Buf;
use mirror_core::meta::META_BLOCK_BYTES;
use mirror_core::{IoId, LegError, LegId, MetaOp};

use super::{Device, Part};
use crate::bdev::{Bufs, Chan, IoOp};
use crate::reactor::Core;

/// The channels to a replica.
#[derive(Clone)]
pub struct LegChans {
    /// To its data.
    pub data: Chan,
    /// To its meta area, if it has one.
    pub meta: Option<Chan>,
}

impl LegChans {
    pub(super) fn close(&self, core: &Core) {
        self.data.close(core);
        if let Some(meta) = &self.meta {
            meta.close(core);
        }
    }
}

impl Device {
    pub(super) fn meta_io(self: &Rc<Self>, core: &Core, (leg, io): (LegId, IoId), op: MetaOp) {
        let chans = self.legs.borrow().get(&leg).map(|l| l.chans.clone());
        let Some(chans) = chans else { return self.refuse(core, (leg, io), LegError::Gone) };
        let Some(chan) = chans.meta else { return self.refuse(core, (leg, io), LegError::Other) };
        let per_block = META_BLOCK_BYTES as u64 / u64::from(chan.bdev().info().block_size);
        match op {
            MetaOp::Read { block, blocks } => {
                let into = Buf::alloc_unpooled(blocks as usize * META_BLOCK_BYTES).into_slice();
                let range = (block * per_block, u64::from(blocks) * per_block);
                let bufs = smallvec::smallvec![into.clone()];
                self.send(core, &chan, (leg, io, Part::MetaRead(into)), IoOp::Read, range, bufs);
            }
            MetaOp::Write { block, data } => {
                let range = (block * per_block, data.len() as u64 / META_BLOCK_BYTES as u64 * per_block);
                let bufs = smallvec::smallvec![Buf::copy_of(&data).into_slice()];
                self.send(core, &chan, (leg, io, Part::MetaWrite), IoOp::Write { fua: true }, range, bufs);
            }
        }
    }

    /// Makes a meta write durable that has arrived; false when it is so already.
    pub(super) fn flush_meta(self: &Rc<Self>, core: &Core, leg: LegId, io: IoId) -> bool {
        let chan = self.legs.borrow().get(&leg).and_then(|l| l.chans.meta.clone());
        let Some(chan) = chan.filter(|chan| chan.bdev().info().write_cache) else { return false };
        self.send(core, &chan, (leg, io, Part::MetaFlush), IoOp::Flush, (0, 0), Bufs::new());
        true
    }
}
