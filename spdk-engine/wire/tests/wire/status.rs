use nvme_wire::Status;
use nvme_wire::status::StatusCodeType;
use proptest::prelude::*;

#[test]
fn each_bit_has_its_place() {
    assert_eq!(Status::new(1, 0x82).raw(), 0x182);
    assert_eq!(Status::new(0, 1).cqe_field(), 0x0002);
    assert_eq!(Status::SUCCESS.with_crd(1).raw(), 1 << 11);
    assert_eq!(Status::SUCCESS.with_crd(2).raw(), 1 << 12);
    assert_eq!(Status::SUCCESS.with_more().raw(), 1 << 13);
    assert_eq!(Status::SUCCESS.with_dnr().raw(), 1 << 14);
    // As seen on the wire for an unknown namespace: SCT 0, SC 0Bh, DNR.
    assert_eq!(Status::INVALID_NAMESPACE.with_dnr().cqe_field(), 0x8016);
    assert_eq!(Status::from_cqe_field(0x8017), Status::INVALID_NAMESPACE.with_dnr());
}

#[test]
fn codes_compare_without_the_retry_bits() {
    assert!(Status::LBA_OUT_OF_RANGE.with_dnr().with_crd(3).is(Status::LBA_OUT_OF_RANGE));
    assert_ne!(Status::LBA_OUT_OF_RANGE.with_dnr(), Status::LBA_OUT_OF_RANGE);
    assert!(Status::SUCCESS.with_more().is_success());
    assert!(!Status::INVALID_FIELD.is_success());
    assert!(Status::ANA_INACCESSIBLE.is_path_error());
    assert!(!Status::COMPARE_FAILURE.is_path_error());
    assert_eq!(Status::new(7, 1).code_type(), StatusCodeType::VendorSpecific);
    assert_eq!(Status::new(5, 1).code_type(), StatusCodeType::Reserved(5));
    // The same code number means other things in other tables.
    assert!(!Status::LBA_OUT_OF_RANGE.is(Status::WRITE_FAULT));
}

#[test]
fn the_name_is_shown_with_the_numbers() {
    assert_eq!(Status::COMPARE_FAILURE.to_string(), "Compare Failure (SCT 2h, SC 85h)");
    assert_eq!(
        Status::INVALID_OPCODE.with_dnr().with_crd(2).to_string(),
        "Invalid Command Opcode (SCT 0h, SC 01h, CRD 2, DNR)"
    );
    assert_eq!(Status::new(6, 0x42).to_string(), "Unknown Status (SCT 6h, SC 42h)");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_field_value_survives(field: u16) {
        let status = Status::from_cqe_field(field);
        prop_assert_eq!(status.cqe_field(), field & !1);
        prop_assert_eq!(Status::from_raw(status.raw()), status);
        let rebuilt = Status::new(status.sct(), status.sc()).with_crd(status.crd());
        let rebuilt = if status.more() { rebuilt.with_more() } else { rebuilt };
        let rebuilt = if status.dnr() { rebuilt.with_dnr() } else { rebuilt };
        prop_assert_eq!(rebuilt, status);
    }
}
