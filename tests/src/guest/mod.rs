//! A real Linux kernel in a virtual machine, as the host that uses Addax's volumes.
//!
//! [`Guest::boot`] starts QEMU with the kernel and root file system of [`image`] and returns when the guest
//! takes commands, which [`Guest::run`] and [`Guest::spawn`] send through [`channel`]. The guest sees one
//! network, where [`HOST_ADDRESS`] is this machine's 127.0.0.1 and nothing else is reachable; targets on other
//! loopback addresses are reached through a [`forward::Forwarder`].
//!
//! All calls block, each with a deadline: from async code use `tokio::task::spawn_blocking`. A guest can be
//! used from several threads at once. Dropping it kills QEMU; if the whole test process dies, the guest notices
//! that the channel closed and powers off. Errors about a guest that is gone carry the end of its console.

pub mod archive;
pub mod channel;
mod cpio;
pub mod forward;
pub mod image;
mod kernel;
pub mod nvme;
pub mod scenario;

use std::fs::{self, File};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use tempfile::TempDir;

use channel::Channel;
use image::Image;

/// The address at which the guest finds this machine's 127.0.0.1.
pub const HOST_ADDRESS: &str = "10.0.2.2";

/// How often a wait for the start of QEMU looks again.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Lines of the guest's console shown with an error.
const CONSOLE_LINES_SHOWN: usize = 40;

/// What a guest is made of.
#[derive(Debug, Clone)]
pub struct GuestConfig {
    /// Memory in MiB. The root file system and everything under `/tmp` live in it.
    pub memory_mib: u32,
    /// Virtual processors.
    pub cpus: u32,
    /// Files the guest sees as read-only disks, `/dev/vda` first.
    pub drives: Vec<PathBuf>,
    /// Host programs to have in the guest's `/sbin` beside `nvme`, `mke2fs`, `e2fsck` and BusyBox.
    pub extra_tools: Vec<String>,
    /// Bounds the time from the start of QEMU until commands are taken.
    pub boot_timeout: Duration,
}

impl Default for GuestConfig {
    fn default() -> Self {
        Self {
            memory_mib: 1024,
            cpus: 2,
            drives: Vec::new(),
            extra_tools: Vec::new(),
            boot_timeout: Duration::from_secs(180),
        }
    }
}

impl GuestConfig {
    /// Adds `path` as the next read-only disk.
    #[must_use]
    pub fn drive(mut self, path: impl Into<PathBuf>) -> Self {
        self.drives.push(path.into());
        self
    }
}

/// What a finished command left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Exit code; 128 plus the signal's number for a killed command.
    pub code: i32,
    /// Standard output, at most [`channel::OUTPUT_BYTES_MAX`] bytes of it.
    pub stdout: String,
    /// Standard error, bounded likewise.
    pub stderr: String,
}

impl Output {
    /// Standard output of a command that exited with 0.
    ///
    /// # Errors
    /// For any other exit code, with what the command printed.
    pub fn success(self) -> Result<String> {
        if self.code != 0 {
            bail!("exit code {}\nstdout: {}\nstderr: {}", self.code, self.stdout.trim_end(), self.stderr.trim_end());
        }
        Ok(self.stdout)
    }
}

/// A running virtual machine; see the module's contract.
#[derive(Debug)]
pub struct Guest {
    // Dropped first: hanging up lets the guest begin to leave before it is killed.
    channel: Channel,
    machine: Machine,
    release: String,
}

impl Guest {
    /// Builds the image if it is not cached, starts QEMU and waits until the guest takes commands.
    ///
    /// # Errors
    /// When something is not installed, or the guest does not come up within the configured time; then with
    /// the end of its console.
    pub fn boot(config: GuestConfig) -> Result<Self> {
        let image = image::build(&config.extra_tools)?;
        let deadline = Instant::now() + config.boot_timeout;
        let mut machine = Machine::start(&config, &image)?;
        let connected = machine.connect(deadline).and_then(|channel| channel.wait_ready(deadline).map(|()| channel));
        match connected {
            Ok(channel) => Ok(Self { channel, machine, release: image.release }),
            Err(error) => Err(error.context(machine.last_words())),
        }
    }

    /// The guest kernel's release name.
    pub fn kernel_release(&self) -> &str {
        &self.release
    }

    /// Everything the kernel and the first process printed so far.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub fn console(&self) -> Result<String> {
        self.machine.console()
    }

    /// Runs a shell script to its end. Any exit code is a success of this call.
    ///
    /// # Errors
    /// When the script has not ended after `timeout` (it is then killed), or the guest is gone.
    pub fn run(&self, script: &str, timeout: Duration) -> Result<Output> {
        self.spawn(script)?.wait(timeout)
    }

    /// Runs a shell script that has to exit with 0 and returns its standard output.
    ///
    /// # Errors
    /// As [`Guest::run`], and when the exit code is another.
    pub fn check(&self, script: &str, timeout: Duration) -> Result<String> {
        self.run(script, timeout)?.success().with_context(|| format!("in the guest: {}", script.trim()))
    }

    /// Starts a shell script and leaves it running.
    ///
    /// # Errors
    /// When the guest is gone.
    pub fn spawn(&self, script: &str) -> Result<Job<'_>> {
        let id = self.explain(self.channel.start(script))?;
        Ok(Job { guest: self, id, script: script.trim().to_owned() })
    }

    /// Adds the console's end to an error of the channel.
    fn explain<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| error.context(self.machine.last_words()))
    }
}

/// A script that runs in the guest. Dropping it leaves the script running.
#[derive(Debug)]
pub struct Job<'guest> {
    guest: &'guest Guest,
    id: u64,
    script: String,
}

impl Job<'_> {
    /// Whether the script has ended.
    ///
    /// # Errors
    /// When the guest is gone.
    pub fn has_ended(&self) -> Result<bool> {
        let ended = self.guest.channel.wait(self.id, Instant::now());
        Ok(self.guest.explain(ended)?.is_some())
    }

    /// Waits for the end and fetches the output.
    ///
    /// # Errors
    /// When the script has not ended after `timeout` (it is then killed), or the guest is gone.
    pub fn wait(self, timeout: Duration) -> Result<Output> {
        let channel = &self.guest.channel;
        let deadline = Instant::now() + timeout;
        let Some(ended) = self.guest.explain(channel.wait(self.id, deadline))? else {
            let partial = self.guest.explain(channel.kill(self.id));
            return Err(anyhow!("not done after {timeout:?}: {}", self.script).context(match partial {
                Ok(()) => self.guest.machine.last_words(),
                Err(error) => format!("{error:#}"),
            }));
        };
        let (stdout, stderr) = self.guest.explain(channel.take_output(self.id, ended))?;
        Ok(Output {
            code: ended.code,
            stdout: String::from_utf8_lossy(&stdout).into_owned(),
            stderr: String::from_utf8_lossy(&stderr).into_owned(),
        })
    }

    /// Ends every process of the script.
    ///
    /// # Errors
    /// When the guest is gone.
    pub fn kill(self) -> Result<()> {
        self.guest.explain(self.guest.channel.kill(self.id))
    }
}

/// The QEMU process with the folder for its sockets and logs.
#[derive(Debug)]
struct Machine {
    qemu: Child,
    control: UnixListener,
    data: UnixListener,
    folder: TempDir,
}

impl Machine {
    fn start(config: &GuestConfig, image: &Image) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        // The listeners exist before QEMU does, so its connections cannot come too early.
        let control = UnixListener::bind(folder.path().join("control"))?;
        let data = UnixListener::bind(folder.path().join("data"))?;
        control.set_nonblocking(true)?;
        data.set_nonblocking(true)?;
        let errors = File::create(folder.path().join("qemu.log"))?;
        let qemu = Command::new("qemu-system-x86_64")
            .args(arguments(config, image, folder.path()))
            .stdin(Stdio::null())
            .stdout(errors.try_clone()?)
            .stderr(errors)
            .spawn()
            .context("cannot start qemu-system-x86_64; run tests/setup.sh")?;
        Ok(Self { qemu, control, data, folder })
    }

    fn connect(&mut self, deadline: Instant) -> Result<Channel> {
        let control = accept(&self.control, &mut self.qemu, deadline)?;
        let data = accept(&self.data, &mut self.qemu, deadline)?;
        Channel::new(control, data)
    }

    fn console(&self) -> Result<String> {
        let bytes = fs::read(self.folder.path().join("console.log"))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The end of the console and of QEMU's own messages, for an error.
    fn last_words(&self) -> String {
        let console = self.console().unwrap_or_default();
        let lines: Vec<&str> = console.lines().collect();
        let shown = &lines[lines.len().saturating_sub(CONSOLE_LINES_SHOWN)..];
        let messages = fs::read_to_string(self.folder.path().join("qemu.log")).unwrap_or_default();
        format!("the guest's console ends with:\n{}\n{}", shown.join("\n"), messages.trim_end())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Fails only for a process that has ended already.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

fn accept(listener: &UnixListener, qemu: &mut Child, deadline: Instant) -> Result<UnixStream> {
    loop {
        match listener.accept() {
            Ok((socket, _)) => {
                socket.set_nonblocking(false)?;
                return Ok(socket);
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).context("cannot accept QEMU's connection"),
        }
        if let Some(status) = qemu.try_wait()? {
            bail!("QEMU ended with {status}");
        }
        if Instant::now() >= deadline {
            bail!("QEMU did not connect in time");
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn arguments(config: &GuestConfig, image: &Image, folder: &Path) -> Vec<String> {
    // Software emulation by default, so that the tests run the same with and without nested virtualisation.
    let accelerator = std::env::var("ADDAX_GUEST_ACCEL").unwrap_or_else(|_| "tcg".into());
    let file = |name: &str| option_path(&folder.join(name));
    let mut arguments: Vec<String> =
        ["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-machine", "q35", "-cpu", "max,la57=off"]
            .map(str::to_owned)
            .into();
    let mut add = |option: &str, value: String| arguments.extend([option.to_owned(), value]);
    add("-accel", accelerator);
    add("-m", config.memory_mib.to_string());
    add("-smp", config.cpus.to_string());
    add("-kernel", image.kernel.display().to_string());
    add("-initrd", image.initrd.display().to_string());
    add("-append", "console=ttyS0 quiet loglevel=5 panic=-1 mitigations=off tsc=unstable".into());
    add("-serial", format!("file:{}", file("console.log")));
    add("-netdev", "user,id=net,net=10.0.2.0/24,restrict=off".into());
    add("-device", "virtio-net-pci,netdev=net".into());
    add("-device", "virtio-rng-pci".into());
    add("-device", "virtio-serial-pci".into());
    for name in ["control", "data"] {
        add("-chardev", format!("socket,id={name},path={},server=off", file(name)));
        add("-device", format!("virtserialport,chardev={name},name={name}"));
    }
    for (index, drive) in config.drives.iter().enumerate() {
        add("-drive", format!("file={},format=raw,if=none,id=drive{index},readonly=on", option_path(drive)));
        add("-device", format!("virtio-blk-pci,drive=drive{index}"));
    }
    arguments
}

/// A path inside an option list, where a comma has to be doubled.
fn option_path(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}
