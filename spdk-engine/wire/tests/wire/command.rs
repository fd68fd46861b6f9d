use nvme_wire::admin::{AdminCommand, GetFeatures, GetLogPage, Identify, SetFeatures};
use nvme_wire::command::{BlockRange, Direction, Fuse, copy_ranges, dsm_ranges};
use nvme_wire::reservation::{
    AcquireAction, PersistChange, RegisterAction, ReleaseAction, ReservationAcquire, ReservationRegister,
    ReservationRelease,
};
use nvme_wire::{Cqe, Fes, IoCommand, Sgl, Sqe, Status, TermError};
use proptest::prelude::*;
use zerocopy::IntoBytes;

#[test]
fn submission_entry_fields_are_where_the_specification_puts_them() {
    let sqe = Sqe {
        opcode: 0x01,
        flags: 0x02,
        cid: 0x0304.into(),
        nsid: 0x0506_0708.into(),
        cdw2: 0x090A_0B0C.into(),
        cdw3: 0x0D0E_0F10.into(),
        mptr: 0x1112_1314_1516_1718.into(),
        dptr: [0x19; 16],
        cdw10: 0x2021_2223.into(),
        cdw11: 0x2425_2627.into(),
        cdw12: 0x2829_2A2B.into(),
        cdw13: 0x2C2D_2E2F.into(),
        cdw14: 0x3031_3233.into(),
        cdw15: 0x3435_3637.into(),
    };
    let bytes = sqe.as_bytes();
    let at = |offset: usize, expected: &[u8]| assert_eq!(&bytes[offset..offset + expected.len()], expected);
    at(0, &[0x01, 0x02, 0x04, 0x03]);
    at(4, &[0x08, 0x07, 0x06, 0x05]);
    at(8, &[0x0C, 0x0B, 0x0A, 0x09]);
    at(12, &[0x10, 0x0F, 0x0E, 0x0D]);
    at(16, &[0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11]);
    at(24, &[0x19; 16]);
    at(40, &[0x23, 0x22, 0x21, 0x20]);
    at(44, &[0x27, 0x26, 0x25, 0x24]);
    at(48, &[0x2B, 0x2A, 0x29, 0x28]);
    at(52, &[0x2F, 0x2E, 0x2D, 0x2C]);
    at(56, &[0x33, 0x32, 0x31, 0x30]);
    at(60, &[0x37, 0x36, 0x35, 0x34]);
    assert_eq!(Sqe::parse(bytes), Some(sqe));
    assert_eq!(Sqe::parse(&bytes[..63]), None);
}

#[test]
fn completion_entry_fields_are_where_the_specification_puts_them() {
    let cqe = Cqe {
        dw0: 0x0102_0304.into(),
        dw1: 0x0506_0708.into(),
        sqhd: 0x090A.into(),
        sqid: 0x0B0C.into(),
        cid: 0x0D0E.into(),
        status_field: 0x0F10.into(),
    };
    let expected = [4, 3, 2, 1, 8, 7, 6, 5, 0x0A, 9, 0x0C, 0x0B, 0x0E, 0x0D, 0x10, 0x0F];
    assert_eq!(cqe.as_bytes(), expected);
    assert_eq!(Cqe::parse(&expected), Some(cqe));
    assert_eq!(Cqe::parse(&expected[..15]), None);
    assert_eq!(cqe.result(), 0x0506_0708_0102_0304);
    let cqe = Cqe::new(7, 3, Status::LBA_OUT_OF_RANGE.with_dnr()).with_dw0(9);
    assert_eq!(cqe.status(), Status::LBA_OUT_OF_RANGE.with_dnr());
    assert_eq!(cqe.as_bytes(), [9, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 7, 0, 0x00, 0x81]);
}

#[test]
fn a_read_sets_each_bit_in_its_place() {
    let range = BlockRange { slba: 0x0102_0304_0506_0708, blocks: 256, fua: true, limited_retry: false, prinfo: 0 };
    let sqe = IoCommand::Read(range).to_sqe(5, 2, Sgl::transport(131_072));
    assert_eq!((sqe.opcode, sqe.flags, sqe.cid.get(), sqe.nsid.get()), (0x02, 0x40, 5, 2));
    assert_eq!((sqe.cdw10.get(), sqe.cdw11.get()), (0x0506_0708, 0x0102_0304));
    assert_eq!(sqe.cdw12.get(), 0x4000_00FF);
    assert_eq!(sqe.dptr, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0x5A]);
    let set = |range: BlockRange| IoCommand::Read(range).to_sqe(0, 0, Sgl::NONE).cdw12.get();
    assert_eq!(set(BlockRange { limited_retry: true, ..BlockRange::new(0, 1) }), 1 << 31);
    assert_eq!(set(BlockRange { prinfo: 0b1001, ..BlockRange::new(0, 1) }), 1 << 29 | 1 << 26);
    assert_eq!(set(BlockRange::new(0, 65_536)), 0xFFFF);
}

#[test]
fn the_other_commands_set_each_bit_in_its_place() {
    let dwords = |command: IoCommand| {
        let sqe = command.to_sqe(0, 1, Sgl::NONE);
        (sqe.opcode, sqe.cdw10.get(), sqe.cdw11.get(), sqe.cdw12.get())
    };
    assert_eq!(dwords(IoCommand::Flush), (0x00, 0, 0, 0));
    assert_eq!(dwords(IoCommand::Write(BlockRange::new(1, 1))), (0x01, 1, 0, 0));
    assert_eq!(dwords(IoCommand::Compare(BlockRange::new(1, 2))), (0x05, 1, 0, 1));
    assert_eq!(dwords(IoCommand::Verify(BlockRange::new(1, 2))), (0x0C, 1, 0, 1));
    let zero = IoCommand::WriteZeroes { range: BlockRange::new(1, 2), deallocate: true };
    assert_eq!(dwords(zero), (0x08, 1, 0, 1 << 25 | 1));
    assert_eq!(dwords(IoCommand::DatasetManagement { ranges: 1, deallocate: true }), (0x09, 0, 4, 0));
    assert_eq!(dwords(IoCommand::DatasetManagement { ranges: 256, deallocate: false }), (0x09, 255, 0, 0));
    let copy = IoCommand::Copy { sdlba: 1 << 32 | 2, ranges: 3, format: 1, fua: true };
    assert_eq!(dwords(copy), (0x19, 2, 1, 1 << 30 | 1 << 8 | 2));
    let register =
        ReservationRegister { action: RegisterAction::Replace, ignore_existing_key: true, persist: PersistChange::Set };
    assert_eq!(dwords(IoCommand::ReservationRegister(register)), (0x0D, 0xC000_000A, 0, 0));
    assert_eq!(dwords(IoCommand::ReservationReport { bytes: 4096, extended: true }), (0x0E, 1023, 1, 0));
    let acquire = ReservationAcquire { action: AcquireAction::PreemptAndAbort, ignore_existing_key: false, rtype: 3 };
    assert_eq!(dwords(IoCommand::ReservationAcquire(acquire)), (0x11, 0x302, 0, 0));
    let release = ReservationRelease { action: ReleaseAction::Clear, ignore_existing_key: false, rtype: 6 };
    assert_eq!(dwords(IoCommand::ReservationRelease(release)), (0x15, 0x601, 0, 0));
}

#[test]
fn unknown_opcodes_and_actions_are_refused() {
    let with = |opcode: u8, cdw10: u32| Sqe { opcode, cdw10: cdw10.into(), ..Sqe::default() };
    for opcode in [0x03, 0x04, 0x0B, 0x7D, 0x7F, 0x80, 0xFF] {
        assert_eq!(IoCommand::parse(&with(opcode, 0)), Err(Status::INVALID_OPCODE), "{opcode:#x}");
    }
    for opcode in [0x00, 0x01, 0x04, 0x05, 0x0D, 0x7F, 0x80] {
        assert_eq!(AdminCommand::parse(&with(opcode, 0)), Err(Status::INVALID_OPCODE), "{opcode:#x}");
    }
    assert_eq!(IoCommand::parse(&with(0x0D, 3)), Err(Status::INVALID_FIELD));
    assert_eq!(IoCommand::parse(&with(0x11, 3)), Err(Status::INVALID_FIELD));
    assert_eq!(IoCommand::parse(&with(0x15, 2)), Err(Status::INVALID_FIELD));
}

#[test]
fn direction_follows_the_opcode_or_the_fabrics_type() {
    let of = |opcode: u8, nsid: u32| Sqe { opcode, nsid: nsid.into(), ..Sqe::default() }.direction();
    assert_eq!(of(0x00, 1), Direction::None);
    assert_eq!(of(0x01, 1), Direction::HostToController);
    assert_eq!(of(0x02, 1), Direction::ControllerToHost);
    assert_eq!(of(0x83, 1), Direction::Bidirectional);
    assert_eq!(of(0x7F, 0x01), Direction::HostToController);
    assert_eq!(of(0x7F, 0x04), Direction::None);
    assert_eq!(of(0x7F, 0x06), Direction::ControllerToHost);
}

#[test]
fn fused_pairs_are_marked_in_the_flags() {
    let sqe = IoCommand::Compare(BlockRange::new(0, 1)).to_sqe(0, 1, Sgl::NONE);
    assert_eq!(sqe.fuse(), Fuse::Normal);
    assert_eq!(sqe.with_fuse(Fuse::First).flags, 0x41);
    assert_eq!(sqe.with_fuse(Fuse::Second).flags, 0x42);
    for fuse in [Fuse::Normal, Fuse::First, Fuse::Second, Fuse::Reserved] {
        assert_eq!(sqe.with_fuse(fuse).fuse(), fuse);
    }
}

#[test]
fn only_two_forms_of_sgl_are_accepted() {
    assert_eq!(Sgl::in_capsule(4096).encode(), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0x01]);
    for kind in 0..=255u8 {
        let mut bytes = [0; 16];
        bytes[15] = kind;
        match kind {
            0x01 => assert_eq!(Sgl::parse(&bytes), Ok(Sgl::in_capsule(0))),
            0x5A => assert_eq!(Sgl::parse(&bytes), Ok(Sgl::NONE)),
            _ => assert_eq!(Sgl::parse(&bytes), Err(TermError::new(Fes::UnsupportedParameter, 40))),
        }
    }
}

#[test]
fn sgl_limits_are_those_of_the_connection() {
    let check = |sgl: Sgl, data: u32| sgl.check(131_072, 4096, data).map_err(|e| (e.fes, e.fei));
    assert_eq!(check(Sgl::transport(131_072), 0), Ok(()));
    assert_eq!(check(Sgl::transport(131_584), 0).unwrap_err().0, Fes::LimitExceeded);
    assert_eq!(check(Sgl::in_capsule(4096), 4096), Ok(()));
    assert_eq!(check(Sgl::in_capsule(8192), 8192).unwrap_err().0, Fes::LimitExceeded);
    assert_eq!(check(Sgl::in_capsule(512), 4096), Err((Fes::InvalidHeaderField, 4)));
    let offset = Sgl::InCapsule { offset: 16, length: 512 };
    assert_eq!(check(offset, 512).unwrap_err().0, Fes::UnsupportedParameter);
}

#[test]
fn ranges_stop_at_the_count_and_at_the_data() {
    let mut data = vec![0; 48];
    data[0..16].copy_from_slice(&[1, 0, 0, 0, 8, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0]);
    let ranges: Vec<_> = dsm_ranges(&data, 1).collect();
    assert_eq!(ranges.len(), 1);
    assert_eq!((ranges[0].attributes, ranges[0].blocks, ranges[0].slba), (1, 8, 16));
    assert_eq!(dsm_ranges(&data, 256).count(), 3);
    data[8] = 5;
    data[16] = 7;
    let ranges: Vec<_> = copy_ranges(&data, 4).collect();
    assert_eq!(ranges.len(), 1);
    assert_eq!((ranges[0].slba, ranges[0].blocks()), (5, 8));
}

#[test]
fn the_end_of_a_range_does_not_wrap() {
    assert_eq!(BlockRange::new(10, 5).end(), Some(15));
    assert_eq!(BlockRange::new(u64::MAX - 1, 1).end(), Some(u64::MAX));
    assert_eq!(BlockRange::new(u64::MAX, 1).end(), None);
}

#[test]
fn admin_commands_set_each_bit_in_its_place() {
    let dwords = |command: AdminCommand| {
        let s = command.to_sqe(0, 0, Sgl::NONE);
        [s.opcode.into(), s.cdw10.get(), s.cdw11.get(), s.cdw12.get(), s.cdw13.get(), s.cdw14.get()]
    };
    let page = GetLogPage {
        lid: 0x70,
        lsp: 0x7F,
        retain_event: true,
        bytes: (0x1_2345 + 1) * 4,
        lsi: 0x6789,
        offset: 0x0102_0304_0506_0708,
        index_offset: true,
        csi: 2,
    };
    let expected = [0x02, 0x2345_FF70, 0x6789_0001, 0x0506_0708, 0x0102_0304, 0x0280_0000];
    assert_eq!(dwords(AdminCommand::GetLogPage(page)), expected);
    let identify = Identify { cns: 6, cntid: 0x0102, cnssid: 0x0304, csi: 5 };
    assert_eq!(dwords(AdminCommand::Identify(identify)), [0x06, 0x0102_0006, 0x0500_0304, 0, 0, 0]);
    assert_eq!(dwords(AdminCommand::Abort { sqid: 1, cid: 2 }), [0x08, 0x0002_0001, 0, 0, 0, 0]);
    let set = SetFeatures { fid: 7, save: true, cdw11: 8, cdw12: 9 };
    assert_eq!(dwords(AdminCommand::SetFeatures(set)), [0x09, 0x8000_0007, 8, 9, 0, 0]);
    let get = GetFeatures { fid: 7, select: 3, cdw11: 8 };
    assert_eq!(dwords(AdminCommand::GetFeatures(get)), [0x0A, 0x307, 8, 0, 0, 0]);
    assert_eq!(dwords(AdminCommand::AsyncEventRequest), [0x0C, 0, 0, 0, 0, 0]);
    assert_eq!(dwords(AdminCommand::KeepAlive), [0x18, 0, 0, 0, 0, 0]);
}

fn block_range() -> impl Strategy<Value = BlockRange> {
    (any::<u64>(), 1..=65_536u32, any::<bool>(), any::<bool>(), 0..16u8)
        .prop_map(|(slba, blocks, fua, limited_retry, prinfo)| BlockRange { slba, blocks, fua, limited_retry, prinfo })
}

fn io_command() -> impl Strategy<Value = IoCommand> {
    prop_oneof![
        Just(IoCommand::Flush),
        block_range().prop_map(IoCommand::Read),
        block_range().prop_map(IoCommand::Write),
        block_range().prop_map(IoCommand::Compare),
        block_range().prop_map(IoCommand::Verify),
        (block_range(), any::<bool>()).prop_map(|(range, deallocate)| IoCommand::WriteZeroes { range, deallocate }),
        (1..=256u16, any::<bool>())
            .prop_map(|(ranges, deallocate)| IoCommand::DatasetManagement { ranges, deallocate }),
        (any::<u64>(), 1..=256u16, 0..16u8, any::<bool>()).prop_map(|(sdlba, ranges, format, fua)| IoCommand::Copy {
            sdlba,
            ranges,
            format,
            fua
        }),
        (1..=1u64 << 32, any::<bool>())
            .prop_map(|(dwords, extended)| IoCommand::ReservationReport { bytes: dwords * 4, extended }),
        (any::<bool>(), any::<u8>()).prop_map(|(ignore_existing_key, rtype)| IoCommand::ReservationAcquire(
            ReservationAcquire { action: AcquireAction::Preempt, ignore_existing_key, rtype }
        )),
        (any::<bool>(), any::<u8>()).prop_map(|(ignore_existing_key, rtype)| IoCommand::ReservationRelease(
            ReservationRelease { action: ReleaseAction::Release, ignore_existing_key, rtype }
        )),
        any::<bool>().prop_map(|ignore_existing_key| IoCommand::ReservationRegister(ReservationRegister {
            action: RegisterAction::Unregister,
            ignore_existing_key,
            persist: PersistChange::Clear,
        })),
    ]
}

fn admin_command() -> impl Strategy<Value = AdminCommand> {
    prop_oneof![
        (any::<(u8, bool, u16, u64, bool, u8)>(), 0..128u8, 1..=1u64 << 32).prop_map(
            |((lid, retain_event, lsi, offset, index_offset, csi), lsp, dwords)| {
                AdminCommand::GetLogPage(GetLogPage {
                    lid,
                    lsp,
                    retain_event,
                    bytes: dwords * 4,
                    lsi,
                    offset,
                    index_offset,
                    csi,
                })
            }
        ),
        any::<(u8, u16, u16, u8)>().prop_map(|(cns, cntid, cnssid, csi)| AdminCommand::Identify(Identify {
            cns,
            cntid,
            cnssid,
            csi
        })),
        any::<(u16, u16)>().prop_map(|(sqid, cid)| AdminCommand::Abort { sqid, cid }),
        any::<(u8, bool, u32, u32)>().prop_map(|(fid, save, cdw11, cdw12)| {
            AdminCommand::SetFeatures(SetFeatures { fid, save, cdw11, cdw12 })
        }),
        (any::<u8>(), 0..8u8, any::<u32>()).prop_map(|(fid, select, cdw11)| AdminCommand::GetFeatures(GetFeatures {
            fid,
            select,
            cdw11
        })),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn io_commands_survive(command in io_command(), cid: u16, nsid: u32, length: u32) {
        let sqe = command.to_sqe(cid, nsid, Sgl::transport(length));
        prop_assert_eq!(IoCommand::parse(&sqe), Ok(command));
        prop_assert_eq!(sqe.opcode, command.opcode());
        prop_assert_eq!((sqe.cid.get(), sqe.nsid.get()), (cid, nsid));
        prop_assert_eq!(Sgl::parse(&sqe.dptr), Ok(Sgl::transport(length)));
    }

    #[test]
    fn admin_commands_survive(command in admin_command(), cid: u16, nsid: u32) {
        let sqe = command.to_sqe(cid, nsid, Sgl::NONE);
        prop_assert_eq!(AdminCommand::parse(&sqe), Ok(command));
        prop_assert_eq!(sqe.opcode, command.opcode());
        prop_assert_eq!((sqe.cid.get(), sqe.nsid.get()), (cid, nsid));
    }

    #[test]
    fn sgls_survive(offset: u64, length: u32) {
        let sgl = Sgl::InCapsule { offset, length };
        prop_assert_eq!(Sgl::parse(&sgl.encode()), Ok(sgl));
    }
}
