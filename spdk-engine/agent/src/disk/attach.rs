//! From a declared disk to an open lvstore: what is there, and whether it may be used or made.
//!
//! *What it is.* [`Attach`] looks at the device and at the data plane; [`judge`] decides. Local devices are read here, the
//! name of their lvstore included, and the data plane opens only what is accepted: opening a store writes to it. Remote
//! namespaces can only be looked at by having the data plane open them.
//!
//! *Invariants.* [`Step::Form`] is answered only for a disk without a recorded identity that may be formatted, and whose
//! device is empty, holds just what the permission to erase names, or is the one on which a formatting was begun and holds
//! the nameless lvstore that an interrupted one leaves. A local device is looked at once more right before it is written to.
//! The lvstore of a local device that was not made here is opened only when the wish names it: by then somebody has seen
//! that no other node has it.
//!
//! *When things fail.* [`Refusal`]; the device is closed again, and everything can be tried again.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use addax_api::node::{DISK_DUPLICATE, DISK_FOUND};
use uuid::Uuid;

use super::probe::{self, Content, ProbeError, Store};
use super::{Away, CLUSTER_BYTES};
use crate::error::{AgentError, blocking};
use crate::rpc::{AttachParams, Lvstore, NewLvstore, RpcError};
use crate::state::{BLOCK_SIZE, DiskRecord, Place};
use crate::supervise::Plane;

/// Deadline of connecting to a remote namespace.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);
/// Pages of metadata for a hundred clusters: an lvol needs one, and one more for every thousand clusters that it has.
const MD_PAGES_PER_100_CLUSTERS: u32 = 10;

/// Why a disk is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) away: Away,
    /// Of what the device holds, when that is the reason.
    pub(super) fingerprint: String,
    /// The lvstore that is to be confirmed.
    pub(super) found: Option<Uuid>,
}

impl From<Away> for Refusal {
    fn from(away: Away) -> Self {
        Self { away, fingerprint: String::new(), found: None }
    }
}

impl From<RpcError> for Refusal {
    fn from(error: RpcError) -> Self {
        Away::passing("DataPlaneFailed", error).into()
    }
}

impl From<AgentError> for Refusal {
    fn from(error: AgentError) -> Self {
        Away::passing("AgentFailed", error).into()
    }
}

impl From<ProbeError> for Refusal {
    fn from(error: ProbeError) -> Self {
        let reason = match &error {
            ProbeError::Missing(_) => "DeviceMissing",
            ProbeError::WrongKind { .. } => "WrongKind",
            ProbeError::InUse(_) => "DeviceInUse",
            ProbeError::Io { .. } => "DeviceFailed",
        };
        Away::lasting(reason, error).into()
    }
}

/// What to do with a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// It has its lvstore.
    Use(Lvstore),
    /// It may be formatted; `wipe`: what its ends hold goes first.
    Form { wipe: bool },
}

/// What was seen of a device without a recorded identity.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Seen {
    /// The ends of a local one, which is not open.
    Local(Content),
    /// A remote one, which is open: its lvstore, or none.
    Remote { store: Option<Lvstore>, fingerprint: String },
}

/// What is to be done about it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    Form {
        wipe: bool,
    },
    /// It has this lvstore, which may be opened.
    Open {
        uuid: Uuid,
        name: String,
    },
    Refuse(Refusal),
}

/// Name of the device of a disk.
fn base_bdev(record: &DiskRecord) -> String {
    match &record.wish.place {
        Place::Nvme { nsid, .. } => format!("{}n{nsid}", controller(record)),
        _ => format!("d.{}", record.wish.name),
    }
}

fn controller(record: &DiskRecord) -> String {
    format!("dn.{}", record.wish.name)
}

/// Decides about a disk that has no recorded identity, and whose device has this one.
fn judge(record: &DiskRecord, device: &str, seen: Seen) -> Verdict {
    let wish = &record.wish;
    let may_erase = |print: &str| wish.create && !print.is_empty() && wish.erase == print;
    let refuse = |reason, message: String, fingerprint: String| {
        Verdict::Refuse(Refusal { fingerprint, ..Away::lasting(reason, message).into() })
    };
    let is_begun_here = begun(record, device).is_some();
    match seen {
        Seen::Local(Content::Empty) if wish.create => Verdict::Form { wipe: false },
        Seen::Local(Content::Empty) => {
            refuse("NoLvstore", "it is empty: there is no lvstore to import".to_owned(), String::new())
        }
        Seen::Local(Content::Blobstore { fingerprint, .. } | Content::Other { fingerprint, .. })
            if may_erase(&fingerprint) =>
        {
            Verdict::Form { wipe: true }
        }
        Seen::Local(Content::Other { what, fingerprint }) => {
            refuse("NotEmpty", format!("it holds {what}; only an empty device is formatted"), fingerprint)
        }
        Seen::Local(Content::Blobstore { store: Store::Named(names), fingerprint }) => {
            match judge_store(record, device, names.uuid, &names.name, fingerprint) {
                Verdict::Open { uuid, name } if begun(record, device) != Some(name.as_str()) => {
                    let text = format!("it holds the lvstore '{name}' ({uuid}), which is used once it is asked for");
                    Verdict::Refuse(Refusal { found: Some(uuid), ..Away::lasting(DISK_FOUND, text).into() })
                }
                verdict => verdict,
            }
        }
        // Begun here and cut short. No store that was ever in use looks like that.
        Seen::Local(Content::Blobstore { store: Store::Unfinished, .. }) if is_begun_here && wish.create => {
            Verdict::Form { wipe: true }
        }
        Seen::Local(Content::Blobstore { fingerprint, .. }) => {
            refuse("Damaged", "it holds a blobstore that cannot be opened as an lvstore".to_owned(), fingerprint)
        }
        // What the data plane has open cannot be erased under it, so there is no fingerprint to permit it.
        Seen::Remote { store: Some(store), .. } => judge_store(record, device, store.uuid, &store.name, String::new()),
        Seen::Remote { store: None, fingerprint } if may_erase(&fingerprint) => Verdict::Form { wipe: false },
        Seen::Remote { store: None, fingerprint } => {
            let text = "it holds no lvstore, and whether it is empty cannot be seen by this data plane".to_owned();
            refuse("ContentUnknown", text, fingerprint)
        }
    }
}

/// The same for a device with an lvstore.
fn judge_store(record: &DiskRecord, device: &str, uuid: Uuid, name: &str, fingerprint: String) -> Verdict {
    if begun(record, device) == Some(name) || !record.wish.create {
        return Verdict::Open { uuid, name: name.to_owned() };
    }
    let text = format!("it holds the lvstore '{name}' ({uuid}): import it, or erase it");
    Verdict::Refuse(Refusal { fingerprint, ..Away::lasting("NotEmpty", text).into() })
}

/// Name of the lvstore whose making was begun on just this device.
fn begun<'a>(record: &'a DiskRecord, device: &str) -> Option<&'a str> {
    record.forming.as_ref().filter(|forming| forming.device == device).map(|forming| forming.lvstore.as_str())
}

/// One look at a disk, on one data plane.
pub(super) struct Attach<'a> {
    pub(super) plane: &'a Plane,
    pub(super) record: &'a DiskRecord,
    pub(super) node: &'a str,
}

/// How long the holder of a device is waited for: an agent that ends as this one starts.
const HOLD_TRIES: u32 = 20;
const HOLD_PAUSE: Duration = Duration::from_millis(50);

/// Keeps a local device for oneself.
async fn hold(path: &Path) -> Result<File, Refusal> {
    let mut tries = 0;
    loop {
        let wanted = path.to_owned();
        match blocking(move || probe::hold(&wanted)).await? {
            Ok(file) => return Ok(file),
            Err(ProbeError::InUse(_)) if tries < HOLD_TRIES => tries += 1,
            Err(error) => return Err(error.into()),
        }
        tokio::time::sleep(HOLD_PAUSE).await;
    }
}

impl Attach<'_> {
    /// The identity of the device that is there, as far as it could be read, and what to do.
    pub(super) async fn look(&self, held: &mut Option<File>) -> (String, Result<Step, Refusal>) {
        if let Some(open) = self.open_already().await {
            let recorded = self.record.identity.as_ref().map(|identity| identity.device.clone());
            let device = match recorded {
                Some(device) => device,
                None => self.device().await.unwrap_or_default(),
            };
            if let Err(refusal) = self.hold(held).await {
                tracing::warn!(disk = %self.record.wish.name, reason = refusal.away.reason, "in use without being held");
            }
            return (device, open.map(Step::Use));
        }
        let device = match self.device().await {
            Ok(device) => device,
            Err(refusal) => return (String::new(), Err(refusal)),
        };
        let step = match self.hold(held).await {
            Ok(()) => self.decide(&device).await,
            // Whoever has it may have it open: it is not touched.
            Err(refusal) => return (device, Err(refusal)),
        };
        // Only what is known to be wrong is closed: replicas may be using what could not be looked at just now.
        if step.as_ref().is_err_and(|refusal| refusal.away.lasting)
            && let Err(error) = self.close().await
        {
            tracing::warn!(disk = %self.record.wish.name, %error, "cannot close a device that is not used");
        }
        (device, step)
    }

    /// The lvstore that is expected, when the data plane has it open since an earlier life of this agent: what it has open
    /// was looked at then, and replicas may be using it. `None` when there is none expected or open.
    async fn open_already(&self) -> Option<Result<Lvstore, Refusal>> {
        let expected = self.expected_store().ok()??;
        match self.store().await {
            Ok(found) => {
                let store = found.filter(|store| store.uuid == expected)?;
                // It stays open meanwhile: its I/O goes on when the target is back.
                Some(self.require_connection().await.map(|()| store))
            }
            Err(error) => Some(Err(error.into())),
        }
    }

    /// Keeps the device that is there now, which may be another one than before.
    async fn hold(&self, held: &mut Option<File>) -> Result<(), Refusal> {
        *held = None;
        if let Some((path, _)) = self.local() {
            *held = Some(hold(&path).await?);
        }
        Ok(())
    }

    async fn decide(&self, device: &str) -> Result<Step, Refusal> {
        self.check_device(device)?;
        match self.expected_store()? {
            Some(expected) => self.known(expected).await,
            None => self.unseen(device).await,
        }
    }

    /// The identity of the device, which for a remote one needs a connection.
    async fn device(&self) -> Result<String, Refusal> {
        let wish = &self.record.wish;
        match &wish.place {
            Place::File { path, size } => {
                let (path, size) = (path.clone(), *size);
                let never_made = self.record.identity.is_none() && wish.uuid.is_none() && self.record.forming.is_none();
                let may_make = wish.create && size > 0 && never_made;
                Ok(blocking(move || file_identity(&path, may_make.then_some(size))).await??)
            }
            Place::Block { path } => {
                let path = path.clone();
                Ok(blocking(move || probe::identity(&path, true)).await??)
            }
            Place::Nvme { .. } => self.connect().await,
        }
    }

    fn check_device(&self, device: &str) -> Result<(), Refusal> {
        let wished = self.record.wish.device.as_str();
        let recorded = self.record.identity.as_ref().map_or("", |identity| identity.device.as_str());
        let expected = if wished.is_empty() { recorded } else { wished };
        if expected.is_empty() || expected == device {
            return Ok(());
        }
        let shown = if device.is_empty() { "one without an identity" } else { device };
        Err(Away::lasting("DeviceChanged", format!("another device is there: {shown} instead of {expected}")).into())
    }

    fn expected_store(&self) -> Result<Option<Uuid>, Refusal> {
        let wished = self.record.wish.uuid;
        let recorded = self.record.identity.as_ref().map(|identity| identity.lvstore);
        match (recorded, wished) {
            (Some(recorded), Some(wished)) if recorded != wished => {
                let text = format!("the node knows the lvstore {recorded} under this name, not {wished}");
                Err(Away::lasting("DiskChanged", text).into())
            }
            _ => Ok(recorded.or(wished)),
        }
    }

    /// A disk that was seen before: it has its lvstore, or it is another one.
    async fn known(&self, expected: Uuid) -> Result<Step, Refusal> {
        let changed = |found: String| {
            Err(Away::lasting("DiskChanged", format!("it holds {found} instead of the lvstore {expected}")).into())
        };
        let mut name = String::new();
        if self.local().is_some() {
            match self.content().await? {
                Content::Blobstore { store: Store::Named(names), .. } if names.uuid == expected => name = names.name,
                Content::Blobstore { store: Store::Named(names), .. } => {
                    return changed(format!("the lvstore '{}' ({})", names.name, names.uuid));
                }
                Content::Blobstore { .. } => return changed("no lvstore that can be read".to_owned()),
                Content::Other { what, .. } => return changed(what),
                Content::Empty => return changed("no lvstore".to_owned()),
            }
        }
        self.open(expected, &name).await
    }

    /// Opens a device that has this lvstore.
    async fn open(&self, expected: Uuid, name: &str) -> Result<Step, Refusal> {
        let base = base_bdev(self.record);
        let all = self.plane.client.bdev_lvol_get_lvstores().await?;
        let is_twin = |store: &&Lvstore| store.uuid == expected || store.name == name;
        if let Some(twin) = all.iter().filter(|store| store.base_bdev != base).find(is_twin) {
            let text = format!("the lvstore '{}' ({}) is open on {} already", twin.name, twin.uuid, twin.base_bdev);
            return Err(Away::lasting(DISK_DUPLICATE, text).into());
        }
        match self.open_store().await? {
            Some(store) if store.uuid == expected => Ok(Step::Use(store)),
            Some(store) => {
                let text = format!("it holds the lvstore '{}' ({}) instead of {expected}", store.name, store.uuid);
                Err(Away::lasting("DiskChanged", text).into())
            }
            None => {
                let reason = if self.local().is_some() { "Damaged" } else { "DiskChanged" };
                let text = format!("there is no lvstore that can be opened; it should have {expected}");
                Err(Away::lasting(reason, text).into())
            }
        }
    }

    async fn unseen(&self, device: &str) -> Result<Step, Refusal> {
        if self.local().is_none() {
            let store = self.open_store().await?;
            let seen = Seen::Remote { store: store.clone(), fingerprint: remote_fingerprint(device) };
            return match (judge(self.record, device, seen), store) {
                (Verdict::Open { .. }, Some(store)) => Ok(Step::Use(store)),
                (Verdict::Open { uuid, name }, None) => self.open(uuid, &name).await,
                (Verdict::Form { wipe }, _) => Ok(Step::Form { wipe }),
                (Verdict::Refuse(refusal), _) => Err(refusal),
            };
        }
        if self.is_open().await? {
            // A formatting that was begun in an earlier life of this agent, or not waited for.
            if let Some(store) =
                self.open_store().await?.filter(|s| begun(self.record, device) == Some(s.name.as_str()))
            {
                return Ok(Step::Use(store));
            }
            self.close().await?;
        }
        match judge(self.record, device, Seen::Local(self.content().await?)) {
            Verdict::Form { wipe } => Ok(Step::Form { wipe }),
            Verdict::Open { uuid, name } => self.open(uuid, &name).await,
            Verdict::Refuse(refusal) => Err(refusal),
        }
    }

    async fn content(&self) -> Result<Content, Refusal> {
        let (path, block) = self.local().ok_or_else(|| Away::lasting("WrongKind", "it is not a local device"))?;
        Ok(blocking(move || probe::probe(&path, block)).await??.content)
    }

    /// Path of the device, and whether it is a block device; none of a remote one.
    pub(super) fn local(&self) -> Option<(PathBuf, bool)> {
        match &self.record.wish.place {
            Place::File { path, .. } => Some((path.clone(), false)),
            Place::Block { path } => Some((path.clone(), true)),
            Place::Nvme { .. } => None,
        }
    }

    // --- on the data plane ---

    async fn is_open(&self) -> Result<bool, RpcError> {
        Ok(self.plane.client.find_bdev(&base_bdev(self.record)).await?.is_some())
    }

    async fn open_base(&self) -> Result<(), Refusal> {
        let Some((path, _)) = self.local() else { return Ok(()) };
        if self.is_open().await? {
            return Ok(());
        }
        let path = path.to_str().ok_or_else(|| Away::lasting("WrongKind", "its path is not UTF-8"))?;
        let name = base_bdev(self.record);
        let place = PathBuf::from(path);
        let block_size = blocking(move || probe::block_size(&place)).await??;
        let opened = self.plane.client.create_base_bdev(self.plane.has_uring(), &name, path, block_size).await;
        opened.map_err(|error| Away::passing("DeviceFailed", format!("it cannot be opened: {error}")).into())
    }

    async fn open_store(&self) -> Result<Option<Lvstore>, Refusal> {
        self.open_base().await?;
        let client = &self.plane.client;
        client.bdev_examine(&base_bdev(self.record)).await?;
        client.bdev_wait_for_examine().await?;
        Ok(client.lvstore_on(&base_bdev(self.record)).await?)
    }

    /// Whether a remote device's target is there; local ones have none.
    pub(super) async fn require_connection(&self) -> Result<(), Refusal> {
        let Place::Nvme { traddr, trsvcid, .. } = &self.record.wish.place else { return Ok(()) };
        match self.plane.client.nvme_controller_is_lost(&controller(self.record)).await? {
            true => Err(Away::passing("Unreachable", format!("{traddr}:{trsvcid} is not connected")).into()),
            false => Ok(()),
        }
    }

    async fn connect(&self) -> Result<String, Refusal> {
        let Place::Nvme { traddr, trsvcid, subnqn, .. } = &self.record.wish.place else {
            return Err(Away::lasting("WrongKind", "it is not a remote namespace").into());
        };
        let (client, name, bdev) = (&self.plane.client, controller(self.record), base_bdev(self.record));
        if let Some(found) = client.find_bdev(&bdev).await? {
            return Ok(found.uuid);
        }
        client.bdev_nvme_detach_controller(&name).await?;
        let params = AttachParams {
            name,
            trtype: "tcp".to_owned(),
            adrfam: if traddr.contains(':') { "ipv6" } else { "ipv4" }.to_owned(),
            traddr: traddr.clone(),
            trsvcid: trsvcid.to_string(),
            subnqn: subnqn.clone(),
            hostnqn: addax_api::nqn::disk_host_nqn(self.node, &self.record.wish.name),
            // The device stays until the target is back. Its I/O does not wait that long: a replica that cannot be written
            // has to leave its volume, which waits for it.
            ctrlr_loss_timeout_sec: -1,
            reconnect_delay_sec: 2,
            fast_io_fail_timeout_sec: 10,
            addax_no_replay: false,
        };
        let attached = client.bdev_nvme_attach_controller(&params, CONNECT_DEADLINE).await;
        attached.map_err(|error| Away::lasting("Unreachable", format!("{traddr}:{trsvcid}: {error}")))?;
        match client.find_bdev(&bdev).await? {
            Some(found) => Ok(found.uuid),
            None => {
                client.bdev_nvme_detach_controller(&params.name).await?;
                Err(Away::lasting("DeviceMissing", format!("{subnqn} has no such namespace")).into())
            }
        }
    }

    /// Looks again whether a local device may be written to: it may be another one by now.
    async fn require_permission(&self, wipe: bool) -> Result<(), Refusal> {
        let device = self.device().await?;
        self.check_device(&device)?;
        match judge(self.record, &device, Seen::Local(self.content().await?)) {
            verdict if begun(self.record, &device).is_some() && verdict == (Verdict::Form { wipe }) => Ok(()),
            Verdict::Refuse(refusal) => Err(refusal),
            _ => Err(Away::passing("DeviceFailed", "it has just changed").into()),
        }
    }

    /// Makes the lvstore that the record has named.
    pub(super) async fn form(&self, wipe: bool) -> Result<Lvstore, Refusal> {
        if let Some((path, _)) = self.local() {
            self.close().await?;
            self.require_permission(wipe).await?;
            if wipe {
                blocking(move || probe::wipe(&path)).await??;
            }
        }
        self.open_base().await?;
        let client = &self.plane.client;
        client.bdev_wait_for_examine().await?;
        let base = base_bdev(self.record);
        let name = self.record.forming.as_ref().map(|forming| forming.lvstore.as_str()).unwrap_or_default();
        let block_size = self.block_size().await?;
        if block_size != BLOCK_SIZE {
            let text = format!("its blocks have {block_size} bytes; replicas need {BLOCK_SIZE}: it is not formatted");
            return Err(Away::lasting("BlockSize", text).into());
        }
        let new = NewLvstore {
            base_bdev: &base,
            name,
            cluster_bytes: CLUSTER_BYTES,
            md_pages_per_100_clusters: MD_PAGES_PER_100_CLUSTERS,
        };
        let made = client.bdev_lvol_create_lvstore(&new).await;
        made.map_err(|error| Away::passing("FormatFailed", format!("it cannot be formatted: {error}")))?;
        let store = client.lvstore_on(&base).await?;
        store.ok_or_else(|| Away::passing("FormatFailed", "the new lvstore is not there").into())
    }

    /// Closes the device, and with it the lvstore.
    pub(super) async fn close(&self) -> Result<(), RpcError> {
        let client = &self.plane.client;
        match &self.record.wish.place {
            Place::Nvme { .. } => client.bdev_nvme_detach_controller(&controller(self.record)).await,
            _ => client.delete_base_bdev(self.plane.has_uring(), &base_bdev(self.record)).await,
        }
    }

    /// Bytes of a block of the open device, and so of its lvols.
    pub(super) async fn block_size(&self) -> Result<u32, RpcError> {
        let found = self.plane.client.find_bdev(&base_bdev(self.record)).await?;
        Ok(found.map_or(BLOCK_SIZE, |bdev| bdev.block_size))
    }

    /// The lvstore, if it is open still.
    pub(super) async fn store(&self) -> Result<Option<Lvstore>, RpcError> {
        self.plane.client.lvstore_on(&base_bdev(self.record)).await
    }
}

/// The identity of a file, which is made when it is absent and may be.
fn file_identity(path: &Path, make: Option<u64>) -> Result<String, ProbeError> {
    match (probe::identity(path, false), make) {
        (Err(ProbeError::Missing(_)), Some(size)) => probe::make_file(path, size).map(|()| String::new()),
        (found, _) => found,
    }
}

/// A permission for a device that cannot be read names the device alone.
fn remote_fingerprint(device: &str) -> String {
    let known: String = device.chars().filter(char::is_ascii_alphanumeric).take(12).collect();
    if known.is_empty() { "unknown".to_owned() } else { known }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::state::{DiskWish, Forming};
    use blobstore_format::lvs::StoreNames;

    /// With the device that a formatting was begun on.
    fn record(create: bool, erase: &str, forming: Option<&str>) -> DiskRecord {
        let wish = DiskWish {
            name: "d".to_owned(),
            place: Place::Block { path: "/dev/x".into() },
            create,
            erase: erase.to_owned(),
            uuid: None,
            device: String::new(),
        };
        let forming = forming.map(|device| Forming { lvstore: "mine".to_owned(), device: device.to_owned() });
        DiskRecord { wish, identity: None, forming }
    }

    fn names(name: &str) -> StoreNames {
        StoreNames { name: name.to_owned(), uuid: Uuid::nil() }
    }

    fn remote(name: &str) -> Option<Lvstore> {
        Some(Lvstore {
            uuid: Uuid::nil(),
            name: name.to_owned(),
            base_bdev: "d.d".to_owned(),
            total_data_clusters: 1,
            free_clusters: 1,
            cluster_size: CLUSTER_BYTES,
        })
    }

    /// `form`, `wipe`, `open`, or the reason of the refusal; the device is `serial`.
    fn verdict(record: &DiskRecord, seen: Seen) -> String {
        match judge(record, "serial", seen) {
            Verdict::Form { wipe: false } => "form".to_owned(),
            Verdict::Form { wipe: true } => "wipe".to_owned(),
            Verdict::Open { .. } => "open".to_owned(),
            Verdict::Refuse(refusal) => refusal.away.reason.to_owned(),
        }
    }

    #[test]
    fn only_what_is_empty_or_permitted_is_formatted() {
        let print = || "abc".to_owned();
        let empty = || Seen::Local(Content::Empty);
        let other = || Seen::Local(Content::Other { what: "x".to_owned(), fingerprint: print() });
        let blobstore = |store| Seen::Local(Content::Blobstore { fingerprint: print(), store });
        let named = |name| blobstore(Store::Named(names(name)));
        let far = |store| Seen::Remote { store, fingerprint: print() };
        let (make, import) = (record(true, "", None), record(false, "", None));
        let (erase, wrong) = (record(true, "abc", None), record(true, "abd", None));
        let (import_erase, forming) = (record(false, "abc", None), record(true, "", Some("serial")));
        let (elsewhere, no_more) = (record(true, "", Some("another")), record(false, "", Some("serial")));
        for (record, seen, expected) in [
            (&make, empty(), "form"),
            (&import, empty(), "NoLvstore"),
            (&no_more, empty(), "NoLvstore"),
            (&elsewhere, empty(), "form"),
            (&make, other(), "NotEmpty"),
            (&wrong, other(), "NotEmpty"),
            (&erase, other(), "wipe"),
            (&import_erase, other(), "NotEmpty"),
            (&forming, other(), "NotEmpty"),
            (&erase, named("theirs"), "wipe"),
            (&make, named("theirs"), "NotEmpty"),
            (&forming, named("theirs"), "NotEmpty"),
            (&import, named("theirs"), "Found"),
            (&forming, named("mine"), "open"),
            (&no_more, named("mine"), "open"),
            (&elsewhere, named("mine"), "NotEmpty"),
            // What cannot be read is never taken for one's own.
            (&make, blobstore(Store::Unknown), "Damaged"),
            (&forming, blobstore(Store::Unknown), "Damaged"),
            (&erase, blobstore(Store::Unknown), "wipe"),
            (&make, blobstore(Store::Unfinished), "Damaged"),
            (&forming, blobstore(Store::Unfinished), "wipe"),
            (&elsewhere, blobstore(Store::Unfinished), "Damaged"),
            (&no_more, blobstore(Store::Unfinished), "Damaged"),
            (&make, far(remote("theirs")), "NotEmpty"),
            (&erase, far(remote("theirs")), "NotEmpty"),
            (&import, far(remote("theirs")), "open"),
            (&forming, far(remote("mine")), "open"),
            (&elsewhere, far(remote("mine")), "NotEmpty"),
            (&make, far(None), "ContentUnknown"),
            (&import, far(None), "ContentUnknown"),
            (&forming, far(None), "ContentUnknown"),
            (&erase, far(None), "form"),
            (&wrong, far(None), "ContentUnknown"),
            (&import_erase, far(None), "ContentUnknown"),
        ] {
            let asked = format!("{:?} {:?} {seen:?}", record.wish, record.forming);
            assert_eq!(verdict(record, seen), expected, "{asked}");
        }
    }
}
