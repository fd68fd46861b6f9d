//! A writer for the `newc` archive format that the Linux kernel unpacks as its first root file system.
//!
//! Output depends on the entries alone: inode numbers count up, times and owners are zero. The kernel accepts
//! several archives one after another, so a caller may append a second one to a finished archive.

use std::io::{self, Write};

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// Writes one archive to `out`; [`Writer::finish`] must be called for it to be complete.
#[derive(Debug)]
pub struct Writer<W> {
    out: W,
    inode: u32,
    position: u64,
}

impl<W: Write> Writer<W> {
    /// Starts an archive at the beginning of `out`.
    pub fn new(out: W) -> Self {
        Self { out, inode: 0, position: 0 }
    }

    /// Adds a directory; its parents must have been added before.
    pub fn directory(&mut self, path: &str) -> io::Result<()> {
        self.entry(path, DIRECTORY | 0o755, (0, 0), &[])
    }

    /// Adds a regular file with the permission bits `mode`.
    pub fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        self.entry(path, REGULAR | mode, (0, 0), content)
    }

    /// Adds a symbolic link at `path` that points to `target`.
    pub fn symlink(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.entry(path, SYMLINK | 0o777, (0, 0), target.as_bytes())
    }

    /// Adds a character device node.
    pub fn character_device(&mut self, path: &str, major: u32, minor: u32) -> io::Result<()> {
        self.entry(path, CHARACTER_DEVICE | 0o600, (major, minor), &[])
    }

    /// Ends the archive and hands `out` back.
    pub fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn entry(&mut self, path: &str, mode: u32, (major, minor): (u32, u32), content: &[u8]) -> io::Result<()> {
        let too_long = |what| io::Error::new(io::ErrorKind::InvalidInput, what);
        let size = u32::try_from(content.len()).map_err(|_| too_long("file over 4 GiB"))?;
        let name_size = u32::try_from(path.len() + 1).map_err(|_| too_long("path over 4 GiB"))?;
        self.inode += 1;
        let links = 1;
        let fields = [self.inode, mode, 0, 0, links, 0, size, 0, 0, major, minor, name_size, 0];
        let mut header = String::from("070701");
        for field in fields {
            header.push_str(&format!("{field:08X}"));
        }
        header.push_str(path);
        header.push('\0');
        self.write_padded(header.as_bytes())?;
        self.write_padded(content)
    }

    /// Both the header with its name and the content end on a multiple of four bytes.
    fn write_padded(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.position += bytes.len() as u64;
        let padding = (4 - self.position % 4) % 4;
        self.out.write_all(&[0; 3][..padding as usize])?;
        self.position += padding;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn entries_are_aligned_and_the_trailer_closes() {
        let mut writer = Writer::new(Vec::new());
        writer.directory("a").unwrap();
        writer.file("a/b", 0o644, b"12345").unwrap();
        let bytes = writer.finish().unwrap();
        assert_eq!(bytes.len() % 4, 0);
        let starts: Vec<usize> =
            bytes.windows(6).enumerate().filter(|(_, window)| *window == b"070701").map(|(at, _)| at).collect();
        assert_eq!(starts.len(), 3);
        assert!(starts.iter().all(|at| at % 4 == 0));
        assert!(bytes.windows(10).any(|window| window == b"TRAILER!!!"));
    }

    #[test]
    fn size_and_mode_stand_in_their_columns() {
        let mut writer = Writer::new(Vec::new());
        writer.file("f", 0o755, b"abc").unwrap();
        let bytes = writer.finish().unwrap();
        let field = |index: usize| {
            let text = std::str::from_utf8(&bytes[6 + index * 8..14 + index * 8]).unwrap();
            u32::from_str_radix(text, 16).unwrap()
        };
        assert_eq!(field(1), 0o100_755);
        assert_eq!(field(6), 3);
        assert_eq!(field(11), 2);
    }
}
