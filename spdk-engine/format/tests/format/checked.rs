//! The checker over every golden image: nothing wrong where nothing is, every damage named where it is.

use blobstore_format::check::{CheckError, Kind, Outcome, Place, Report, Severity, check};
use blobstore_format::dump::dump;
use blobstore_golden::{Class, case, cases};

/// For each kind of damage: where it is named, as (image, kind, part of the finding's text).
const DAMAGE: &[(&str, Kind, &str)] = &[
    ("crafted-super-crc", Kind::SuperBlock, "CRC"),
    ("crafted-super-bit", Kind::SuperBlock, "CRC"),
    ("crafted-super-version-4", Kind::SuperBlock, "version is 4; 1 to 3"),
    ("crafted-super-version-0", Kind::SuperBlock, "version is 0; 1 to 3"),
    ("crafted-super-type", Kind::StoreType, "OTHERSTORE"),
    ("crafted-super-size", Kind::Geometry, "device of 50335744 bytes; this one has 50331648"),
    ("crafted-super-no-super-blob", Kind::SuperBlob, "names no super blob"),
    ("crafted-truncated", Kind::Geometry, "this one has 25165824"),
    ("crafted-truncated-dirty", Kind::Geometry, "this one has 25165824"),
    ("crafted-mask-clusters-zero", Kind::ClusterNotMarked, "not marked in the used-cluster mask"),
    ("crafted-mask-pages-zero", Kind::PageNotMarked, "not marked in the used-page mask"),
    ("crafted-mask-blobids-zero", Kind::BlobNotMarked, "not marked in the used-blobid mask"),
    ("crafted-mask-pages-wiped", Kind::Mask, "the used-page mask's length is 0 bits; 48 are expected"),
    ("crafted-md-root-bit", Kind::Chain, "metadata page 10 is damaged: the page's CRC"),
    ("crafted-md-root-bit-dirty", Kind::PageDamaged, "page 10 0x10000000a"),
    ("crafted-md-snapshot-bit", Kind::Chain, "metadata page 6 is damaged"),
    ("crafted-md-snapshot-bit", Kind::ParentLost, "\"alpha\""),
    ("crafted-md-snapshot-bit", Kind::ParentLost, "\"gamma\""),
    ("crafted-md-snapshot-bit-dirty", Kind::PageDamaged, "page 6 0x100000006"),
    ("crafted-md-snapshot-bit-dirty", Kind::ParentMissing, "\"gamma\""),
    ("crafted-md-extent-bit", Kind::ExtentPage, "\"delta\"): extent page 11 is damaged"),
    ("crafted-md-extent-bit-dirty", Kind::Recovery, "extent page 11 is damaged"),
    ("crafted-md-super-blob-bit", Kind::SuperBlob, "cannot be opened"),
    ("crafted-md-super-blob-bit-dirty", Kind::SuperBlob, "does not exist or is damaged"),
    ("crafted-md-next-self", Kind::ChainCycle, "page 10 names page 10"),
    ("crafted-md-next-self-dirty", Kind::ChainCycle, "page 10 names page 10"),
    ("crafted-md-next-cycle", Kind::ChainCycle, "page 303 names page 306"),
    ("crafted-md-next-cycle-dirty", Kind::ChainCycle, "page 303 names page 306"),
    ("crafted-md-next-lost", Kind::Chain, "page 303 holds nothing but zeroes"),
    ("crafted-md-next-lost-dirty", Kind::Chain, "page 303 holds nothing but zeroes"),
    ("crafted-md-next-range", Kind::Chain, "page 53 lies outside the metadata region of 48"),
    ("crafted-md-next-range-dirty", Kind::Chain, "page 53 lies outside the metadata region of 48"),
    ("crafted-cluster-twice", Kind::ClusterShared, "cluster 8"),
    ("crafted-cluster-twice-dirty", Kind::ClusterShared, "cluster 8"),
    ("crafted-cluster-range", Kind::ClusterBeyondDevice, "cluster 148 of the device, which has 48"),
    ("crafted-cluster-range-dirty", Kind::ClusterBeyondDevice, "cluster 148 of the device, which has 48"),
    ("crafted-cluster-in-metadata", Kind::ClusterShared, "cluster 1 "),
    ("crafted-cluster-in-metadata-dirty", Kind::ClusterShared, "cluster 1 "),
    ("crafted-thick-hole", Kind::ThickHole, "no cluster allocated at 1"),
    ("crafted-thick-hole-dirty", Kind::ThickHole, "no cluster allocated at 1"),
    ("crafted-extent-start", Kind::ExtentPage, "begins with cluster 512"),
    ("crafted-extent-start-dirty", Kind::ExtentPage, "begins with cluster 512"),
    ("crafted-table-foreign-page", Kind::ExtentPage, "page 8 cannot be its extent page"),
    ("crafted-table-foreign-page-dirty", Kind::Recovery, "page 8 cannot be its extent page"),
    ("crafted-flag-invalid", Kind::UnknownFlags, "invalid_flags is 0x104"),
    ("crafted-flag-invalid-dirty", Kind::UnknownFlags, "invalid_flags is 0x104"),
    ("crafted-flag-data-ro", Kind::UnknownFlags, "data_ro_flags is 0x100"),
    ("crafted-flag-md-ro", Kind::UnknownFlags, "md_ro_flags is 0x100"),
    ("crafted-descriptor-unknown", Kind::UnknownDescriptor, "0x42"),
    ("crafted-descriptor-unknown-dirty", Kind::Recovery, "0x42"),
    ("crafted-lvol-no-name", Kind::Name, "no xattr \"name\""),
    ("crafted-lvol-no-uuid", Kind::Uuid, "no xattr \"uuid\""),
    ("crafted-lvol-same-name", Kind::SameName, "the same name"),
    ("crafted-parent-missing", Kind::ParentMissing, "blob 0x100000028"),
    ("crafted-parent-missing-dirty", Kind::ParentMissing, "blob 0x100000028"),
    ("crafted-parent-self", Kind::ParentCycle, "blob 0x100000008"),
    ("crafted-parent-self-dirty", Kind::ParentCycle, "blob 0x100000008"),
];

fn report(name: &str) -> Report {
    check(&case(name).image()).unwrap()
}

fn texts(report: &Report) -> Vec<String> {
    report.findings.iter().map(ToString::to_string).collect()
}

#[test]
fn every_damage_is_named() {
    for (name, kind, text) in DAMAGE {
        let report = report(name);
        let found = report.findings.iter().any(|f| f.kind == *kind && f.to_string().contains(text));
        assert!(found, "{name}: {kind} {text:?} is not among {:#?}", texts(&report));
        assert!(!report.is_clean(), "{name}");
    }
}

#[test]
fn every_damaged_image_is_covered() {
    // Wrong masks of a store that is not clean are no damage: nobody trusts them.
    let harmless = ["crafted-mask-clusters-zero-dirty", "crafted-mask-pages-wiped-dirty"];
    for case in cases().iter().filter(|case| case.is_damaged()) {
        if harmless.contains(&case.name.as_str()) {
            assert!(report(&case.name).is_clean());
        } else if case.name == "crafted-super-signature" {
            let error = check(&case.image()).unwrap_err();
            assert!(matches!(error, CheckError::NoBlobstore(_)));
            assert!(error.to_string().contains("SPDKBLOC"), "{error}");
        } else {
            assert!(DAMAGE.iter().any(|(name, ..)| *name == case.name), "{} is not covered", case.name);
        }
    }
}

#[test]
fn nothing_is_wrong_with_whole_images() {
    for case in cases().iter().filter(|case| !case.is_damaged()) {
        let report = check(&case.image()).unwrap();
        let wrong: Vec<_> = report.findings.iter().filter(|f| f.severity != Severity::Note).collect();
        let Outcome::Opens { lvols, lost: 0, removed } = report.outcome else { panic!("{}: {report}", case.name) };
        assert_eq!(lvols, case.expected().unwrap().1.len(), "{}", case.name);
        match case.name.as_str() {
            // What SPDK lost when writes beyond the external device failed: two clusters and a page.
            "esnap-grown" => {
                let places: Vec<_> = wrong.iter().map(|f| (f.kind, f.place)).collect();
                let cluster = |n| (Kind::ClusterLeaked, Place::Clusters(n, 1));
                assert_eq!(places, [cluster(1), cluster(6), (Kind::PageLeaked, Place::Page(2))]);
            }
            name if name.starts_with("interrupted-") => {
                assert_eq!(case.class, Class::Dirty);
                assert!(wrong.iter().all(|f| f.kind == Kind::UnfinishedSnapshot), "{name}: {report}");
                let marked = name.contains("-snapshot-") || name.contains("-delete-");
                assert!(marked != wrong.is_empty() || name == "interrupted-burst", "{name}: {report}");
                let gone = ["-empty", "-both", "-both-chain", "-moved", "-moved-chain", "-burst"];
                assert_eq!(removed > 0, gone.iter().any(|end| name.ends_with(end)), "{name}: {report}");
            }
            name => assert!(wrong.is_empty(), "{name}: {report}"),
        }
    }
}

#[test]
fn every_image_with_a_store_can_be_dumped() {
    for case in cases() {
        let Ok(dump) = dump(&case.image()) else {
            assert!(case.is_damaged());
            continue;
        };
        let json = serde_json::to_value(&dump).unwrap();
        assert_eq!(json["blobs"].as_array().unwrap().len(), dump.blobs.len());
        let text = dump.to_string();
        for lvol in case.lvols.iter().flatten() {
            assert!(dump.blobs.iter().any(|blob| blob.name.as_deref() == Some(&lvol.name)), "{}", case.name);
            assert!(text.contains(&format!("{:?}", lvol.name)), "{}: {text}", case.name);
        }
    }
}
