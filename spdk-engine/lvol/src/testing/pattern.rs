//! What tests write: every 512 bytes repeat (tag, number of the block within the lvol), so that a block found in the
//! wrong place tells where it belongs.

/// Names one write. 0 stands for zeroes.
pub type Tag = u32;

/// What a block was found to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// Zeroes (tag 0) or what the write of this tag put into this block.
    Tag(Tag),
    /// What the write of this tag put into another block.
    Misplaced(Tag, u32),
    /// Parts of different writes.
    Mixed,
    /// Nothing that a test wrote.
    Junk,
}

/// Fills `bytes`, whole blocks from block `first` on, with a tag.
pub fn fill(bytes: &mut [u8], block_size: usize, first: u64, tag: Tag) {
    if tag == 0 {
        return bytes.fill(0);
    }
    for (index, block) in bytes.chunks_mut(block_size).enumerate() {
        let word = word(first + index as u64, tag);
        for chunk in block.chunks_exact_mut(8) {
            chunk.copy_from_slice(&word);
        }
    }
}

/// Blocks `first..first + count` of a tag.
pub fn blocks(block_size: usize, first: u64, count: u64, tag: Tag) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(count).unwrap_or(usize::MAX) * block_size];
    fill(&mut bytes, block_size, first, tag);
    bytes
}

/// Reads one block back; `number` is its place.
pub fn read(block: &[u8], number: u64) -> Found {
    let (head, rest) = block.split_at(8.min(block.len()));
    if !rest.chunks_exact(8).all(|chunk| chunk == head) {
        let known = |chunk: &[u8]| chunk.iter().all(|&byte| byte == 0) || chunk[4..] == word(number, 0)[4..];
        return if block.chunks_exact(8).all(known) { Found::Mixed } else { Found::Junk };
    }
    let part = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let (tag, place) = (part(0), part(4));
    match tag {
        0 if place == 0 => Found::Tag(0),
        0 => Found::Junk,
        // No test has so many writes or blocks: these are bytes from elsewhere.
        _ if tag >= 1 << 24 || place >= 1 << 28 => Found::Junk,
        _ if u64::from(place) == number + 1 => Found::Tag(tag),
        _ => Found::Misplaced(tag, place - 1),
    }
}

fn word(block: u64, tag: Tag) -> [u8; 8] {
    // One more, so that no block of a write is all zeroes but for its tag.
    let place = u32::try_from(block + 1).unwrap_or(u32::MAX);
    let mut word = [0; 8];
    word[..4].copy_from_slice(&tag.to_le_bytes());
    word[4..].copy_from_slice(&place.to_le_bytes());
    word
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn blocks_tell_what_they_are() {
        let bytes = blocks(512, 7, 2, 3);
        assert_eq!(read(&bytes[..512], 7), Found::Tag(3));
        assert_eq!(read(&bytes[512..], 8), Found::Tag(3));
        assert_eq!(read(&bytes[512..], 7), Found::Misplaced(3, 8));
        assert_eq!(read(&[0; 512], 7), Found::Tag(0));
        assert_eq!(read(&[0xA5; 512], 7), Found::Junk);
        let mut torn = bytes[..512].to_vec();
        torn[256..].fill(0);
        assert_eq!(read(&torn, 7), Found::Mixed);
    }
}
