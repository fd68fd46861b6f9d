//! A device's contents in memory, without its holes.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::Path;

use blobstore_format::ReadAt;
use blobstore_format::read::beyond;

const PAGE: usize = 16 << 10;
static ZEROES: [u8; PAGE] = [0; PAGE];

/// Bytes of a device: pages that were never written, or only with zeroes, take no memory.
#[derive(Clone, PartialEq, Eq)]
pub struct Sparse {
    size: u64,
    pages: BTreeMap<u64, Box<[u8]>>,
}

impl Sparse {
    /// `size` zeroes.
    pub fn new(size: u64) -> Self {
        Self { size, pages: BTreeMap::new() }
    }

    /// The contents of a packed file, which must have `size` bytes.
    pub(crate) fn unpack(path: &Path, size: u64) -> Self {
        let file = std::fs::File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let mut stream = zstd::Decoder::new(file).unwrap();
        let mut sparse = Self::new(size);
        let mut buf = vec![0; PAGE];
        for offset in (0..size).step_by(PAGE) {
            let len = (size - offset).min(PAGE as u64) as usize;
            stream.read_exact(&mut buf[..len]).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            sparse.write(offset, &buf[..len]);
        }
        assert_eq!(stream.read(&mut buf).unwrap(), 0, "{} is longer than {size} bytes", path.display());
        sparse
    }

    /// Writes; panics beyond the end.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        assert!(offset + bytes.len() as u64 <= self.size, "a write at {offset} beyond the end, {}", self.size);
        for (page, at, part) in parts(offset, bytes.len()) {
            let bytes = &bytes[part];
            let zero = bytes == &ZEROES[..bytes.len()];
            if zero && bytes.len() == PAGE {
                self.pages.remove(&page);
            } else if !zero || self.pages.contains_key(&page) {
                let contents = self.pages.entry(page).or_insert_with(|| ZEROES.to_vec().into_boxed_slice());
                contents[at..at + bytes.len()].copy_from_slice(bytes);
            }
        }
    }

    /// Makes it longer, or cuts it.
    pub fn resize(&mut self, size: u64) {
        let end = size.min(self.size);
        let keep = end.next_multiple_of(PAGE as u64);
        if keep > end && keep <= self.size.next_multiple_of(PAGE as u64) {
            let tail = (keep.min(self.size) - end) as usize;
            self.write(end, &ZEROES[..tail]);
        }
        self.pages.retain(|page, _| page * (PAGE as u64) < keep);
        self.size = size;
    }
}

impl ReadAt for Sparse {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if offset.checked_add(buf.len() as u64).is_none_or(|end| end > self.size) {
            return Err(beyond(offset, buf.len(), self.size));
        }
        for (page, at, part) in parts(offset, buf.len()) {
            let out = &mut buf[part];
            match self.pages.get(&page) {
                Some(contents) => out.copy_from_slice(&contents[at..at + out.len()]),
                None => out.fill(0),
            }
        }
        Ok(())
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<u64>> {
        let page = self.pages.range(offset / PAGE as u64..).next();
        Ok(page.map(|(page, _)| offset.max(page * PAGE as u64)).filter(|data| *data < self.size))
    }
}

/// Splits a range: page, byte within it, range of the buffer.
fn parts(offset: u64, len: usize) -> impl Iterator<Item = (u64, usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        (done < len).then(|| {
            let place = offset + done as u64;
            let at = (place % PAGE as u64) as usize;
            let n = (PAGE - at).min(len - done);
            done += n;
            (place / PAGE as u64, at, done - n..done)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_come_back_and_zeroes_take_no_room() {
        let mut sparse = Sparse::new(100_000);
        sparse.write(16_000, &[7; 1000]);
        let mut buf = vec![1; 3000];
        sparse.read_at(15_000, &mut buf).unwrap();
        assert_eq!(buf[..1000], [0; 1000]);
        assert_eq!(buf[1000..2000], [7; 1000]);
        assert_eq!(buf[2000..], [0; 1000]);
        assert_eq!(sparse.next_data(0).unwrap(), Some(0));
        assert_eq!(sparse.next_data(40_000).unwrap(), None);
        sparse.write(0, &[0; 50_000]);
        assert_eq!(sparse.next_data(0).unwrap(), None);
        assert!(sparse.read_at(99_999, &mut buf).is_err());
        sparse.write(99_990, &[1; 10]);
        sparse.resize(99_995);
        sparse.resize(100_000);
        let mut end = [9; 10];
        sparse.read_at(99_990, &mut end).unwrap();
        assert_eq!(end, [1, 1, 1, 1, 1, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn the_manifest_and_an_image_can_be_read() {
        assert_eq!(crate::cases().len(), 119);
        let case = crate::case("crafted-base");
        let image = case.image();
        assert_eq!(image.size(), case.device_size);
        let mut signature = [0; 8];
        image.read_at(0, &mut signature).unwrap();
        assert_eq!(&signature, b"SPDKBLOB");
    }
}
