//! The blob tool from outside: exit codes, both outputs, and that it leaves the image alone.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use blobstore_format::ReadAt;
use blobstore_golden::case;
use serde_json::Value;

/// Writes a golden image into a file with holes, `start` bytes into it.
fn image(folder: &Path, name: &str, start: u64) -> PathBuf {
    let (sparse, path) = (case(name).image(), folder.join(name));
    let file = File::create(&path).unwrap();
    file.set_len(start + sparse.size()).unwrap();
    let mut buf = vec![0; 16 << 10];
    let mut next = sparse.next_data(0).unwrap();
    while let Some(at) = next {
        let n = (sparse.size() - at).min(buf.len() as u64) as usize;
        sparse.read_at(at, &mut buf[..n]).unwrap();
        file.write_all_at(&buf[..n], start + at).unwrap();
        next = sparse.next_data(at + n as u64).unwrap();
    }
    path
}

fn blob(args: &[&str], image: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_addax-engine")).arg("blob").args(args).arg(image).output().unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn check_tells_by_exit_code_and_in_both_outputs() {
    let folder = tempfile::tempdir().unwrap();
    let good = blob(&["check"], &image(folder.path(), "crafted-base", 0));
    assert_eq!(good.status.code(), Some(0), "{good:?}");
    assert_eq!(String::from_utf8_lossy(&good.stdout), "the store opens: 5 lvols; 0 errors, 0 warnings\n");

    let path = image(folder.path(), "crafted-md-next-self", 0);
    let before = std::fs::read(&path).unwrap();
    let bad = blob(&["check"], &path);
    assert_eq!(bad.status.code(), Some(1), "{bad:?}");
    assert!(
        String::from_utf8_lossy(&bad.stdout).contains("error [chain-cycle] page 10 0x10000000a (\"delta\")"),
        "{bad:?}"
    );
    let bad = blob(&["check", "-o", "json"], &path);
    assert_eq!(bad.status.code(), Some(1));
    let report = json(&bad);
    let findings = report["findings"].as_array().unwrap();
    let cycle = findings.iter().find(|f| f["kind"] == "chain-cycle").unwrap();
    assert_eq!(cycle["severity"], "error");
    assert_eq!(cycle["place"]["page"], 10);
    assert_eq!(cycle["blob"], "0x10000000a");
    assert_eq!(report["outcome"]["opens"]["lost"], 1);
    assert_eq!(std::fs::read(&path).unwrap(), before, "the image was changed");
}

#[test]
fn dump_shows_what_the_store_holds() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), "crafted-base", 0);
    let text = blob(&["dump"], &path);
    assert_eq!(text.status.code(), Some(0), "{text:?}");
    let shown = String::from_utf8_lossy(&text.stdout);
    for part in ["type \"LVOLSTORE\"", "\"alpha-snap\"", "internal xattr SNAP: 0x100000006", "used-cluster mask"] {
        assert!(shown.contains(part), "{part} is not in {shown}");
    }
    let dump = json(&blob(&["dump", "-o", "json"], &path));
    assert_eq!(dump["super_block"]["cluster_size"], 1 << 20);
    let names: Vec<_> = dump["blobs"].as_array().unwrap().iter().filter_map(|b| b["name"].as_str()).collect();
    assert_eq!(names, ["craft_store", "alpha", "beta", "alpha-snap", "gamma", "delta"]);
}

#[test]
fn a_store_within_a_device_is_found_by_its_offset() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), "crafted-base", 1 << 20);
    let without = blob(&["check"], &path);
    assert_eq!(without.status.code(), Some(2));
    let with = blob(&["check", "--offset", "1048576"], &path);
    assert_eq!(with.status.code(), Some(0), "{with:?}");
}

#[test]
fn what_cannot_be_read_is_told_apart_from_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty");
    File::create(&empty).unwrap();
    for (path, text) in [
        (folder.path().join("absent"), "No such file"),
        (empty, "the super block is 0 bytes long"),
        (image(folder.path(), "crafted-super-signature", 0), "SPDKBLOC"),
    ] {
        for tool in ["check", "dump"] {
            let output = blob(&[tool], &path);
            assert_eq!(output.status.code(), Some(2), "{tool}: {output:?}");
            assert!(String::from_utf8_lossy(&output.stderr).contains(text), "{tool}: {output:?}");
        }
    }
}

#[test]
fn help_has_an_example() {
    for tool in ["check", "dump"] {
        let help = Command::new(env!("CARGO_BIN_EXE_addax-engine")).args(["blob", tool, "--help"]).output().unwrap();
        assert!(help.status.success());
        assert!(String::from_utf8_lossy(&help.stdout).contains(&format!("Example: addax-engine blob {tool}")));
    }
}
