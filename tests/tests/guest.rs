//! The test guest itself: it boots, runs commands, and has what the other tests need.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use e2e::guest::{Guest, GuestConfig, nvme};

const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn guest_boots_and_has_nvme_tcp() {
    let guest = Guest::boot(GuestConfig::default()).unwrap();

    let release = guest.check("uname -r", COMMAND_TIMEOUT).unwrap();
    assert_eq!(release.trim(), guest.kernel_release());
    nvme::load_modules(&guest).unwrap();
    guest.check("test -c /dev/nvme-fabrics && modprobe ext4", COMMAND_TIMEOUT).unwrap();
    let version = guest.check("nvme version", COMMAND_TIMEOUT).unwrap();
    assert!(version.contains("nvme version"), "{version}");

    // Codes, both streams and large output come over whole.
    let output = guest.run("echo out; echo 'it''s err' >&2; exit 7", COMMAND_TIMEOUT).unwrap();
    assert_eq!(output.code, 7);
    assert_eq!(output.stdout, "out\n");
    assert_eq!(output.stderr, "its err\n");
    let large = guest.check("seq 1 100000", COMMAND_TIMEOUT).unwrap();
    assert_eq!(large.lines().count(), 100_000);
    assert_eq!(large.lines().last(), Some("100000"));

    // A command that hangs is killed and leaves the channel usable, beside one that goes on.
    let background = guest.spawn("until [ -e /tmp/go ]; do sleep 0.1; done; echo went").unwrap();
    let hung = guest.run("sleep 1000", Duration::from_millis(200));
    assert!(hung.unwrap_err().to_string().contains("console"));
    assert!(!background.has_ended().unwrap());
    guest.check("touch /tmp/go", COMMAND_TIMEOUT).unwrap();
    let output = background.wait(COMMAND_TIMEOUT).unwrap();
    assert_eq!(output.stdout, "went\n");
}
