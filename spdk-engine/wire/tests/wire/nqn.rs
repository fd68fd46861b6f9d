use nvme_wire::nqn::{DISCOVERY_NQN, MAX_LEN, Nqn, NqnError};
use proptest::prelude::*;

#[test]
fn the_three_forms_are_accepted() {
    for text in [
        DISCOVERY_NQN,
        "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555",
        "nqn.2026-11.io.addax:volume:vol-1",
        "nqn.2026-11.io.addax:engine:vol:12:0",
        "nqn.2016-06.io.spdk:cnode1",
        "nqn.2016-06.a:b",
        "nqn.2016-06.io.a-b.c9:ünïcode with spaces",
    ] {
        assert_eq!(Nqn::new(text).unwrap().as_str(), text);
    }
    assert!(Nqn::discovery().is_discovery());
    assert_eq!(Nqn::new(DISCOVERY_NQN).unwrap(), Nqn::discovery());
    let uuid = uuid::Uuid::from_u128(0x1111_1111_2222_3333_4444_5555_5555_5555);
    assert_eq!(Nqn::new(Nqn::from_uuid(uuid).as_str()), Ok(Nqn::from_uuid(uuid)));
}

#[test]
fn lengths_are_limited() {
    let of = |len: usize| {
        let prefix = "nqn.2016-06.io.spdk:";
        Nqn::new(&format!("{prefix}{}", "a".repeat(len - prefix.len())))
    };
    assert!(of(MAX_LEN).is_ok());
    assert_eq!(of(MAX_LEN + 1), Err(NqnError::Length(224)));
    assert_eq!(Nqn::new("nqn.2016-0"), Err(NqnError::Length(10)));
    assert_eq!(Nqn::new(""), Err(NqnError::Length(0)));
    assert!(matches!(Nqn::new("nqn.2016-06"), Err(NqnError::Date(_))), "long enough, yet no name");
}

#[test]
fn what_is_wrong_is_said() {
    for (text, expected) in [
        ("nqm.2016-06.io.spdk:a", "must start with `nqn.yyyy-mm.`"),
        ("nqn.201-06.io.spdk:aa", "must start with `nqn.yyyy-mm.`"),
        ("nqn.2016:06.io.spdk:a", "must start with `nqn.yyyy-mm.`"),
        ("nqn.2016-06.io.spdk", "a colon and a name"),
        ("nqn.2016-06.io.spdk:", "a colon and a name"),
        ("nqn.2016-06.:name", "domain label ``"),
        ("nqn.2016-06.io..spdk:a", "domain label ``"),
        ("nqn.2016-06.io.9spdk:a", "domain label `9spdk`"),
        ("nqn.2016-06.io.-spdk:a", "domain label `-spdk`"),
        ("nqn.2016-06.io.spdk-:a", "domain label `spdk-`"),
        ("nqn.2016-06.io-.spdk:a", "domain label `io-`"),
        ("nqn.2016-06.io.sp_dk:a", "domain label `sp_dk`"),
        ("nqn.2014-08.org.nvmexpress:uuid:1111", "hexadecimal digits"),
        ("nqn.2014-08.org.nvmexpress:uuid:11111111222233334444555555555555", "hexadecimal digits"),
        ("nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-55555555555g", "hexadecimal digits"),
        ("nqn.2016-06.io.spdk:a\0b", "NUL byte at 21"),
    ] {
        let error = Nqn::new(text).unwrap_err().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
    let label = |len: usize| Nqn::new(&format!("nqn.2016-06.io.{}:a", "a".repeat(len)));
    assert!(label(63).is_ok());
    assert!(matches!(label(64), Err(NqnError::Domain { .. })));
}

#[test]
fn fields_end_at_the_first_nul() {
    let nqn = Nqn::new("nqn.2016-06.io.spdk:a").unwrap();
    let mut field = *nqn.to_field().as_bytes();
    field[100] = b'x';
    assert_eq!(Nqn::from_field(&field), Ok(nqn));
    assert_eq!(Nqn::from_field(&[b'n'; 256]), Err(NqnError::Length(256)));
    let mut broken = [0; 256];
    broken[..3].copy_from_slice(&[b'n', b'q', 0xFF]);
    assert_eq!(Nqn::from_field(&broken), Err(NqnError::NotUtf8(2)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn well_formed_names_survive(
        text in "nqn\\.[0-9]{4}-[0-9]{2}\\.[a-z]([a-z0-9-]{0,8}[a-z0-9])?(\\.[A-Z][a-z0-9]{0,5}){0,3}:[^\u{0}]{1,30}",
    ) {
        let nqn = Nqn::new(&text).unwrap();
        prop_assert_eq!(Nqn::from_field(nqn.to_field().as_bytes()), Ok(nqn.clone()));
        prop_assert_eq!(text.parse::<Nqn>(), Ok(nqn));
    }

    #[test]
    fn no_text_panics(text: String, field: Vec<u8>) {
        let _ = Nqn::new(&text);
        let _ = Nqn::new(&format!("nqn.2016-06.{text}"));
        let _ = Nqn::from_field(&field);
    }
}
