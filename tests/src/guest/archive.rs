//! A tar archive of some thousand files for file system tests, the same bytes on every machine.
//!
//! Sizes run from empty to about a megabyte, most of them small, as in a source tree; most content is noise,
//! some is zeros, so that a target that detects either is exercised. The last member, [`SUMS`], lists the
//! SHA-256 digest of every other file for `sha256sum -c`. The archive is made once and kept in the cache.

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use sha2::{Digest, Sha256};

use super::image;

/// Files in the archive, without [`SUMS`].
pub const FILES: usize = 3200;

/// Name of the list of digests, at the archive's root.
pub const SUMS: &str = "SHA256SUMS";

const FOLDERS: usize = 40;
const BLOCK: usize = 512;

/// The archive's path, after making it if it is not cached. Its length is about 60 MiB, a multiple of 512 bytes.
///
/// # Errors
/// When the cache folder cannot be written.
pub fn build() -> Result<PathBuf> {
    let mut hasher = DefaultHasher::new();
    // The code below decides every byte.
    include_str!("archive.rs").hash(&mut hasher);
    image::cached(&format!("archive-{:016x}.tar", hasher.finish()), |path| Ok(write(path)?))
}

fn write(path: &Path) -> io::Result<()> {
    let mut out = BufWriter::new(File::create(path)?);
    let mut noise = Noise::new(0x5eed);
    let mut sums = String::new();
    for index in 0..FOLDERS {
        out.write_all(&header(&folder_name(index), 0, b'5'))?;
    }
    for index in 0..FILES {
        let name = format!("{}file-{index:05}", folder_name(index % FOLDERS));
        let content = content(index, &mut noise);
        sums.push_str(&format!("{}  {name}\n", hex(&Sha256::digest(&content))));
        member(&mut out, &name, &content)?;
    }
    member(&mut out, SUMS, sums.as_bytes())?;
    out.write_all(&[0; 2 * BLOCK])?;
    out.flush()
}

fn folder_name(index: usize) -> String {
    format!("folder-{index:02}/")
}

fn member(out: &mut impl Write, name: &str, content: &[u8]) -> io::Result<()> {
    out.write_all(&header(name, content.len(), b'0'))?;
    out.write_all(content)?;
    let padding = content.len().next_multiple_of(BLOCK) - content.len();
    out.write_all(&[0; BLOCK][..padding])
}

/// A POSIX `ustar` header. Names here are far below its 100 bytes.
fn header(name: &str, size: usize, kind: u8) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    let mut put = |at: usize, text: &[u8]| block[at..at + text.len()].copy_from_slice(text);
    put(0, name.as_bytes());
    put(100, if kind == b'5' { b"0000755\0" } else { b"0000644\0" });
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    put(124, format!("{size:011o}\0").as_bytes());
    put(136, b"00000000000\0");
    put(156, &[kind]);
    put(257, b"ustar\x0000");
    // The checksum counts its own field as blanks.
    put(148, b"        ");
    let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

fn content(index: usize, noise: &mut Noise) -> Vec<u8> {
    let size = file_size(noise);
    let mut content = vec![0; size];
    // One file in sixteen stays zero, and one has a hole of zeros in its middle.
    match index % 16 {
        3 => {}
        7 => {
            noise.fill(&mut content[..size / 3]);
            noise.fill(&mut content[size - size / 3..]);
        }
        _ => noise.fill(&mut content),
    }
    content
}

fn file_size(noise: &mut Noise) -> usize {
    let (low, high) = match noise.next() % 100 {
        0 => (0, 1),
        1..50 => (1, 4 << 10),
        50..90 => (4 << 10, 32 << 10),
        90..99 => (32 << 10, 128 << 10),
        _ => (128 << 10, 1 << 20),
    };
    low + noise.next() as usize % (high - low)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The xorshift64 generator: enough to be incompressible, and the same everywhere.
struct Noise(u64);

impl Noise {
    /// `seed` must not be zero, the one state the generator never leaves.
    fn new(seed: u64) -> Self {
        debug_assert_ne!(seed, 0);
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn header_checksum_counts_its_field_as_blanks() {
        let block = header("a/b", 1234, b'0');
        let text = std::str::from_utf8(&block[148..154]).unwrap();
        let stored = u32::from_str_radix(text, 8).unwrap();
        let sum: u32 = block
            .iter()
            .enumerate()
            .map(|(at, &byte)| if (148..156).contains(&at) { 32 } else { u32::from(byte) })
            .sum();
        assert_eq!(stored, sum);
        assert_eq!(&block[124..135], b"00000002322");
    }

    #[test]
    fn content_depends_on_the_seed_alone() {
        let make = || {
            let mut noise = Noise::new(1);
            (0..32).map(|index| content(index, &mut noise)).collect::<Vec<_>>()
        };
        let files = make();
        assert_eq!(files, make());
        assert!(files[3].iter().all(|&byte| byte == 0));
        assert!(files.iter().any(|file| file.len() > 4096));
    }
}
