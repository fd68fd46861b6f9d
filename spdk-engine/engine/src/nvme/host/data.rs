//! The data of a command: a sequence of buffers, addressed by byte offset as if it were one.

use addax_hugepages::BufSlice;
use nvme_wire::pdu::DataDigest;

use crate::reactor::disk::Bufs;

/// Data of a command and its direction.
#[derive(Debug, Default)]
pub enum Data {
    #[default]
    None,
    /// To the controller. Nobody writes to the buffers until the command has ended.
    Send(Bufs),
    /// From the controller, straight into these buffers.
    Receive(Bufs),
}

impl Data {
    /// The buffers; none where there is no data.
    #[must_use]
    pub fn bufs(&self) -> &[BufSlice] {
        match self {
            Self::None => &[],
            Self::Send(bufs) | Self::Receive(bufs) => bufs,
        }
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bufs().iter().map(|b| b.len()).sum()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Calls `visit` with the parts that make up `len` bytes from `offset`; stops at the end of the data.
    pub fn each_part(&self, offset: usize, len: usize, visit: impl FnMut(BufSlice)) {
        each_part(self.bufs(), offset, len, visit);
    }

    /// The first contiguous part from `offset`, of at most `len` bytes; `None` at the end.
    #[must_use]
    pub fn part_at(&self, offset: usize, len: usize) -> Option<BufSlice> {
        let mut start = 0;
        for buf in self.bufs() {
            if offset < start + buf.len() {
                let from = offset - start;
                let to = buf.len().min(from + len);
                return Some(buf.slice(from..to));
            }
            start += buf.len();
        }
        None
    }

    /// The digest of `len` bytes from `offset`.
    #[must_use]
    pub fn digest(&self, offset: usize, len: usize) -> DataDigest {
        let mut digest = DataDigest::new();
        self.each_part(offset, len, |part| part.for_each_chunk(|chunk| digest.update(chunk)));
        digest
    }

    /// Puts `bytes` at `offset`; what does not fit is dropped.
    pub fn fill(&self, offset: usize, bytes: &[u8]) {
        let mut rest = bytes;
        self.each_part(offset, bytes.len(), |part| {
            let (now, later) = rest.split_at(part.len().min(rest.len()));
            part.copy_from(now, 0);
            rest = later;
        });
    }
}

/// The parts of `bufs` that make up `len` bytes from `offset`.
pub fn each_part(bufs: &[BufSlice], offset: usize, len: usize, mut visit: impl FnMut(BufSlice)) {
    let (mut skip, mut left) = (offset, len);
    for buf in bufs {
        if left == 0 {
            return;
        }
        if skip >= buf.len() {
            skip -= buf.len();
            continue;
        }
        let count = left.min(buf.len() - skip);
        visit(buf.slice(skip..skip + count));
        skip = 0;
        left -= count;
    }
}
