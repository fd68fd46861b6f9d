//! NVMe qualified names of subsystems and hosts.
//!
//! A replica lets one host in: the engine instance that promoted it. The host's name holds the epoch and the instance,
//! so an older engine is another host and is refused by the allow-list alone.

/// The part that every name begins with.
pub const NQN_PREFIX: &str = "nqn.2026-11.io.addax";

/// The subsystem of a volume, for hosts.
pub fn volume_nqn(volume: &str) -> String {
    format!("{NQN_PREFIX}:volume:{volume}")
}

/// The subsystem of a replica, for engines.
pub fn replica_nqn(replica: &str) -> String {
    format!("{NQN_PREFIX}:replica:{replica}")
}

/// The host name under which one engine instance connects to the replicas of its volume.
pub fn engine_host_nqn(volume: &str, epoch: u64, instance: &str) -> String {
    format!("{NQN_PREFIX}:engine:{volume}:{epoch}:{instance}")
}

/// The host name under which a node connects to a remote namespace that is one of its disks.
pub fn disk_host_nqn(node: &str, disk: &str) -> String {
    format!("{NQN_PREFIX}:disk:{node}:{disk}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_as_the_engine_expects_them() {
        let nqn = engine_host_nqn("v", 7, "e-1");
        assert_eq!(nqn, "nqn.2026-11.io.addax:engine:v:7:e-1");
        assert_eq!(replica_nqn("v-r-1"), "nqn.2026-11.io.addax:replica:v-r-1");
    }

    #[test]
    fn the_longest_names_fit_in_an_nqn() {
        let volume = "v".repeat(crate::name::MAX_VOLUME_NAME);
        let instance = "01234567-89ab-cdef-0123-456789abcdef";
        assert!(engine_host_nqn(&volume, u64::MAX, instance).len() <= 223);
    }
}
