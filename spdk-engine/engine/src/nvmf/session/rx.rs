//! Input of one connection: a fixed buffer from which many PDUs are parsed per receive.
//!
//! *Invariants.* The unread bytes are contiguous. There is always room for the largest header once
//! [`Input::space`] was called.

/// Bytes of the buffer: eight full command capsules, as in SPDK.
pub const INPUT_BYTES: usize = 33 << 10;

/// Bytes received and not parsed yet.
#[derive(Debug)]
pub struct Input {
    bytes: Box<[u8]>,
    head: usize,
    tail: usize,
}

impl Input {
    pub fn with_room() -> Self {
        Self { bytes: vec![0; INPUT_BYTES].into_boxed_slice(), head: 0, tail: 0 }
    }

    /// A buffer without room.
    pub fn empty() -> Self {
        Self { bytes: Box::default(), head: 0, tail: 0 }
    }

    /// What has been received and not parsed.
    pub fn unread(&self) -> &[u8] {
        &self.bytes[self.head..self.tail]
    }

    /// The first `count` unread bytes have been parsed.
    pub fn consume(&mut self, count: usize) {
        self.head = (self.head + count).min(self.tail);
        if self.head == self.tail {
            self.clear();
        }
    }

    /// Forgets everything unread.
    pub fn clear(&mut self) {
        self.head = 0;
        self.tail = 0;
    }

    /// Where the next bytes go. Moves the unread bytes to the front when the rest has become small.
    pub fn space(&mut self) -> &mut [u8] {
        if self.head > 0 && self.bytes.len() - self.tail < self.bytes.len() / 2 {
            self.bytes.copy_within(self.head..self.tail, 0);
            self.tail -= self.head;
            self.head = 0;
        }
        &mut self.bytes[self.tail..]
    }

    /// So many bytes were put into [`Self::space`].
    pub fn filled(&mut self, count: usize) {
        self.tail = (self.tail + count).min(self.bytes.len());
    }
}
