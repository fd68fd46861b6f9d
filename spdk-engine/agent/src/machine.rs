//! Which start of which machine an agent runs on (consistency rules 1 and 16).
//!
//! *What it is.* Two texts: the machine's identity, which stays with it, and its *boot*, which is another one after every
//! start. Replicas tell the boot to engines: what a disk with a volatile cache had not flushed may be gone when it is
//! another one. An agent that finds another boot of the same machine knows that every process of the time before ended.
//!
//! *Invariants.* Two machines never pass for one: an unknown identity is equal to none, not even to itself. So what an agent
//! knows, carried to another machine, proves nothing there about processes.
//!
//! *When things fail.* What cannot be read is unknown. With an unknown boot, disks with a volatile cache count as having
//! lost what was not flushed each time a volume is opened after an unclean stop.

use std::fs;
use std::path::Path;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// The firmware's name of the machine. The kernel's own, unlike files of a system image, which many machines may share.
const PRODUCT_UUID: &str = "/sys/class/dmi/id/product_uuid";
/// Longest text; the meta area of a replica has room for it and for the name of a disk's opening.
const TEXT_BYTES_MAX: usize = 64;

/// A start of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    identity: Option<String>,
    boot: Option<String>,
}

impl Machine {
    /// The machine this process runs on.
    #[must_use]
    pub fn this() -> Self {
        let found = Self::read(Path::new(PRODUCT_UUID), Path::new(BOOT_ID));
        if found.boot.is_none() {
            tracing::warn!("{BOOT_ID} cannot be read: after each unclean stop disks count as having lost their caches");
        }
        found
    }

    /// A machine of that identity in that boot; for agents on machines that tell neither by themselves.
    #[must_use]
    pub fn named(identity: &str, boot: &str) -> Self {
        Self { identity: known(identity), boot: known(boot) }
    }

    fn read(identity: &Path, boot: &Path) -> Self {
        let text = |path| fs::read_to_string(path).unwrap_or_default();
        Self::named(&text(identity), &text(boot))
    }

    /// Another text after every start; empty when it is unknown.
    #[must_use]
    pub fn boot(&self) -> &str {
        self.boot.as_deref().unwrap_or_default()
    }

    /// Which machine it is; empty when that is unknown.
    #[must_use]
    pub fn identity(&self) -> &str {
        self.identity.as_deref().unwrap_or_default()
    }

    /// Whether this is the machine of that identity, started again since that boot.
    #[must_use]
    pub fn has_restarted_since(&self, identity: &str, boot: &str) -> bool {
        let same = self.identity.as_deref().is_some_and(|own| own == identity);
        same && known(boot).is_some() && self.boot.is_some() && self.boot != known(boot)
    }
}

fn known(text: &str) -> Option<String> {
    let text = text.trim();
    (1..=TEXT_BYTES_MAX).contains(&text.len()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_restart_is_known_only_of_the_same_machine() {
        let now = Machine::named("m1", "b2");
        assert!(now.has_restarted_since("m1", "b1"));
        assert!(!now.has_restarted_since("m1", "b2"), "it runs on");
        assert!(!now.has_restarted_since("m2", "b1"), "another machine, which may run on");
        assert!(!now.has_restarted_since("m1", ""), "nobody knows when that was");
        assert!(!Machine::named("", "b2").has_restarted_since("", "b1"), "two unknown ones need not be the same");
        assert!(!Machine::named("m1", "").has_restarted_since("m1", "b1"));
    }

    #[test]
    fn what_cannot_be_read_or_is_no_name_is_unknown() {
        let dir = tempfile::tempdir().unwrap();
        let (identity, boot) = (dir.path().join("identity"), dir.path().join("boot"));
        fs::write(&boot, "one\n").unwrap();
        let found = Machine::read(&identity, &boot);
        assert_eq!((found.identity(), found.boot()), ("", "one"));
        fs::write(&boot, "x".repeat(TEXT_BYTES_MAX + 1)).unwrap();
        assert_eq!(Machine::read(&identity, &boot).boot(), "");
    }

    #[test]
    fn a_real_machine_tells_its_boot() {
        let (one, two) = (Machine::this(), Machine::this());
        assert!(!one.boot().is_empty() && one == two);
    }
}
