//! Admin commands that are awaited one by one, for bring-up and for reading what a controller says.

use std::rc::Rc;

use addax_hugepages::{Buf, BufSlice};
use nvme_wire::admin::{AdminCommand, GetFeatures, GetLogPage, Identify, SetFeatures, cns};
use nvme_wire::ana::{self, AnaLog};
use nvme_wire::fabrics::{FabricsCommand, PropertySize};
use nvme_wire::features::{AsyncEventConfig, NumberOfQueues, fid};
use nvme_wire::identify::{ControllerData, IDENTIFY_SIZE, NvmControllerData};
use nvme_wire::log::lid;
use nvme_wire::property::{Capabilities, Configuration, ControllerStatus, offset};
use nvme_wire::{Cqe, Sgl};

use super::HostError;
use super::connection::Conn;
use super::data::Data;
use super::qpair::Command;
use crate::reactor::Core;
use crate::reactor::driver::{NANOS_PER_MS, Nanos};

/// How often a controller is asked whether it is ready.
const READY_POLL_NS: Nanos = 10 * NANOS_PER_MS;
/// Unit of the property that says how long a controller may take to become ready.
const READY_UNIT_NS: Nanos = 500 * NANOS_PER_MS;
/// Most bytes of an ANA log page that are read.
const ANA_BYTES_MAX: usize = 1 << 20;

/// Reads an answer.
pub(super) fn parse<T>(
    bytes: &[u8],
    parse: impl Fn(&[u8]) -> Result<T, nvme_wire::ShortBuffer>,
) -> Result<T, HostError> {
    parse(bytes).map_err(|error| HostError::Invalid {
        field: error.what,
        value: format!("{} bytes", error.got),
        allowed: "the whole structure is needed",
    })
}

/// Admin commands of one connection.
pub(super) struct Admin<'a> {
    pub(super) core: &'a Core,
    pub(super) conn: &'a Rc<Conn>,
    pub(super) limit_ns: Nanos,
}

impl Admin<'_> {
    async fn run(&self, what: &'static str, command: Command) -> Result<Cqe, HostError> {
        let cqe = self.conn.call(self.core, what, command, Some(self.limit_ns)).await?;
        let status = cqe.status();
        if status.is_success() { Ok(cqe) } else { Err(HostError::Command { what, status }) }
    }

    async fn read(
        &self,
        what: &'static str,
        command: AdminCommand,
        nsid: u32,
        len: usize,
    ) -> Result<Vec<u8>, HostError> {
        let buf: BufSlice = Buf::alloc_unpooled(len).into_slice();
        let data = Data::Receive([buf.clone()].into_iter().collect());
        self.run(what, Command { sqe: command.to_sqe(0, nsid, Sgl::NONE), data }).await?;
        Ok(buf.to_vec())
    }

    pub(super) async fn identify(&self, nsid: u32, cns: u8) -> Result<Vec<u8>, HostError> {
        let command = AdminCommand::Identify(Identify { cns, ..Identify::default() });
        self.read("identify", command, nsid, IDENTIFY_SIZE).await
    }

    /// The limits of the NVM command set; controllers before 2.0 have none to tell.
    pub(super) async fn nvm_limits(&self, version: u32) -> Result<NvmControllerData, HostError> {
        if version >> 16 < 2 {
            return Ok(NvmControllerData::default());
        }
        let cns = cns::COMMAND_SET_CONTROLLER;
        match self.identify(0, cns).await {
            Ok(bytes) => parse(&bytes, NvmControllerData::parse),
            Err(HostError::Command { .. }) => Ok(NvmControllerData::default()),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn log_page(&self, lid: u8, len: usize) -> Result<Vec<u8>, HostError> {
        let page = GetLogPage { lid, bytes: len as u64, ..GetLogPage::default() };
        self.read("get log page", AdminCommand::GetLogPage(page), nvme_wire::admin::NSID_ALL, len).await
    }

    pub(super) async fn ana(&self, data: &ControllerData) -> Result<AnaLog, HostError> {
        let groups = data.nanagrpid as usize * ana::GROUP_SIZE;
        let nsids = (if data.mnan == 0 { data.nn } else { data.mnan }) as usize * 4;
        let len = (ana::HEADER_SIZE + groups).saturating_add(nsids).min(ANA_BYTES_MAX);
        let bytes = self.log_page(lid::ANA, len).await?;
        parse(&bytes, AnaLog::parse)
    }

    pub(super) async fn property(&self, offset: u32, size: PropertySize) -> Result<u64, HostError> {
        let sqe = FabricsCommand::PropertyGet { size, offset }.to_sqe(0, Sgl::NONE);
        Ok(self.run("property get", Command::plain(sqe)).await?.result())
    }

    pub(super) async fn set_property(&self, offset: u32, value: u32) -> Result<(), HostError> {
        let command = FabricsCommand::PropertySet { size: PropertySize::Four, offset, value: value.into() };
        self.run("property set", Command::plain(command.to_sqe(0, Sgl::NONE))).await.map(|_| ())
    }

    /// Enables the controller and waits until it is ready.
    pub(super) async fn enable(&self, capabilities: &Capabilities) -> Result<(), HostError> {
        self.set_property(offset::CC, Configuration::enabled().raw()).await?;
        let limit = Nanos::from(capabilities.timeout.max(1)) * READY_UNIT_NS;
        let ready = async {
            loop {
                let raw = self.property(offset::CSTS, PropertySize::Four).await?;
                let status = ControllerStatus::from_raw(raw as u32);
                if status.fatal {
                    let allowed = "a controller without fatal status is needed";
                    return Err(HostError::Invalid { field: "CSTS", value: format!("{raw:#x}"), allowed });
                }
                if status.ready {
                    return Ok(());
                }
                self.core.sleep(READY_POLL_NS).await;
            }
        };
        self.core.timeout(limit, ready).await.unwrap_or(Err(HostError::Deadline { what: "enable the controller" }))
    }

    async fn set_feature(&self, fid: u8, cdw11: u32) -> Result<Cqe, HostError> {
        let set = AdminCommand::SetFeatures(SetFeatures { fid, cdw11, ..SetFeatures::default() });
        self.run("set features", Command::plain(set.to_sqe(0, 0, Sgl::NONE))).await
    }

    pub(super) async fn io_queues(&self, wanted: u32) -> Result<u32, HostError> {
        let wanted = wanted.clamp(1, 0xFFFF);
        let cqe = self.set_feature(fid::NUMBER_OF_QUEUES, NumberOfQueues::both(wanted).raw()).await?;
        let granted = NumberOfQueues::from_raw(cqe.dw0.get())
            .map_err(|status| HostError::Command { what: "number of queues", status })?;
        Ok(granted.submission.min(granted.completion).min(wanted))
    }

    pub(super) async fn request_events(&self, data: &ControllerData) -> Result<(), HostError> {
        let wanted = AsyncEventConfig::NAMESPACE_ATTRIBUTE.with(AsyncEventConfig::ANA_CHANGE);
        let config = wanted.0 & data.oaes;
        match self.set_feature(fid::ASYNC_EVENT_CONFIG, config).await {
            Ok(_) => Ok(()),
            Err(HostError::Command { status, .. }) => {
                tracing::warn!(%status, "the controller takes no event configuration");
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// The keep-alive timeout to go by, in milliseconds.
    pub(super) async fn keep_alive_timeout(&self, asked_ms: u32) -> Result<u32, HostError> {
        if asked_ms == 0 {
            return Ok(0);
        }
        let get = AdminCommand::GetFeatures(GetFeatures { fid: fid::KEEP_ALIVE_TIMER, ..GetFeatures::default() });
        match self.run("get features", Command::plain(get.to_sqe(0, 0, Sgl::NONE))).await {
            // A controller may count longer than asked; the shorter time still finds out sooner that it is gone.
            Ok(cqe) if cqe.dw0.get() > 0 => Ok(cqe.dw0.get().min(asked_ms)),
            Ok(_) | Err(HostError::Command { .. }) => Ok(asked_ms),
            Err(error) => Err(error),
        }
    }
}
