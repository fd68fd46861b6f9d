//! The meta area's bytes: what is written is read, what is damaged is refused or counts as set, nothing panics.
#![allow(clippy::unwrap_used)]

use mirror_core::meta::{
    BITS_PER_BLOCK, Geometry, META_BLOCK_BYTES, MetaError, RegionBits, ReplicaState, STAMPS_PER_BLOCK, Stamp,
    Superblock, decode_bits, decode_stamps, encode_bits, encode_stamps, newest_superblock,
};
use mirror_core::{Config, ConfigNumber, EngineInstance, Epoch, Lineage, ReplicaId, VolumeId};
use proptest::prelude::*;

const SECTOR: usize = 512;

fn name() -> impl Strategy<Value = String> {
    "[a-zA-Z0-9._-]{1,63}"
}

fn superblock() -> impl Strategy<Value = Superblock> {
    let names = (name(), name(), name(), name(), "[ -~]{0,127}");
    let numbers = (any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>(), any::<u32>(), any::<u32>(), 0u32..64);
    let sets = (proptest::collection::btree_set(name(), 1..17), any::<prop::sample::Index>());
    let state =
        prop_oneof![Just(ReplicaState::Member), Just(ReplicaState::Rebuilding), Just(ReplicaState::ClosedClean)];
    (names, numbers, sets, state).prop_map(|(names, numbers, (replicas, split), state)| {
        let replicas: Vec<ReplicaId> = replicas.iter().map(|n| ReplicaId::new(n).unwrap()).collect();
        let split = split.index(replicas.len()) + 1;
        Superblock {
            volume: VolumeId::new(&names.0).unwrap(),
            replica: ReplicaId::new(&names.1).unwrap(),
            record: Config {
                lineage: Lineage::new(&names.2).unwrap(),
                epoch: Epoch(numbers.0),
                engine_instance: EngineInstance::new(&names.3).unwrap(),
                config_number: ConfigNumber(numbers.1),
                in_sync: replicas[..split].iter().cloned().collect(),
                rebuilding: replicas[split..].iter().cloned().collect(),
                min_in_sync: numbers.4,
                size_blocks: numbers.2,
                clean: state == ReplicaState::ClosedClean,
                tree: Default::default(),
            },
            block_size: numbers.5,
            region_blocks: 1 << numbers.6,
            state,
            instance: names.4,
            sequence: numbers.3,
        }
    })
}

fn bits(regions: &[u32], len: u32) -> RegionBits {
    let mut bits = RegionBits::empty(len);
    regions.iter().for_each(|r| bits.insert(*r));
    bits
}

fn encoded(bits: &RegionBits, geometry: &Geometry) -> Vec<u8> {
    let mut bytes = Vec::new();
    (0..geometry.bits_blocks()).for_each(|block| encode_bits(bits, block, &mut bytes));
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(96) })]

    #[test]
    fn a_superblock_is_read_as_it_was_written(superblock in superblock()) {
        let block = superblock.encode().unwrap();
        prop_assert_eq!(block.len(), META_BLOCK_BYTES);
        prop_assert_eq!(Superblock::decode(&block), Ok(superblock));
    }

    /// One bit anywhere, also in bytes that hold nothing: a CRC finds it.
    #[test]
    fn a_damaged_superblock_is_refused(superblock in superblock(), bit in 0usize..META_BLOCK_BYTES * 8) {
        let mut block = superblock.encode().unwrap();
        block[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(Superblock::decode(&block).is_err());
    }

    /// A torn write of a slot leaves the new superblock, or the one in the other slot.
    #[test]
    fn a_torn_superblock_leaves_the_other_slot(
        old in superblock(), older in superblock(), new in superblock(), torn in 0u8..=255,
    ) {
        let older = Superblock { sequence: 6, ..older };
        let old = Superblock { sequence: 7, ..old };
        let new = Superblock { sequence: 8, ..new };
        let mut slot = older.encode().unwrap();
        let fresh = new.encode().unwrap();
        for sector in (0..8).filter(|s| torn >> s & 1 != 0) {
            let at = sector * SECTOR;
            slot[at..at + SECTOR].copy_from_slice(&fresh[at..at + SECTOR]);
        }
        slot.extend(old.encode().unwrap());
        let found = newest_superblock(&slot).unwrap();
        prop_assert!(found == old || found == new, "{:?}", found);
        prop_assert!(torn != 255 || found == new);
    }

    #[test]
    fn bits_are_read_as_they_were_written(
        regions in 1u32..80_000, set in proptest::collection::vec(any::<u32>(), 0..50),
    ) {
        let geometry = Geometry::new(u64::from(regions), 1).unwrap();
        let set: Vec<u32> = set.into_iter().map(|r| r % regions).collect();
        let written = bits(&set, regions);
        prop_assert_eq!(decode_bits(&geometry, &encoded(&written, &geometry)), (written, 0));
    }

    /// Whole sectors of an older state may be left: each region then says what either state said. Damage says "set".
    #[test]
    fn torn_and_damaged_bits_never_lose_a_set_one(
        old in proptest::collection::vec(0u32..20_000, 0..40),
        new in proptest::collection::vec(0u32..20_000, 0..40),
        kept in any::<u64>(),
        flips in proptest::collection::vec(0usize..META_BLOCK_BYTES * 8, 0..6),
    ) {
        let geometry = Geometry::new(20_000, 1).unwrap();
        let (old, new) = (bits(&old, 20_000), bits(&new, 20_000));
        let (before, mut bytes) = (encoded(&old, &geometry), encoded(&new, &geometry));
        for (i, sector) in bytes.chunks_mut(SECTOR).enumerate().filter(|(i, _)| kept >> i & 1 != 0) {
            sector.copy_from_slice(&before[i * SECTOR..][..SECTOR]);
        }
        flips.iter().for_each(|bit| bytes[bit / 8] ^= 1 << (bit % 8));
        let (read, bad) = decode_bits(&geometry, &bytes);
        for region in 0..20_000 {
            let in_both = old.contains(region) && new.contains(region);
            prop_assert!(read.contains(region) || !in_both, "{region} is lost");
            prop_assert!(!read.contains(region) || bad > 0 || old.contains(region) || new.contains(region));
        }
    }

    #[test]
    fn stamps_are_read_as_they_were_written(
        stamps in proptest::collection::vec(any::<u64>(), 0..STAMPS_PER_BLOCK as usize), block in 0u32..2081, bad in 0usize..8,
    ) {
        let stamps: Vec<Stamp> = stamps.into_iter().map(|s| Stamp::new(Epoch(s >> 32), s as u32)).collect();
        let mut bytes = Vec::new();
        encode_stamps(stamps.iter().copied(), block, &mut bytes);
        let read = decode_stamps(block, &bytes);
        for (i, found) in read.iter().enumerate() {
            prop_assert_eq!(*found, Some(stamps.get(i).copied().unwrap_or_default()));
        }
        prop_assert!(decode_stamps(block + 1, &bytes).iter().all(Option::is_none), "another place");
        bytes[bad * SECTOR + 77] ^= 4;
        prop_assert_eq!(decode_stamps(block, &bytes).iter().filter(|s| s.is_none()).count(), 63);
    }

    /// Whatever the bytes: no panic, and what is not whole counts as set.
    #[test]
    fn random_bytes_are_no_superblock_and_all_bits(bytes in proptest::collection::vec(any::<u8>(), 0..9000)) {
        prop_assert!(Superblock::decode(&bytes).is_err());
        prop_assert_eq!(newest_superblock(&bytes), None);
        let geometry = Geometry::new(9000, 1).unwrap();
        prop_assert_eq!(decode_bits(&geometry, &bytes), (RegionBits::full(9000), 3));
        prop_assert!(decode_stamps(0, &bytes).iter().all(Option::is_none));
    }

    /// Sound checksums over nonsense: every field is looked at, nothing panics.
    #[test]
    fn sealed_nonsense_does_not_panic(
        superblock in superblock(), writes in proptest::collection::vec((16usize..1536, any::<u8>()), 1..40),
    ) {
        let mut block = superblock.encode().unwrap();
        writes.iter().for_each(|(at, byte)| block[*at] = *byte);
        block[8..12].fill(0);
        let crc = crc_fast::crc32_iscsi(&block);
        block[8..12].copy_from_slice(&crc.to_le_bytes());
        if let Ok(read) = Superblock::decode(&block) {
            let (s, r) = (&read.record.in_sync, &read.record.rebuilding);
            prop_assert!(!s.is_empty() && s.is_disjoint(r));
            prop_assert_eq!(Superblock::decode(&read.encode().unwrap()), Ok(read));
        }
    }
}

/// The layout does not change by itself: volumes outlive programs.
#[test]
fn the_bytes_are_those_of_version_1() {
    let superblock = Superblock {
        volume: VolumeId::new("vol").unwrap(),
        replica: ReplicaId::new("r1").unwrap(),
        record: Config {
            lineage: Lineage::new("l").unwrap(),
            epoch: Epoch(0x0102),
            engine_instance: EngineInstance::new("e").unwrap(),
            config_number: ConfigNumber(3),
            in_sync: [ReplicaId::new("r1").unwrap()].into(),
            rebuilding: [ReplicaId::new("r2").unwrap()].into(),
            min_in_sync: 2,
            size_blocks: 4096,
            clean: false,
            tree: Default::default(),
        },
        block_size: 512,
        region_blocks: 2048,
        state: ReplicaState::Rebuilding,
        instance: "boot".to_owned(),
        sequence: 9,
    };
    let block = superblock.encode().unwrap();
    let at = |from: usize, len: usize| &block[from..from + len];
    assert_eq!(at(0, 8), b"ADDAXSB1");
    assert_eq!((at(12, 4), at(16, 8)), (&[1u8, 0, 0, 0][..], &[9u8, 0, 0, 0, 0, 0, 0, 0][..]));
    assert_eq!((at(24, 3), at(32, 2)), (&[2u8, 1, 0][..], &[3u8, 0][..]));
    assert_eq!(
        (at(40, 2), at(48, 2), at(56, 2), at(60, 1)),
        (&[0u8, 16][..], &[0u8, 8][..], &[0u8, 2][..], &[2u8][..])
    );
    assert_eq!(at(64, 3), [2, 1, 1]);
    assert_eq!(
        (at(72, 4), at(136, 3), at(200, 2), at(264, 2)),
        (&b"\x03vol"[..], &b"\x02r1"[..], &b"\x01l"[..], &b"\x01e"[..])
    );
    assert_eq!((at(328, 5), at(512, 3), at(576, 3)), (&b"\x04boot"[..], &b"\x02r1"[..], &b"\x02r2"[..]));
    let mut bytes = Vec::new();
    encode_bits(&bits(&[0, 9, 4032], BITS_PER_BLOCK), 0, &mut bytes);
    assert_eq!((bytes[8], bytes[9], bytes[SECTOR + 8]), (1, 2, 1));
    assert_eq!((&bytes[4..8], &bytes[SECTOR + 4..SECTOR + 8]), (&[0u8, 0, 0, 0][..], &[1u8, 0, 0, 0][..]));
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let geometry = Geometry::for_volume(1 << 20, 512).unwrap();
    assert_eq!((geometry.regions(), geometry.bits_blocks(), geometry.stamps_blocks()), (512, 1, 2));
    let names: Vec<ReplicaId> = (0..17).map(|i| ReplicaId::new(&format!("r{i}")).unwrap()).collect();
    let superblock = Superblock {
        volume: VolumeId::new("v").unwrap(),
        replica: names[0].clone(),
        record: Config {
            lineage: Lineage::new("l").unwrap(),
            epoch: Epoch(1),
            engine_instance: EngineInstance::new("e").unwrap(),
            config_number: ConfigNumber(1),
            in_sync: names.into_iter().collect(),
            rebuilding: Default::default(),
            min_in_sync: 1,
            size_blocks: 1,
            clean: false,
            tree: Default::default(),
        },
        block_size: 512,
        region_blocks: 1,
        state: ReplicaState::Member,
        instance: String::new(),
        sequence: 1,
    };
    assert!(matches!(superblock.encode(), Err(MetaError::Field { field: "in_sync", value: 17, .. })));
    let record = Config { in_sync: [superblock.replica.clone()].into(), ..superblock.record.clone() };
    let long = Superblock { record, instance: "x".repeat(128), ..superblock };
    assert!(matches!(long.encode(), Err(MetaError::Field { field: "instance", value: 128, .. })));
}

#[test]
fn a_set_of_regions_survives_the_way_through_bytes() {
    for len in [1, 7, 8, 9, 64, 65, 1000] {
        let mut set = RegionBits::empty(len);
        (0..len).filter(|region| region % 3 == 0).for_each(|region| set.insert(region));
        let bytes = set.to_bytes();
        assert_eq!(bytes.len(), len.div_ceil(8) as usize);
        assert_eq!(RegionBits::from_bytes(len, &bytes), Some(set), "{len}");
        assert_eq!(RegionBits::from_bytes(len, &RegionBits::full(len).to_bytes()), Some(RegionBits::full(len)));
        assert_eq!(RegionBits::from_bytes(len + 8, &bytes), None, "too short");
    }
    assert_eq!(RegionBits::from_bytes(7, &[0x80]), None, "a region that is none");
}
