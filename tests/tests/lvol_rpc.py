"""Calls every method of the lvol family and prints the answers as JSON, with what differs from run to run replaced.

Arguments: the part to run ("calls" or "reopened"), the socket, a folder with the files disk, external and target.
"""
import json
import re
import sys
import time

from spdk.rpc.client import JSONRPCClient, JSONRPCException

part, socket, folder = sys.argv[1:4]
client = JSONRPCClient(socket, timeout=60)
answers = []
known = {}
EXTERNAL_UUID = "5a3e8f60-64a7-4f4e-9b1e-3c1f4c1d2e3f"
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def plain(value):
    """The same value on every run: UUIDs numbered in order of appearance."""
    text = json.dumps(value)
    return json.loads(UUID.sub(lambda m: known.setdefault(m.group(), f"uuid{len(known)}"), text))


def call(method, **params):
    shown = f"{method} {json.dumps(params, sort_keys=True).replace(folder, '')}"
    try:
        answer = client.call(method, params)
    except JSONRPCException as error:
        found = re.search(r"response:\s*(\{.*\})", str(error), re.S)
        answer = {"error": json.loads(found.group(1)) if found else str(error)}
    answers.append(plain({"call": shown, "answer": answer}))
    return answer


def ok(method, **params):
    answer = call(method, **params)
    assert not (isinstance(answer, dict) and "error" in answer), (method, params, answer)
    return answer


def refused(method, **params):
    answer = call(method, **params)
    assert isinstance(answer, dict) and "error" in answer, (method, params, answer)


def devices(*names):
    """What both engines say alike of devices."""
    for name in names:
        (device,) = client.call("bdev_get_bdevs", {"name": name})
        wanted = ["name", "aliases", "product_name", "block_size", "num_blocks", "uuid", "claimed", "zoned",
                  "driver_specific"]
        shown = {key: device[key] for key in wanted}
        shown["claim_type"] = device.get("claim_type")
        # Beyond SPDK: a flush of a volume is passed on.
        types = {key: on for key, on in device["supported_io_types"].items() if key != "flush"}
        shown["supported_io_types"] = types if name not in ("disk", "external", "target") else None
        shown["driver_specific"] = device["driver_specific"].get("lvol")
        answers.append({"call": f"device {name}", "answer": plain(shown)})


def lists():
    for method in ["bdev_lvol_get_lvstores", "bdev_lvol_get_lvols"]:
        listed = client.call(method)
        answers.append({"call": method, "answer": plain(sorted(listed, key=lambda e: e.get("alias", e["name"])))})


def attach():
    ok("bdev_aio_create", name="external", filename=f"{folder}/external", block_size=512, uuid=EXTERNAL_UUID)
    ok("bdev_aio_create", name="target", filename=f"{folder}/target", block_size=512)
    ok("bdev_aio_create", name="disk", filename=f"{folder}/disk", block_size=512)
    ok("bdev_wait_for_examine")


def stores():
    create = dict(bdev_name="disk", lvs_name="lvs", cluster_sz=1048576)
    refused("bdev_lvol_create_lvstore", **{**create, "bdev_name": "nothing"})
    refused("bdev_lvol_create_lvstore", **{**create, "lvs_name": ""})
    refused("bdev_lvol_create_lvstore", **{**create, "lvs_name": "n" * 64})
    refused("bdev_lvol_create_lvstore", **{**create, "cluster_sz": 100})
    refused("bdev_lvol_create_lvstore", **{**create, "cluster_sz": 512})
    refused("bdev_lvol_create_lvstore", **{**create, "md_page_size": 5000})
    refused("bdev_lvol_create_lvstore", **{**create, "clear_method": "burn"})
    refused("bdev_lvol_create_lvstore", **{**create, "colour": "red"})
    refused("bdev_lvol_create_lvstore", bdev_name="disk")
    ok("bdev_lvol_create_lvstore", **create, clear_method="none")
    refused("bdev_lvol_create_lvstore", **{**create, "lvs_name": "other"})
    refused("bdev_lvol_create_lvstore", **{**create, "bdev_name": "target"})
    devices("disk")
    refused("bdev_lvol_rename_lvstore", old_name="nothing", new_name="x")
    refused("bdev_lvol_rename_lvstore", old_name="lvs")
    ok("bdev_lvol_rename_lvstore", old_name="lvs", new_name="lvs")
    ok("bdev_lvol_rename_lvstore", old_name="lvs", new_name="store")
    refused("bdev_lvol_get_lvstores", lvs_name="lvs")
    refused("bdev_lvol_get_lvstores", uuid="x", lvs_name="store")
    refused("bdev_lvol_get_lvstores", uuid="not-a-uuid")
    ok("bdev_lvol_get_lvstores", lvs_name="store")
    refused("bdev_lvol_get_lvols", lvs_name="lvs")
    ok("bdev_lvol_get_lvols", lvs_name="store")
    refused("bdev_lvol_delete_lvstore", lvs_name="lvs")
    refused("bdev_lvol_grow_lvstore", lvs_name="lvs")
    ok("bdev_lvol_grow_lvstore", lvs_name="store")
    ok("bdev_lvol_delete_lvstore", lvs_name="store")
    devices("disk")
    ok("bdev_lvol_create_lvstore", **create, num_md_pages_per_cluster_ratio=200)


def volumes():
    create = dict(lvol_name="thick", size_in_mib=5, lvs_name="lvs")
    refused("bdev_lvol_create", **{**create, "lvs_name": "nothing"})
    refused("bdev_lvol_create", lvol_name="thick", size_in_mib=5)
    refused("bdev_lvol_create", **{**create, "lvol_name": ""})
    refused("bdev_lvol_create", **{**create, "lvol_name": "n" * 64})
    refused("bdev_lvol_create", **{**create, "size_in_mib": 100000})
    refused("bdev_lvol_create", **{**create, "size_in_mib": -1})
    refused("bdev_lvol_create", **{**create, "size_in_mib": "5"})
    refused("bdev_lvol_create", **{**create, "clear_method": "burn"})
    ok("bdev_lvol_create", **create)
    refused("bdev_lvol_create", **create)
    ok("bdev_lvol_create", **{**create, "lvol_name": "thin", "thin_provision": True, "clear_method": "write_zeroes"})
    devices("lvs/thick", "lvs/thin")
    for method, name in [("bdev_lvol_rename", "old_name"), ("bdev_lvol_resize", "name"),
                         ("bdev_lvol_set_read_only", "name"), ("bdev_lvol_inflate", "name"),
                         ("bdev_lvol_decouple_parent", "name"), ("bdev_lvol_delete", "name")]:
        more = {"bdev_lvol_rename": {"new_name": "x"}, "bdev_lvol_resize": {"size_in_mib": 1}}.get(method, {})
        refused(method, **{name: "lvs/nothing"}, **more)
        refused(method, **{name: "target"}, **more)
        refused(method)
    refused("bdev_lvol_rename", old_name="lvs/thick", new_name="thin")
    ok("bdev_lvol_rename", old_name="lvs/thick", new_name="fat")
    ok("bdev_lvol_rename", old_name="lvs/fat", new_name="thick")
    ok("bdev_lvol_resize", name="lvs/thick", size_in_mib=9)
    ok("bdev_lvol_resize", name="lvs/thin", size_in_mib=20)
    ok("bdev_lvol_resize", name="lvs/thin", size_in_mib=10)
    refused("bdev_lvol_resize", name="lvs/thick", size_in_mib=100000)
    devices("lvs/thick", "lvs/thin")
    lists()


def snapshots():
    refused("bdev_lvol_snapshot", lvol_name="lvs/nothing", snapshot_name="s")
    refused("bdev_lvol_snapshot", lvol_name="target", snapshot_name="s")
    refused("bdev_lvol_snapshot", lvol_name="lvs/thin", snapshot_name="thick")
    refused("bdev_lvol_snapshot", lvol_name="lvs/thin", snapshot_name="")
    ok("bdev_lvol_snapshot", lvol_name="lvs/thick", snapshot_name="s1")
    ok("bdev_lvol_snapshot", lvol_name="lvs/thin", snapshot_name="s2")
    ok("bdev_lvol_snapshot", lvol_name="lvs/thin", snapshot_name="s3")
    refused("bdev_lvol_snapshot", lvol_name="lvs/s3", snapshot_name="s4")
    refused("bdev_lvol_clone", snapshot_name="lvs/thin", clone_name="c")
    refused("bdev_lvol_clone", snapshot_name="lvs/nothing", clone_name="c")
    refused("bdev_lvol_clone", snapshot_name="lvs/s1", clone_name="thin")
    ok("bdev_lvol_clone", snapshot_name="lvs/s1", clone_name="c1")
    ok("bdev_lvol_clone", snapshot_name="lvs/s3", clone_name="c3")
    devices("lvs/thick", "lvs/thin", "lvs/s1", "lvs/s2", "lvs/s3", "lvs/c1", "lvs/c3")
    refused("bdev_lvol_delete", name="lvs/s1")
    refused("bdev_lvol_rename", old_name="lvs/c1", new_name="c3")
    refused("bdev_lvol_resize", name="lvs/s1", size_in_mib=1)
    call("bdev_lvol_inflate", name="lvs/s1")
    lists()
    ok("bdev_lvol_decouple_parent", name="lvs/c1")
    refused("bdev_lvol_decouple_parent", name="lvs/c1")
    ok("bdev_lvol_inflate", name="lvs/c3")
    ok("bdev_lvol_delete", name="lvs/s2")
    devices("lvs/thin", "lvs/s3", "lvs/c1", "lvs/c3")
    lists()
    ok("bdev_lvol_set_read_only", name="lvs/c1")
    refused("bdev_lvol_resize", name="lvs/c1", size_in_mib=1)
    ok("bdev_lvol_delete", name="lvs/c1")
    ok("bdev_lvol_delete", name=client.call("bdev_get_bdevs", {"name": "lvs/c3"})[0]["name"])
    refused("bdev_lvol_delete", name="lvs/c3")


def parents():
    ok("bdev_lvol_create", lvol_name="p", size_in_mib=8, lvs_name="lvs", thin_provision=True)
    ok("bdev_lvol_snapshot", lvol_name="lvs/p", snapshot_name="p1")
    ok("bdev_lvol_create", lvol_name="q", size_in_mib=8, lvs_name="lvs", thin_provision=True)
    refused("bdev_lvol_set_parent", lvol_name="lvs/q", parent_name="lvs/nothing")
    refused("bdev_lvol_set_parent", lvol_name="lvs/nothing", parent_name="lvs/p1")
    refused("bdev_lvol_set_parent", lvol_name="lvs/q", parent_name="target")
    refused("bdev_lvol_set_parent", lvol_name="lvs/q", parent_name="lvs/thin")
    refused("bdev_lvol_set_parent", lvol_name="lvs/q", parent_name="lvs/s1")
    ok("bdev_lvol_set_parent", lvol_name="lvs/q", parent_name="lvs/p1")
    refused("bdev_lvol_set_parent", lvol_name="lvs/q", parent_name="lvs/p1")
    refused("bdev_lvol_set_parent_bdev", lvol_name="lvs/q", parent_name="nothing")
    refused("bdev_lvol_set_parent_bdev", lvol_name="lvs/nothing", parent_name="external")
    ok("bdev_lvol_set_parent_bdev", lvol_name="lvs/q", parent_name="external")
    refused("bdev_lvol_clone_bdev", bdev="external", lvs_name="nothing", clone_name="e")
    refused("bdev_lvol_clone_bdev", bdev="nothing", lvs_name="lvs", clone_name="e")
    refused("bdev_lvol_clone_bdev", bdev="lvs/thin", lvs_name="lvs", clone_name="e")
    refused("bdev_lvol_clone_bdev", bdev="external", lvs_name="lvs", clone_name="thin")
    ok("bdev_lvol_clone_bdev", bdev="external", lvs_name="lvs", clone_name="e")
    ok("bdev_lvol_clone_bdev", bdev=EXTERNAL_UUID, lvs_name="lvs", clone_name="f")
    ok("bdev_lvol_snapshot", lvol_name="lvs/f", snapshot_name="f1")
    devices("external", "lvs/p", "lvs/p1", "lvs/q", "lvs/e", "lvs/f", "lvs/f1")
    ok("bdev_lvol_inflate", name="lvs/q")
    devices("lvs/q")
    lists()


def copies():
    def copy(source, target):
        answer = call("bdev_lvol_start_shallow_copy", src_lvol_name=source, dst_bdev_name=target)
        if "error" in answer:
            return
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            state = client.call("bdev_lvol_check_shallow_copy", {"operation_id": answer["operation_id"]})
            if state["state"] != "in progress":
                answers.append({"call": f"copied {source} to {target}", "answer": state})
                return
            time.sleep(0.01)
        raise AssertionError("the copy does not end")

    copy("lvs/nothing", "target")
    copy("lvs/s1", "nothing")
    copy("lvs/s1", "disk")
    copy("lvs/thick", "target")
    copy("lvs/s1", "external")
    copy("lvs/s1", "target")
    refused("bdev_lvol_check_shallow_copy", operation_id=1000)


if part == "calls":
    attach()
    stores()
    volumes()
    snapshots()
    parents()
    copies()
    refused("bdev_lvol_set_xattr", name="lvs/thin")
else:
    attach()
    lists()
    devices("lvs/thick", "lvs/thin", "lvs/s1", "lvs/s3", "lvs/p", "lvs/p1", "lvs/q", "lvs/e", "lvs/f", "lvs/f1")
    # Found by examine, and nothing of it saved.
    saved = client.call("framework_get_config", {"name": "bdev"})
    assert not [e for e in saved if e["method"].startswith("bdev_lvol")], saved
    # Without its external device a clone has no device; it comes back with it.
    ok("bdev_aio_delete", name="disk")
    ok("bdev_aio_delete", name="external")
    ok("bdev_aio_create", name="disk", filename=f"{folder}/disk", block_size=512)
    ok("bdev_wait_for_examine")
    lists()
    refused("bdev_get_bdevs", name="lvs/e")
    ok("bdev_aio_create", name="external", filename=f"{folder}/external", block_size=512, uuid=EXTERNAL_UUID)
    devices("lvs/e", "lvs/f", "lvs/f1")
    lists()

print(json.dumps(answers))
