//! What a device is and what it holds, before anybody writes to it.
//!
//! *What it is.* Reads of a local file or block device: its identity as the system tells it, and a look at its two ends.
//!
//! *Invariants.* A device counts as empty only when its first and its last [`END_BYTES`] are all zeroes: partition
//! tables, file systems, volume managers, software RAID and encryption all leave a mark there. A fingerprint covers both
//! ends, the size and the identity, so a permission to erase holds for just what was seen, and for nothing after it.
//! Which lvstore a device holds is read here too, because a data plane that opens a store also writes to it.
//!
//! *When things fail.* [`ProbeError`] says what cannot be read. Nothing is written but by [`wipe`] and [`make_file`].

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use blobstore_format::lvs::StoreNames;
use blobstore_format::metadata::Reading;
use blobstore_format::page::NO_PAGE;
use blobstore_format::superblock::BsType;
use blobstore_format::{BlobId, Geometry, MdPage, Metadata, PAGE_SIZE, SuperBlock};
use sha2::{Digest, Sha256};

use crate::state::BLOCK_SIZE;

/// How much of each end is looked at, in bytes.
pub const END_BYTES: usize = 1 << 20;
/// The first bytes of SPDK's blobstore, which carries lvstores.
const BLOBSTORE_SIGNATURE: &[u8] = b"SPDKBLOB";

/// Why a device could not be looked at.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// There is nothing at the path.
    #[error("{0} is not there")]
    Missing(PathBuf),
    /// It is not of the kind that was asked for.
    #[error("{path} is not {expected}")]
    WrongKind {
        /// The path.
        path: PathBuf,
        /// What it should be.
        expected: &'static str,
    },
    /// The system or another program has it.
    #[error("{0} is in use: it is mounted, part of something that is, or a disk of another node or name")]
    InUse(PathBuf),
    /// The system failed.
    #[error("{path}: {source}")]
    Io {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Metadata pages that the name of a store may take: it takes one.
const NAME_PAGES_MAX: usize = 16;

/// What a blobstore is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Store {
    /// An lvstore.
    Named(StoreNames),
    /// An lvstore whose making was cut short: it has no name yet, hence no lvols.
    Unfinished,
    /// Another kind of blobstore, or one that cannot be read.
    Unknown,
}

/// What a device holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Nothing: both ends are zeroes.
    Empty,
    /// A blobstore, which may be an lvstore.
    Blobstore {
        /// Identity of what it holds.
        fingerprint: String,
        /// What it is.
        store: Store,
    },
    /// Something else.
    Other {
        /// In words.
        what: String,
        /// Identity of what it holds.
        fingerprint: String,
    },
}

/// The two ends of a device.
#[derive(Debug)]
pub struct Ends {
    /// Bytes of the whole device.
    pub size: u64,
    /// The first [`END_BYTES`], or all.
    pub head: Vec<u8>,
    /// The last [`END_BYTES`], or all.
    pub tail: Vec<u8>,
}

impl Ends {
    /// What they show; `store` reads further into a blobstore.
    pub fn content(&self, device: &str, store: impl FnOnce() -> Store) -> Content {
        let is_zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
        if is_zero(&self.head) && is_zero(&self.tail) {
            return Content::Empty;
        }
        let fingerprint = self.fingerprint(device);
        if self.head.starts_with(BLOBSTORE_SIGNATURE) {
            return Content::Blobstore { fingerprint, store: store() };
        }
        Content::Other { what: self.describe().to_owned(), fingerprint }
    }

    fn fingerprint(&self, device: &str) -> String {
        let mut hash = Sha256::new();
        hash.update(device.as_bytes());
        hash.update([0]);
        hash.update(self.size.to_le_bytes());
        hash.update(&self.head);
        hash.update(&self.tail);
        hash.finalize().iter().take(6).map(|byte| format!("{byte:02x}")).collect()
    }

    fn describe(&self) -> &'static str {
        const SIGNATURES: [(usize, &[u8], &str); 10] = [
            (512, b"EFI PART", "a GPT partition table"),
            (4096, b"EFI PART", "a GPT partition table"),
            (1024 + 56, b"\x53\xef", "an ext file system"),
            (0, b"XFSB", "an XFS file system"),
            (65_536 + 64, b"_BHRfS_M", "a btrfs file system"),
            (0, b"LUKS\xba\xbe", "a LUKS container"),
            (512, b"LABELONE", "an LVM physical volume"),
            (4086, b"SWAPSPACE2", "a swap area"),
            (4096, b"\xfc\x4e\x2b\xa9", "a software RAID member"),
            (510, b"\x55\xaa", "a boot sector or an MBR partition table"),
        ];
        let at = |offset: usize, mark: &[u8]| self.head.get(offset..offset + mark.len()) == Some(mark);
        let known = SIGNATURES.iter().find(|(offset, mark, _)| at(*offset, mark));
        known.map_or("data of an unknown kind", |(_, _, what)| what)
    }
}

/// A local device that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Bytes.
    pub size: u64,
    /// Identity of the device; empty when it has none of its own, as files.
    pub device: String,
    /// What it holds.
    pub content: Content,
}

/// Identity and size of a file (`block` false) or block device.
///
/// # Errors
/// See [`ProbeError`].
pub fn identity(path: &Path, block: bool) -> Result<String, ProbeError> {
    let meta = metadata(path)?;
    match block {
        true if !meta.file_type().is_block_device() => {
            Err(ProbeError::WrongKind { path: path.to_owned(), expected: "a block device" })
        }
        true => Ok(block_identity(Path::new("/sys/dev/block"), meta.rdev())),
        false if !meta.file_type().is_file() => {
            Err(ProbeError::WrongKind { path: path.to_owned(), expected: "a regular file" })
        }
        false => Ok(String::new()),
    }
}

/// Keeps others on this machine from using a device as long as the file lives: another agent, or this one under another
/// name. Data planes ask for no such lock, so one that was left running does not matter.
///
/// # Errors
/// [`ProbeError::InUse`] when somebody has it.
pub fn hold(path: &Path) -> Result<File, ProbeError> {
    let io = |source| ProbeError::Io { path: path.to_owned(), source };
    let file = File::open(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => ProbeError::Missing(path.to_owned()),
        _ => io(source),
    })?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(ProbeError::InUse(path.to_owned())),
        Err(fs::TryLockError::Error(source)) => Err(io(source)),
    }
}

/// The size of the blocks with which a device has to be opened: those of the blobstore on it, else [`BLOCK_SIZE`].
///
/// # Errors
/// See [`ProbeError`].
pub fn block_size(path: &Path) -> Result<u32, ProbeError> {
    let io = |source| ProbeError::Io { path: path.to_owned(), source };
    let file = File::open(path).map_err(io)?;
    let mut head = vec![0; PAGE_SIZE];
    match file.read_exact_at(&mut head, 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(BLOCK_SIZE),
        read => read.map_err(io)?,
    }
    // Old stores do not say it; their blocks are pages.
    let said = SuperBlock::parse(&head).ok().map(|super_block| super_block.io_unit_size);
    Ok(said.filter(|size| (512..BLOCK_SIZE).contains(size)).unwrap_or(BLOCK_SIZE))
}

/// Looks at a device that nobody here has opened yet.
///
/// # Errors
/// See [`ProbeError`]; [`ProbeError::InUse`] for a block device that is mounted or belongs to something else.
pub fn probe(path: &Path, block: bool) -> Result<Probe, ProbeError> {
    let device = identity(path, block)?;
    let io = |source| ProbeError::Io { path: path.to_owned(), source };
    let mut options = File::options();
    options.read(true);
    if block {
        // For a block device this asks whether anybody holds it.
        options.custom_flags(nix::libc::O_EXCL);
    }
    let file = options.open(path).map_err(|source| match source.raw_os_error() {
        Some(nix::libc::EBUSY) => ProbeError::InUse(path.to_owned()),
        _ => io(source),
    })?;
    let ends = ends(&file).map_err(io)?;
    let content = ends.content(&device, || store(&file, &ends).unwrap_or(Store::Unknown));
    Ok(Probe { size: ends.size, content, device })
}

/// What the blobstore of a device is; `None` for one that cannot be read.
fn store(file: &File, ends: &Ends) -> Option<Store> {
    let super_block = SuperBlock::parse(&ends.head).ok().filter(|found| found.bstype == BsType::LVOLSTORE)?;
    if super_block.super_blob == BlobId::INVALID {
        return Some(Store::Unfinished);
    }
    let geometry = Geometry::of(&super_block, ends.size).ok()?;
    let (mut pages, mut next) = (Vec::new(), super_block.super_blob.page());
    while let Some(index) = next.filter(|index| *index < geometry.md_len && pages.len() < NAME_PAGES_MAX) {
        let mut bytes = vec![0; PAGE_SIZE];
        file.read_exact_at(&mut bytes, geometry.page_offset(index)).ok()?;
        let page = MdPage::parse(&bytes).ok()?;
        next = (page.next != NO_PAGE).then_some(page.next);
        pages.push(page);
    }
    let super_blob = Metadata::parse(super_block.super_blob, &pages, Reading::Load).ok()?;
    StoreNames::of(&super_blob).ok().map(Store::Named)
}

/// Overwrites both ends with zeroes, durably.
///
/// # Errors
/// See [`ProbeError`].
pub fn wipe(path: &Path) -> Result<(), ProbeError> {
    let io = |source| ProbeError::Io { path: path.to_owned(), source };
    let file = File::options().read(true).write(true).open(path).map_err(io)?;
    let size = size_of(&file).map_err(io)?;
    let zeroes = vec![0; END_BYTES];
    let count = usize::try_from(size).unwrap_or(usize::MAX).min(END_BYTES);
    let tail = size - count as u64;
    file.write_all_at(&zeroes[..count], 0).map_err(io)?;
    file.write_all_at(&zeroes[..count], tail).map_err(io)?;
    file.sync_all().map_err(io)
}

/// Makes a sparse file; it must not be there. It gets its name when it has its size, so that one that is there is whole.
///
/// # Errors
/// See [`ProbeError`].
pub fn make_file(path: &Path, size: u64) -> Result<(), ProbeError> {
    let io = |source| ProbeError::Io { path: path.to_owned(), source };
    let parent = path.parent().unwrap_or(Path::new("/"));
    let new = parent.join(format!(".{}.addax-new", path.file_name().unwrap_or_default().display()));
    // Left by a crash. It may be a second name of the file by now: it is never written to.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io(error)),
        _ => {}
    }
    let file = File::options().create_new(true).write(true).mode(0o600).open(&new).map_err(io)?;
    // A link, unlike a new name, never takes the place of what is there.
    let linked = file.set_len(size).and_then(|()| file.sync_all()).and_then(|()| fs::hard_link(&new, path));
    fs::remove_file(&new).and(linked).and_then(|()| File::open(parent)?.sync_all()).map_err(io)
}

/// Bytes that the file system of a file can still take.
pub fn free_around(path: &Path) -> Option<u64> {
    let stat = nix::sys::statvfs::statvfs(path).ok()?;
    Some(stat.blocks_available().saturating_mul(stat.fragment_size()))
}

fn metadata(path: &Path) -> Result<fs::Metadata, ProbeError> {
    fs::metadata(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => ProbeError::Missing(path.to_owned()),
        _ => ProbeError::Io { path: path.to_owned(), source },
    })
}

fn ends(file: &File) -> io::Result<Ends> {
    let size = size_of(file)?;
    let count = usize::try_from(size).unwrap_or(usize::MAX).min(END_BYTES);
    let mut head = vec![0; count];
    file.read_exact_at(&mut head, 0)?;
    let mut tail = vec![0; count];
    file.read_exact_at(&mut tail, size - count as u64)?;
    Ok(Ends { size, head, tail })
}

fn size_of(mut file: &File) -> io::Result<u64> {
    use std::io::{Seek, SeekFrom};
    // Also for block devices, whose metadata has no length.
    file.seek(SeekFrom::End(0))
}

/// What the system knows of a block device that stays the same when it is plugged in elsewhere: a partition's or a
/// mapped volume's UUID, the serial number, else the world-wide name.
fn block_identity(sys: &Path, device: u64) -> String {
    let folder = sys.join(format!("{}:{}", nix::sys::stat::major(device), nix::sys::stat::minor(device)));
    let read = |name: &str| {
        let text = fs::read_to_string(folder.join(name)).unwrap_or_default();
        let text = text.trim().to_owned();
        (!text.is_empty()).then_some(text)
    };
    let partition = || {
        let number = read("partition")?;
        let parent = ["../device/serial", "../wwid", "../device/wwid"].iter().find_map(|name| read(name))?;
        Some(format!("{parent}-part{number}"))
    };
    let whole = || ["dm/uuid", "device/serial", "serial", "wwid", "device/wwid"].iter().find_map(|name| read(name));
    partition().or_else(whole).unwrap_or_default()
}

/// Whether a block device has a cache that loses what is not flushed when power does; yes, unless the system says no.
pub fn has_cache(path: &Path) -> bool {
    fs::metadata(path).map_or(true, |meta| has_block_cache(Path::new("/sys/dev/block"), meta.rdev()))
}

fn has_block_cache(sys: &Path, device: u64) -> bool {
    let folder = sys.join(format!("{}:{}", nix::sys::stat::major(device), nix::sys::stat::minor(device)));
    // A partition has its disk's queue.
    let said =
        ["queue/write_cache", "../queue/write_cache"].iter().find_map(|at| fs::read_to_string(folder.join(at)).ok());
    said.is_none_or(|said| said.trim() != "write through")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn file(size: u64, writes: &[(u64, &[u8])]) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        make_file(&path, size).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        writes.iter().for_each(|(at, bytes)| file.write_all_at(bytes, *at).unwrap());
        (dir, path)
    }

    fn content(size: u64, writes: &[(u64, &[u8])]) -> Content {
        let (_dir, path) = file(size, writes);
        probe(&path, false).unwrap().content
    }

    #[test]
    fn only_zeroes_at_both_ends_are_empty() {
        let size = 16 << 20;
        assert_eq!(content(size, &[]), Content::Empty);
        for at in [0, 511, END_BYTES as u64 - 1, size - END_BYTES as u64, size - 1] {
            assert!(matches!(content(size, &[(at, b"x")]), Content::Other { .. }), "at {at}");
        }
        assert_eq!(content(4096, &[]), Content::Empty);
        assert!(matches!(content(4096, &[(4095, b"x")]), Content::Other { .. }));
    }

    #[test]
    fn what_is_there_is_named() {
        let named = |at, mark: &[u8]| match content(4 << 20, &[(at, mark)]) {
            Content::Other { what, .. } => what,
            other => panic!("{other:?}"),
        };
        assert_eq!(named(1080, b"\x53\xef"), "an ext file system");
        assert_eq!(named(512, b"EFI PART"), "a GPT partition table");
        assert_eq!(named(510, b"\x55\xaa"), "a boot sector or an MBR partition table");
        assert_eq!(named(100, b"hello"), "data of an unknown kind");
        assert!(matches!(content(4 << 20, &[(0, b"SPDKBLOB")]), Content::Blobstore { .. }));
    }

    #[test]
    fn a_fingerprint_is_of_just_what_is_there() {
        let (_dir, path) = file(4 << 20, &[(0, b"one")]);
        let print = || match probe(&path, false).unwrap().content {
            Content::Other { fingerprint, .. } => fingerprint,
            other => panic!("{other:?}"),
        };
        let first = print();
        assert_eq!(print(), first);
        File::options().write(true).open(&path).unwrap().write_all_at(b"two", (4 << 20) - 3).unwrap();
        assert_ne!(print(), first);
        wipe(&path).unwrap();
        assert_eq!(probe(&path, false).unwrap().content, Content::Empty);
    }

    #[test]
    fn absent_and_wrong_things_are_told_apart() {
        let (dir, path) = file(4096, &[]);
        assert!(matches!(probe(&dir.path().join("none"), false), Err(ProbeError::Missing(_))));
        assert!(matches!(probe(&path, true), Err(ProbeError::WrongKind { .. })));
        assert!(matches!(probe(dir.path(), false), Err(ProbeError::WrongKind { .. })));
        assert!(matches!(make_file(&path, 1), Err(ProbeError::Io { .. })));
        assert_eq!(fs::metadata(&path).unwrap().len(), 4096);
    }

    #[test]
    fn a_file_is_there_with_its_size_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let (path, new) = (dir.path().join("disk"), dir.path().join(".disk.addax-new"));
        // Killed before it had its size, and after it had its name.
        File::create(&new).unwrap();
        make_file(&path, 8192).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 8192);
        fs::hard_link(&path, &new).unwrap();
        assert!(make_file(&path, 4096).is_err());
        assert_eq!((fs::metadata(&path).unwrap().len(), new.exists()), (8192, false));
    }

    #[test]
    fn the_lvstore_of_a_device_is_read_without_opening_it() {
        let size = 64 << 20;
        let (_dir, path) = file(size, &[]);
        let names = StoreNames { name: "lvs".to_owned(), uuid: uuid::Uuid::from_u128(7) };
        let geometry = crate::fake_plane::FakeStore::geometry(size);
        let mut super_block = geometry.super_block(BsType::LVOLSTORE);
        let write = |at, bytes: &[u8]| {
            File::options().write(true).open(&path).unwrap().write_all_at(bytes, at).unwrap();
        };
        let seen = || match probe(&path, false).unwrap().content {
            Content::Blobstore { store, .. } => store,
            other => panic!("{other:?}"),
        };
        write(0, &super_block.emit());
        assert_eq!(seen(), Store::Unfinished);
        super_block.super_blob = BlobId::from_page(0);
        write(0, &super_block.emit());
        assert_eq!(seen(), Store::Unknown);
        let mut blob = Metadata::new(BlobId::from_page(0), false);
        blob.xattrs = names.xattrs().unwrap();
        write(geometry.page_offset(0), &blob.emit().unwrap()[0].emit());
        assert_eq!(seen(), Store::Named(names));
        super_block.bstype = BsType(*b"BLOBFS\0\0\0\0\0\0\0\0\0\0");
        write(0, &super_block.emit());
        assert_eq!(seen(), Store::Unknown);
    }

    #[test]
    fn a_device_is_held_by_one() {
        let (dir, path) = file(4096, &[]);
        let held = hold(&path).unwrap();
        assert!(matches!(hold(&path), Err(ProbeError::InUse(_))));
        drop(held);
        hold(&path).unwrap();
        assert!(matches!(hold(&dir.path().join("none")), Err(ProbeError::Missing(_))));
    }

    #[test]
    fn rule_01_only_a_device_that_writes_through_has_no_volatile_cache() {
        let sys = tempfile::tempdir().unwrap();
        let (disk, part) = (nix::sys::stat::makedev(8, 0), nix::sys::stat::makedev(8, 1));
        assert!(has_block_cache(sys.path(), disk), "nobody knows");
        fs::create_dir_all(sys.path().join("8:0/queue")).unwrap();
        fs::create_dir_all(sys.path().join("8:0/sda1")).unwrap();
        std::os::unix::fs::symlink(sys.path().join("8:0/sda1"), sys.path().join("8:1")).unwrap();
        for (said, volatile) in [("write back\n", true), ("write through\n", false)] {
            fs::write(sys.path().join("8:0/queue/write_cache"), said).unwrap();
            assert_eq!((has_block_cache(sys.path(), disk), has_block_cache(sys.path(), part)), (volatile, volatile));
        }
    }

    #[test]
    fn a_block_device_is_known_by_what_stays_with_it() {
        let sys = tempfile::tempdir().unwrap();
        let (disk, part) = (nix::sys::stat::makedev(8, 0), nix::sys::stat::makedev(8, 1));
        assert_eq!(block_identity(sys.path(), disk), "");
        let folder = sys.path().join("8:0");
        fs::create_dir_all(folder.join("device")).unwrap();
        fs::write(folder.join("wwid"), "eui.01\n").unwrap();
        assert_eq!(block_identity(sys.path(), disk), "eui.01");
        fs::write(folder.join("device/serial"), " S3R1AL \n").unwrap();
        assert_eq!(block_identity(sys.path(), disk), "S3R1AL");
        // As in sysfs: a partition's folder lies in its disk's.
        fs::create_dir_all(folder.join("sda1")).unwrap();
        std::os::unix::fs::symlink(folder.join("sda1"), sys.path().join("8:1")).unwrap();
        fs::write(folder.join("sda1/partition"), "1\n").unwrap();
        assert_eq!(block_identity(sys.path(), part), "S3R1AL-part1");
    }
}
