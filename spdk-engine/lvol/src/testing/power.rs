//! An in-memory disk with a volatile cache whose power can be cut after any operation.
//!
//! *What it is.* Operations are submitted, wait, and are executed one by one in an order drawn from the seed; reads
//! see what was executed. A flush makes durable what was executed **before the flush was submitted** and nothing
//! else. [`PowerDisk::cut`] gives what may be found on the disk if power failed now: all that is durable, and of
//! everything else, also of what is still in flight, any part that the seed draws. Writes are torn at the borders of
//! [`Tear`]. Cutting does not disturb the disk, so one run can be cut after each of its operations.
//!
//! *What is assumed of real disks.* A piece of [`Tear`]'s size is written whole or not at all; this is what the
//! format itself assumes of a metadata page.
//!
//! *When things fail.* An operation beyond the end is an error; errors drawn by [`PowerDisk::fail_next`] are
//! answered without touching the disk. A disk whose power is off answers nothing any more.

use std::cell::{Ref, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use super::image::{Fill, Image};
use super::rng::Rng;

/// What an unmapped range reads as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unmapped {
    /// Zeroes, and the disk says so.
    Zeroes,
    /// What was there before.
    Old,
    /// Something else altogether.
    Junk,
    /// The disk cannot unmap.
    Unsupported,
}

/// The smallest pieces that are written whole: `fine` bytes, but `coarse` below `coarse_until` (bytes).
///
/// The format needs whole pages for metadata; data may be torn between any two blocks.
#[derive(Debug, Clone, Copy)]
pub struct Tear {
    /// Size of the pieces in the metadata, in bytes.
    pub coarse: u64,
    /// Where the metadata ends, in bytes.
    pub coarse_until: u64,
    /// Size of the pieces behind it, in bytes.
    pub fine: u64,
}

impl Tear {
    fn next_border(&self, offset: u64) -> u64 {
        let size = if offset < self.coarse_until { self.coarse } else { self.fine };
        (offset / size + 1) * size
    }
}

/// How a [`PowerDisk`] is built.
#[derive(Debug, Clone)]
pub struct PowerOptions {
    /// Bytes.
    pub size: u64,
    /// Logical block in bytes.
    pub block_size: u32,
    /// Whether what was written waits in a volatile cache for a flush.
    pub write_cache: bool,
    /// What becomes of unmapped ranges.
    pub unmapped: Unmapped,
    /// What never-written pages hold.
    pub fill: Fill,
    /// How writes are torn by a power cut.
    pub tear: Tear,
    /// Draws the order of operations.
    pub seed: u64,
}

/// One operation, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskOp {
    /// Reads.
    Read {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Writes.
    Write {
        /// First byte.
        offset: u64,
        /// What is written.
        bytes: Rc<[u8]>,
    },
    /// Writes zeroes.
    Zero {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Unmaps.
    Unmap {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Copies within the disk.
    Copy {
        /// First byte of the source.
        from: u64,
        /// First byte of the destination.
        to: u64,
        /// Bytes.
        len: u64,
    },
    /// Makes durable what was executed before.
    Flush,
}

impl DiskOp {
    /// The range that it changes: offset and length in bytes.
    pub fn changes(&self) -> Option<(u64, u64)> {
        match self {
            Self::Read { .. } | Self::Flush => None,
            Self::Write { offset, bytes } => Some((*offset, bytes.len() as u64)),
            Self::Zero { offset, len } | Self::Unmap { offset, len } => Some((*offset, *len)),
            Self::Copy { to, len, .. } => Some((*to, *len)),
        }
    }

    fn range_end(&self) -> Option<u64> {
        match self {
            Self::Flush => Some(0),
            Self::Read { offset, len } => offset.checked_add(*len),
            Self::Copy { from, to, len } => (*from).max(*to).checked_add(*len),
            other => other.changes().and_then(|(offset, len)| offset.checked_add(len)),
        }
    }
}

/// Why an operation failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskFailure {
    /// The range is beyond the end or not in whole blocks.
    Range,
    /// The disk answered with an error.
    Io,
    /// A thinly provided disk has no space left.
    NoSpace,
    /// The disk was pulled out.
    Gone,
}

/// How many operations were executed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Reads.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes, zeroes, unmaps and copies.
    pub changes: u64,
    /// Flushes.
    pub flushes: u64,
}

/// The disk. Clones are the same disk.
#[derive(Debug, Clone)]
pub struct PowerDisk(Rc<RefCell<State>>);

#[derive(Debug)]
struct State {
    options: PowerOptions,
    durable: Image,
    current: Image,
    /// Executed and not durable, in order of execution.
    volatile: Vec<Change>,
    waiting: Vec<Waiting>,
    done: BTreeMap<u64, Result<Vec<u8>, DiskFailure>>,
    next_id: u64,
    rng: Rng,
    counts: Counts,
    failures: Vec<DiskFailure>,
    gone: bool,
    log: Option<Vec<DiskOp>>,
}

#[derive(Debug)]
struct Waiting {
    id: u64,
    op: DiskOp,
    waker: Option<Waker>,
    /// Number of changes that were executed when it was submitted.
    after: u64,
}

#[derive(Debug, Clone)]
struct Change {
    /// Position among all changes ever executed.
    number: u64,
    offset: u64,
    content: Content,
}

#[derive(Debug, Clone)]
enum Content {
    Bytes(Rc<[u8]>),
    Zero(u64),
    Junk(u64, u64),
}

impl Change {
    fn len(&self) -> u64 {
        match &self.content {
            Content::Bytes(bytes) => bytes.len() as u64,
            Content::Zero(len) | Content::Junk(len, _) => *len,
        }
    }

    fn apply(&self, image: &mut Image) {
        match &self.content {
            Content::Bytes(bytes) => image.write(self.offset, bytes),
            Content::Zero(len) => image.zero(self.offset, *len),
            Content::Junk(len, seed) => image.junk(self.offset, *len, *seed),
        }
    }

    fn apply_part(&self, image: &mut Image, from: u64, to: u64) {
        match &self.content {
            Content::Bytes(bytes) => {
                let at = |place: u64| usize::try_from(place - self.offset).unwrap_or(usize::MAX);
                image.write(from, &bytes[at(from)..at(to)]);
            }
            Content::Zero(_) => image.zero(from, to - from),
            Content::Junk(_, seed) => image.junk(from, to - from, *seed),
        }
    }
}

/// Which of the changes that are not durable survive a cut, in percent, and in what pieces.
#[derive(Debug, Clone, Copy)]
struct Survival {
    percent: u64,
    /// Pieces of one change survive apart from each other.
    torn: bool,
    /// The newest change survives whatever is drawn.
    newest: bool,
}

impl PowerDisk {
    /// A disk that was never written.
    pub fn new(options: PowerOptions) -> Self {
        let image = Image::new(options.size, options.fill);
        Self::with_image(options, image)
    }

    /// A disk that holds `image`, all of it durable.
    pub fn with_image(mut options: PowerOptions, image: Image) -> Self {
        options.size = image.size();
        let rng = Rng::new(options.seed);
        Self(Rc::new(RefCell::new(State {
            options,
            current: image.clone(),
            durable: image,
            volatile: Vec::new(),
            waiting: Vec::new(),
            done: BTreeMap::new(),
            next_id: 0,
            rng,
            counts: Counts::default(),
            failures: Vec::new(),
            gone: false,
            log: None,
        })))
    }

    /// How it was built.
    pub fn options(&self) -> PowerOptions {
        self.0.borrow().options.clone()
    }

    /// What reads see now.
    pub fn current(&self) -> Ref<'_, Image> {
        Ref::map(self.0.borrow(), |state| &state.current)
    }

    /// How many operations were executed.
    pub fn counts(&self) -> Counts {
        self.0.borrow().counts
    }

    /// Whether an operation waits to be executed.
    pub fn is_busy(&self) -> bool {
        !self.0.borrow().waiting.is_empty()
    }

    /// Makes the disk larger.
    pub fn set_size(&self, size: u64) {
        let mut state = self.0.borrow_mut();
        state.options.size = size;
        state.current.set_size(size);
        state.durable.set_size(size);
    }

    /// Says where the metadata ends, for [`Tear`].
    pub fn set_tear_border(&self, offset: u64) {
        self.0.borrow_mut().options.tear.coarse_until = offset;
    }

    /// The next changing operation fails so; called several times, so many fail.
    pub fn fail_next(&self, failure: DiskFailure) {
        self.0.borrow_mut().failures.push(failure);
    }

    /// Pulls the disk out: all that waits and all that comes fails.
    pub fn pull(&self) {
        self.0.borrow_mut().gone = true;
    }

    /// Keeps the executed operations from now on, to be taken by [`PowerDisk::take_log`].
    pub fn keep_log(&self) {
        self.0.borrow_mut().log = Some(Vec::new());
    }

    /// The operations executed since [`PowerDisk::keep_log`] or the last call.
    pub fn take_log(&self) -> Vec<DiskOp> {
        self.0.borrow_mut().log.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Submits an operation when first polled; ready when it was executed.
    pub fn submit(&self, op: DiskOp) -> Submitted {
        Submitted { disk: self.clone(), op: Some(op), id: 0 }
    }

    /// Executes one of the waiting operations, drawn from the seed; gives it back.
    pub fn step(&self) -> Option<DiskOp> {
        let mut state = self.0.borrow_mut();
        if state.waiting.is_empty() {
            return None;
        }
        let count = state.waiting.len();
        let drawn = state.rng.index(count);
        let waiting = state.waiting.swap_remove(drawn);
        let result = state.execute(&waiting);
        state.done.insert(waiting.id, result);
        if let Some(log) = &mut state.log {
            log.push(waiting.op.clone());
        }
        drop(state);
        if let Some(waker) = waiting.waker {
            waker.wake();
        }
        Some(waiting.op)
    }

    /// What the disk may hold if power failed now; `seed` draws what survives of all that is not durable.
    pub fn cut(&self, seed: u64) -> Image {
        let state = self.0.borrow();
        let mut rng = Rng::new(seed);
        let percent = [0, 50, 100, 15, 85, 50][rng.index(6)];
        let survival = Survival { percent, torn: rng.percent(60), newest: rng.percent(30) };
        let mut image = state.durable.clone();
        let mut candidates = state.volatile.clone();
        for waiting in &state.waiting {
            candidates.extend(state.change_of(&waiting.op, u64::MAX));
        }
        let count = candidates.len();
        for (index, change) in candidates.iter().enumerate() {
            if survival.newest && index + 1 == count {
                change.apply(&mut image);
            } else {
                survive(&mut image, change, survival, state.options.tear, &mut rng);
            }
        }
        image
    }
}

fn survive(image: &mut Image, change: &Change, survival: Survival, tear: Tear, rng: &mut Rng) {
    if !survival.torn {
        if rng.percent(survival.percent) {
            change.apply(image);
        }
        return;
    }
    let end = change.offset + change.len();
    let mut from = change.offset;
    // Ranges of gigabytes are torn into few large pieces: each small piece would only cost time.
    let stride = (change.len() / 256 / tear.coarse) * tear.coarse;
    while from < end {
        let to = tear.next_border(from + stride).min(end);
        if rng.percent(survival.percent) {
            change.apply_part(image, from, to);
        }
        from = to;
    }
}

impl State {
    fn check(&self, op: &DiskOp) -> Result<(), DiskFailure> {
        if self.gone {
            return Err(DiskFailure::Gone);
        }
        let block = u64::from(self.options.block_size);
        let aligned = match op {
            DiskOp::Flush => true,
            DiskOp::Read { offset, len } => offset % block == 0 && len % block == 0,
            DiskOp::Copy { from, to, len } => from % block == 0 && to % block == 0 && len % block == 0,
            other => other.changes().is_none_or(|(offset, len)| offset % block == 0 && len % block == 0),
        };
        let within = op.range_end().is_some_and(|end| end <= self.options.size);
        let supported = !matches!(op, DiskOp::Unmap { .. }) || self.options.unmapped != Unmapped::Unsupported;
        if aligned && within && supported { Ok(()) } else { Err(DiskFailure::Range) }
    }

    fn execute(&mut self, waiting: &Waiting) -> Result<Vec<u8>, DiskFailure> {
        self.check(&waiting.op)?;
        match &waiting.op {
            DiskOp::Read { offset, len } => {
                self.counts.reads += 1;
                self.counts.read_bytes += len;
                return Ok(self.current.read_vec(*offset, usize::try_from(*len).unwrap_or(usize::MAX)));
            }
            DiskOp::Flush => {
                self.counts.flushes += 1;
                self.make_durable(waiting.after);
                return Ok(Vec::new());
            }
            _ => {}
        }
        if !self.failures.is_empty() {
            return Err(self.failures.remove(0));
        }
        self.counts.changes += 1;
        if let Some(change) = self.change_of(&waiting.op, self.counts.changes) {
            change.apply(&mut self.current);
            if self.options.write_cache {
                self.volatile.push(change);
            } else {
                change.apply(&mut self.durable);
            }
        }
        Ok(Vec::new())
    }

    fn make_durable(&mut self, up_to: u64) {
        let volatile = std::mem::take(&mut self.volatile);
        for change in volatile {
            if change.number <= up_to {
                change.apply(&mut self.durable);
            } else {
                self.volatile.push(change);
            }
        }
    }

    fn change_of(&self, op: &DiskOp, number: u64) -> Option<Change> {
        let (offset, len) = op.changes()?;
        let content = match op {
            DiskOp::Write { bytes, .. } => Content::Bytes(Rc::clone(bytes)),
            DiskOp::Zero { .. } => Content::Zero(len),
            DiskOp::Copy { from, .. } => {
                Content::Bytes(self.current.read_vec(*from, usize::try_from(len).unwrap_or(usize::MAX)).into())
            }
            _ => match self.options.unmapped {
                Unmapped::Zeroes => Content::Zero(len),
                Unmapped::Junk => Content::Junk(len, self.options.seed ^ number),
                Unmapped::Old | Unmapped::Unsupported => return None,
            },
        };
        Some(Change { number, offset, content })
    }
}

/// An operation on its way. Dropped before it is ready, the disk may execute it all the same.
#[derive(Debug)]
pub struct Submitted {
    disk: PowerDisk,
    op: Option<DiskOp>,
    id: u64,
}

impl Future for Submitted {
    type Output = Result<Vec<u8>, DiskFailure>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let disk = self.disk.clone();
        let mut state = disk.0.borrow_mut();
        if let Some(op) = self.op.take() {
            let id = state.next_id;
            state.next_id += 1;
            let after = state.counts.changes;
            state.waiting.push(Waiting { id, op, waker: Some(context.waker().clone()), after });
            self.id = id;
            return Poll::Pending;
        }
        if let Some(result) = state.done.remove(&self.id) {
            return Poll::Ready(result);
        }
        if let Some(waiting) = state.waiting.iter_mut().find(|waiting| waiting.id == self.id) {
            waiting.waker = Some(context.waker().clone());
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::exec::Exec;
    use super::*;

    fn disk(unmapped: Unmapped) -> PowerDisk {
        PowerDisk::new(PowerOptions {
            size: 1 << 20,
            block_size: 512,
            write_cache: true,
            unmapped,
            fill: Fill::Zeroes,
            tear: Tear { coarse: 4096, coarse_until: 8192, fine: 512 },
            seed: 1,
        })
    }

    fn write(offset: u64, byte: u8, len: usize) -> DiskOp {
        DiskOp::Write { offset, bytes: vec![byte; len].into() }
    }

    #[test]
    fn what_was_flushed_survives_every_cut_and_what_was_not_survives_some() {
        let disk = disk(Unmapped::Zeroes);
        let program = async {
            disk.submit(write(0, 1, 4096)).await.unwrap();
            disk.submit(DiskOp::Flush).await.unwrap();
            disk.submit(write(0, 2, 8192)).await.unwrap();
        };
        Exec::new(1, &[&disk]).run(program).unwrap();
        let found: std::collections::BTreeSet<(u8, u8)> =
            (0..200).map(|seed| disk.cut(seed)).map(|i| (i.read_vec(0, 1)[0], i.read_vec(4096, 1)[0])).collect();
        assert_eq!(found, [(1, 0), (1, 2), (2, 0), (2, 2)].into_iter().collect(), "writes are torn between pages");
        assert!((0..200).all(|seed| {
            let page = disk.cut(seed).read_vec(0, 4096);
            page.iter().all(|byte| *byte == page[0])
        }));
        assert_eq!(disk.current().read_vec(0, 1), [2]);
    }

    #[test]
    fn a_flush_makes_durable_only_what_ended_before_it_began() {
        let disk = disk(Unmapped::Zeroes);
        let program = async {
            disk.submit(write(0, 1, 512)).await.unwrap();
            futures::join!(disk.submit(DiskOp::Flush), disk.submit(write(0, 3, 512))).0.unwrap();
        };
        Exec::new(3, &[&disk]).run(program).unwrap();
        let found: std::collections::BTreeSet<u8> = (0..200).map(|seed| disk.cut(seed).read_vec(0, 1)[0]).collect();
        assert_eq!(found, [1, 3].into_iter().collect());
    }

    #[test]
    fn an_unmapped_range_is_what_the_disk_makes_of_it() {
        for (unmapped, expected) in [(Unmapped::Zeroes, Some(0)), (Unmapped::Old, Some(7)), (Unmapped::Junk, None)] {
            let disk = disk(unmapped);
            let program = async {
                disk.submit(write(65536, 7, 4096)).await.unwrap();
                disk.submit(DiskOp::Unmap { offset: 65536, len: 4096 }).await.unwrap();
                disk.submit(DiskOp::Read { offset: 65536, len: 4096 }).await.unwrap()
            };
            let bytes = Exec::new(1, &[&disk]).run(program).unwrap();
            match expected {
                Some(byte) => assert!(bytes.iter().all(|b| *b == byte)),
                None => assert!(bytes.iter().any(|b| *b != bytes[0])),
            }
        }
    }

    #[test]
    fn a_pulled_disk_and_a_range_beyond_the_end_are_errors_and_waiting_for_nothing_is_found() {
        let disk = disk(Unmapped::Unsupported);
        let mut exec = Exec::new(1, &[&disk]);
        assert_eq!(exec.run(disk.submit(write(1 << 20, 1, 512))).unwrap(), Err(DiskFailure::Range));
        assert_eq!(exec.run(disk.submit(DiskOp::Unmap { offset: 0, len: 512 })).unwrap(), Err(DiskFailure::Range));
        disk.fail_next(DiskFailure::NoSpace);
        assert_eq!(exec.run(disk.submit(write(0, 1, 512))).unwrap(), Err(DiskFailure::NoSpace));
        disk.pull();
        assert_eq!(exec.run(disk.submit(DiskOp::Flush)).unwrap(), Err(DiskFailure::Gone));
        exec.run(std::future::pending::<()>()).unwrap_err();
    }
}
