//! Each field of each data structure, alone, against the bytes the specification puts it at.

use nvme_wire::ana::{AnaGroupHeader, AnaHeader};
use nvme_wire::command::{CopyRange, DsmRange};
use nvme_wire::discovery::{DiscoveryEntry, DiscoveryHeader};
use nvme_wire::fabrics::ConnectData;
use nvme_wire::features::HostBehavior;
use nvme_wire::identify::{CommandSetData, ControllerData, NvmControllerData};
use nvme_wire::log::{EffectsLog, ErrorEntry, FirmwareSlotLog, HealthLog};
use nvme_wire::namespace::{IndependentNamespaceData, LbaFormat, NamespaceData, NvmNamespaceData};
use nvme_wire::reservation::{
    AcquireData, NotificationLog, RegisterData, RegisteredController, ReleaseData, ReportHeader,
};
use nvme_wire::{NulPadded, SpacePadded};

/// Each integer field: set alone to a value whose bytes all differ, it appears little-endian at its offset and nowhere
/// else, and reads back.
macro_rules! integers {
    ($name:ident: $ty:ident, $($offset:literal $field:ident)*) => {
        #[test]
        #[allow(clippy::useless_vec)] // Some of the structures are pages.
        fn $name() {
            $({
                let mut data = $ty::default();
                let mut bytes = vec![0; $ty::SIZE];
                let size = size_of_val(&data.$field);
                for (i, byte) in bytes[$offset..$offset + size].iter_mut().enumerate() {
                    *byte = 0x11 * (i as u8 % 15 + 1);
                }
                let mut wide = [0; 16];
                wide[..size].copy_from_slice(&bytes[$offset..$offset + size]);
                data.$field = u128::from_le_bytes(wide) as _;
                assert_eq!(data.encode().as_slice(), bytes, "{}", stringify!($field));
                assert_eq!($ty::parse(&bytes).unwrap(), data, "{}", stringify!($field));
            })*
            assert!($ty::parse(&vec![0; $ty::SIZE - 1]).is_err());
            assert_eq!($ty::parse(&vec![0; $ty::SIZE + 3]).unwrap(), $ty::default());
        }
    };
}

/// Fields that are not integers: a value and the bytes it is to give.
macro_rules! others {
    ($name:ident: $ty:ident, $($offset:literal $field:ident = $value:expr => $raw:expr;)*) => {
        #[test]
        #[allow(clippy::useless_vec, clippy::needless_update)] // Not so for those with more bytes or fields.
        fn $name() {
            $({
                let data = $ty { $field: $value, ..$ty::default() };
                let raw: &[u8] = &$raw;
                let mut bytes = vec![0; $ty::SIZE];
                bytes[$offset..$offset + raw.len()].copy_from_slice(raw);
                assert_eq!(data.encode().as_slice(), bytes, "{}", stringify!($field));
                assert_eq!($ty::parse(&bytes).unwrap(), data, "{}", stringify!($field));
            })*
        }
    };
}

integers!(controller: ControllerData,
    0 vid 2 ssvid 72 rab 76 cmic 77 mdts 78 cntlid 80 ver 92 oaes 96 ctratt 111 cntrltype 256 oacs 258 acl 259 aerl
    260 frmw 261 lpa 262 elpe 263 npss 266 wctemp 268 cctemp 280 tnvmcap 296 unvmcap 320 kas 342 anatt 343 anacap
    344 anagrpmax 348 nanagrpid 512 sqes 513 cqes 514 maxcmd 516 nn 520 oncs 522 fuses 524 fna 525 vwc 526 awun
    528 awupf 532 acwu 534 ocfs 536 sgls 540 mnan 1792 ioccsz 1796 iorcsz 1800 icdoff 1802 fcatt 1803 msdbd 1804 ofcs);
others!(controller_texts: ControllerData,
    4 sn = SpacePadded::new("S1").unwrap() => *b"S1                  ";
    24 mn = SpacePadded::new("M").unwrap() => *b"M                                       ";
    64 fr = SpacePadded::new("26.09").unwrap() => *b"26.09   ";
    73 ieee = [1, 2, 3] => [1, 2, 3];
    112 fguid = [9; 16] => [9; 16];
    128 crdt = [0x0102, 0x0304, 0x0506] => [2, 1, 4, 3, 6, 5];
    768 subnqn = NulPadded::new("nqn.x").unwrap() => *b"nqn.x";
);

integers!(namespace: NamespaceData,
    0 nsze 8 ncap 16 nuse 24 nsfeat 25 nlbaf 26 flbas 27 mc 28 dpc 29 dps 30 nmic 31 rescap 32 fpi 33 dlfeat 34 nawun
    36 nawupf 38 nacwu 40 nabsn 42 nabo 44 nabspf 46 noiob 48 nvmcap 64 npwg 66 npwa 68 npdg 70 npda 72 nows 74 mssrl
    76 mcl 80 msrc 92 anagrpid 99 nsattr 100 nvmsetid 102 endgid);
others!(namespace_arrays: NamespaceData,
    104 nguid = [7; 16] => [7; 16];
    120 eui64 = [1, 2, 3, 4, 5, 6, 7, 8] => [1, 2, 3, 4, 5, 6, 7, 8];
    132 lbaf = {
        let mut formats = NamespaceData::default().lbaf;
        formats[1] = LbaFormat { ms: 0x0102, lbads: 12, rp: 3 };
        formats
    } => [2, 1, 12, 3];
);
integers!(lba_format: LbaFormat, 0 ms 2 lbads 3 rp);
integers!(independent_namespace: IndependentNamespaceData,
    0 nsfeat 1 nmic 2 rescap 3 fpi 4 anagrpid 8 nsattr 10 nvmsetid 12 endgid 14 nstat);
integers!(nvm_namespace: NvmNamespaceData, 0 lbstm 8 pic);
others!(nvm_namespace_formats: NvmNamespaceData,
    16 elbaf = { let mut e = [0; 64]; e[1] = 0x0403_0201; e } => [1, 2, 3, 4];
);
integers!(nvm_controller: NvmControllerData, 0 vsl 1 wzsl 2 wusl 3 dmrl 4 dmrsl 8 dmsl);
others!(command_sets: CommandSetData,
    8 vectors = { let mut v = [0; 512]; v[1] = 0x0807_0605_0403_0201; v } => [1, 2, 3, 4, 5, 6, 7, 8];
);

integers!(connect_cntlid: ConnectData, 16 cntlid);
others!(connect: ConnectData,
    0 hostid = [3; 16] => [3; 16];
    256 subnqn = NulPadded::new("sub").unwrap() => *b"sub";
    512 hostnqn = NulPadded::new("host").unwrap() => *b"host";
);

integers!(error_entry: ErrorEntry,
    0 error_count 8 sqid 10 cid 12 status_field 14 parameter 16 lba 24 nsid 28 vendor 29 trtype 32 command_specific
    40 transport_specific);
integers!(health: HealthLog,
    0 critical_warning 1 temperature 3 available_spare 4 spare_threshold 5 percentage_used 32 data_units_read
    48 data_units_written 64 host_reads 80 host_writes 96 busy_minutes 112 power_cycles 128 power_on_hours
    144 unsafe_shutdowns 160 media_errors 176 error_entries 192 warning_minutes 196 critical_minutes);
integers!(firmware_slot: FirmwareSlotLog, 0 afi);
others!(firmware_revisions: FirmwareSlotLog,
    16 revisions = {
        let mut slots = FirmwareSlotLog::default().revisions;
        slots[1] = SpacePadded::new("26.09").unwrap();
        slots
    } => *b"26.09   ";
);
others!(effects: EffectsLog,
    24 admin = { let mut a = [0; 256]; a[6] = 0x0403_0201; a } => [1, 2, 3, 4];
    1032 io = { let mut io = [0; 256]; io[2] = 0x0403_0201; io } => [1, 2, 3, 4];
);

integers!(ana_header: AnaHeader, 0 change_count 8 groups);
integers!(ana_group: AnaGroupHeader, 0 id 4 nsids 8 change_count 16 state);
integers!(discovery_header: DiscoveryHeader, 0 genctr 8 numrec 16 recfmt 18 extended 20 tdlpl);
integers!(discovery_entry: DiscoveryEntry,
    0 trtype 1 adrfam 2 subtype 3 treq 4 portid 6 cntlid 8 asqsz 10 eflags);
others!(discovery_texts: DiscoveryEntry,
    32 trsvcid = SpacePadded::new("4420").unwrap() => *b"4420                            ";
    256 subnqn = NulPadded::new("nqn.x").unwrap() => *b"nqn.x";
    512 traddr = SpacePadded::from_bytes([b'1'; 256]) => [b'1'; 256];
    768 tsas = [2; 256] => [2; 256];
);

integers!(dsm_range: DsmRange, 0 attributes 4 blocks 8 slba);
integers!(copy_range: CopyRange, 8 slba 16 nlb);
integers!(host_behavior: HostBehavior, 0 acre 1 etdas 2 lbafee);

integers!(register: RegisterData, 0 crkey 8 nrkey);
integers!(acquire: AcquireData, 0 crkey 8 prkey);
integers!(release: ReleaseData, 0 crkey);
integers!(report_header: ReportHeader, 0 generation 4 rtype 5 registered 9 ptpls);
integers!(registered_controller: RegisteredController, 0 cntlid 2 rcsts 8 rkey);
others!(registered_host: RegisteredController, 16 hostid = [5; 16] => [5; 16];);
integers!(notification: NotificationLog, 0 count 8 kind 9 available 12 nsid);

#[test]
fn text_fields_are_padded_and_trimmed() {
    let text = SpacePadded::<8>::new("ab").unwrap();
    assert_eq!(text.as_bytes(), b"ab      ");
    assert_eq!(text.as_str(), "ab");
    assert_eq!(NulPadded::<4>::new("ab").unwrap().as_bytes(), b"ab\0\0");
    assert_eq!(NulPadded::<2>::new("ab").unwrap().as_str(), "ab");
    assert!(NulPadded::<2>::new("abc").is_err());
    // Some targets pad with NUL where spaces belong.
    assert_eq!(SpacePadded::<8>::from_bytes(*b"4420\0\0\0\0").as_str(), "4420");
    assert_eq!(SpacePadded::<4>::from_bytes([b'a', 0xFF, b'b', b'c']).as_str(), "a");
    assert_eq!(SpacePadded::<4>::default().as_str(), "");
    let error = NulPadded::<2>::new("abc").unwrap_err();
    assert_eq!(error.to_string(), "text of 3 bytes does not fit a field of 2 bytes");
}

#[test]
fn a_short_buffer_says_what_is_missing() {
    let error = ControllerData::parse(&[0; 100]).unwrap_err();
    assert_eq!(error.to_string(), "ControllerData: 100 bytes given, 4096 needed");
}
