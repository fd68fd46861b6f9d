//! What a disk holds: a sparse array of bytes whose clones share their pages.
//!
//! A page that was never written reads as the disk's *fill*: zeroes, or junk that is a function of its place, as on a
//! used disk. Cloning costs one reference per written page, so that a test can keep the disk's state after every
//! single write.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::rng::mix;

/// Granularity of the sparse array in bytes.
pub const PAGE: usize = 4096;

const PAGE_U64: u64 = PAGE as u64;

/// What never-written pages hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// Zeroes.
    Zeroes,
    /// Bytes that look random, from this seed: the disk was used for something else before.
    Junk(u64),
}

/// The content of a disk.
#[derive(Debug, Clone)]
pub struct Image {
    size: u64,
    fill: Fill,
    pages: BTreeMap<u64, Rc<[u8; PAGE]>>,
    zero: Rc<[u8; PAGE]>,
}

impl Image {
    /// A disk of `size` bytes, never written.
    pub fn new(size: u64, fill: Fill) -> Self {
        Self { size, fill, pages: BTreeMap::new(), zero: Rc::new([0; PAGE]) }
    }

    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Makes it larger or smaller.
    pub fn set_size(&mut self, size: u64) {
        self.size = size;
        self.pages.split_off(&size.div_ceil(PAGE_U64));
    }

    /// Number of pages held in memory.
    pub fn pages_held(&self) -> usize {
        self.pages.len()
    }

    /// Bytes `offset..offset + buf.len()`.
    ///
    /// # Panics
    /// When the range is beyond the end: a bug of the caller that a real disk would refuse.
    pub fn read(&self, offset: u64, buf: &mut [u8]) {
        self.check(offset, buf.len() as u64);
        let mut at = offset;
        let mut rest = buf;
        while !rest.is_empty() {
            let (page, start, len) = piece(at, rest.len());
            let (head, tail) = rest.split_at_mut(len);
            match self.pages.get(&page) {
                Some(held) => head.copy_from_slice(&held[start..start + len]),
                None => head.copy_from_slice(&self.filled(page)[start..start + len]),
            }
            at += len as u64;
            rest = tail;
        }
    }

    /// Where something other than zeroes may be, at or after `offset`; the end when there is nothing.
    pub fn next_data(&self, offset: u64) -> u64 {
        if self.fill != Fill::Zeroes {
            return offset;
        }
        let page = self.pages.range(offset / PAGE_U64..).next();
        page.map_or(self.size, |(page, _)| offset.max(page * PAGE_U64)).min(self.size)
    }

    /// As [`Image::read`], into a new vector.
    pub fn read_vec(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.read(offset, &mut bytes);
        bytes
    }

    /// Replaces bytes from `offset` on.
    ///
    /// # Panics
    /// As [`Image::read`].
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.check(offset, bytes.len() as u64);
        let mut at = offset;
        let mut rest = bytes;
        while !rest.is_empty() {
            let (page, start, len) = piece(at, rest.len());
            let (head, tail) = rest.split_at(len);
            self.page_mut(page)[start..start + len].copy_from_slice(head);
            at += len as u64;
            rest = tail;
        }
    }

    /// Zeroes a range.
    ///
    /// # Panics
    /// As [`Image::read`].
    pub fn zero(&mut self, offset: u64, len: u64) {
        self.check(offset, len);
        let end = offset + len;
        let (first, last) = (offset.div_ceil(PAGE_U64), end / PAGE_U64);
        if first >= last {
            return self.write(offset, &vec![0; len_of(len)]);
        }
        self.write(offset, &vec![0; len_of(first * PAGE_U64 - offset)]);
        self.write(last * PAGE_U64, &vec![0; len_of(end - last * PAGE_U64)]);
        if self.fill == Fill::Zeroes {
            let mut tail = self.pages.split_off(&first);
            self.pages.append(&mut tail.split_off(&last));
        } else {
            for page in first..last {
                self.pages.insert(page, Rc::clone(&self.zero));
            }
        }
    }

    /// Fills a range with junk that differs from what was there: what some disks show after an unmap.
    pub fn junk(&mut self, offset: u64, len: u64, seed: u64) {
        self.check(offset, len);
        let mut at = offset;
        while at < offset + len {
            let (page, start, piece) = piece(at, len_of(offset + len - at));
            let junk = junk_page(seed, page);
            self.write(at, &junk[start..start + piece]);
            at += piece as u64;
        }
    }

    fn check(&self, offset: u64, len: u64) {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.size),
            "bytes {offset}+{len} are beyond the disk's end at {}",
            self.size
        );
    }

    fn filled(&self, page: u64) -> Box<[u8; PAGE]> {
        match self.fill {
            Fill::Zeroes => Box::new([0; PAGE]),
            Fill::Junk(seed) => junk_page(seed, page),
        }
    }

    fn page_mut(&mut self, page: u64) -> &mut [u8; PAGE] {
        if !self.pages.contains_key(&page) {
            let filled: Rc<[u8; PAGE]> = self.filled(page).into();
            self.pages.insert(page, filled);
        }
        let zero = &self.zero;
        Rc::make_mut(self.pages.entry(page).or_insert_with(|| Rc::clone(zero)))
    }
}

/// The part of `at..at + len` within the page of `at`: page, start within it, length.
fn piece(at: u64, len: usize) -> (u64, usize, usize) {
    let start = len_of(at % PAGE_U64);
    (at / PAGE_U64, start, len.min(PAGE - start))
}

impl blobstore_format::ReadAt for Image {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<()> {
        if offset.checked_add(buf.len() as u64).is_none_or(|end| end > self.size) {
            return Err(blobstore_format::read::beyond(offset, buf.len(), self.size));
        }
        self.read(offset, buf);
        Ok(())
    }

    fn next_data(&self, offset: u64) -> std::io::Result<Option<u64>> {
        let data = Self::next_data(self, offset);
        Ok((data < self.size).then_some(data))
    }
}

fn len_of(len: u64) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}

fn junk_page(seed: u64, page: u64) -> Box<[u8; PAGE]> {
    let mut bytes = Box::new([0; PAGE]);
    for (word, chunk) in bytes.chunks_exact_mut(8).enumerate() {
        chunk.copy_from_slice(&mix(seed ^ (page * 512 + word as u64 + 1)).to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn reference(fill: Fill, changes: &[(u64, u64, u8)]) {
        const SIZE: u64 = 5 * PAGE_U64;
        let mut image = Image::new(SIZE, fill);
        let mut flat = image.read_vec(0, SIZE as usize);
        for &(offset, len, byte) in changes {
            if byte == 0 {
                image.zero(offset, len);
            } else {
                image.write(offset, &vec![byte; len as usize]);
            }
            flat[offset as usize..(offset + len) as usize].fill(byte);
            assert_eq!(image.read_vec(0, SIZE as usize), flat, "after {offset}+{len}");
        }
    }

    #[test]
    fn it_behaves_as_a_flat_array() {
        let changes =
            [(0, 3, 1), (4000, 9000, 2), (5000, 10, 0), (4096, 8192, 0), (100, 20000, 3), (0, 20480, 0), (4095, 2, 7)];
        reference(Fill::Zeroes, &changes);
        reference(Fill::Junk(9), &changes);
    }

    #[test]
    fn a_clone_keeps_its_content_when_the_original_changes() {
        let mut image = Image::new(1 << 40, Fill::Zeroes);
        image.write(1 << 39, b"before");
        let clone = image.clone();
        image.write(1 << 39, b"behind");
        image.zero(0, 1 << 30);
        assert_eq!(clone.read_vec(1 << 39, 6), b"before");
        assert_eq!(image.pages_held(), 1);
    }
}
