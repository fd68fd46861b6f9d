//! The discovery log page.
//!
//! *Invariants.* A host sees only what it may connect to. The page changes only together with its generation.

use nvme_wire::discovery::{DiscoveryEntry, DiscoveryLog, ExtendedAttribute, exattype};

use super::controller::Controller;

/// The page for the host of `controller`; `extended` with admin labels.
pub fn log_page(controller: &Controller, extended: bool) -> Vec<u8> {
    let target = &controller.target;
    let mut entries = Vec::new();
    let mut labels = Vec::new();
    for subsystem in target.subsystems() {
        if subsystem.is_deleting() || !subsystem.allows(controller.host()) {
            continue;
        }
        let mut listeners = subsystem.listeners();
        listeners.reverse();
        for listener in listeners {
            let depth = controller.options.max_aq_depth;
            entries.push(DiscoveryEntry::tcp(subsystem.nqn(), listener.address.0, listener.port, depth));
            labels.push(subsystem.config.admin_label.clone());
        }
    }
    for (port, referral) in (0..).zip(target.referrals()) {
        let entry = DiscoveryEntry::referral(&referral.subnqn, referral.address.0, port);
        entries.push(if referral.secure_channel { entry.secured() } else { entry });
        labels.push(None);
    }
    let log = DiscoveryLog { genctr: target.generation(), entries };
    if !extended {
        return log.encode();
    }
    let attribute =
        |label: &String| ExtendedAttribute { kind: exattype::ADMIN_LABEL, value: label.clone().into_bytes() };
    log.encode_extended(|index| labels.get(index).and_then(Option::as_ref).map(attribute).into_iter().collect())
}
