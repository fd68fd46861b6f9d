//! The guest's kernel, from the package that the distribution's `linux-image-amd64` stands for.
//!
//! The package is downloaded and unpacked into the cache, never installed. A kernel already there is used without
//! asking the package registry again, so tests run offline and the kernel changes only when the cache is emptied.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::image::{cached, output};

/// An unpacked kernel package.
#[derive(Debug)]
pub(super) struct Kernel {
    /// The package's files, with an index of its modules.
    pub(super) package: PathBuf,
    /// The kernel for QEMU.
    pub(super) elf: PathBuf,
    /// The kernel's release name.
    pub(super) release: String,
}

/// The kernel, after downloading it if it is not cached.
pub(super) fn build() -> Result<Kernel> {
    let package = cached("kernel", unpack_package)?;
    let release = release(&package)?;
    let elf = cached(&format!("vmlinux-{release}"), |path| {
        unpack_elf(&package.join("boot").join(format!("vmlinuz-{release}")), path)
    })?;
    Ok(Kernel { package, elf, release })
}

fn unpack_package(target: &Path) -> Result<()> {
    let record = output(Command::new("apt-cache").args(["show", "--no-all-versions", "linux-image-amd64"]))?;
    let package = record
        .lines()
        .filter_map(|line| line.strip_prefix("Depends: "))
        .flat_map(|names| names.split([',', ' ']))
        .find(|name| name.starts_with("linux-image-") && *name != "linux-image-amd64")
        .context("linux-image-amd64 names no kernel package; run `apt-get update`")?
        .to_owned();
    let download = tempfile::tempdir()?;
    // Without this the downloader, which gives up its rights, warns that it cannot write into the folder.
    fs::set_permissions(download.path(), fs::Permissions::from_mode(0o777))?;
    output(Command::new("apt-get").args(["download", "-qq", &package]).current_dir(download.path()))?;
    let archive = fs::read_dir(download.path())?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|suffix| suffix == "deb"))
        .with_context(|| format!("no package file after downloading {package}"))?;
    output(Command::new("dpkg-deb").arg("-x").args([&archive, target]))?;
    let release = release(target)?;
    output(Command::new("busybox").args(["depmod", "-b"]).arg(target).arg(&release))?;
    Ok(())
}

fn release(package: &Path) -> Result<String> {
    fs::read_dir(package.join("boot"))?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .find_map(|name| name.strip_prefix("vmlinuz-").map(str::to_owned))
        .with_context(|| format!("no kernel in {}", package.display()))
}

/// Writes the kernel proper to `target`, so that no emulated processor spends seconds on unpacking it. QEMU starts
/// either kind; a kernel compressed in another way than the one known here is left to unpack itself.
fn unpack_elf(vmlinuz: &Path, target: &Path) -> Result<()> {
    let image = fs::read(vmlinuz)?;
    match xz_payload(&image) {
        Some(payload) => {
            let packed = target.with_extension("xz");
            fs::write(&packed, payload)?;
            let status = Command::new("xz")
                .arg("-dc")
                .stdin(File::open(&packed)?)
                .stdout(File::create(target)?)
                .status()
                .context("cannot start xz; run tests/setup.sh")?;
            fs::remove_file(&packed)?;
            ensure!(status.success(), "xz failed with {status}");
        }
        None => fs::write(target, image)?,
    }
    Ok(())
}

/// The compressed kernel inside a Linux/x86 boot image, if it is an xz stream. Offsets are those of the x86 boot
/// protocol, 2.08 and later.
fn xz_payload(image: &[u8]) -> Option<&[u8]> {
    const SETUP_SECTORS: usize = 0x1f1;
    const PAYLOAD_OFFSET: usize = 0x248;
    const PAYLOAD_LENGTH: usize = 0x24c;
    const SECTOR: usize = 512;
    // The build appends the unpacked size to the stream.
    const TRAILER: usize = 4;
    let word = |at: usize| {
        let bytes = image.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    let setup = (usize::from(*image.get(SETUP_SECTORS)?) + 1) * SECTOR;
    let start = setup.checked_add(word(PAYLOAD_OFFSET)?)?;
    let end = start.checked_add(word(PAYLOAD_LENGTH)?)?.checked_sub(TRAILER)?;
    image.get(start..end).filter(|payload| payload.starts_with(b"\xfd7zXZ\0"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_payload_is_found_only_in_an_image_that_has_one() {
        let mut image = vec![0; 2048];
        image[0x1f1] = 1;
        image[0x248..0x24c].copy_from_slice(&16_u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&100_u32.to_le_bytes());
        assert_eq!(xz_payload(&image), None);
        image[1040..1046].copy_from_slice(b"\xfd7zXZ\0");
        assert_eq!(xz_payload(&image).unwrap().len(), 96);
        image[0x24c..0x250].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(xz_payload(&image), None);
        assert_eq!(xz_payload(&image[..512]), None);
    }
}
