//! What is on a disk, read from its file without any engine, by the project's own reader of the format.
//!
//! *When things fail.* Errors name the file. A data plane may have it open: metadata is on the disk when a write is
//! acknowledged, so what is read then is what a crash at that moment would leave.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};
use blobstore_format::ReadAt;
use blobstore_format::image::{Image, Mode};

struct DiskFile {
    file: File,
    size: u64,
}

impl ReadAt for DiskFile {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buf, offset)
    }
}

fn open(path: &Path) -> Result<Image<DiskFile>> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    let size = file.metadata()?.len();
    Image::open(DiskFile { file, size }, Mode::AsMarked).with_context(|| path.display().to_string())
}

/// Name and UUID of the lvstore on a disk.
///
/// # Errors
/// When there is none.
pub fn store(path: &Path) -> Result<(String, String)> {
    let image = open(path)?;
    Ok((image.names.name.clone(), image.names.uuid.to_string()))
}

/// The contents of all lvols on a disk, by name.
///
/// # Errors
/// When there is no lvstore, or an lvol cannot be read.
pub fn lvols(path: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let image = open(path)?;
    let mut all = BTreeMap::new();
    for lvol in image.lvols() {
        let mut bytes = vec![0; usize::try_from(image.size(lvol))?];
        image.read(lvol.id, 0, &mut bytes, &()).with_context(|| lvol.names.name.clone())?;
        all.insert(lvol.names.name.clone(), bytes);
    }
    Ok(all)
}
