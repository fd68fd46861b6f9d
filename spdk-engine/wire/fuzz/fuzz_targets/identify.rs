//! What an initiator reads from a target it does not trust: Identify answers and log pages.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nvme_wire::ana::AnaLog;
use nvme_wire::discovery::{DiscoveryEntry, DiscoveryLog};
use nvme_wire::identify::ControllerData;
use nvme_wire::log::window;
use nvme_wire::namespace::{NamespaceData, NamespaceIds, parse_namespace_list};

fuzz_target!(|bytes: &[u8]| {
    let mut page = [0; 4096];
    let len = bytes.len().min(page.len());
    page[..len].copy_from_slice(&bytes[..len]);

    let controller = ControllerData::parse(&page).expect("the page is whole");
    let _ = (controller.max_transfer(), controller.in_capsule_data(), controller.sn.as_str());
    assert_eq!(ControllerData::parse(&controller.encode()).as_ref(), Ok(&controller));
    let namespace = NamespaceData::parse(&page).expect("the page is whole");
    let _ = namespace.block_size();
    assert_eq!(NamespaceData::parse(&namespace.encode()).as_ref(), Ok(&namespace));
    let entry = DiscoveryEntry::parse(&page).expect("the page is whole");
    let _ = entry.address();
    assert_eq!(DiscoveryEntry::parse(&entry.encode()).as_ref(), Ok(&entry));

    let ids = NamespaceIds::parse(bytes);
    assert_eq!(NamespaceIds::parse(&ids.encode()), ids);
    assert!(parse_namespace_list(bytes).count() <= bytes.len() / 4);
    if let Ok(log) = AnaLog::parse(bytes) {
        assert_eq!(AnaLog::parse(&log.encode(false)).as_ref(), Ok(&log));
    }
    if let Ok(log) = DiscoveryLog::parse(bytes) {
        assert_eq!(DiscoveryLog::parse(&log.encode()).as_ref(), Ok(&log));
    }
    let _ = window(bytes, u64::from(page[0]), &mut [0; 64]);
});
