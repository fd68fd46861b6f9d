//! Submission entries: what a parser accepts, the builder must write so that it reads back the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nvme_wire::admin::AdminCommand;
use nvme_wire::command::{copy_ranges, dsm_ranges};
use nvme_wire::fabrics::FabricsCommand;
use nvme_wire::{IoCommand, Sgl, Sqe};

fuzz_target!(|bytes: &[u8]| {
    let Some(sqe) = Sqe::parse(bytes) else {
        assert!(bytes.len() < Sqe::SIZE);
        return;
    };
    let (cid, nsid) = (sqe.cid.get(), sqe.nsid.get());
    let _ = (sqe.fuse(), sqe.direction());
    let sgl = Sgl::parse(&sqe.dptr).unwrap_or(Sgl::NONE);
    assert_eq!(Sgl::parse(&sgl.encode()), Ok(sgl));
    let _ = sgl.check(131_072, 4096, 512);
    if let Ok(command) = IoCommand::parse(&sqe) {
        assert_eq!(IoCommand::parse(&command.to_sqe(cid, nsid, sgl)), Ok(command));
    }
    if let Ok(command) = AdminCommand::parse(&sqe) {
        assert_eq!(AdminCommand::parse(&command.to_sqe(cid, nsid, sgl)), Ok(command));
    }
    if let Ok(command) = FabricsCommand::parse(&sqe) {
        assert_eq!(FabricsCommand::parse(&command.to_sqe(cid, sgl)), Ok(command));
    }
    let data = &bytes[Sqe::SIZE..];
    assert_eq!(dsm_ranges(data, 256).count(), (data.len() / 16).min(256));
    assert_eq!(copy_ranges(data, 256).count(), (data.len() / 32).min(256));
});
