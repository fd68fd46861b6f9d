//! `error`: a device that fails on request, for tests of everything above it.
//!
//! *What it is.* A virtual device over a base. Each injection names kinds of I/O, a way to fail and a count. *Invariants.*
//! Injections are taken in the order they were made; the newest of a kind replaces the older one, as in SPDK.

use std::any::Any;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::{Arc, Mutex, PoisonError};

use nvme_wire::Status;
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::registry::Entry;
use super::{Bdev, BdevError, BdevInfo, Chan, Channel, Io, IoOp, IoSink, IoStatus};
use crate::reactor::Core;

/// Which I/O an injection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Clear,
    Read,
    Write,
    Unmap,
    Flush,
    All,
}

/// How an I/O fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Ends with this status.
    Status(Status),
    /// Stays until `bdev_error_resume_pending`.
    Pending,
    /// Goes through with one byte of each block's data changed.
    Corrupt { offset: u64, value: u8 },
}

/// One kind's injection.
#[derive(Debug, Clone, Copy)]
pub struct Injection {
    pub fault: Fault,
    /// How many more I/Os fail.
    pub left: u32,
}

type Injections = Arc<Mutex<HashMap<Kind, Injection>>>;

/// The device.
#[derive(Debug)]
pub struct ErrorBdev {
    name: String,
    uuid: Uuid,
    given_uuid: bool,
    base: Arc<Entry>,
    injections: Injections,
    /// Raised to let pending I/O go; channels compare it with what they have seen.
    resumed: Arc<std::sync::atomic::AtomicU64>,
}

impl ErrorBdev {
    /// A device `EE_<base>`.
    #[must_use]
    pub fn new(base: Arc<Entry>, uuid: Option<Uuid>) -> Self {
        let info = base.bdev.info();
        let namespace = Uuid::from_u128(0x976b_899e_3e1e_4d71_ab69_c2b0_8e9d_f8b8);
        Self {
            name: format!("EE_{}", info.name),
            uuid: uuid.unwrap_or_else(|| Uuid::new_v5(&namespace, info.uuid.as_bytes())),
            given_uuid: uuid.is_some(),
            base,
            injections: Injections::default(),
            resumed: Arc::default(),
        }
    }

    /// Adds or, with [`Kind::Clear`], removes injections.
    pub fn inject(&self, kind: Kind, injection: Injection) {
        let mut injections = self.injections.lock().unwrap_or_else(PoisonError::into_inner);
        match kind {
            Kind::Clear => injections.clear(),
            Kind::All => {
                for kind in [Kind::Read, Kind::Write, Kind::Unmap, Kind::Flush] {
                    injections.insert(kind, injection);
                }
            }
            kind => {
                injections.insert(kind, injection);
            }
        }
    }

    /// Lets pending I/O go on, on every core.
    pub fn resume_pending(&self, core: &Core) {
        self.resumed.fetch_add(1, std::sync::atomic::Ordering::AcqRel);
        for peer in core.peers().iter() {
            core.post(peer.id, |core| {
                let open: Vec<_> =
                    core.local(OpenChannels::default).0.borrow().iter().filter_map(Weak::upgrade).collect();
                open.iter().for_each(|channel| channel.release_resumed(core));
            });
        }
    }
}

impl Bdev for ErrorBdev {
    fn info(&self) -> BdevInfo {
        let base = self.base.bdev.info();
        BdevInfo { name: self.name.clone(), uuid: self.uuid, product_name: "Error Injection Disk", ..base }
    }
    fn num_blocks(&self) -> u64 {
        self.base.bdev.num_blocks()
    }
    fn open(&self, core: &Core) -> Result<Rc<dyn Channel>, BdevError> {
        let channel = Rc::new(ErrorChannel {
            base: self.base.open(core)?,
            injections: Arc::clone(&self.injections),
            resumed: Arc::clone(&self.resumed),
            seen: std::cell::Cell::new(self.resumed.load(std::sync::atomic::Ordering::Acquire)),
            pending: RefCell::default(),
        });
        let open = core.local(OpenChannels::default);
        open.0.borrow_mut().retain(|other| other.strong_count() > 0);
        open.0.borrow_mut().push(Rc::downgrade(&channel));
        Ok(channel)
    }
    fn unmap_reads_zeroes(&self) -> bool {
        self.base.bdev.unmap_reads_zeroes()
    }
    fn holds_guest_data(&self) -> bool {
        self.base.bdev.holds_guest_data()
    }
    fn driver_specific(&self) -> Value {
        json!({ "error_disk": { "base_bdev": self.base.bdev.info().name } })
    }
    fn config(&self) -> Option<(&'static str, Value)> {
        let mut params = json!({ "base_name": self.base.bdev.info().name });
        if self.given_uuid {
            params["uuid"] = json!(self.uuid.to_string());
        }
        Some(("bdev_error_create", params))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The channels of one core, so that pending I/O can be let go.
#[derive(Default)]
struct OpenChannels(RefCell<Vec<Weak<ErrorChannel>>>);

struct ErrorChannel {
    base: Chan,
    injections: Injections,
    resumed: Arc<std::sync::atomic::AtomicU64>,
    seen: std::cell::Cell<u64>,
    pending: RefCell<Vec<Io>>,
}

impl ErrorChannel {
    fn fault(&self, op: IoOp) -> Option<Fault> {
        let kind = match op {
            IoOp::Read | IoOp::Compare => Kind::Read,
            IoOp::Write { .. } | IoOp::WriteZeroes => Kind::Write,
            IoOp::Unmap => Kind::Unmap,
            IoOp::Flush => Kind::Flush,
            IoOp::Reset => return None,
        };
        let mut injections = self.injections.lock().unwrap_or_else(PoisonError::into_inner);
        let injection = injections.get_mut(&kind)?;
        let fault = injection.fault;
        injection.left -= 1;
        if injection.left == 0 {
            injections.remove(&kind);
        }
        Some(fault)
    }

    fn forward(&self, core: &Core, io: Io, corrupt: Option<(u64, u8)>) {
        let (op, lba, blocks, bufs) = (io.op, io.lba, io.blocks, io.bufs.clone());
        let bufs = match (corrupt, op) {
            (Some(change), IoOp::Write { .. }) => corrupted(&bufs, change),
            _ => bufs,
        };
        let corrupt = corrupt.filter(|_| op == IoOp::Read);
        let sink = Rc::new(Forward { io: RefCell::new(Some(io)), corrupt });
        self.base.submit(core, Io::new(op, lba, blocks, bufs, sink, 0));
    }

    fn release_resumed(&self, core: &Core) {
        let now = self.resumed.load(std::sync::atomic::Ordering::Acquire);
        if self.seen.replace(now) != now {
            for io in self.pending.take() {
                self.forward(core, io, None);
            }
        }
    }
}

fn corrupted(bufs: &super::Bufs, (offset, value): (u64, u8)) -> super::Bufs {
    let mut left = offset;
    bufs.iter()
        .map(|buf| {
            let copy = addax_hugepages::Buf::copy_of(&buf.to_vec());
            if let Ok(at) = usize::try_from(left)
                && at < copy.len()
            {
                copy.copy_from(&[value], at);
                left = u64::MAX;
            } else {
                left = left.saturating_sub(buf.len() as u64);
            }
            copy.into_slice()
        })
        .collect()
}

impl Channel for ErrorChannel {
    fn submit(&self, core: &Core, io: Io) {
        if io.op == IoOp::Reset {
            for pending in self.pending.take() {
                core.complete(pending, Status::ABORTED_BY_REQUEST);
            }
        }
        match self.fault(io.op) {
            None => self.forward(core, io, None),
            Some(Fault::Status(status)) => core.complete(io, status),
            Some(Fault::Pending) => self.pending.borrow_mut().push(io),
            Some(Fault::Corrupt { offset, value }) => self.forward(core, io, Some((offset, value))),
        }
    }

    fn close(&self, core: &Core) {
        for io in self.pending.take() {
            core.complete(io, Status::ABORTED_BY_REQUEST);
        }
        self.base.close(core);
    }
}

/// Gives a base device's answer to the original I/O.
struct Forward {
    io: RefCell<Option<Io>>,
    corrupt: Option<(u64, u8)>,
}

impl IoSink for Forward {
    fn io_done(self: Rc<Self>, core: &Core, _tag: u64, status: IoStatus) {
        let Some(io) = self.io.borrow_mut().take() else { return };
        if let (Some((offset, value)), true) = (self.corrupt, status.is_success()) {
            let mut left = offset as usize;
            for buf in &io.bufs {
                if left < buf.len() {
                    buf.copy_from(&[value], left);
                    break;
                }
                left -= buf.len();
            }
        }
        core.complete(io, status);
    }
}
