//! Raids on simulated cores and disks.
mod assembly;
mod basics;
mod crash;
mod rebuild;

use std::sync::Arc;

use blobstore_format::raid::RaidSuperblock;
use serde_json::{Value, json};

use crate::testing::disk::Medium;
use crate::testing::{World, uuid};

/// Blocks of 4096 bytes before the data.
const DATA_OFFSET: u64 = 256;
/// Blocks of data in small raids.
const DATA: u64 = 64;

fn world() -> World {
    World::new(2, super::register)
}

/// A disk for a raid of [`DATA`] blocks.
fn medium(number: u128) -> Arc<Medium> {
    Medium::new(uuid(number), 4096, DATA_OFFSET + DATA)
}

fn media(count: u128) -> Vec<Arc<Medium>> {
    (0..count).map(medium).collect()
}

/// A world with disks `d0`, `d1`, … over media.
fn world_with(media: &[Arc<Medium>]) -> World {
    let mut world = world();
    for (index, medium) in media.iter().enumerate() {
        world.add_disk(&format!("d{index}"), medium);
    }
    world
}

/// A raid `r` with superblocks over `d0`, `d1`, ….
fn create(world: &mut World, count: usize) {
    let members: Vec<String> = (0..count).map(|n| format!("d{n}")).collect();
    let params = json!({ "name": "r", "raid_level": "raid1", "base_bdevs": members, "superblock": true });
    assert_eq!(world.ok("bdev_raid_create", params), json!(true));
}

fn raid(world: &mut World) -> Value {
    world.ok("bdev_raid_get_bdevs", json!({ "category": "all" }))[0].clone()
}

fn superblock(medium: &Medium) -> RaidSuperblock {
    RaidSuperblock::parse(&medium.blocks(0..2)).unwrap()
}

/// Turns until no rebuild runs.
fn until_rebuilt(world: &mut World) {
    while !raid(world)["process"].is_null() {
        world.rounds(10);
    }
}

/// Whether all media have the same data.
fn same_data(media: &[&Arc<Medium>]) -> bool {
    let data = |medium: &Arc<Medium>| medium.blocks(DATA_OFFSET..DATA_OFFSET + DATA);
    media.windows(2).all(|pair| data(pair[0]) == data(pair[1]))
}
