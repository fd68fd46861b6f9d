//! The base devices of a mirror's legs: claimed, opened, and their meta areas read before there is a mirror.
//!
//! *What it is.* What a leg is made of ([`LegParams`]), and the RPC method `addax_mirror_read_meta`, by which the agent
//! reads superblock and bits over the very session that will carry the data (rule 15).
//!
//! *Invariants.* Both devices of a leg are claimed together or not at all.
//!
//! *When things fail.* A device that is too small, or has unfit blocks, is refused. A base that is removed takes its leg
//! along; the core's rules then handle that.

use std::sync::Arc;

use addax_hugepages::Buf;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use mirror_core::meta::{Geometry, META_BLOCK_BYTES};
use serde::Deserialize;
use serde_json::{Value, json};

use super::device::LegChans;
use super::{drop_leg, refuse};
use crate::app::App;
use crate::bdev::registry::{Access, BdevEvent, Desc, Entry};
use crate::bdev::{BdevError, BdevInfo, IoOp};
use crate::raid::io;
use crate::reactor::Core;
use crate::reactor::driver::{NANOS_PER_S, Nanos};
use crate::rpc::params::{decode, invalid_parameters};
use crate::rpc::{RpcError, RpcResult};

/// Most meta blocks read by one call; superblocks and bits of the largest volume are 35.
const READ_BLOCKS_MAX: u32 = 256;
/// Longest wait for such a read.
const READ_DEADLINE_NS: Nanos = 5 * NANOS_PER_S;

/// A leg, in the calls that make one.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LegParams {
    pub(super) replica: String,
    pub(super) bdev_name: String,
    pub(super) meta_bdev_name: Option<String>,
    #[serde(default)]
    pub(super) local: bool,
    /// Of the replica, when its disk has a volatile cache (rule 1).
    #[serde(default)]
    pub(super) instance: String,
    /// It may lack acknowledged writes; only in a mirror that is made.
    #[serde(default)]
    pub(super) changed: bool,
}

/// What holds a leg's devices for the mirror.
pub(super) struct Claims {
    data: Desc,
    meta: Option<Desc>,
}

impl Claims {
    pub(super) fn entries(&self) -> Entries {
        let meta = self.meta.as_ref().map(|meta| Arc::clone(meta.entry()));
        Entries { data: Arc::clone(self.data.entry()), meta }
    }
}

/// A leg's devices, to be opened on the mirror's core.
pub(super) struct Entries {
    data: Arc<Entry>,
    meta: Option<Arc<Entry>>,
}

impl Entries {
    pub(super) fn open(&self, core: &Core) -> Result<LegChans, BdevError> {
        let data = self.data.open(core)?;
        let meta = match self.meta.as_ref().map(|meta| meta.open(core)).transpose() {
            Ok(meta) => meta,
            Err(error) => {
                data.close(core);
                return Err(error);
            }
        };
        Ok(LegChans { data, meta })
    }
}

pub(super) fn claim(
    app: &App,
    leg: &LegParams,
    mirror: &str,
    block_size: u32,
    size_bytes: u64,
) -> Result<Claims, RpcError> {
    let data = claim_device(app, leg, mirror, &leg.bdev_name)?;
    let info = data.entry().bdev.info();
    if info.block_size != block_size || bytes_of(&info) < size_bytes {
        return Err(refuse(format!(
            "leg {:?}: {:?} has {} bytes in blocks of {}, at least {size_bytes} in blocks of {block_size} are needed",
            leg.replica,
            leg.bdev_name,
            bytes_of(&info),
            info.block_size
        )));
    }
    let Some(name) = &leg.meta_bdev_name else { return Ok(Claims { data, meta: None }) };
    let meta = claim_device(app, leg, mirror, name)?;
    let geometry = Geometry::for_volume(size_bytes / u64::from(block_size), block_size);
    let needed = geometry.map_err(|e| refuse(e.to_string()))?.blocks().saturating_mul(META_BLOCK_BYTES as u64);
    let info = meta.entry().bdev.info();
    if !has_meta_blocks(&info) || bytes_of(&info) < needed {
        return Err(refuse(format!(
            "leg {:?}: {name:?} has {} bytes in blocks of {}, at least {needed} in blocks that divide \
             {META_BLOCK_BYTES} are needed",
            leg.replica,
            bytes_of(&info),
            info.block_size
        )));
    }
    Ok(Claims { data, meta: Some(meta) })
}

fn bytes_of(info: &BdevInfo) -> u64 {
    info.num_blocks.saturating_mul(u64::from(info.block_size))
}

fn has_meta_blocks(info: &BdevInfo) -> bool {
    info.block_size > 0 && (META_BLOCK_BYTES as u64).is_multiple_of(u64::from(info.block_size))
}

fn claim_device(app: &App, leg: &LegParams, mirror: &str, device: &str) -> Result<Desc, RpcError> {
    let (on_app, name, replica) = (app.clone(), mirror.to_owned(), leg.replica.clone());
    let desc = app.registry().open(device, Access::Exclusive("mirror"), move |event| {
        if event == BdevEvent::Removing {
            let (app, name, replica) = (on_app.clone(), name.clone(), replica.clone());
            on_app.core().spawn(async move {
                match drop_leg(&app, &name, &replica).await {
                    // Its other device went first.
                    Ok(()) => {}
                    Err(error) if error.code == -i64::from(libc::ENOENT) => {}
                    Err(error) => tracing::warn!(mirror = name, replica, ?error, "a removed base's leg did not go"),
                }
            });
        }
    })?;
    Ok(desc)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReadMeta {
    bdev_name: String,
    block: u64,
    blocks: u32,
}

/// `addax_mirror_read_meta`: blocks of a meta area that no mirror uses yet, as base64.
pub(super) async fn read_meta(app: &App, params: Option<Value>) -> RpcResult {
    let request: ReadMeta = decode(params, invalid_parameters)?;
    if !(1..=READ_BLOCKS_MAX).contains(&request.blocks) {
        return Err(refuse(format!("blocks {}: 1 to {READ_BLOCKS_MAX} are allowed", request.blocks)));
    }
    // Keeps the device from going while it is read.
    let desc = app.registry().open(&request.bdev_name, Access::ReadOnly, |_| {})?;
    let info = desc.entry().bdev.info();
    let end = request.block.saturating_add(u64::from(request.blocks)).saturating_mul(META_BLOCK_BYTES as u64);
    if !has_meta_blocks(&info) || end > bytes_of(&info) {
        let has = format!("{:?} has {} bytes in blocks of {}", request.bdev_name, bytes_of(&info), info.block_size);
        return Err(refuse(format!("block {}, blocks {}: {has}", request.block, request.blocks)));
    }
    let entry = Arc::clone(desc.entry());
    let read = app.core().call_async(io::worker(app.core()), move |core| {
        let core = core.clone();
        async move { read_here(&core, &entry, request.block, request.blocks).await }
    });
    let read = app.core().timeout(READ_DEADLINE_NS, read).await.flatten();
    drop(desc);
    match read {
        Some(Ok(data)) => Ok(json!({ "data": BASE64.encode(data) })),
        Some(Err(errno)) => Err(RpcError::errno(errno)),
        None => Err(RpcError::errno(libc::ETIMEDOUT)),
    }
}

async fn read_here(core: &Core, entry: &Entry, block: u64, blocks: u32) -> Result<Vec<u8>, i32> {
    let chan = entry.open(core).map_err(|error| error.errno())?;
    let per_block = META_BLOCK_BYTES as u64 / u64::from(entry.bdev.info().block_size);
    let mut data = vec![0; blocks as usize * META_BLOCK_BYTES];
    let into = Buf::alloc_unpooled(data.len()).into_slice();
    let range = (block * per_block, u64::from(blocks) * per_block);
    let status = io::run(core, &chan, IoOp::Read, range, smallvec::smallvec![into.clone()]).await;
    chan.close(core);
    if !status.is_success() {
        tracing::warn!(bdev = entry.bdev.info().name, ?status, "the meta area cannot be read");
        return Err(libc::EIO);
    }
    into.copy_to(0, &mut data);
    Ok(data)
}
