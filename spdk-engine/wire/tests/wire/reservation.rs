use nvme_wire::Status;
use nvme_wire::reservation::ReservationType;

#[test]
fn six_types_and_no_more() {
    for raw in 1..=6 {
        assert_eq!(ReservationType::from_raw(raw).unwrap().raw(), raw);
    }
    for raw in [0, 7, 8, 255] {
        assert_eq!(ReservationType::from_raw(raw), Err(Status::INVALID_FIELD));
    }
}

#[test]
fn what_each_type_lets_through() {
    let of = |raw| {
        let kind = ReservationType::from_raw(raw).unwrap();
        (kind.lets_all_read(), kind.lets_registrants_in(), kind.is_all_registrants())
    };
    assert_eq!(of(1), (true, false, false));
    assert_eq!(of(2), (false, false, false));
    assert_eq!(of(3), (true, true, false));
    assert_eq!(of(4), (false, true, false));
    assert_eq!(of(5), (true, true, true));
    assert_eq!(of(6), (false, true, true));
}
