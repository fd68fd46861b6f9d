//! Identify.

use nvme_wire::Status;
use nvme_wire::admin::{Identify, NSID_ALL, cns, csi};
use nvme_wire::fabrics::CNTLID_DYNAMIC;
use nvme_wire::identify::{CommandSetData, DiscoveryController, IDENTIFY_SIZE, IoController, NvmControllerData, oncs};
use nvme_wire::namespace::{
    IndependentNamespaceData, NSTAT_READY, Namespace as NamespaceBuilder, NamespaceIds, NvmNamespaceData,
    encode_namespace_list,
};

use super::admin::Answer;
use super::controller::Controller;
use super::features::has_write_cache;
use super::subsystem::Namespace;
use crate::bdev::IoTypes;

/// Firmware revision, that of the SPDK release whose interface this is.
pub const FIRMWARE: &str = "26.09";
/// Namespaces from here on are not valid as the start of a list.
const NSID_LIST_END: u32 = 0xFFFF_FFFE;

/// Answers an Identify; `room` is the host's buffer in bytes.
pub fn answer(controller: &Controller, nsid: u32, identify: &Identify, room: usize) -> Result<Answer, Status> {
    if room < IDENTIFY_SIZE {
        return Err(Status::INVALID_FIELD);
    }
    if controller.is_discovery() {
        return match identify.cns {
            cns::CONTROLLER => discovery_controller(controller),
            _ => Err(Status::INVALID_FIELD),
        };
    }
    match identify.cns {
        cns::NAMESPACE => namespace(controller, nsid),
        cns::CONTROLLER if nsid != 0 => Err(Status::INVALID_FIELD),
        cns::CONTROLLER => io_controller(controller),
        cns::ACTIVE_NAMESPACES => active(controller, nsid),
        cns::COMMAND_SET_ACTIVE_NAMESPACES if identify.csi == csi::NVM => active(controller, nsid),
        cns::NAMESPACE_DESCRIPTORS => descriptors(controller, nsid),
        cns::COMMAND_SET_NAMESPACE if identify.csi == csi::NVM => command_set_namespace(controller, nsid),
        cns::COMMAND_SET_CONTROLLER if identify.csi == csi::NVM => Ok(command_set_controller(controller)),
        cns::INDEPENDENT_NAMESPACE => independent_namespace(controller, nsid),
        cns::COMMAND_SETS => command_sets(controller, identify.cntid),
        _ => Err(Status::INVALID_FIELD),
    }
}

fn discovery_controller(controller: &Controller) -> Result<Answer, Status> {
    let options = &controller.options;
    let builder = DiscoveryController {
        firmware: FIRMWARE,
        cntlid: controller.cntlid(),
        max_io_size: options.max_io_size,
        queue_depth: options.max_queue_depth,
    };
    let data = builder.build().map_err(|_| Status::INTERNAL_ERROR)?;
    Ok(Answer::data(data.encode()))
}

/// Optional commands that every namespace takes.
pub fn optional_commands(controller: &Controller) -> u16 {
    let everything = IoTypes { unmap: true, write_zeroes: true, compare: true, ..IoTypes::READ_WRITE };
    let common = controller
        .subsystem
        .with_namespaces(|all| all.values().map(|n| n.info().io_types).fold(everything, IoTypes::and));
    let bit = |has: bool, bit: u16| if has { bit } else { 0 };
    // Write zeroes is emulated for every device that can be written.
    bit(common.compare, oncs::COMPARE)
        | bit(common.unmap, oncs::DATASET_MANAGEMENT)
        | bit(common.write, oncs::WRITE_ZEROES)
}

fn io_controller(controller: &Controller) -> Result<Answer, Status> {
    let (config, options) = (&controller.subsystem.config, &controller.options);
    let builder = IoController {
        serial: &config.serial_number,
        model: &config.model_number,
        firmware: FIRMWARE,
        subnqn: config.nqn.as_str(),
        cntlid: controller.cntlid(),
        max_io_size: options.max_io_size,
        in_capsule_data: options.limits().in_capsule,
        queue_depth: options.max_queue_depth,
        max_namespaces: config.max_namespaces,
        ana: config.ana_reporting,
        oncs: optional_commands(controller),
        write_cache: has_write_cache(controller),
        crdt: controller.target.retry_delays(),
        ..IoController::default()
    };
    let mut data = builder.build().map_err(|_| Status::INTERNAL_ERROR)?;
    // Neither compare-and-write nor copy is offered.
    data.fuses = 0;
    data.ocfs = 0;
    Ok(Answer::data(data.encode()))
}

fn with_namespace<T>(controller: &Controller, nsid: u32, look: impl FnOnce(&Namespace) -> T) -> Option<T> {
    controller.subsystem.with_namespaces(|all| all.get(&nsid).map(look))
}

fn check_nsid(controller: &Controller, nsid: u32) -> Result<(), Status> {
    match nsid {
        0 | NSID_ALL => Err(Status::INVALID_NAMESPACE),
        nsid if nsid > controller.subsystem.config.max_namespaces => Err(Status::INVALID_NAMESPACE),
        _ => Ok(()),
    }
}

fn ana_group(controller: &Controller, namespace: &Namespace) -> u32 {
    if controller.subsystem.config.ana_reporting { namespace.ana_group } else { 0 }
}

fn namespace(controller: &Controller, nsid: u32) -> Result<Answer, Status> {
    check_nsid(controller, nsid)?;
    let built = with_namespace(controller, nsid, |namespace| {
        let info = namespace.info();
        let anagrpid = ana_group(controller, namespace);
        let mut data = NamespaceBuilder {
            blocks: info.num_blocks,
            block_size: info.block_size,
            physical_block_size: info.physical_block_size.max(info.block_size),
            optimal_io_boundary: info.optimal_io_boundary,
            max_io_size: controller.options.max_io_size,
            nguid: namespace.nguid,
            eui64: namespace.eui64,
            anagrpid,
            inaccessible: anagrpid != 0 && !controller.ana().get(anagrpid).is_accessible(),
            ..NamespaceBuilder::default()
        }
        .build();
        // Reservations and copy are not offered.
        data.rescap = 0;
        data.mssrl = 0;
        data.mcl = 0;
        data.encode()
    });
    Ok(Answer::data(built.unwrap_or([0; IDENTIFY_SIZE])))
}

fn active(controller: &Controller, after: u32) -> Result<Answer, Status> {
    if after >= NSID_LIST_END {
        return Err(Status::INVALID_NAMESPACE);
    }
    let list = controller
        .subsystem
        .with_namespaces(|all| encode_namespace_list(all.keys().copied().filter(|nsid| *nsid > after)));
    Ok(Answer::data(list))
}

fn descriptors(controller: &Controller, nsid: u32) -> Result<Answer, Status> {
    let ids = with_namespace(controller, nsid, |namespace| NamespaceIds {
        eui64: Some(namespace.eui64),
        nguid: Some(namespace.nguid),
        uuid: Some(namespace.uuid),
        csi: None,
    });
    Ok(Answer::data(ids.ok_or(Status::INVALID_FIELD)?.encode()))
}

fn command_set_namespace(controller: &Controller, nsid: u32) -> Result<Answer, Status> {
    check_nsid(controller, nsid)?;
    with_namespace(controller, nsid, |_| Answer::data(NvmNamespaceData::default().encode()))
        .ok_or(Status::INVALID_NAMESPACE)
}

fn command_set_controller(controller: &Controller) -> Answer {
    let config = &controller.subsystem.config;
    let mut data = NvmControllerData { wzsl: config.wzsl, ..NvmControllerData::default() };
    if config.dmrsl != 0 {
        data.dmrl = 1;
        data.dmrsl = u32::try_from(config.dmrsl).unwrap_or(u32::MAX);
        data.dmsl = config.dmrsl;
    }
    Answer::data(data.encode())
}

fn independent_namespace(controller: &Controller, nsid: u32) -> Result<Answer, Status> {
    check_nsid(controller, nsid)?;
    let built = with_namespace(controller, nsid, |namespace| {
        let (nmic, anagrpid) = (nvme_wire::namespace::NMIC_SHARED, ana_group(controller, namespace));
        IndependentNamespaceData { nmic, anagrpid, nstat: NSTAT_READY, ..Default::default() }.encode()
    });
    Ok(Answer::data(built.unwrap_or([0; IDENTIFY_SIZE])))
}

fn command_sets(controller: &Controller, cntid: u16) -> Result<Answer, Status> {
    if cntid != controller.cntlid() && cntid != CNTLID_DYNAMIC {
        return Err(Status::INVALID_FIELD);
    }
    let mut data = CommandSetData::default();
    data.vectors[0] = 1 << csi::NVM;
    Ok(Answer::data(data.encode()))
}
