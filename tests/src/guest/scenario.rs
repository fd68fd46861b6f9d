//! What a person does with a volume, from a real kernel: file systems that survive, and writes that survive an
//! outage. Each scenario takes any NVMe/TCP subsystem with one namespace of at least [`VOLUME_MIB_MIN`] MiB,
//! destroys what is on it and leaves the guest disconnected. The guest must come from [`config`], whose first
//! disk is the [`archive`].

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::nvme::{self, ConnectOptions, Connection, Target};
use super::{Guest, GuestConfig, Job, archive};

/// The smallest namespace that has room for the archive, the journal and metadata.
pub const VOLUME_MIB_MIN: u64 = 128;

/// The archive as the guest sees it.
const ARCHIVE_DEVICE: &str = "/dev/vda";

/// Where the volume is mounted.
const MOUNT: &str = "/mnt";

/// Bounds every wait for the kernel to show or regain a device.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(90);

/// Bounds every step that moves data; a step takes seconds even under emulation.
const STEP_TIMEOUT: Duration = Duration::from_secs(300);

/// How often the writer's progress is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Writes acknowledged before an outage starts, and again after it ends.
const WRITES_AROUND_OUTAGE: u64 = 10;

/// A guest with the archive as its first disk.
///
/// # Errors
/// When the archive cannot be made.
pub fn config() -> Result<GuestConfig> {
    Ok(GuestConfig::default().drive(archive::build()?))
}

/// Connects, makes an ext4 file system, unpacks the archive, disconnects, connects again and compares the digest
/// of every file, so that what is compared came over the wire and not from the page cache.
///
/// # Errors
/// When a step fails or a file differs; the error names the step.
pub fn scenario_ext4(guest: &Guest, traddr: &str, port: u16, nqn: &str) -> Result<()> {
    let target = Target { traddr: traddr.to_owned(), port, nqn: nqn.to_owned() };
    let (connection, device) = attach(guest, &target)?;
    make_file_system(guest, &device)?;
    guest
        .check(&format!("tar xf {ARCHIVE_DEVICE} -C {MOUNT} && umount {MOUNT}"), STEP_TIMEOUT)
        .context("unpacking the archive")?;
    connection.disconnect()?;

    let (connection, device) = attach(guest, &target)?;
    check_file_system(guest, &device)?;
    verify_archive(guest)?;
    guest.check(&format!("umount {MOUNT}"), STEP_TIMEOUT)?;
    connection.disconnect()
}

/// Writes to a file system without pause while `outage` happens, for example while the engine is killed and
/// started again on the same port, and checks that writing goes on afterwards and that every write whose
/// `fsync` returned, before or after, is there.
///
/// `outage` runs once, with writes in flight, and must return with the target reachable again, before the
/// kernel gives up (60 seconds). Gives the longest time between two acknowledged writes.
///
/// # Errors
/// When `outage` fails, the guest sees an I/O error, writing does not go on, or an acknowledged write is lost.
pub fn scenario_reconnect(
    guest: &Guest,
    traddr: &str,
    port: u16,
    nqn: &str,
    outage: impl FnOnce() -> Result<()>,
) -> Result<Duration> {
    let target = Target { traddr: traddr.to_owned(), port, nqn: nqn.to_owned() };
    let pauses = scenario_outages(guest, &target, &mut [Outage::new("the outage itself", outage)])?;
    Ok(pauses.into_iter().max().unwrap_or_default())
}

/// Something that happens to a volume while it is written, and after which it is served again: at the same place, or, if
/// `then` gives one, by a path that the guest does not know yet.
pub struct Outage<'a> {
    name: &'a str,
    then: Option<Box<dyn FnOnce() -> Result<Option<Target>> + 'a>>,
}

impl std::fmt::Debug for Outage<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Outage").field(&self.name).finish()
    }
}

impl<'a> Outage<'a> {
    /// One after which the volume is where it was.
    pub fn new(name: &'a str, happen: impl FnOnce() -> Result<()> + 'a) -> Self {
        Self { name, then: Some(Box::new(move || happen().map(|()| None))) }
    }

    /// One after which the volume is elsewhere.
    pub fn moved(name: &'a str, happen: impl FnOnce() -> Result<Target> + 'a) -> Self {
        Self { name, then: Some(Box::new(move || happen().map(Some))) }
    }
}

/// As [`scenario_reconnect`], for several outages in a row under one mounted file system; gives the longest pause of each.
/// After a move the new path is connected before the old one is let go.
///
/// # Errors
/// As [`scenario_reconnect`].
pub fn scenario_outages(guest: &Guest, first: &Target, outages: &mut [Outage<'_>]) -> Result<Vec<Duration>> {
    let mut target = first.clone();
    let (connection, device) = attach(guest, &target)?;
    make_file_system(guest, &device)?;
    let writer = Writer::start(guest)?;
    writer.wait_for_writes(WRITES_AROUND_OUTAGE)?;
    let mut pauses = Vec::new();
    for outage in outages {
        let happen = outage.then.take().with_context(|| format!("{} has happened already", outage.name))?;
        writer.forget_times()?;
        if let Some(moved) = happen().with_context(|| outage.name.to_owned())? {
            let old: Vec<_> = connection.controllers()?.into_iter().map(|path| path.name).collect();
            nvme::connect(guest, &moved, &ConnectOptions::default())?;
            connection.wait_for_state("live", DEVICE_TIMEOUT)?;
            old.iter().try_for_each(|path| connection.drop_path(path))?;
            target = moved;
        }
        connection.wait_for_state("live", DEVICE_TIMEOUT)?;
        let before = writer.writes()?;
        writer.wait_for_writes(before + WRITES_AROUND_OUTAGE)?;
        let pause = writer.longest_pause()?;
        println!("{}: writes paused for at most {:.2} s", outage.name, pause.as_secs_f64());
        pauses.push(pause);
    }
    writer.stop()?;
    guest.check(&format!("umount {MOUNT}"), STEP_TIMEOUT)?;
    connection.disconnect()?;
    no_io_errors(guest)?;

    let (connection, device) = attach(guest, &target)?;
    check_file_system(guest, &device)?;
    verify_writes(guest)?;
    guest.check(&format!("umount {MOUNT}"), STEP_TIMEOUT)?;
    connection.disconnect()?;
    Ok(pauses)
}

/// What the kernel logs when a user of a device or a file system met an error; that a path has gone is none.
const IO_ERRORS: &str = "I/O error, dev nvme|Buffer I/O error|EXT4-fs error|EXT4-fs .*[Rr]emount|Aborting journal";

fn no_io_errors(guest: &Guest) -> Result<()> {
    let found = guest.check(&format!("dmesg | grep -E '{IO_ERRORS}' || true"), STEP_TIMEOUT)?;
    ensure!(found.is_empty(), "the kernel met errors:\n{found}");
    Ok(())
}

fn attach<'guest>(guest: &'guest Guest, target: &Target) -> Result<(Connection<'guest>, String)> {
    let connection = nvme::connect(guest, target, &ConnectOptions::default())?;
    let device = connection.device(DEVICE_TIMEOUT)?;
    Ok((connection, device))
}

/// Makes and mounts an ext4 file system on `device`.
///
/// # Errors
/// When either fails.
pub fn make_file_system(guest: &Guest, device: &str) -> Result<()> {
    // Everything is written now and nothing left to a kernel thread, so that runs are alike.
    guest
        .check(
            &format!(
                "mkfs.ext4 -q -F -E lazy_itable_init=0,lazy_journal_init=0 {device} && \
                 mount -t ext4 {device} {MOUNT}"
            ),
            STEP_TIMEOUT,
        )
        .context("making the file system")?;
    Ok(())
}

/// Checks the unmounted ext4 file system on `device` and mounts it.
///
/// # Errors
/// When it has any inconsistency.
pub fn check_file_system(guest: &Guest, device: &str) -> Result<()> {
    guest
        .check(&format!("e2fsck -f -n {device} && mount -t ext4 {device} {MOUNT}"), STEP_TIMEOUT)
        .context("checking the file system")?;
    Ok(())
}

/// Compares the unpacked archive with its digests.
fn verify_archive(guest: &Guest) -> Result<()> {
    let sums = archive::SUMS;
    let listed = guest
        .check(
            &format!(
                "set -e; cd {MOUNT}\n\
                 tar xf {ARCHIVE_DEVICE} -O {sums} >/tmp/{sums}\n\
                 cmp {sums} /tmp/{sums}\n\
                 sha256sum -c {sums} | grep -c ': OK$'"
            ),
            STEP_TIMEOUT,
        )
        .context("comparing digests")?;
    ensure!(
        listed.trim() == archive::FILES.to_string(),
        "{} of {} files are as they were written",
        listed.trim(),
        archive::FILES
    );
    Ok(())
}

/// Pieces of the archive written over and over into a fixed number of files, each write followed by `fsync`. The
/// piece differs from round to round, so a lost overwrite shows.
const WRITER: &str = "\
rm -rf /tmp/writer; mkdir /tmp/writer; cd /tmp/writer
write=0
while [ ! -e stop ]; do
    slot=$((write % 24)); piece=$(((write + write / 24) % 160))
    dd if=/dev/vda of=/mnt/slot.$slot bs=256k skip=$piece count=1 conv=fsync,notrunc || exit 1
    read now rest </proc/uptime; echo $now >>times
    echo $piece >piece.$slot
    write=$((write + 1)); echo $write >writes.new; mv writes.new writes
done
";

/// Compares each file of the writer with the piece whose write was acknowledged last.
const VERIFY_WRITES: &str = "\
cd /tmp/writer
for slot in piece.*; do
    file=/mnt/slot.${slot#piece.}
    dd if=/dev/vda bs=256k skip=$(cat $slot) count=1 2>/dev/null | cmp - $file || exit 1
done
";

/// A writer that runs in the guest until it is stopped.
struct Writer<'guest> {
    guest: &'guest Guest,
    job: Job<'guest>,
}

impl<'guest> Writer<'guest> {
    fn start(guest: &'guest Guest) -> Result<Self> {
        let job = guest.spawn(WRITER)?;
        Ok(Self { guest, job })
    }

    /// Writes acknowledged so far.
    fn writes(&self) -> Result<u64> {
        let text = self.guest.check("cat /tmp/writer/writes 2>/dev/null || echo 0", STEP_TIMEOUT)?;
        text.trim().parse().with_context(|| format!("not a count of writes: {text:?}"))
    }

    /// Begins to look for pauses, from the last write on.
    fn forget_times(&self) -> Result<()> {
        // Renamed, not emptied: the writer opens it for every line.
        let script = "cd /tmp/writer && mv times old && tail -n 1 old >first";
        self.guest.check(script, STEP_TIMEOUT).map(drop)
    }

    /// The longest time between two acknowledged writes since [`Self::forget_times`].
    fn longest_pause(&self) -> Result<Duration> {
        let text = self.guest.check("cat /tmp/writer/first /tmp/writer/times", STEP_TIMEOUT)?;
        let times: Vec<f64> = text.lines().map(str::parse).collect::<Result<_, _>>().context("times of writes")?;
        let longest = times.windows(2).map(|pair| pair[1] - pair[0]).fold(0.0, f64::max);
        Ok(Duration::from_secs_f64(longest))
    }

    fn wait_for_writes(&self, wanted: u64) -> Result<()> {
        let deadline = Instant::now() + STEP_TIMEOUT;
        loop {
            let writes = self.writes()?;
            if writes >= wanted {
                return Ok(());
            }
            ensure!(
                !self.job.has_ended()?,
                "the writer ended after {writes} writes\n{}",
                self.guest.check("dmesg | grep -v 'Buffer I/O error' | grep -A 12 nvme | tail -n 30", STEP_TIMEOUT)?
            );
            ensure!(Instant::now() < deadline, "{writes} of {wanted} writes after {STEP_TIMEOUT:?}");
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn stop(self) -> Result<()> {
        self.guest.check("touch /tmp/writer/stop", STEP_TIMEOUT)?;
        self.job.wait(STEP_TIMEOUT)?.success().context("the writer met an error")?;
        Ok(())
    }
}

fn verify_writes(guest: &Guest) -> Result<()> {
    guest.check(VERIFY_WRITES, STEP_TIMEOUT).context("comparing acknowledged writes")?;
    Ok(())
}
