//! The guest's kernel and first root file system, made from the machine's own distribution packages.
//!
//! Nothing is installed or kept in the repository: the kernel package is downloaded and unpacked under the
//! cache folder, the modules that tests need are picked from it with their dependencies, and the machine's own
//! tools are copied with their shared libraries. Both steps happen once; later calls find the result. The cache
//! folder is `$ADDAX_CACHE`, or `target/guest-cache` of this workspace. Entries are made beside their final
//! name and renamed, under a file lock, so test programs that start together build each of them once and never
//! see half of one.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::{cpio, kernel};

/// Kernel modules in the image, by file name without suffix; their dependencies come along.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_console",
    "virtio_net",
    "virtio_blk",
    "virtio-rng",
    "nvme-tcp",
    "ext4",
    "crc32c_generic",
    "crc32c-intel",
    "loop",
];

/// Host programs in every image.
const TOOLS: &[&str] = &["nvme", "mke2fs", "e2fsck"];

/// Where host programs are looked for; `PATH` of a plain user lacks the `sbin` folders.
const TOOL_FOLDERS: &[&str] = &["/usr/sbin", "/usr/bin", "/sbin", "/bin"];

const INIT: &str = include_str!("rootfs/init");
const JOB: &str = include_str!("rootfs/job");
const NVME_DEVICE: &str = include_str!("rootfs/nvme-device");

/// Names `nvme-cli` gives when a command names no host.
const HOST_NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:5c8a3f6e-0d4b-4f0e-9a43-6b1f0f2f7a01\n";
const HOST_ID: &str = "5c8a3f6e-0d4b-4f0e-9a43-6b1f0f2f7a01\n";

/// A bootable pair of files.
#[derive(Debug, Clone)]
pub struct Image {
    /// Kernel, for `-kernel`.
    pub kernel: PathBuf,
    /// First root file system, for `-initrd`.
    pub initrd: PathBuf,
    /// The kernel's release name, such as `6.1.0-57-amd64`.
    pub release: String,
}

/// The cache folder, created if missing.
///
/// # Errors
/// When the folder cannot be created.
pub fn cache_dir() -> Result<PathBuf> {
    let dir = match std::env::var_os("ADDAX_CACHE") {
        Some(dir) => PathBuf::from(dir),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/guest-cache"),
    };
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    dir.canonicalize().with_context(|| format!("cannot resolve {}", dir.display()))
}

/// Makes cache entry `name` with `build`, unless it is there. `build` gets a path to fill, file or folder.
///
/// # Errors
/// Those of `build`, and of the file system.
pub fn cached(name: &str, build: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let dir = cache_dir()?;
    let entry = dir.join(name);
    let lock = File::create(dir.join(format!("{name}.lock")))?;
    lock.lock().with_context(|| format!("cannot lock cache entry {name}"))?;
    if entry.exists() {
        return Ok(entry);
    }
    let partial = dir.join(format!("{name}.partial"));
    remove(&partial)?;
    build(&partial).with_context(|| format!("cannot make cache entry {name}"))?;
    fs::rename(&partial, &entry).with_context(|| format!("cannot rename {} into place", partial.display()))?;
    Ok(entry)
}

/// The image with `extra_tools` (host program names) beside the usual ones.
///
/// # Errors
/// When a tool is not installed (`tests/setup.sh` installs them), or the kernel package cannot be had.
pub fn build(extra_tools: &[String]) -> Result<Image> {
    let kernel = kernel::build()?;
    let tools = find_tools(extra_tools)?;
    let name = format!("initrd-{:016x}", image_key(&kernel.release, &tools)?);
    let initrd = cached(&name, |path| {
        let file = BufWriter::new(File::create(path)?);
        write_initrd(&kernel.package, &kernel.release, &tools, file)
    })?;
    Ok(Image { kernel: kernel.elf, initrd, release: kernel.release })
}

fn remove(path: &Path) -> Result<()> {
    let gone = if path.is_dir() {
        fs::remove_dir_all(path)
    } else if path.exists() {
        fs::remove_file(path)
    } else {
        Ok(())
    };
    gone.with_context(|| format!("cannot remove {}", path.display()))
}

fn find_tools(extra: &[String]) -> Result<Vec<PathBuf>> {
    let names: BTreeSet<&str> = TOOLS.iter().copied().chain(extra.iter().map(String::as_str)).collect();
    ["busybox"]
        .into_iter()
        .chain(names)
        .map(|name| {
            TOOL_FOLDERS
                .iter()
                .map(|folder| Path::new(folder).join(name))
                .find(|path| path.is_file())
                .with_context(|| format!("`{name}` is not installed; run tests/setup.sh"))
        })
        .collect()
}

/// Names the content of an image: whatever changes what it holds must change this.
fn image_key(release: &str, tools: &[PathBuf]) -> Result<u64> {
    let mut hasher = DefaultHasher::new();
    (release, MODULES, INIT, JOB, NVME_DEVICE, HOST_NQN, HOST_ID).hash(&mut hasher);
    // The code below is part of what makes the image.
    include_str!("image.rs").hash(&mut hasher);
    for tool in tools {
        let meta = fs::metadata(tool)?;
        (tool, meta.len(), meta.modified()?).hash(&mut hasher);
    }
    Ok(hasher.finish())
}

fn write_initrd(package: &Path, release: &str, tools: &[PathBuf], out: impl Write) -> Result<()> {
    let mut image = cpio::Writer::new(out);
    for folder in [
        "bin",
        "dev",
        "etc",
        "etc/nvme",
        "lib",
        "lib64",
        "lib/modules",
        "mnt",
        "proc",
        "root",
        "run",
        "sbin",
        "sys",
        "tmp",
        "usr",
        "usr/lib",
        "usr/share",
    ] {
        image.directory(folder)?;
    }
    // The kernel opens this before the first process runs.
    image.character_device("dev/console", 5, 1)?;
    image.file("init", 0o755, INIT.as_bytes())?;
    image.file("sbin/job", 0o755, JOB.as_bytes())?;
    image.file("sbin/nvme-device", 0o755, NVME_DEVICE.as_bytes())?;
    image.file("etc/nvme/hostnqn", 0o644, HOST_NQN.as_bytes())?;
    image.file("etc/nvme/hostid", 0o644, HOST_ID.as_bytes())?;
    image.file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n")?;
    image.file("etc/group", 0o644, b"root:x:0:\n")?;
    image.file("etc/mtab", 0o644, b"")?;
    add_tools(&mut image, tools)?;
    add_modules(&mut image, package, release)?;
    image.finish()?;
    Ok(())
}

/// Adds each program as `/sbin/NAME`, its libraries under their own paths, and BusyBox's names in `/bin`
/// for everything else.
fn add_tools<W: Write>(image: &mut cpio::Writer<W>, tools: &[PathBuf]) -> Result<()> {
    let mut libraries = BTreeSet::new();
    let mut taken = BTreeSet::from(["busybox".to_owned()]);
    for tool in tools {
        let name = file_name(tool)?;
        if name == "busybox" {
            image.file("bin/busybox", 0o755, &fs::read(tool)?)?;
            continue;
        }
        image.file(&format!("sbin/{name}"), 0o755, &fs::read(tool)?)?;
        libraries.extend(shared_libraries(tool)?);
        taken.insert(name);
    }
    image.symlink("sbin/mkfs.ext4", "mke2fs")?;
    // The kernel calls this by its full path when it needs a module.
    image.symlink("sbin/modprobe", "/bin/busybox")?;
    for applet in output(Command::new("busybox").arg("--list"))?.lines() {
        if taken.insert(applet.to_owned()) {
            image.symlink(&format!("bin/{applet}"), "busybox")?;
        }
    }
    let mut folders = BTreeSet::new();
    for library in &libraries {
        add_parents(image, &mut folders, library)?;
        image.file(library.trim_start_matches('/'), 0o755, &fs::read(library)?)?;
    }
    Ok(())
}

/// Adds the folders of an absolute path below the first one, which the image has already.
fn add_parents<W: Write>(image: &mut cpio::Writer<W>, known: &mut BTreeSet<String>, path: &str) -> Result<()> {
    let parts: Vec<&str> = path.split('/').collect();
    for depth in 3..parts.len() {
        let folder = parts[1..depth].join("/");
        if folder != "usr/lib" && known.insert(folder.clone()) {
            image.directory(&folder)?;
        }
    }
    Ok(())
}

/// The files that the dynamic loader would map for `program`, the loader among them.
fn shared_libraries(program: &Path) -> Result<BTreeSet<String>> {
    let listing = output(Command::new("ldd").arg(program))?;
    ensure!(!listing.contains("not found"), "{} misses a library: {listing}", program.display());
    Ok(listing.split_whitespace().filter(|word| word.starts_with('/')).map(str::to_owned).collect())
}

fn add_modules<W: Write>(image: &mut cpio::Writer<W>, package: &Path, release: &str) -> Result<()> {
    let root = format!("lib/modules/{release}");
    let source = package.join(&root);
    // A small tree of its own, so that the guest's module index lists what the image has.
    let staging = tempfile::tempdir()?;
    let staged = staging.path().join(&root);
    let chosen = module_closure(&fs::read_to_string(source.join("modules.dep"))?, MODULES)?;
    for module in &chosen {
        let target = staged.join(module);
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::copy(source.join(module), target)?;
    }
    for index in ["modules.builtin", "modules.order"] {
        fs::copy(source.join(index), staged.join(index))?;
    }
    output(Command::new("busybox").args(["depmod", "-b"]).arg(staging.path()).arg(release))?;
    image.directory(&root)?;
    let mut folders = BTreeSet::from([root.clone(), "lib/modules".to_owned()]);
    for module in &chosen {
        add_parents(image, &mut folders, &format!("/{root}/{module}"))?;
        image.file(&format!("{root}/{module}"), 0o644, &fs::read(staged.join(module))?)?;
    }
    for entry in fs::read_dir(&staged)? {
        let path = entry?.path();
        if path.is_file() {
            let name = file_name(&path)?;
            image.file(&format!("{root}/{name}"), 0o644, &fs::read(&path)?)?;
        }
    }
    Ok(())
}

/// The module files (relative to the index) that `wanted` need, from the text of `modules.dep`. The index lists
/// a module's dependencies in full, so one look-up per module is enough.
fn module_closure(index: &str, wanted: &[&str]) -> Result<BTreeSet<String>> {
    let mut chosen = BTreeSet::new();
    for name in wanted {
        let line = index
            .lines()
            .find(|line| {
                let path = line.split(':').next().unwrap_or_default();
                let file = path.rsplit('/').next().unwrap_or_default();
                let stem = file.split(".ko").next().unwrap_or_default();
                stem.replace('-', "_") == name.replace('-', "_")
            })
            .with_context(|| format!("the kernel package has no module {name}"))?;
        chosen.extend(line.replace(':', " ").split_whitespace().map(str::to_owned));
    }
    Ok(chosen)
}

fn file_name(path: &Path) -> Result<String> {
    path.file_name()
        .and_then(|name| name.to_str())
        .map(str::to_owned)
        .with_context(|| format!("{} has no plain file name", path.display()))
}

/// Runs a host command to its end and returns what it printed.
pub(super) fn output(command: &mut Command) -> Result<String> {
    let done = command.output().with_context(|| format!("cannot start {command:?}"))?;
    if !done.status.success() {
        bail!("{command:?} failed with {}: {}", done.status, String::from_utf8_lossy(&done.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const INDEX: &str = "kernel/nvme/nvme-tcp.ko: kernel/nvme/nvme-fabrics.ko kernel/nvme/nvme-core.ko\n\
                         kernel/nvme/nvme-core.ko:\n\
                         kernel/fs/ext4.ko.xz: kernel/lib/crc16.ko.xz\n";

    #[test]
    fn a_module_brings_its_dependencies() {
        let chosen = module_closure(INDEX, &["nvme_tcp"]).unwrap();
        let names: Vec<&str> = chosen.iter().map(String::as_str).collect();
        assert_eq!(names, ["kernel/nvme/nvme-core.ko", "kernel/nvme/nvme-fabrics.ko", "kernel/nvme/nvme-tcp.ko"]);
    }

    #[test]
    fn compressed_modules_are_found_and_missing_ones_named() {
        assert_eq!(module_closure(INDEX, &["ext4"]).unwrap().len(), 2);
        let error = module_closure(INDEX, &["nvme"]).unwrap_err();
        assert!(error.to_string().contains("module nvme"), "{error}");
    }
}
