//! `addax-engine blob`: looks into a blobstore on a device or in a file, without an engine and without changing it.
//!
//! The image is opened for reading only. `check` exits with 0 when nothing is wrong, 1 when something was found, 2 when
//! the image cannot be read or holds no blobstore; `dump` with 0 or 2. A store that an engine has open changes under the
//! reader: what is found then is not to be relied on.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use blobstore_format::ReadAt;
use blobstore_format::check::check;
use blobstore_format::dump::dump;
use blobstore_format::read::beyond;
use clap::{Args, Subcommand, ValueEnum};
use nix::errno::Errno;
use nix::unistd::{Whence, lseek};

/// Exit code when something was found.
const FINDINGS: u8 = 1;
/// Exit code when the image cannot be read.
const UNREADABLE: u8 = 2;

/// What to do with an image.
#[derive(Subcommand, Debug)]
pub enum BlobTool {
    /// Find and name every inconsistency: exit code 0 if there is none, 1 if there is, 2 if the image cannot be read.
    #[command(after_help = "Example: addax-engine blob check /dev/sdb -o json")]
    Check(Input),
    /// Show super block, masks and all blobs: exit code 0, or 2 if the image cannot be read.
    #[command(after_help = "Example: addax-engine blob dump disk.img")]
    Dump(Input),
}

/// Where the blobstore is, and how to tell about it.
#[derive(Args, Debug)]
pub struct Input {
    /// A device or a file with a blobstore. It is opened for reading only and should not be in use.
    image: PathBuf,
    /// Where the blobstore begins, in bytes; on a member of a raid1 array with a superblock, its data_offset.
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    offset: u64,
    /// How to tell.
    #[arg(short = 'o', long, default_value = "text")]
    output: Output,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Output {
    Text,
    Json,
}

/// Runs the tool.
pub fn run(tool: &BlobTool) -> ExitCode {
    let (BlobTool::Check(input) | BlobTool::Dump(input)) = tool;
    let done = match tool {
        BlobTool::Check(_) => run_check(input),
        BlobTool::Dump(_) => run_dump(input),
    };
    done.unwrap_or_else(|error| {
        eprintln!("addax-engine: {}: {error}", input.image.display());
        ExitCode::from(UNREADABLE)
    })
}

fn run_check(input: &Input) -> Result<ExitCode, String> {
    let report = check(&Image::open(&input.image, input.offset)?).map_err(|e| e.to_string())?;
    print(input.output, &report)?;
    Ok(if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::from(FINDINGS) })
}

fn run_dump(input: &Input) -> Result<ExitCode, String> {
    let contents = dump(&Image::open(&input.image, input.offset)?).map_err(|e| e.to_string())?;
    print(input.output, &contents)?;
    Ok(ExitCode::SUCCESS)
}

fn print<T: serde::Serialize + std::fmt::Display>(output: Output, what: &T) -> Result<(), String> {
    let text = match output {
        Output::Text => what.to_string(),
        Output::Json => serde_json::to_string_pretty(what).map_err(|e| e.to_string())?,
    };
    writeln!(io::stdout().lock(), "{}", text.trim_end()).map_err(|e| format!("writing the result: {e}"))
}

/// A device or file, from some byte on.
struct Image {
    file: File,
    start: u64,
    size: u64,
}

impl Image {
    fn open(path: &Path, start: u64) -> Result<Self, String> {
        let mut file = File::open(path).map_err(|e| e.to_string())?;
        // The length in a device's metadata is 0; its end tells.
        let end = file.seek(SeekFrom::End(0)).map_err(|e| e.to_string())?;
        let size = end.checked_sub(start).ok_or_else(|| format!("--offset is {start}; the image has {end} bytes"))?;
        Ok(Self { file, start, size })
    }
}

impl ReadAt for Image {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if offset.checked_add(buf.len() as u64).is_none_or(|end| end > self.size) {
            return Err(beyond(offset, buf.len(), self.size));
        }
        self.file.read_exact_at(buf, self.start + offset)
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<u64>> {
        if offset >= self.size {
            return Ok(None);
        }
        match i64::try_from(self.start + offset).map(|at| lseek(&self.file, at, Whence::SeekData)) {
            Ok(Ok(data)) => Ok(Some((data as u64).saturating_sub(self.start).max(offset)).filter(|at| *at < self.size)),
            Ok(Err(Errno::ENXIO)) => Ok(None),
            // Not every file system and no device knows holes: then all may be data.
            _ => Ok(Some(offset)),
        }
    }
}
