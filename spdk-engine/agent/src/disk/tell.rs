//! A disk in the words of the interface.

use addax_proto::engine_v1 as pb;

use super::Usage;
use crate::state::{DiskWish, Place};

/// Lvols that are no replicas, listed at most.
const UNMANAGED_MAX: usize = 64;
/// Free space is told in steps of this, so that writing does not become a stream of events.
const STEP_BYTES: u64 = 256 * 1024 * 1024;

/// What was asked for.
pub(super) fn wish(wish: &DiskWish) -> pb::PutDiskRequest {
    let mut request = pb::PutDiskRequest {
        name: wish.name.clone(),
        create: wish.create,
        erase: wish.erase.clone(),
        uuid: wish.uuid.map(|uuid| uuid.to_string()).unwrap_or_default(),
        device: wish.device.clone(),
        ..pb::PutDiskRequest::default()
    };
    match &wish.place {
        Place::File { path, size } => {
            request.set_kind(pb::DiskKind::File);
            request.path = path.display().to_string();
            request.size_bytes = *size;
        }
        Place::Block { path } => {
            request.set_kind(pb::DiskKind::Block);
            request.path = path.display().to_string();
        }
        Place::Nvme { traddr, trsvcid, subnqn, nsid } => {
            request.set_kind(pb::DiskKind::Nvme);
            let (traddr, nqn) = (traddr.clone(), subnqn.clone());
            request.namespace_at = Some(pb::Address { traddr, trsvcid: u32::from(*trsvcid), nqn });
            request.nsid = *nsid;
        }
    }
    request
}

/// Puts what is known of the clusters in.
pub(super) fn usage(disk: &mut pb::Disk, usage: &Usage) {
    disk.size_bytes = usage.size;
    disk.available_bytes = round(usage.available);
    let may_take = |lvol: &super::Unmanaged| if lvol.is_snapshot { lvol.allocated } else { lvol.size };
    disk.unmanaged_bytes = usage.unmanaged.iter().map(may_take).sum();
    disk.unmanaged_count = u32::try_from(usage.unmanaged.len()).unwrap_or(u32::MAX);
    let lvol = |lvol: &super::Unmanaged| pb::Lvol {
        name: lvol.name.clone(),
        uuid: lvol.uuid.to_string(),
        size_bytes: lvol.size,
        allocated_bytes: lvol.allocated,
    };
    disk.unmanaged = usage.unmanaged.iter().take(UNMANAGED_MAX).map(lvol).collect();
}

/// Free space in steps, rounded down.
fn round(available: u64) -> u64 {
    let step = if available >= STEP_BYTES { STEP_BYTES } else { 1024 * 1024 };
    available / step * step
}
