use super::refusal::bytes;
use super::*;
use crate::build::{at, node, observed, replica, setting};
use addax_api::node::DiskStatus;

const GIB: i64 = 1 << 30;

fn request(size: i64) -> Request<'static> {
    Request {
        volume: "v",
        size,
        node_selector: &[],
        disk_selector: &[],
        soft_anti_affinity: false,
        used_nodes: BTreeSet::new(),
    }
}

fn place(observed: &Observed, request: &Request<'_>) -> Result<Place, NoPlace> {
    let settings = observed.settings_in_force();
    Scheduler::new(observed, &settings, at(0)).place(request)
}

fn reasons(result: Result<Place, NoPlace>) -> Vec<Refusal> {
    result.unwrap_err().refusals.into_iter().map(|refused| refused.reason).collect()
}

#[test]
fn the_emptier_node_is_taken_and_what_was_placed_counts() {
    let observed = observed()
        .with(node("n1").disk("d", 100 * GIB))
        .with(node("n2").disk("d", 100 * GIB))
        .with(replica("a", "w").on("n1", "d").size(10 * GIB));
    let settings = observed.settings_in_force();
    let mut scheduler = Scheduler::new(&observed, &settings, at(0));
    assert_eq!(scheduler.place(&request(10 * GIB)).unwrap().node, "n2");
    let mut nodes = BTreeSet::new();
    for _ in 0..2 {
        nodes.insert(scheduler.place(&request(10 * GIB)).unwrap().node);
    }
    assert_eq!(nodes.len(), 2);
}

#[test]
fn within_a_node_the_emptier_disk_is_taken() {
    let observed = observed()
        .with(node("n1").disk("d1", 100 * GIB).disk("d2", 100 * GIB))
        .with(replica("a", "w").on("n1", "d1").size(GIB));
    assert_eq!(place(&observed, &request(GIB)).unwrap().disk, "d2");
}

#[test]
fn hard_anti_affinity_refuses_and_soft_prefers_other_nodes() {
    let one = observed().with(node("n1").disk("d", 100 * GIB));
    let mut request = request(GIB);
    request.used_nodes.insert("n1".to_owned());
    assert_eq!(reasons(place(&one, &request)), [Refusal::NodeHoldsCopy]);
    request.soft_anti_affinity = true;
    assert_eq!(place(&one, &request).unwrap().node, "n1");
    let two = one.with(node("n2").disk("d", 10 * GIB));
    assert_eq!(place(&two, &request).unwrap().node, "n2");
}

#[test]
fn every_refusal_has_its_reason() {
    let observed = observed()
        .with(node("dead").disk("d", 100 * GIB).dead())
        .with(node("down").disk("d", 100 * GIB).not_ready())
        .with(node("empty"))
        .with(node("off").disk("d", 100 * GIB).no_scheduling())
        .with(node("small").disk("d", GIB))
        .with(node("sold").disk("d", 100 * GIB).disk_off("off"))
        .with(replica("a", "w").on("sold", "d").size(99 * GIB));
    assert_eq!(
        reasons(place(&observed, &request(2 * GIB))),
        [
            Refusal::NodeNotReady,
            Refusal::NodeNotReady,
            Refusal::NoDisk,
            Refusal::NodeSchedulingDisabled,
            Refusal::DiskFull { available: GIB, keep_free: GIB / 10 },
            Refusal::DiskOverCommitted { scheduled: 99 * GIB, limit: 100 * GIB },
            Refusal::DiskSchedulingDisabled,
        ]
    );
}

#[test]
fn tags_must_all_be_there() {
    let observed = observed()
        .with(node("n1").disk("d", 100 * GIB).tags(&["fast"]))
        .with(node("n2").disk("d", 100 * GIB).tags(&["fast", "near"]));
    let selector = ["fast".to_owned(), "near".to_owned()];
    let mut request = request(GIB);
    request.node_selector = &selector;
    assert_eq!(place(&observed, &request).unwrap().node, "n2");
    request.node_selector = &[];
    request.disk_selector = &selector;
    assert!(matches!(
        &reasons(place(&observed, &request))[..],
        [Refusal::DiskTagsMissing(_), Refusal::DiskTagsMissing(_)]
    ));
}

#[test]
fn capacity_is_exact_at_its_edges() {
    let observed = observed().with(node("n1").disk("d", 100 * GIB).available("d", 20 * GIB));
    // 10 GiB must stay free, strictly: a copy that leaves exactly that is refused.
    assert!(place(&observed, &request(10 * GIB)).is_err());
    assert!(place(&observed, &request(10 * GIB - 1)).is_ok());
    let observed = super::tests::observed()
        .with(node("n1").disk("d", 100 * GIB))
        .with(replica("a", "w").on("n1", "d").size(50 * GIB));
    assert!(place(&observed, &request(50 * GIB)).is_ok());
    assert!(place(&observed, &request(50 * GIB + 1)).is_err());
}

#[test]
fn what_others_have_on_a_disk_is_not_promised_and_copies_take_whole_clusters() {
    let disk = |change: fn(&mut DiskStatus)| observed().with(node("n1").disk("d", 100 * GIB).disk_status("d", change));
    let foreign = disk(|status| status.storage_unmanaged = 60 * GIB);
    assert!(place(&foreign, &request(40 * GIB)).is_ok());
    assert!(place(&foreign, &request(40 * GIB + 1)).is_err());
    let coarse = disk(|status| status.cluster_size = 30 * GIB).with(replica("a", "w").on("n1", "d").size(1));
    assert!(place(&coarse, &request(60 * GIB)).is_ok());
    assert!(place(&coarse, &request(60 * GIB + 1)).is_err());
}

#[test]
fn a_disk_that_cannot_tell_that_it_is_full_is_never_promised_twice() {
    let over = || observed().with(setting("storage-over-provisioning-percentage", "200"));
    let thin = over().with(node("n1").disk("d", 100 * GIB)).with(replica("a", "w").on("n1", "d").size(99 * GIB));
    assert!(place(&thin, &request(2 * GIB)).is_ok());
    let stock = thin.with(node("n1").disk("d", 100 * GIB).disk_status("d", |status| status.no_overcommit = true));
    assert!(matches!(&reasons(place(&stock, &request(2 * GIB)))[..], [Refusal::DiskOverCommitted { .. }]));
}

#[test]
fn the_sentence_groups_by_reason() {
    let observed = observed()
        .with(node("n1").disk("d", 100 * GIB))
        .with(node("n2").disk("d", 100 * GIB))
        .with(node("n3").disk("d", GIB));
    let mut request = request(GIB);
    request.used_nodes.extend(["n1".to_owned(), "n2".to_owned()]);
    assert_eq!(
        place(&observed, &request).unwrap_err().to_string(),
        "no place for a copy of 1 GiB: n1, n2: already holding a copy; n3/d: 1 GiB free, of which 102.3 MiB must stay free"
    );
    let nobody = super::tests::observed();
    assert!(place(&nobody, &request).unwrap_err().to_string().ends_with("there are no nodes"));
}

#[test]
fn sizes_read_well() {
    assert_eq!(bytes(0), "0 B");
    assert_eq!(bytes(1023), "1023 B");
    assert_eq!(bytes(1536), "1.5 KiB");
    assert_eq!(bytes(1 << 40), "1 TiB");
}
