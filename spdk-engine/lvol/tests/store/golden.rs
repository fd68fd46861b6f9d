//! Disk images that SPDK wrote: the store finds in them what SPDK finds, and what SPDK should find where it crashes.

use std::collections::BTreeMap;
use std::rc::Rc;

use blobstore_format::ReadAt;
use blobstore_golden::{Case, Class, Lvol as Expected, Sparse};
use lvol_core::testing::{Fill, Image, PowerDisk, PowerOptions, Tear, Unmapped};
use lvol_core::{Device, LoadOptions, LoadReport, LocalFuture, Lvol, NoHooks, Place, Store};
use sha2::{Digest, Sha256};

use crate::support::{check_image, full, on_all};

const CHUNK: u64 = 1 << 20;

fn image(sparse: &Sparse) -> Image {
    let mut image = Image::new(sparse.size(), Fill::Zeroes);
    let mut at = 0;
    while let Some(from) = sparse.next_data(at).unwrap() {
        let len = 16384.min(sparse.size() - from);
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        sparse.read_at(from, &mut bytes).unwrap();
        image.write(from, &bytes);
        at = from + len;
    }
    image
}

fn disk(sparse: &Sparse, block_size: u32, unmap: bool) -> PowerDisk {
    let options = PowerOptions {
        size: sparse.size(),
        block_size,
        write_cache: true,
        unmapped: if unmap { Unmapped::Zeroes } else { Unmapped::Unsupported },
        fill: Fill::Zeroes,
        tear: Tear { coarse: 4096, coarse_until: u64::MAX, fine: 4096 },
        seed: 7,
    };
    PowerDisk::with_image(options, image(sparse))
}

struct Opened {
    disk: PowerDisk,
    external: Option<(String, PowerDisk)>,
}

impl Opened {
    fn of(case: &Case, with_external: bool) -> Self {
        let external = case.external.as_ref().filter(|_| with_external);
        let external = external.map(|e| (e.uuid.clone(), disk(&e.image(), e.block_size, true)));
        Self { disk: disk(&case.image(), case.block_size, case.unmap), external }
    }

    fn run<T>(&self, code: impl Future<Output = T>) -> T {
        let disks: Vec<&PowerDisk> = std::iter::once(&self.disk).chain(self.external.iter().map(|(_, d)| d)).collect();
        on_all(&disks, code)
    }

    async fn load(&self) -> Result<(Store, LoadReport), lvol_core::Error> {
        let find = |id: &str| -> LocalFuture<'_, Option<Rc<dyn Device>>> {
            let found = self.external.as_ref().filter(|(uuid, _)| uuid == id);
            let found = found.map(|(_, disk)| Rc::new(disk.clone()) as Rc<dyn Device>);
            Box::pin(async move { found })
        };
        Store::load(Rc::new(self.disk.clone()), Rc::new(NoHooks), LoadOptions::default(), &find, &|_| {}).await
    }
}

/// The 1 MiB chunks of an lvol that are not all zero. Where the map shows nothing there is nothing to read.
async fn chunks(lvol: &Lvol, cluster_size: u64) -> Result<BTreeMap<u64, String>, String> {
    let mut found = BTreeMap::new();
    let mut view = lvol.map().view();
    let size = lvol.size_bytes();
    for chunk in 0..size.div_ceil(CHUNK) {
        let (from, to) = (chunk * CHUNK, ((chunk + 1) * CHUNK).min(size));
        let mut clusters = from / cluster_size..to.div_ceil(cluster_size);
        if clusters.all(|cluster| view.place(cluster) == Place::Zeroes) {
            continue;
        }
        let bytes = lvol.read(from, usize::try_from(to - from).unwrap()).await;
        let bytes = bytes.map_err(|error| format!("chunk {chunk}: {error}"))?;
        if bytes.iter().any(|byte| *byte != 0) {
            found.insert(chunk, Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect());
        }
    }
    Ok(found)
}

async fn contents(lvol: &Lvol, cluster_size: u64, expected: &Expected) -> Result<(), String> {
    // Part of it lies beyond its external device: SPDK fails such reads, here it is zeroes.
    if !expected.unreadable_chunks.is_empty() {
        return Ok(());
    }
    let found = chunks(lvol, cluster_size).await?;
    if found == expected.chunks { Ok(()) } else { Err(format!("{}: chunks {:?}", expected.name, found.keys())) }
}

async fn compare(store: &Store, case: &Case, exactly: bool) -> Result<(), String> {
    let (expected_store, expected) = case.expected().ok_or("nothing is expected")?;
    let info = store.info();
    let seen = (info.name.as_str(), info.uuid.to_string(), u64::from(info.cluster_size), u64::from(info.io_unit_size));
    let store_is = (
        expected_store.name.as_str(),
        expected_store.uuid.clone(),
        expected_store.cluster_size,
        expected_store.io_unit_size,
    );
    assert_eq!(seen, store_is, "{}", case.name);
    assert_eq!(info.total_data_clusters, expected_store.total_data_clusters, "{}", case.name);
    assert_eq!(info.max_growable_size, expected_store.max_growable_size, "{}", case.name);
    if exactly {
        let own: u64 = expected.iter().map(|lvol| lvol.num_allocated_clusters).sum();
        // A clean store is taken as its masks say, with what SPDK leaked. Of an interrupted deletion it leaks, in the
        // recovery, what only the snapshot had.
        let leaks = case.name == "interrupted-delete-moved";
        let expected_free = if leaks { info.total_data_clusters - own } else { expected_store.free() };
        assert_eq!(info.free_clusters, expected_free, "{}: free clusters", case.name);
    }
    let mut names: Vec<String> = store.lvols().iter().map(|lvol| lvol.info().name).collect();
    let mut expected_names: Vec<String> = expected.iter().map(|lvol| lvol.name.clone()).collect();
    names.sort();
    expected_names.sort();
    if names != expected_names {
        return Err(format!("lvols {names:?} in place of {expected_names:?}"));
    }
    for expected in expected {
        let lvol = store.lvol_by_name(&expected.name).ok_or_else(|| format!("{} is missing", expected.name))?;
        lvol_is(store, &lvol, expected)?;
        contents(&lvol, u64::from(info.cluster_size), expected).await?;
    }
    Ok(())
}

fn lvol_is(store: &Store, lvol: &Lvol, expected: &Expected) -> Result<(), String> {
    let info = lvol.info();
    let mut clones: Vec<String> =
        info.clones.iter().filter_map(|id| store.lvol(*id)).map(|lvol| lvol.info().name).collect();
    let mut expected_clones = expected.clones.clone();
    clones.sort();
    expected_clones.sort();
    let seen = (
        info.uuid.map(|uuid| uuid.to_string()),
        info.thin,
        info.read_only,
        Some(lvol.size_bytes()),
        info.parent_name.clone(),
        info.allocated_clusters,
        clones,
    );
    let is = (
        Some(expected.uuid.clone()),
        expected.thin,
        expected.read_only,
        expected.size,
        expected.parent.clone(),
        expected.num_allocated_clusters,
        expected_clones,
    );
    let kind = match (&info.external, info.is_clone, info.clones.is_empty()) {
        (_, _, false) => "snapshot",
        (Some(_), ..) => "esnap clone",
        (None, true, _) => "clone",
        (None, false, _) => "lvol",
    };
    let kind_fits = expected.kind.as_deref().is_none_or(|expected| expected == kind);
    if seen == is && kind_fits { Ok(()) } else { Err(format!("{}: {seen:?} ({kind}) in place of {is:?}", info.name)) }
}

#[test]
fn undamaged_images_hold_exactly_what_spdk_finds_in_them_also_after_they_were_written_back() {
    let mut failed = Vec::new();
    let cases = blobstore_golden::cases().iter().filter(|case| !case.is_damaged());
    let mut checked = 0;
    for case in cases {
        let opened = Opened::of(case, true);
        let result = opened.run(async {
            let (store, report) = opened.load().await.map_err(|error| error.to_string())?;
            if !report.damaged.is_empty() {
                return Err(format!("damaged: {:?}", report.damaged));
            }
            compare(&store, case, true).await?;
            store.unload().await.map_err(|error| error.to_string())?;
            // What SPDK leaked stays leaked until a recovery.
            if check_image(&image(&case.image())).is_ok() || case.clean_flag == 0 {
                check_image(&opened.disk.current())?;
            }
            let (store, report) = opened.load().await.map_err(|error| format!("second load: {error}"))?;
            if report != LoadReport::default() {
                return Err(format!("second load: {report:?}"));
            }
            compare(&store, case, true).await
        });
        checked += 1;
        if let Err(error) = result {
            failed.push(format!("{} ({}): {error}", case.name, case.about));
        }
    }
    assert!(failed.is_empty(), "{} of {checked}:\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn without_their_external_device_only_its_clones_are_degraded() {
    for case in blobstore_golden::cases().iter().filter(|case| case.without_external.is_some()) {
        let opened = Opened::of(case, false);
        let mut degraded = opened.run(async {
            let (store, _) = opened.load().await.unwrap();
            let names: Vec<String> =
                store.lvols().iter().map(Lvol::info).filter(|i| i.is_degraded).map(|i| i.name).collect();
            for lvol in store.lvols().iter().filter(|lvol| lvol.info().is_degraded) {
                let (mut view, size) = (lvol.map().view(), u64::from(store.info().cluster_size));
                let behind = (0..view.clusters()).find(|cluster| view.place(*cluster) == Place::External).unwrap();
                let block = case.block_size as usize;
                lvol.read(behind * size, block).await.unwrap_err();
                lvol.write(behind * size, &vec![1; block]).await.unwrap_err();
            }
            names
        });
        let mut expected = case.without_external.clone().unwrap();
        degraded.sort();
        expected.sort();
        assert_eq!(degraded, expected, "{}", case.name);
    }
}

/// What may be served of a damaged image: lvols as SPDK reports them for it or for the image it was made from.
async fn only_sound_lvols(store: &Store, case: &Case) -> Result<(), String> {
    let base = blobstore_golden::cases().iter().find(|base| base.name == "crafted-base");
    let allowed = case.lvols.iter().flatten().chain(base.iter().filter_map(|base| base.lvols.as_ref()).flatten());
    let allowed: Vec<&Expected> = allowed.collect();
    for lvol in store.lvols() {
        let info = lvol.info();
        let uuid = info.uuid.map(|uuid| uuid.to_string());
        let fitting = allowed.iter().filter(|expected| match &uuid {
            Some(uuid) => *uuid == expected.uuid,
            None => info.name == expected.name,
        });
        let mut reasons = Vec::new();
        let mut sound = false;
        for expected in fitting {
            match contents(&lvol, u64::from(store.info().cluster_size), expected).await {
                Ok(()) => sound = true,
                Err(error) => reasons.push(error),
            }
        }
        if !sound {
            return Err(format!("lvol {} is not as any expected one: {reasons:?}", info.name));
        }
    }
    Ok(())
}

#[test]
fn damaged_images_are_refused_unchanged_or_opened_without_what_is_damaged() {
    let mut failed = Vec::new();
    let (mut refused, mut opened_without) = (0, 0);
    for case in blobstore_golden::cases().iter().filter(|case| case.is_damaged()) {
        let opened = Opened::of(case, true);
        let result = opened.run(async {
            match opened.load().await {
                Err(error) if opened.disk.counts().changes > 0 => Err(format!("changed before it is refused: {error}")),
                Err(error) => {
                    println!("{}: {error}", case.name);
                    refused += 1;
                    Ok(())
                }
                Ok((store, report)) => {
                    opened_without += 1;
                    println!("{}: {:?}", case.name, report);
                    only_sound_lvols(&store, case).await
                }
            }
        });
        if let Err(error) = result {
            failed.push(format!("{} ({:?}, {:?}): {error}", case.name, case.change, case.spdk_load));
        }
    }
    assert!(failed.is_empty(), "{}:\n{}", failed.len(), failed.join("\n"));
    assert!(refused > 0 && opened_without > 0, "{refused} refused, {opened_without} opened");
}

/// Power is cut while SPDK's own leftovers are repaired: the next load ends the repair.
#[test]
fn a_recovery_that_is_cut_short_is_finished_by_the_next_load() {
    let dirty =
        blobstore_golden::cases().iter().filter(|case| case.class == Class::Dirty && case.device_size < 128 << 20);
    let dirty: Vec<&Case> = dirty.filter(|case| !case.name.starts_with("dirty-many")).collect();
    for (index, case) in dirty.iter().enumerate() {
        if !full() && index % 5 != 0 && case.finished_by_hand.is_none() {
            continue;
        }
        for after in 1.. {
            let opened = Opened::of(case, true);
            let Some(image) = opened.cut(after) else { break };
            let options = opened.disk.options();
            let again = Opened { disk: PowerDisk::with_image(options, image), external: opened.external };
            let result = again.run(async {
                let (store, _) = again.load().await.map_err(|error| error.to_string())?;
                compare(&store, case, true).await
            });
            assert_eq!(result, Ok(()), "{} after {after} operations", case.name);
        }
    }
}

impl Opened {
    /// The disk when power is cut after so many changes of a load; none when the load ends before.
    fn cut(&self, after: u64) -> Option<Image> {
        let mut cut = None;
        let mut seen = 0;
        let disks: Vec<&PowerDisk> = std::iter::once(&self.disk).chain(self.external.iter().map(|(_, d)| d)).collect();
        let mut exec = lvol_core::testing::Exec::new(after, &disks);
        let load = async { drop(self.load().await.unwrap()) };
        let ended = exec.run_with(load, |disk, op| {
            seen += u64::from(disk == 0 && op.changes().is_some());
            if seen < after {
                return std::ops::ControlFlow::Continue(());
            }
            cut = Some(self.disk.cut(after));
            std::ops::ControlFlow::Break(())
        });
        ended.unwrap();
        cut
    }
}
