use nvme_wire::fabrics::{
    AuthTransfer, Connect, ConnectData, ConnectError, ConnectResponse, FabricsCommand, PropertySize,
};
use nvme_wire::property::{AdminQueueAttributes, Capabilities, Configuration, ControllerStatus, NSSR_RESET, Shutdown};
use nvme_wire::{Nqn, Sgl, Sqe, Status};
use proptest::prelude::*;
use zerocopy::IntoBytes;

#[test]
fn connect_command_as_bytes() {
    let connect = Connect { recfmt: 0x0102, qid: 0x0304, sqsize: 0x0506, cattr: 0x07, kato_ms: 0x0809_0A0B };
    let sqe = FabricsCommand::Connect(connect).to_sqe(9, Sgl::in_capsule(1024));
    let bytes = sqe.as_bytes();
    assert_eq!(bytes[..5], [0x7F, 0x40, 9, 0, 0x01]);
    assert_eq!(bytes[40..52], [2, 1, 4, 3, 6, 5, 7, 0, 0x0B, 0x0A, 9, 8]);
    assert_eq!(FabricsCommand::parse(&sqe), Ok(FabricsCommand::Connect(connect)));
    assert!(connect.disables_flow_control());
    assert!(!Connect { cattr: 0x0B, ..connect }.disables_flow_control());
}

#[test]
fn property_commands_as_bytes() {
    let set = FabricsCommand::PropertySet { size: PropertySize::Four, offset: 0x14, value: 0x0102_0304_0506_0708 };
    let sqe = set.to_sqe(0, Sgl::NONE);
    assert_eq!(sqe.as_bytes()[4], 0x00);
    assert_eq!(sqe.as_bytes()[40..56], [0, 0, 0, 0, 0x14, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1]);
    let get = FabricsCommand::PropertyGet { size: PropertySize::Eight, offset: 0x28 };
    let sqe = get.to_sqe(0, Sgl::NONE);
    assert_eq!(sqe.as_bytes()[4], 0x04);
    assert_eq!(sqe.as_bytes()[40..48], [1, 0, 0, 0, 0x28, 0, 0, 0]);
    let odd = Sqe { cdw10: 2.into(), ..sqe };
    assert_eq!(FabricsCommand::parse(&odd), Err(Status::INVALID_FIELD));
}

#[test]
fn authentication_and_disconnect_as_bytes() {
    let transfer = AuthTransfer::nvme(0x0102);
    let sqe = FabricsCommand::AuthSend(transfer).to_sqe(0, Sgl::NONE);
    assert_eq!(sqe.as_bytes()[4], 0x05);
    assert_eq!(sqe.as_bytes()[40..48], [0, 1, 1, 0xE9, 2, 1, 0, 0]);
    assert_eq!(FabricsCommand::AuthRecv(transfer).to_sqe(0, Sgl::NONE).as_bytes()[4], 0x06);
    let sqe = FabricsCommand::Disconnect { recfmt: 0x0102 }.to_sqe(0, Sgl::NONE);
    assert_eq!((sqe.as_bytes()[4], &sqe.as_bytes()[40..42]), (0x08, [2u8, 1].as_slice()));
    let unknown = Sqe { opcode: 0x7F, nsid: 0x7E.into(), ..Sqe::default() };
    assert_eq!(FabricsCommand::parse(&unknown), Err(Status::INVALID_OPCODE));
    assert_eq!(FabricsCommand::parse(&Sqe::default()), Err(Status::INVALID_OPCODE));
}

#[test]
fn refused_connects_name_the_field() {
    assert_eq!(ConnectError::SUBNQN.dw0(), 0x10100);
    assert_eq!(ConnectError::CNTLID.dw0(), 0x10010);
    assert_eq!(ConnectError::HOSTNQN.dw0(), 0x10200);
    assert_eq!(ConnectError::HOSTID.dw0(), 0x10000);
    assert_eq!(ConnectError::SQSIZE.dw0(), 0x2C);
    assert_eq!(ConnectError::QID.dw0(), 0x2A);
    for error in [ConnectError::SUBNQN, ConnectError::SQSIZE] {
        assert_eq!(ConnectError::from_dw0(error.dw0()), error);
    }
    let cqe = ConnectError::SUBNQN.completion(3);
    assert_eq!((cqe.cid.get(), cqe.dw0.get()), (3, 0x10100));
    assert_eq!(cqe.status(), Status::CONNECT_INVALID_PARAMETERS);
    assert_eq!(ConnectError::SQSIZE.to_string(), "invalid Connect parameter at byte 44 of the command");
}

#[test]
fn connect_response_bits() {
    assert_eq!(ConnectResponse { cntlid: 0x0102, ..Default::default() }.dw0(), 0x0102);
    assert_eq!(ConnectResponse { auth_required: true, ..Default::default() }.dw0(), 1 << 17);
    assert_eq!(ConnectResponse { secure_channel_required: true, ..Default::default() }.dw0(), 1 << 18);
    assert!(!ConnectResponse::from_dw0(1 << 16).auth_required);
}

#[test]
fn connect_data_carries_names() {
    let (sub, host) = (Nqn::new("nqn.2026-11.io.addax:volume:a").unwrap(), Nqn::from_uuid(uuid::Uuid::nil()));
    let data = ConnectData { subnqn: sub.to_field(), hostnqn: host.to_field(), ..ConnectData::default() };
    let back = ConnectData::parse(&data.encode()).unwrap();
    assert_eq!(Nqn::from_field(back.subnqn.as_bytes()), Ok(sub));
    assert_eq!(Nqn::from_field(back.hostnqn.as_bytes()), Ok(host));
}

#[test]
fn capability_bits() {
    assert_eq!(Capabilities::default().raw(), 0x0800_0020_1E01_007F);
    let zero = Capabilities::from_raw(0);
    assert_eq!((zero.max_queue_entries, zero.min_page_shift, zero.max_page_shift), (1, 12, 12));
    assert_eq!(zero.raw(), 0);
    assert_eq!(Capabilities { max_queue_entries: 65_536, ..zero }.raw(), 0xFFFF);
    assert_eq!(Capabilities { contiguous_queues: true, ..zero }.raw(), 1 << 16);
    assert_eq!(Capabilities { timeout: 0xFF, ..zero }.raw(), 0xFF << 24);
    assert_eq!(Capabilities { subsystem_reset: true, ..zero }.raw(), 1 << 36);
    assert_eq!(Capabilities { command_sets: 0xFF, ..zero }.raw(), 0xFF << 37);
    assert_eq!(Capabilities { min_page_shift: 27, ..zero }.raw(), 0xF << 48);
    assert_eq!(Capabilities { max_page_shift: 27, ..zero }.raw(), 0xF << 52);
    assert_eq!(Capabilities { ready_with_media: true, ..zero }.raw(), 1 << 59);
    assert_eq!(Capabilities { ready_without_media: true, ..zero }.raw(), 1 << 60);
}

#[test]
fn configuration_bits() {
    assert_eq!(Configuration::enabled().raw(), 0x0046_0001);
    let zero = Configuration::default();
    assert_eq!(zero.raw(), 0);
    assert_eq!(Configuration { enable: true, ..zero }.raw(), 1);
    assert_eq!(Configuration { command_set: 7, ..zero }.raw(), 7 << 4);
    assert_eq!(Configuration { page_size: 15, ..zero }.raw(), 15 << 7);
    assert_eq!(Configuration { arbitration: 7, ..zero }.raw(), 7 << 11);
    assert_eq!(Configuration { shutdown: 3, ..zero }.raw(), 3 << 14);
    assert_eq!(Configuration { iosqes: 15, ..zero }.raw(), 15 << 16);
    assert_eq!(Configuration { iocqes: 15, ..zero }.raw(), 15 << 20);
    assert_eq!(Configuration { ready_without_media: true, ..zero }.raw(), 1 << 24);
}

#[test]
fn status_bits() {
    let zero = ControllerStatus::default();
    assert_eq!(zero.raw(), 0);
    assert_eq!(ControllerStatus { ready: true, ..zero }.raw(), 1);
    assert_eq!(ControllerStatus { fatal: true, ..zero }.raw(), 2);
    assert_eq!(ControllerStatus { shutdown: Shutdown::InProgress, ..zero }.raw(), 1 << 2);
    assert_eq!(ControllerStatus { shutdown: Shutdown::Complete, ..zero }.raw(), 2 << 2);
    assert_eq!(ControllerStatus { subsystem_reset: true, ..zero }.raw(), 1 << 4);
    assert_eq!(ControllerStatus { paused: true, ..zero }.raw(), 1 << 5);
    assert_eq!(AdminQueueAttributes { submission: 32, completion: 4096 }.raw(), 0x0FFF_001F);
    assert_eq!(NSSR_RESET.to_be_bytes(), *b"NVMe");
}

fn fabrics_command() -> impl Strategy<Value = FabricsCommand> {
    let size = prop_oneof![Just(PropertySize::Four), Just(PropertySize::Eight)];
    let auth =
        any::<(u8, u8, u8, u32)>().prop_map(|(spsp0, spsp1, secp, length)| AuthTransfer { spsp0, spsp1, secp, length });
    prop_oneof![
        any::<(u16, u16, u16, u8, u32)>().prop_map(|(recfmt, qid, sqsize, cattr, kato_ms)| {
            FabricsCommand::Connect(Connect { recfmt, qid, sqsize, cattr, kato_ms })
        }),
        (size.clone(), any::<u32>(), any::<u64>()).prop_map(|(size, offset, value)| FabricsCommand::PropertySet {
            size,
            offset,
            value
        }),
        (size, any::<u32>()).prop_map(|(size, offset)| FabricsCommand::PropertyGet { size, offset }),
        auth.clone().prop_map(FabricsCommand::AuthSend),
        auth.prop_map(FabricsCommand::AuthRecv),
        any::<u16>().prop_map(|recfmt| FabricsCommand::Disconnect { recfmt }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn fabrics_commands_survive(command in fabrics_command(), cid: u16) {
        let sqe = command.to_sqe(cid, Sgl::NONE);
        prop_assert_eq!(FabricsCommand::parse(&sqe), Ok(command));
        prop_assert_eq!(sqe.fctype(), command.fctype());
    }

    #[test]
    fn property_values_survive(cap: u64, cc: u32, csts: u32, aqa: u32, dw0: u32) {
        let known = 0xFFFF | 1 << 16 | 0xFF << 24 | 1 << 36 | 0xFF << 37 | 0xFF << 48 | 3 << 59;
        prop_assert_eq!(Capabilities::from_raw(cap).raw(), cap & known);
        prop_assert_eq!(Configuration::from_raw(cc).raw(), cc & 0x01FF_FFF1);
        prop_assert_eq!(ControllerStatus::from_raw(csts).raw(), csts & 0x3F);
        prop_assert_eq!(AdminQueueAttributes::from_raw(aqa).raw(), aqa & 0x0FFF_0FFF);
        prop_assert_eq!(ConnectError::from_dw0(dw0).dw0(), dw0 & 0x1_FFFF);
        prop_assert_eq!(ConnectResponse::from_dw0(dw0).dw0(), dw0 & 0x0006_FFFF);
    }
}
