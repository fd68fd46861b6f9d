# Drives the raid, passthru, crypto and keyring families with SPDK's own client, and prints what it was answered, so that
# two data planes can be compared. Arguments: part, RPC socket, folder with the disks, order of the disks.
import json, os, sys, time
from spdk.rpc.client import JSONRPCClient, JSONRPCException

part, socket, folder, order = sys.argv[1:5]
client = JSONRPCClient(socket, timeout=60)
answers = []

def note(what):
    answers.append(what)
    return what

def call(method, **params):
    return client.call(method, params or None)

def ask(method, **params):
    """A call whose answer, good or bad, is part of the comparison."""
    try:
        return note([method, call(method, **params)])[1]
    except JSONRPCException as error:
        text = str(error)
        code = next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith('"code":') or '"code"' in line)
        message = next(line.split(":", 1)[1].strip() for line in text.splitlines() if '"message"' in line)
        return note([method, params.get("name"), code.rstrip(","), message.rstrip(",")])

UUIDS = {name: f"6a0d1c5e-0000-4000-8000-00000000000{index}" for index, name in enumerate(["d0", "d1", "d2", "d3"])}
RAID = "5f0d1c5e-1111-4000-8000-000000000001"

def disk(name, block_size=512):
    assert call("bdev_aio_create", name=name, filename=f"{folder}/{name}", block_size=block_size, uuid=UUIDS[name]) == name

def shown(name):
    """Those members of a device that two data planes must agree on."""
    try:
        (device,) = call("bdev_get_bdevs", name=name)
    except JSONRPCException:
        return note([name, "is not there"])
    keys = ["name", "aliases", "product_name", "block_size", "num_blocks", "uuid", "claimed", "claim_type", "zoned",
            "driver_specific"]
    if aio := device["driver_specific"].get("aio"):
        aio["filename"] = os.path.basename(aio["filename"])
    return note({key: device.get(key) for key in keys})

def raids(category="all"):
    return ask("bdev_raid_get_bdevs", category=category)

def settled():
    """Waits for rebuilds to end."""
    deadline = time.time() + 60
    while any("process" in raid for raid in call("bdev_raid_get_bdevs", category="all")):
        assert time.time() < deadline, "a rebuild does not end"
        time.sleep(0.05)

def options():
    ask("bdev_raid_set_options", process_window_size_kb=0)
    ask("bdev_raid_set_options", process_window_size=5)
    ask("bdev_raid_set_options", process_window_size_kb="5")
    ask("bdev_raid_set_options", process_window_size_kb=512, process_max_bandwidth_mb_sec=0)
    saved = call("framework_get_config", name="bdev")
    note([entry for entry in saved if entry["method"] == "bdev_raid_set_options"])

def refused_raids():
    two = ["d0", "d1"]
    ask("bdev_raid_create", name="x", raid_level="raid7", base_bdevs=two)
    ask("bdev_raid_create", name="x", raid_level="raid1", base_bdevs=two, colour="red")
    ask("bdev_raid_create", raid_level="raid1", base_bdevs=two)
    ask("bdev_raid_create", name="x", raid_level="raid1")
    ask("bdev_raid_create", name="x", raid_level="raid1", base_bdevs=["d0"])
    ask("bdev_raid_create", name="x", raid_level="raid1", base_bdevs=["d0", ""])
    ask("bdev_raid_create", name="x", raid_level="raid1", base_bdevs=two, strip_size_kb=64)
    ask("bdev_raid_create", name="n" * 64, raid_level="raid1", base_bdevs=two)
    ask("bdev_raid_create", name="x", raid_level="raid5f", base_bdevs=["d0", "d1", "d2"], strip_size_kb=64)
    ask("bdev_raid_create", name="x", raid_level="raid1", base_bdevs=two, uuid="not-one")
    ask("bdev_raid_delete", name="x")
    ask("bdev_raid_delete")
    ask("bdev_raid_get_bdevs")
    ask("bdev_raid_get_bdevs", category="some")
    ask("bdev_raid_remove_base_bdev", name="d0")
    ask("bdev_raid_remove_base_bdev", name="nothing")
    ask("bdev_raid_remove_base_bdev")
    ask("bdev_raid_add_base_bdev", raid_bdev="x", base_bdev="d0")
    ask("bdev_raid_add_base_bdev", raid_bdev="x")
    raids()
    shown("d0")

def superblock_raid():
    ask("bdev_raid_create", name="R", raid_level="raid1", base_bdevs=["d0", "d1"], superblock=True, uuid=RAID)
    raids(), raids("online"), raids("configuring"), raids("offline")
    shown("R"), shown("d0")
    (device,) = call("bdev_get_bdevs", name="R")
    note(device["supported_io_types"])
    ask("bdev_raid_create", name="R", raid_level="raid1", base_bdevs=["d2", "d3"])
    ask("bdev_raid_create", name="S", raid_level="raid1", base_bdevs=["d2", "d1"])
    shown("d2")
    ask("bdev_raid_add_base_bdev", raid_bdev="R", base_bdev="d2")
    ask("bdev_raid_remove_base_bdev", name="d1")
    raids()
    shown("d1")
    ask("bdev_raid_remove_base_bdev", name="d1")
    ask("bdev_raid_add_base_bdev", raid_bdev="R", base_bdev="nothing")
    ask("bdev_raid_add_base_bdev", raid_bdev="R", base_bdev="d0")
    ask("bdev_raid_add_base_bdev", raid_bdev="R", base_bdev="d2")
    settled()
    raids()
    # Its place is taken now.
    ask("bdev_raid_add_base_bdev", raid_bdev="R", base_bdev="d1")
    ask("bdev_raid_create", name="S", raid_level="raid1", base_bdevs=["d1", "d3"])
    raids()
    ask("bdev_raid_remove_base_bdev", name="d0")
    ask("bdev_raid_add_base_bdev", raid_bdev="R", base_bdev="d0")
    settled()
    raids()
    saved = call("framework_get_config", name="bdev")
    note([entry for entry in saved if entry["method"] == "bdev_raid_create"])

def hot_removal():
    ask("bdev_aio_delete", name="d2")
    raids()
    # The disk returns and is rebuilt by itself.
    disk("d2")
    call("bdev_wait_for_examine")
    settled()
    raids()

def plain_raid():
    for name in ["m0", "m1"]:
        call("bdev_malloc_create", name=name, num_blocks=4096, block_size=512,
             uuid=f"7b0d1c5e-0000-4000-8000-00000000000{name[1]}")
    ask("bdev_raid_create", name="P", raid_level="1", base_bdevs=["m0", "later"], uuid="5f0d1c5e-1111-4000-8000-000000000002")
    raids("configuring")
    shown("P")
    call("bdev_malloc_create", name="later", num_blocks=8192, block_size=512, uuid="7b0d1c5e-0000-4000-8000-000000000009")
    call("bdev_wait_for_examine")
    raids("online")
    saved = call("framework_get_config", name="bdev")
    note([entry for entry in saved if entry["method"] == "bdev_raid_create"])
    ask("bdev_raid_remove_base_bdev", name="m0")
    saved = call("framework_get_config", name="bdev")
    note([entry for entry in saved if entry["method"] == "bdev_raid_create"])
    ask("bdev_raid_add_base_bdev", raid_bdev="P", base_bdev="m1")
    settled()
    raids("online")
    ask("bdev_malloc_delete", name="m1")
    # The last member takes the raid with it.
    ask("bdev_raid_remove_base_bdev", name="later")
    shown("P")
    raids()
    call("bdev_null_create", name="n0", num_blocks=100, block_size=4096)
    ask("bdev_raid_create", name="P", raid_level="raid1", base_bdevs=["m0", "n0"])
    raids(), shown("m0")
    call("bdev_null_delete", name="n0")

def passthru():
    ask("bdev_passthru_create", name="pt", base_bdev_name="m0")
    shown("pt"), shown("m0")
    ask("bdev_passthru_create", name="pt", base_bdev_name="m0")
    ask("bdev_passthru_create", name="pt")
    ask("bdev_passthru_create", name="pt", base_bdev_name="m0", size=5)
    ask("bdev_passthru_create", name="pt2", base_bdev_name="not-yet", uuid="8c0d1c5e-0000-4000-8000-000000000001")
    shown("pt2")
    call("bdev_malloc_create", name="not-yet", num_blocks=64, block_size=4096)
    call("bdev_wait_for_examine")
    device = shown("pt2")
    assert device["uuid"] == "8c0d1c5e-0000-4000-8000-000000000001", device
    saved = call("framework_get_config", name="bdev")
    note([entry for entry in saved if entry["method"] == "bdev_passthru_create" and entry["params"]["name"] == "pt2"])
    ask("bdev_malloc_delete", name="not-yet")
    shown("pt2")
    ask("bdev_passthru_delete", name="m0")
    ask("bdev_passthru_delete", name="nothing")
    ask("bdev_passthru_delete")
    ask("bdev_passthru_delete", name="pt")
    shown("pt"), shown("m0")

KEY, KEY2 = "00112233445566778899aabbccddeeff", "ffeeddccbbaa99887766554433221100"

def keys():
    ask("accel_crypto_keys_get")
    ask("accel_crypto_key_create", cipher="AES_XTS", key=KEY, key2=KEY2, name="k128")
    ask("accel_crypto_key_create", cipher="AES_XTS", key=KEY * 2, key2=KEY2 * 2, name="k256", tweak_mode="SIMPLE_LBA")
    ask("accel_crypto_key_create", cipher="AES_XTS", key=KEY, key2=KEY2, name="k128")
    ask("accel_crypto_key_create", cipher="AES_XTS", key=KEY, key2=KEY, name="x")
    ask("accel_crypto_key_create", cipher="AES_XTS", key=KEY, name="x")
    ask("accel_crypto_key_create", cipher="AES_XTS", key=KEY, key2=KEY2 * 2, name="x")
    ask("accel_crypto_key_create", cipher="AES_XTS", key="xy" * 16, key2=KEY2, name="x")
    ask("accel_crypto_key_create", cipher="AES_XTS", key=KEY[:30], key2=KEY2[:30], name="x")
    ask("accel_crypto_key_create", cipher="AES_XTS", key="", key2=KEY2, name="x")
    ask("accel_crypto_key_create", cipher="AES_CBC", key=KEY, name="x")
    ask("accel_crypto_key_create", cipher="ROT13", key=KEY, key2=KEY2, name="x")
    ask("accel_crypto_key_create", cipher="AES_XTS", key=KEY, key2=KEY2, name="x", tweak_mode="INCR_512_FULL_LBA")
    ask("accel_crypto_key_create", cipher="AES_XTS", key=KEY, key2=KEY2)
    ask("accel_crypto_keys_get")
    ask("accel_crypto_keys_get", key_name="k256")
    ask("accel_crypto_keys_get", key_name="x")
    ask("accel_crypto_keys_get", name="x")
    ask("accel_crypto_key_destroy", key_name="x")
    ask("accel_crypto_key_destroy")
    ask("accel_crypto_key_destroy", key_name="k256")
    saved = call("framework_get_config", name="accel")
    note([entry for entry in saved if entry["method"] == "accel_crypto_key_create"])

def crypto():
    ask("bdev_crypto_create", name="c", base_bdev_name="m0", key_name="nothing")
    ask("bdev_crypto_create", name="c", base_bdev_name="m0", colour="red")
    ask("bdev_crypto_create", name="c")
    ask("bdev_crypto_create", name="c", base_bdev_name="m0")
    ask("bdev_crypto_create", name="c", base_bdev_name="m0", key_name="k128")
    shown("c"), shown("m0")
    ask("bdev_crypto_create", name="c", base_bdev_name="m0", key_name="k128")
    ask("bdev_crypto_create", name="c2", base_bdev_name="m0", key_name="k128")
    ask("bdev_crypto_create", name="c3", base_bdev_name="not-yet-2", cipher="AES_XTS", key=KEY, key2=KEY2)
    ask("accel_crypto_keys_get", key_name="c3_AES_XTS")
    call("bdev_malloc_create", name="not-yet-2", num_blocks=64, block_size=4096, uuid="9d0d1c5e-0000-4000-8000-000000000001")
    call("bdev_wait_for_examine")
    shown("c3")
    saved = call("framework_get_config", name="bdev")
    note([entry for entry in saved if entry["method"] == "bdev_crypto_create"])
    ask("bdev_crypto_delete", name="c3")
    ask("accel_crypto_keys_get", key_name="c3_AES_XTS")
    ask("bdev_crypto_delete", name="m0")
    ask("bdev_crypto_delete")
    ask("bdev_crypto_delete", name="c")
    shown("c"), shown("m0")

def keyring():
    path = f"{folder}/key"
    with open(path, "w") as file:
        file.write("secret")
    for mode in [0o644, 0o640, 0o601]:
        os.chmod(path, mode)
        ask("keyring_file_add_key", name="key0", path=path)
    os.chmod(path, 0o600)
    ask("keyring_file_add_key", name="key0", path="key")
    ask("keyring_file_add_key", name="key0", path="/nonexistent")
    ask("keyring_file_add_key", name="key0")
    ask("keyring_file_add_key", name="ring:key0", path=path)
    ask("keyring_file_add_key", name="key0", path=path, colour="red")
    ask("keyring_file_add_key", name="key0", path=path)
    ask("keyring_file_add_key", name=":key0", path=path)
    found = call("keyring_get_keys")
    note([{key: value for key, value in entry.items() if key != "path"} for entry in found])
    saved = call("framework_get_config", name="keyring")
    note([entry["method"] for entry in saved if entry["params"].get("name") == "key0"])
    ask("keyring_file_remove_key", name="key9")
    ask("keyring_file_remove_key", name="key0", colour="red")
    ask("keyring_file_remove_key", name="key0")
    ask("keyring_get_keys")

if part == "calls":
    for name in order.split(","):
        disk(name)
    options()
    refused_raids()
    superblock_raid()
    hot_removal()
    plain_raid()
    passthru()
    keys()
    keyring()
    # Last, because a stock SPDK may be built without it.
    if "bdev_crypto_create" in call("rpc_get_methods"):
        crypto()
else:
    # After a start: what superblocks make of the disks, in this order.
    for name in order.split(","):
        disk(name)
        call("bdev_wait_for_examine")
        raids()
    settled()
    shown("R")
    raids()
    if part == "cleared":
        ask("bdev_raid_delete", name="R", clear_sb=True)
        raids()
        for name in ["d0", "d1", "d2"]:
            shown(name)
        ask("bdev_raid_create", name="T", raid_level="raid1", base_bdevs=["d0", "d2"], superblock=True, uuid=RAID)
        raids()
        ask("bdev_raid_delete", name="T")
        raids()

print(json.dumps(answers))
