//! The data of a Connect and the names in it: an accepted name keeps its text in both directions.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nvme_wire::Nqn;
use nvme_wire::fabrics::ConnectData;
use nvme_wire::nqn::{MAX_LEN, MIN_LEN};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(text) = std::str::from_utf8(bytes) {
        check(Nqn::new(text).ok());
    }
    check(Nqn::from_field(bytes).ok());
    // Short inputs still reach the fields, which lie far into the structure.
    let mut page = [0; ConnectData::SIZE];
    let (head, tail) = bytes.split_at(bytes.len().min(18));
    page[..head.len()].copy_from_slice(head);
    let room = &mut page[256..768];
    let len = tail.len().min(room.len());
    room[..len].copy_from_slice(&tail[..len]);
    let data = ConnectData::parse(&page).expect("the page is whole");
    assert_eq!(data.encode(), page);
    for field in [&data.subnqn, &data.hostnqn] {
        check(Nqn::from_field(field.as_bytes()).ok());
    }
});

fn check(nqn: Option<Nqn>) {
    let Some(nqn) = nqn else { return };
    assert!((MIN_LEN..=MAX_LEN).contains(&nqn.as_str().len()));
    assert_eq!(Nqn::from_field(nqn.to_field().as_bytes()), Ok(nqn));
}
