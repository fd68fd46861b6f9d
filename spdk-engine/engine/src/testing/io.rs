//! I/O of tests that await it.

use std::cell::RefCell;
use std::rc::Rc;

use addax_hugepages::Buf;
use futures::channel::oneshot;

use crate::bdev::{Bufs, Chan, Io, IoOp, IoSink, IoStatus};
use crate::reactor::Core;

struct Waiter(RefCell<Option<oneshot::Sender<IoStatus>>>);

impl IoSink for Waiter {
    fn io_done(self: Rc<Self>, _core: &Core, _tag: u64, status: IoStatus) {
        if let Some(sender) = self.0.borrow_mut().take() {
            let _ = sender.send(status);
        }
    }
}

/// Submits an I/O; its status comes when awaited.
pub fn start(core: &Core, chan: &Chan, op: IoOp, lba: u64, blocks: u64, bufs: Bufs) -> oneshot::Receiver<IoStatus> {
    let (sender, receiver) = oneshot::channel();
    let sink = Rc::new(Waiter(RefCell::new(Some(sender))));
    chan.submit(core, Io::new(op, lba, blocks, bufs, sink, 0));
    receiver
}

/// The bytes, in buffers of at most 100 KiB.
pub fn bufs(bytes: &[u8]) -> Bufs {
    bytes.chunks(100 << 10).map(|part| Buf::copy_of(part).into_slice()).collect()
}
