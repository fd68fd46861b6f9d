//! Every golden image, read as an engine would: exactly what SPDK finds in it, or a refusal that says why.

use std::collections::BTreeMap;

use blobstore_format::extent::ExtentPage;
use blobstore_format::image::{Externals, Image, Lvol, Mode};
use blobstore_format::metadata::{Extents, Parent};
use blobstore_format::{ReadAt, lvs};
use blobstore_golden::{Case, Class, Sparse, SpdkLoad, Store, cases};
use sha2::{Digest, Sha256};
use uuid::Uuid;

const CHUNK: u64 = 1 << 20;

struct Beside(Option<(Uuid, Sparse)>);

impl Beside {
    fn of(case: &Case) -> Self {
        Self(case.external.as_ref().map(|e| (e.uuid.parse().unwrap(), e.image())))
    }
}

impl Externals for Beside {
    fn find(&self, id: &[u8]) -> Option<&dyn ReadAt> {
        let (uuid, image) = self.0.as_ref()?;
        (lvs::parse_uuid(id) == Some(*uuid)).then_some(image as &dyn ReadAt)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// The chunks that are not all zero; unreadable ones are listed apart.
fn chunks(image: &Image<&Sparse>, lvol: &Lvol, externals: &Beside) -> (BTreeMap<u64, String>, Vec<u64>) {
    let (size, cluster) = (image.size(lvol), u64::from(image.geometry.cluster_size));
    let zeroes = vec![0; CHUNK as usize];
    let (mut found, mut unreadable) = (BTreeMap::new(), Vec::new());
    for chunk in 0..size.div_ceil(CHUNK) {
        let (start, end) = (chunk * CHUNK, (chunk * CHUNK + CHUNK).min(size));
        if (start / cluster..end.div_ceil(cluster)).all(|at| !image.may_hold_data(lvol, at)) {
            continue;
        }
        let mut bytes = vec![0; (end - start) as usize];
        match image.read(lvol.id, start, &mut bytes, externals) {
            Ok(()) if bytes == zeroes[..bytes.len()] => {}
            Ok(()) => {
                found.insert(chunk, hex(&Sha256::digest(&bytes)));
            }
            Err(_) => unreadable.push(chunk),
        }
    }
    (found, unreadable)
}

/// Clusters that SPDK leaves marked as used although no blob has them: where it failed to write beyond an external
/// device, and where it removed a half-deleted snapshot. Scanning finds them free.
fn leaked(case: &Case) -> u64 {
    match case.name.as_str() {
        "esnap-grown" => 2,
        "interrupted-delete-moved" => 1,
        _ => 0,
    }
}

fn check_store(image: &Image<&Sparse>, store: &Store) {
    assert_eq!(image.names.name, store.name);
    assert_eq!(image.names.uuid.to_string(), store.uuid);
    assert_eq!(u64::from(image.geometry.cluster_size), store.cluster_size);
    assert_eq!(u64::from(image.geometry.io_unit_size), store.io_unit_size);
    assert_eq!(u64::from(image.geometry.data_clusters()), store.total_data_clusters);
    assert_eq!(image.geometry.max_growable_size(), store.max_growable_size);
}

fn check_lvol(image: &Image<&Sparse>, lvol: &blobstore_golden::Lvol, externals: &Beside) {
    let name = &lvol.name;
    let found = image.find(name).unwrap_or_else(|| panic!("{name} is not found"));
    assert_eq!(found.names.uuid.to_string(), lvol.uuid, "{name}");
    assert_eq!(found.metadata.flags.thin(), lvol.thin, "{name}");
    assert_eq!(found.read_only, lvol.read_only, "{name}");
    assert_eq!(Some(image.size(found)), lvol.size, "{name}");
    assert_eq!(found.map.num_allocated(), lvol.num_allocated_clusters, "{name}");
    let parent = match &found.parent {
        Parent::Snapshot(id) => Some(image.lvol(*id).unwrap().names.name.clone()),
        Parent::None | Parent::External(_) => None,
    };
    assert_eq!(parent, lvol.parent, "{name}");
    let mut clones: Vec<_> = found.clones.iter().map(|id| &image.lvol(*id).unwrap().names.name).collect();
    let mut expected: Vec<_> = lvol.clones.iter().collect();
    clones.sort();
    expected.sort();
    assert_eq!(clones, expected, "{name}");
    let kind = match (&found.parent, found.clones.is_empty()) {
        (_, false) => "snapshot",
        (Parent::Snapshot(_), true) => "clone",
        (Parent::External(_), true) => "esnap clone",
        (Parent::None, true) => "lvol",
    };
    assert_eq!(kind, lvol.kind.as_deref().unwrap_or(kind), "{name}");
    let (chunks, unreadable) = chunks(image, found, externals);
    assert_eq!(chunks, lvol.chunks, "{name}");
    assert_eq!(unreadable, lvol.unreadable_chunks, "{name}");
}

#[test]
fn whole_images_show_what_spdk_finds() {
    for case in cases().iter().filter(|case| !case.is_damaged()) {
        println!("{}: {}", case.name, case.about);
        let (sparse, externals) = (case.image(), Beside::of(case));
        let image = Image::open(&sparse, Mode::AsMarked).unwrap();
        let (store, lvols) = case.expected().unwrap();
        assert_eq!(image.lost.iter().map(|lost| lost.problem.to_string()).collect::<Vec<_>>(), [""; 0]);
        check_store(&image, store);
        let leaked = leaked(case);
        assert_eq!(u64::from(image.free_clusters), store.free() + if image.recovered { leaked } else { 0 });
        assert_eq!(image.lvols().count(), lvols.len());
        lvols.iter().for_each(|lvol| check_lvol(&image, lvol, &externals));
        // Scanning finds the same as the masks.
        let recovered = Image::open(&sparse, Mode::Recover).unwrap();
        assert!(recovered.recovered);
        assert_eq!(recovered.names, image.names);
        assert_eq!(u64::from(recovered.free_clusters), store.free() + leaked);
        assert_eq!(recovered.lvols().count(), lvols.len());
    }
}

#[test]
fn without_its_external_device_an_lvol_has_no_contents() {
    for case in cases().iter().filter(|case| !case.is_damaged()) {
        let Some(degraded) = &case.without_external else { continue };
        let sparse = case.image();
        let image = Image::open(&sparse, Mode::AsMarked).unwrap();
        let mut found: Vec<_> = image
            .lvols()
            .filter(|lvol| {
                let mut top = *lvol;
                while let Parent::Snapshot(id) = &top.parent {
                    top = image.lvol(*id).unwrap();
                }
                matches!(top.parent, Parent::External(_))
            })
            .map(|lvol| lvol.names.name.clone())
            .collect();
        found.sort();
        assert_eq!(&found, degraded, "{}", case.name);
    }
}

#[test]
fn damaged_images_are_refused_or_lose_the_damaged_lvols() {
    for case in cases().iter().filter(|case| case.is_damaged()) {
        let sparse = case.image();
        println!("{}: {:?}", case.name, case.change);
        let image = match Image::open(&sparse, Mode::AsMarked) {
            Ok(image) => image,
            Err(error) => {
                println!("    refused: {error}");
                continue;
            }
        };
        assert!(!matches!(case.spdk_load, SpdkLoad::Refuses | SpdkLoad::Hangs | SpdkLoad::Crashes), "{}", case.name);
        // Whatever is served, SPDK serves it too, with the same contents.
        let externals = Beside::of(case);
        let (_, lvols) = case.expected().unwrap();
        for lost in &image.lost {
            println!("    {:?} is lost: {}", lost.name, lost.problem);
        }
        for found in image.lvols() {
            let lvol = lvols.iter().find(|lvol| lvol.name == found.names.name);
            let mut lvol = lvol.unwrap_or_else(|| panic!("SPDK has no {}", found.names.name)).clone();
            lvol.clones.retain(|name| image.find(name).is_some());
            lvol.kind = None;
            check_lvol(&image, &lvol, &externals);
        }
        assert_eq!(case.class, Class::Crafted);
    }
}

#[test]
fn beyond_the_end_of_a_shorter_parent_there_are_zeroes() {
    // No golden image has clusters of a grandparent there, so a snapshot is cut here.
    let case = blobstore_golden::case("chain-of-4");
    let mut sparse = case.image();
    let image = Image::open(&sparse, Mode::AsMarked).unwrap();
    // A cluster that neither an lvol nor its parent has, but an older snapshot: seen through both.
    let found = image.lvols().find_map(|lvol| {
        let Parent::Snapshot(parent) = &lvol.parent else { return None };
        let parent = image.lvol(*parent).unwrap();
        let through = |at: &u64| lvol.map.get(*at).is_none() && parent.map.get(*at).is_none();
        let at = (1..lvol.map.len()).rev().find(|at| through(at) && image.may_hold_data(lvol, *at))?;
        Some((lvol.id, parent, at))
    });
    let (id, parent, at) = found.unwrap();
    let cluster = u64::from(image.geometry.cluster_size);
    let read = |image: &Image<&Sparse>| {
        let mut bytes = vec![0; cluster as usize];
        image.read(id, at * cluster, &mut bytes, &()).unwrap();
        bytes
    };
    assert!(read(&image).iter().any(|b| *b != 0));
    // Now the parent ends before it.
    let mut short = parent.metadata.clone();
    let Extents::Table(table) = &mut short.extents else { panic!("it has no extent table") };
    let (page, geometry) = (table.allocated().next().unwrap().1, image.geometry);
    table.num_clusters = at;
    let clusters = (0..at).map(|at| parent.map.get(at).unwrap_or(0)).collect();
    let extents = ExtentPage { start_cluster: 0, clusters }.emit(parent.id);
    let root = short.emit().unwrap();
    let root_at = geometry.page_offset(parent.id.page().unwrap());
    assert_eq!(root.len(), 1);
    sparse.write(geometry.page_offset(page), &extents.emit());
    sparse.write(root_at, &root[0].emit());
    let image = Image::open(&sparse, Mode::AsMarked).unwrap();
    assert!(!image.may_hold_data(image.lvol(id).unwrap(), at));
    assert!(read(&image).iter().all(|b| *b == 0), "the grandparent shines through");
}
