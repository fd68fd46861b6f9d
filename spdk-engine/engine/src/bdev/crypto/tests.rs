//! Encrypted and handed-on devices, keys and their files, on simulated cores and disks.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use addax_hugepages::Buf;
use nvme_wire::Status;
use serde_json::{Value, json};

use super::xts::Xts;
use crate::bdev::{Bufs, IoOp, passthru};
use crate::keyring;
use crate::rpc::Methods;
use crate::testing::disk::Medium;
use crate::testing::{World, uuid};

const KEY: &str = "00112233445566778899aabbccddeeff";
const KEY2: &str = "ffeeddccbbaa99887766554433221100";

fn register(m: &mut Methods) {
    super::register(m);
    passthru::register(m);
    keyring::register(m);
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
}

fn world() -> (World, Arc<Medium>) {
    let medium = Medium::new(uuid(1), 4096, 512);
    let mut world = World::new(1, register);
    world.add_disk("base", &medium);
    (world, medium)
}

fn key(world: &mut World) {
    let params = json!({ "cipher": "AES_XTS", "key": KEY, "key2": KEY2, "name": "k" });
    assert_eq!(world.ok("accel_crypto_key_create", params), json!(true));
}

fn crypto(world: &mut World) {
    let params = json!({ "base_bdev_name": "base", "name": "c", "key_name": "k" });
    assert_eq!(world.ok("bdev_crypto_create", params), json!("c"));
}

/// `len` bytes that differ, cut at `cuts`.
fn pieces(len: usize, cuts: &[usize]) -> (Vec<u8>, Bufs) {
    let data: Vec<u8> = (0..len).map(|i| (i * 31 % 253) as u8).collect();
    let ends = cuts.iter().copied().chain([len]);
    let mut from = 0;
    let bufs = ends
        .map(|end| {
            let piece = Buf::copy_of(&data[from..end]).into_slice();
            from = end;
            piece
        })
        .collect();
    (data, bufs)
}

#[test]
fn the_base_holds_what_the_key_makes_of_it_however_buffers_are_cut() {
    for cuts in [&[][..], &[4096], &[100, 5000, 5001, 12288], &[16383]] {
        let (mut world, medium) = world();
        key(&mut world);
        crypto(&mut world);
        let handle = world.open("c", 1);
        let (data, bufs) = pieces(4 * 4096, cuts);
        let write = handle.begin(IoOp::Write { fua: true }, 7, 4, bufs);
        world.until(|| write.status().is_some());
        assert_eq!(write.status(), Some(Status::SUCCESS));
        assert_eq!(write.bytes(), data, "the submitter's bytes stay");
        let xts = Xts::new(&bytes(KEY), &bytes(KEY2)).unwrap();
        for (lba, block) in (7..).zip(data.chunks(4096)) {
            let mut expected = block.to_vec();
            xts.encrypt(lba, &mut expected);
            assert_eq!(medium.blocks(lba..lba + 1), expected);
        }
        let (_, bufs) = pieces(4 * 4096, cuts);
        bufs.iter().for_each(|buf| buf.fill(0));
        let read = handle.begin(IoOp::Read, 7, 4, bufs);
        world.until(|| read.status().is_some());
        assert_eq!((read.status(), read.bytes()), (Some(Status::SUCCESS), data));
    }
}

#[test]
fn zeroes_are_encrypted_and_the_rest_goes_through() {
    let (mut world, medium) = world();
    key(&mut world);
    crypto(&mut world);
    let handle = world.open("c", 1);
    let zeroes = handle.begin(IoOp::WriteZeroes, 3, 70, Bufs::new());
    world.until(|| zeroes.status() == Some(Status::SUCCESS));
    assert_ne!(medium.blocks(3..4), vec![0; 4096]);
    let read = handle.read(3, 70);
    world.until(|| read.status().is_some());
    assert_eq!(read.bytes(), vec![0; 70 * 4096]);
    let unmap = handle.begin(IoOp::Unmap, 3, 1, Bufs::new());
    let flush = handle.begin(IoOp::Flush, 0, 0, Bufs::new());
    let reset = handle.begin(IoOp::Reset, 0, 0, Bufs::new());
    world.until(|| [&unmap, &flush, &reset].iter().all(|io| io.status() == Some(Status::SUCCESS)));
    assert_eq!(medium.blocks(3..4), vec![0; 4096]);
    medium.fail_reads(0..u64::MAX);
    let read = handle.read(3, 1);
    world.until(|| read.status().is_some());
    assert_eq!(read.status(), Some(Status::UNRECOVERED_READ_ERROR));
}

/// The pool of the simulated engine has eight large buffers.
#[test]
fn writes_wait_for_buffers_in_their_order() {
    let (mut world, medium) = world();
    key(&mut world);
    crypto(&mut world);
    medium.late_ns.store(2_000_000, Ordering::Relaxed);
    let handle = world.open("c", 1);
    let writes: Vec<_> = (0..20).map(|n| handle.write(n * 20, 20, n as u8 + 1)).collect();
    let second: Vec<_> = (0..20).map(|n| handle.write(n * 20, 1, n as u8 + 101)).collect();
    handle.close();
    world.until(|| writes.iter().chain(&second).all(|w| w.status() == Some(Status::SUCCESS)));
    medium.late_ns.store(0, Ordering::Relaxed);
    let handle = world.open("c", 1);
    let read = handle.read(7 * 20, 20);
    world.until(|| read.status().is_some());
    assert_eq!(&read.bytes()[4096..], vec![8; 19 * 4096]);
}

#[test]
fn keys_are_refused_and_shown_as_by_spdk() {
    let (mut world, _) = world();
    let mut refused = |params: Value, code: i64, text: &str| {
        let error = world.call("accel_crypto_key_create", params).unwrap_err();
        assert_eq!((error.code, error.message.as_str()), (code, text));
    };
    let with = |key: &str, key2: &str| json!({ "cipher": "AES_XTS", "key": key, "key2": key2, "name": "k" });
    let invalid = "failed to create DEK, rc -22";
    refused(with(KEY, KEY), -32602, invalid);
    refused(with(KEY, &KEY2[2..]), -32602, invalid);
    refused(with("zz112233445566778899aabbccddeeff", KEY2), -32602, invalid);
    refused(json!({ "cipher": "AES_XTS", "key": KEY, "name": "k" }), -32602, invalid);
    refused(json!({ "cipher": "AES_CBC", "key": KEY, "name": "k" }), -32602, invalid);
    let mut mode = with(KEY, KEY2);
    mode["tweak_mode"] = json!("INCR_512_FULL_LBA");
    refused(mode, -32602, invalid);
    refused(json!({ "cipher": "AES_XTS", "key": 5, "name": "k" }), -32700, "spdk_json_decode_object failed");
    key(&mut world);
    let error = world.call("accel_crypto_key_create", with(KEY, KEY2)).unwrap_err();
    assert_eq!(error.message, "failed to create DEK, rc -17");
    let shown = world.ok("accel_crypto_keys_get", Value::Null);
    let expected = json!({ "name": "k", "cipher": "AES_XTS", "key": KEY, "key2": KEY2, "tweak_mode": "SIMPLE_LBA" });
    assert_eq!(shown, json!([expected]));
    assert_eq!(world.saved("accel"), [("accel_crypto_key_create".to_owned(), expected)]);
    crypto(&mut world);
    let error = world.call("accel_crypto_key_destroy", json!({ "key_name": "k" })).unwrap_err();
    assert_eq!(error.message, "Failed to destroy key, rc -16");
    assert_eq!(world.ok("bdev_crypto_delete", json!({ "name": "c" })), json!(true));
    assert_eq!(world.ok("accel_crypto_key_destroy", json!({ "key_name": "k" })), json!(true));
    let debug = format!("{:?}", Xts::new(&bytes(KEY), &bytes(KEY2)));
    assert_eq!(debug, "Some(Xts)");
}

#[test]
fn devices_come_and_go_with_their_base_and_their_own_key() {
    let (mut world, medium) = world();
    let legacy = json!({ "base_bdev_name": "later", "name": "c", "key": KEY, "key2": KEY2, "cipher": "AES_XTS" });
    assert_eq!(world.ok("bdev_crypto_create", legacy.clone()), json!("c"));
    assert_eq!(world.call("bdev_crypto_create", legacy).unwrap_err().code, -17);
    let pass = json!({ "base_bdev_name": "c", "name": "p" });
    assert_eq!(world.ok("bdev_passthru_create", pass), json!("p"));
    assert!(world.app.registry().find("c").is_none());
    let later = Medium::new(uuid(2), 4096, 64);
    world.add_disk("later", &later);
    let registry = std::rc::Rc::clone(world.app.registry());
    let device = registry.find("p").unwrap();
    let namespace = uuid::Uuid::parse_str("7e25812e-c8c0-4d3f-8599-16d790555b85").unwrap();
    let crypto_uuid = registry.find("c").unwrap().bdev.info().uuid;
    assert_eq!(device.bdev.info().uuid, uuid::Uuid::new_v5(&namespace, crypto_uuid.as_bytes()));
    assert_eq!(device.bdev.driver_specific(), json!({ "passthru": { "name": "p", "base_bdev_name": "c" } }));
    assert_eq!(registry.claimed_by("later"), Some("crypto"));
    assert_eq!(world.saved("bdev")[0].1["key_name"], "c_AES_XTS");
    let handle = world.open("p", 1);
    let write = handle.write(0, 2, 5);
    world.until(|| write.status() == Some(Status::SUCCESS));
    handle.close();
    later.grow(128);
    registry.resized("later");
    assert_eq!(registry.find("p").unwrap().bdev.num_blocks(), 128);

    world.pull_disk("later");
    world.rounds(50);
    assert!(registry.find("c").is_none() && registry.find("p").is_none());
    world.add_disk("later", &later);
    assert!(registry.find("p").is_some(), "back with its base");
    let busy = json!({ "base_bdev_name": "later", "name": "q" });
    assert_eq!(world.call("bdev_passthru_create", busy).unwrap_err().code, -1);
    world.ok("bdev_passthru_delete", json!({ "name": "p" }));
    assert_eq!(world.call("bdev_passthru_delete", json!({ "name": "c" })).unwrap_err().code, -19);
    world.ok("bdev_crypto_delete", json!({ "name": "c" }));
    assert_eq!(world.ok("accel_crypto_keys_get", Value::Null), json!([]), "its own key goes with it");
    assert!(registry.claimed_by("later").is_none());
    drop(medium);
}

#[test]
fn a_key_from_a_file_of_the_keyring_is_named_and_nothing_else() {
    let (mut world, medium) = world();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("key");
    std::fs::write(&path, format!("{KEY}{KEY2}\n")).unwrap();
    let set_mode = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    set_mode(0o640);
    let add = |name: &str, path: &str| json!({ "name": name, "path": path, "unknown": 1 });
    let path_text = path.to_str().unwrap();
    let mut refused = |params: Value, code: i64| {
        let error = world.call("keyring_file_add_key", params).unwrap_err();
        assert_eq!(error.code, code, "{error:?}");
    };
    refused(add("f", path_text), -1);
    refused(add("f", "relative"), -1);
    refused(add("f", "/nonexistent/key"), -2);
    refused(add("other:f", path_text), -22);
    refused(json!({ "name": "f" }), -32602);
    set_mode(0o600);
    world.ok("keyring_file_add_key", add("f", path_text));
    assert_eq!(world.call("keyring_file_add_key", add(":f", path_text)).unwrap_err().code, -17);
    let shown = json!([{ "name": "f", "module": "keyring_file", "removed": false, "probed": false, "refcnt": 1,
        "path": path_text }]);
    assert_eq!(world.ok("keyring_get_keys", json!({})), shown);

    let create = json!({ "base_bdev_name": "base", "name": "c", "key_name": "f" });
    set_mode(0o644);
    let error = world.call("bdev_crypto_create", create.clone()).unwrap_err();
    assert_eq!((error.code, error.message.as_str()), (-32602, "Key was not found"));
    set_mode(0o400);
    assert_eq!(world.ok("bdev_crypto_create", create.clone()), json!("c"));
    let handle = world.open("c", 1);
    let write = handle.write(9, 1, 5);
    world.until(|| write.status() == Some(Status::SUCCESS));
    let mut expected = vec![5; 4096];
    Xts::new(&bytes(KEY), &bytes(KEY2)).unwrap().encrypt(9, &mut expected);
    assert_eq!(medium.blocks(9..10), expected);
    assert_eq!(world.saved("accel"), []);
    assert_eq!(world.saved("bdev"), [("bdev_crypto_create".to_owned(), create)]);
    assert_eq!(world.saved("keyring")[0].1["path"], path_text);
    world.ok("keyring_file_remove_key", json!({ "name": "f" }));
    let error = world.call("keyring_file_remove_key", json!({ "name": "f" })).unwrap_err();
    assert_eq!((error.code, error.message.as_str()), (-126, "Required key not available"));
}
