//! Input of one connection: a buffer from which many PDUs are parsed per receive, and from which the data of small
//! writes is handed on without a copy.
//!
//! *Invariants.* The unread bytes are contiguous, and there is always room for the rest of the largest capsule once
//! [`Input::space`] was called. At most [`SPARES`] + 1 buffers exist: when the parts that were handed out hold all the
//! others, the next part is copied instead ([`Input::part`]). So a slow device pins a bounded amount, whatever the host
//! sends.

use addax_hugepages::{Buf, BufPool, BufSlice, Intake};

/// Bytes of a buffer: a dozen full command capsules.
pub const INPUT_BYTES: usize = 66 << 10;
/// Room that is always there: the largest capsule and then some.
const ROOM_MIN: usize = 16 << 10;
/// Buffers beside the present one.
const SPARES: usize = 3;

/// Bytes received and not parsed yet.
#[derive(Debug)]
pub struct Input {
    buffer: Intake,
    head: usize,
    tail: usize,
    /// Earlier buffers, held or free.
    spares: Vec<Intake>,
}

impl Input {
    pub fn with_room() -> Self {
        Self::of(INPUT_BYTES)
    }

    /// A buffer without room.
    pub fn empty() -> Self {
        Self::of(0)
    }

    fn of(bytes: usize) -> Self {
        Self { buffer: Intake::new(bytes), head: 0, tail: 0, spares: Vec::new() }
    }

    /// What has been received and not parsed.
    pub fn unread(&self) -> &[u8] {
        self.buffer.bytes(self.head, self.tail)
    }

    /// The first `count` unread bytes have been parsed.
    pub fn consume(&mut self, count: usize) {
        self.head = (self.head + count).min(self.tail);
    }

    /// Forgets everything unread.
    pub fn clear(&mut self) {
        self.head = self.tail;
    }

    /// Unread bytes `from..to`, to keep: shared with the buffer, or copied when too many buffers are held already.
    pub fn part(&mut self, from: usize, to: usize, pool: &BufPool) -> BufSlice {
        if self.has_spare() {
            return self.buffer.share(self.head + from, self.head + to);
        }
        let bytes = self.buffer.bytes(self.head + from, self.head + to);
        let copy = pool.take(bytes.len()).unwrap_or_else(|| Buf::alloc_unpooled(bytes.len()));
        copy.copy_from(bytes, 0);
        copy.into_slice()
    }

    fn has_spare(&self) -> bool {
        self.spares.len() < SPARES || self.spares.iter().any(|s| !s.is_held())
    }

    /// Where the next bytes go.
    pub fn space(&mut self) -> &mut [u8] {
        if self.head == self.tail && self.head > 0 && self.buffer.restart() {
            self.head = 0;
            self.tail = 0;
        }
        if self.buffer.len() - self.tail < ROOM_MIN {
            self.make_room();
        }
        self.buffer.room(self.tail)
    }

    fn make_room(&mut self) {
        let unread = self.tail - self.head;
        if !self.buffer.restart_with(self.head, self.tail) {
            let free = self.spares.iter_mut().position(|s| s.restart());
            let mut next = match free {
                Some(index) => self.spares.swap_remove(index),
                // Parts are shared only while there is one more buffer to be had.
                None => Intake::new(self.buffer.len()),
            };
            next.room(0)[..unread].copy_from_slice(self.unread());
            self.spares.push(std::mem::replace(&mut self.buffer, next));
        }
        self.head = 0;
        self.tail = unread;
    }

    /// So many bytes were put into [`Self::space`].
    pub fn filled(&mut self, count: usize) {
        self.tail = (self.tail + count).min(self.buffer.len());
    }
}

#[cfg(test)]
mod tests {
    use addax_hugepages::{ClassConfig, MapPolicy, PoolConfig};
    use proptest::prelude::*;

    use super::*;

    fn pool() -> BufPool {
        let class = |bytes| ClassConfig { bytes, count: 4 };
        BufPool::new(PoolConfig { small: class(8192), large: class(135_168), policy: MapPolicy::plain() }).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Whatever is handed on keeps its bytes, however long it is held and however the stream is cut; and the number
        /// of buffers stays bounded.
        #[test]
        fn parts_keep_their_bytes(records in prop::collection::vec((1usize..8300, 0usize..200), 1..200), cut in 1usize..70_000) {
            let pool = pool();
            let mut input = Input::with_room();
            let stream: Vec<u8> = (0..records.iter().map(|r| r.0).sum()).map(|i: usize| (i / 3 + i % 251) as u8).collect();
            let (mut fed, mut at, mut held) = (0, 0, Vec::new());
            for (index, (len, hold)) in records.into_iter().enumerate() {
                while input.unread().len() < len {
                    let space = input.space();
                    prop_assert!(space.len() >= ROOM_MIN);
                    let count = space.len().min(cut).min(stream.len() - fed);
                    space[..count].copy_from_slice(&stream[fed..fed + count]);
                    input.filled(count);
                    fed += count;
                }
                held.push((index + hold, at, input.part(0, len, &pool)));
                input.consume(len);
                at += len;
                for (_, from, part) in &held {
                    prop_assert_eq!(part.to_vec(), &stream[*from..*from + part.len()]);
                }
                held.retain(|h| h.0 > index);
                prop_assert!(input.spares.len() <= SPARES);
            }
        }
    }
}
