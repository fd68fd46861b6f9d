//! Output of one connection: headers and payloads in order, sent many at a time.
//!
//! *Invariants.* Consecutive header bytes form one piece. A payload's buffer is held until its last byte was taken by
//! the socket. In the steady state nothing is allocated.

use std::collections::VecDeque;

use addax_hugepages::BufSlice;
use smallvec::SmallVec;

use crate::reactor::net::{MAX_PIECES, Piece};

/// Pieces of one vectored send.
pub type Pieces<'a> = SmallVec<[Piece<'a>; MAX_PIECES]>;

/// Sent header bytes that may stay in front of the scratch memory before it is moved together.
const COMPACT_BYTES: usize = 64 << 10;

#[derive(Debug)]
enum Item {
    /// So many bytes of the scratch memory.
    Header(usize),
    Payload(BufSlice),
}

/// Bytes waiting for the socket.
#[derive(Debug, Default)]
pub struct Output {
    items: VecDeque<Item>,
    scratch: Vec<u8>,
    sent_scratch: usize,
    bytes: usize,
}

impl Output {
    /// Bytes waiting.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Adds bytes of a header.
    pub fn push_bytes(&mut self, bytes: &[u8]) {
        self.scratch.extend_from_slice(bytes);
        self.bytes += bytes.len();
        match self.items.back_mut() {
            Some(Item::Header(len)) => *len += bytes.len(),
            _ => self.items.push_back(Item::Header(bytes.len())),
        }
    }

    /// Adds a payload.
    pub fn push_payload(&mut self, payload: BufSlice) {
        if !payload.is_empty() {
            self.bytes += payload.len();
            self.items.push_back(Item::Payload(payload));
        }
    }

    /// The next pieces to send, at most [`MAX_PIECES`].
    pub fn pieces(&self) -> Pieces<'_> {
        let mut pieces = Pieces::new();
        let mut at = self.sent_scratch;
        for item in self.items.iter().take(MAX_PIECES) {
            match item {
                Item::Header(len) => {
                    pieces.push(Piece::Bytes(&self.scratch[at..at + len]));
                    at += len;
                }
                Item::Payload(payload) => pieces.push(Piece::Memory(payload)),
            }
        }
        pieces
    }

    /// The socket took the first `count` bytes.
    pub fn sent(&mut self, mut count: usize) {
        self.bytes -= count.min(self.bytes);
        while let Some(item) = self.items.front_mut() {
            match item {
                Item::Header(len) => {
                    let now = count.min(*len);
                    self.sent_scratch += now;
                    *len -= now;
                    count -= now;
                    if *len > 0 {
                        break;
                    }
                }
                Item::Payload(payload) => {
                    if count < payload.len() {
                        let _ = payload.split_to(count);
                        break;
                    }
                    count -= payload.len();
                }
            }
            self.items.pop_front();
        }
        if self.sent_scratch == self.scratch.len() {
            self.scratch.clear();
            self.sent_scratch = 0;
        } else if self.sent_scratch > COMPACT_BYTES {
            self.scratch.drain(..self.sent_scratch);
            self.sent_scratch = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use addax_hugepages::Buf;
    use proptest::prelude::*;

    use super::*;

    fn gather(output: &Output) -> Vec<u8> {
        let mut all = Vec::new();
        for piece in output.pieces() {
            match piece {
                Piece::Bytes(b) => all.extend_from_slice(b),
                Piece::Memory(m) => all.extend_from_slice(&m.to_vec()),
            }
        }
        all
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Whatever is queued comes out once and in order, however the socket cuts it.
        #[test]
        fn order_and_completeness(parts in prop::collection::vec((any::<bool>(), 1usize..300), 1..100),
                                  cuts in prop::collection::vec(1usize..700, 1..50)) {
            let mut output = Output::default();
            let mut expected = Vec::new();
            for (index, (header, len)) in parts.into_iter().enumerate() {
                let bytes: Vec<u8> = (0..len).map(|i| (i + index * 7) as u8).collect();
                expected.extend_from_slice(&bytes);
                if header { output.push_bytes(&bytes) } else { output.push_payload(Buf::copy_of(&bytes).into_slice()) }
            }
            let mut got = Vec::new();
            for cut in cuts.iter().cycle() {
                if output.is_empty() { break }
                let offered = gather(&output);
                let take = (*cut).min(offered.len());
                got.extend_from_slice(&offered[..take]);
                output.sent(take);
            }
            prop_assert_eq!(got, expected);
            prop_assert!(output.items.is_empty() && output.scratch.is_empty());
        }
    }
}
