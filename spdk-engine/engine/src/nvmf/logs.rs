//! Get Log Page.
//!
//! *Invariants.* Reading a page without Retain lets its events be reported again. The changed-namespaces page is
//! emptied by every read.

use std::collections::BTreeMap;

use nvme_wire::admin::{GetLogPage, NSID_ALL};
use nvme_wire::ana::{AnaGroup, AnaLog, LSP_GROUPS_ONLY};
use nvme_wire::log::{EffectsLog, FirmwareSlotLog, HealthLog, changed_namespaces, encode_id_table, lid};
use nvme_wire::log::{ErrorEntry, supported_log_pages, window};
use nvme_wire::{SpacePadded, Status};

use super::admin::Answer;
use super::controller::Controller;
use super::{discovery, identify};

/// Error entries of the error page (ELPE is one less).
const ERROR_ENTRIES: usize = 128;

/// Answers a Get Log Page; `room` is the host's buffer in bytes.
pub fn answer(controller: &Controller, nsid: u32, page: &GetLogPage, room: usize) -> Result<Answer, Status> {
    if page.bytes > room as u64 || page.index_offset || !page.offset.is_multiple_of(4) {
        return Err(Status::INVALID_FIELD);
    }
    let content =
        if controller.is_discovery() { discovery_page(controller, page)? } else { io_page(controller, nsid, page)? };
    let mut out = vec![0; page.bytes as usize];
    window(&content, page.offset, &mut out)?;
    if !page.retain_event {
        controller.events.page_read(page.lid);
    }
    Ok(Answer::data(out))
}

fn discovery_page(controller: &Controller, page: &GetLogPage) -> Result<Vec<u8>, Status> {
    match page.lid {
        lid::DISCOVERY => Ok(discovery::log_page(controller, page.lsp & nvme_wire::discovery::LSP_EXTENDED != 0)),
        _ => Err(Status::INVALID_LOG_PAGE),
    }
}

fn io_page(controller: &Controller, nsid: u32, page: &GetLogPage) -> Result<Vec<u8>, Status> {
    let subsystem_scope = page.lid != lid::HEALTH;
    if subsystem_scope && nsid != 0 && nsid != NSID_ALL {
        return Err(Status::INVALID_FIELD);
    }
    Ok(match page.lid {
        lid::SUPPORTED => supported(controller),
        lid::ERROR => vec![0; ERROR_ENTRIES * ErrorEntry::SIZE],
        lid::HEALTH => HealthLog::default().encode().to_vec(),
        lid::FIRMWARE_SLOT => firmware_slots(),
        lid::CHANGED_NAMESPACES => changed_namespaces(&controller.events.take_changed()).to_vec(),
        lid::EFFECTS => EffectsLog::target(identify::optional_commands(controller)).encode().to_vec(),
        lid::ANA if controller.subsystem.config.ana_reporting => ana(controller, page.lsp & LSP_GROUPS_ONLY != 0),
        lid::FEATURE_EFFECTS | lid::MI_EFFECTS => encode_id_table([]).to_vec(),
        _ => return Err(Status::INVALID_LOG_PAGE),
    })
}

fn supported(controller: &Controller) -> Vec<u8> {
    let ana = controller.subsystem.config.ana_reporting.then_some(lid::ANA);
    let ids = [
        lid::SUPPORTED,
        lid::ERROR,
        lid::HEALTH,
        lid::FIRMWARE_SLOT,
        lid::CHANGED_NAMESPACES,
        lid::EFFECTS,
        lid::FEATURE_EFFECTS,
        lid::MI_EFFECTS,
    ];
    supported_log_pages(ids.into_iter().chain(ana)).to_vec()
}

fn firmware_slots() -> Vec<u8> {
    let mut log = FirmwareSlotLog { afi: 1, ..FirmwareSlotLog::default() };
    log.revisions[0] = SpacePadded::new(identify::FIRMWARE).unwrap_or_default();
    log.encode().to_vec()
}

fn ana(controller: &Controller, groups_only: bool) -> Vec<u8> {
    let mut groups: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    controller.subsystem.with_namespaces(|all| {
        for namespace in all.values() {
            groups.entry(namespace.ana_group).or_default().push(namespace.nsid);
        }
    });
    let states = controller.ana();
    let group = |(id, nsids)| AnaGroup { id, state: states.get(id), change_count: 0, nsids };
    AnaLog { change_count: 0, groups: groups.into_iter().map(group).collect() }.encode(groups_only)
}
