"""What the engine suite does not show of Mooncake: settings, registration, blobs, and whether it is there at all."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from mooncake_here import FAST, MIB, opened, with_process

from engine_here import need
from kvferry.engines import child, find
from kvferry.engines.grants import GrantTable
from kvferry.engines.mooncake import MooncakeEngine, instance, library, tryout
from kvferry.engines.mooncake.options import DEFAULT_TIMEOUT_S, parse
from kvferry.engines.seam import MAX_BLOB_BYTES, Batch, EngineConfig, Outcome, Region
from kvferry.errors import ConfigError, EngineError, EngineUnavailable
from kvferry.ids import PeerId

need("mooncake")


@pytest.fixture
def suite():
    yield from opened()


@pytest.fixture
def attached(suite):
    return with_process(suite)


# options and environment


def test_options_have_defaults_and_an_unknown_one_is_refused_with_the_known_names(monkeypatch):
    monkeypatch.delenv("MC_TRANSFER_TIMEOUT", raising=False)
    assert parse({}) == ("tcp", "", DEFAULT_TIMEOUT_S)
    with pytest.raises(ConfigError, match=r"no option 'device'.*'protocol', 'devices', 'gpu', 'timeout_s'"):
        parse({"device": "mlx5_0"})


@pytest.mark.parametrize("text", ["4", "x", "-1", "3601", "5.5"])
def test_a_timeout_that_the_library_would_not_take_is_refused(text):
    with pytest.raises(ConfigError, match=r"'timeout_s'.*5 to 3600"):
        parse({"timeout_s": text})


@pytest.mark.parametrize(("given", "seconds"), [("60", 60), ("2", 5), ("soon", DEFAULT_TIMEOUT_S)])
def test_the_librarys_own_variable_is_the_default(given, seconds, monkeypatch):
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", given)
    assert parse({}).timeout_s == seconds


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"devices": "mlx5_0"}, "mlx5_0"),
        ({"devices": " mlx5_0, mlx5_1 ,"}, "mlx5_0,mlx5_1"),
        ({"devices": '{"0": "mlx5_0", "3": "mlx5_3,mlx5_4"}', "gpu": "3"}, "mlx5_3,mlx5_4"),
    ],
)
def test_devices_are_a_name_a_list_or_a_table_by_accelerator(options, names):
    assert parse(options).devices == names


@pytest.mark.parametrize(
    ("devices", "why"), [("{", "JSON object"), ('{"1": "a"}', "entry for GPU 1"), ("{}", "for GPU none")]
)
def test_devices_that_say_nothing_for_this_process_are_refused(devices, why):
    with pytest.raises(ConfigError, match=why):
        parse({"devices": devices})


@pytest.mark.parametrize(("name", "value"), [("MC_TCP_PROTO", "1"), ("MC_TCP_SLICE_SIZE", "4096")])
def test_settings_under_which_outcomes_would_not_be_true_are_refused(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        MooncakeEngine().open(EngineConfig(PeerId(1), GrantTable()))


def test_a_host_without_an_address_of_this_machine_can_not_be_reached(suite):
    elsewhere = MooncakeEngine()
    elsewhere.open(EngineConfig(PeerId(7), GrantTable(), advertise_host="192.0.2.1", options=FAST))
    said = msgspec.msgpack.decode(elsewhere.describe())
    assert said["session"].startswith("192.0.2.1:")
    elsewhere.close()


def test_the_transport_is_what_the_library_uses_not_what_was_asked_for(monkeypatch):
    engine = MooncakeEngine()
    engine.open(EngineConfig(PeerId(1), GrantTable(), options={"protocol": "rdma", **FAST}))
    if not instance.rdma_devices():
        assert engine.info()["transport"] == "tcp"
    assert engine.info()["protocol_asked_for"] == "rdma"
    engine.close()
    monkeypatch.setattr(instance, "rdma_devices", lambda: ["mlx5_0"])
    for forced, transport in (("1", "tcp"), (None, "rdma")):
        monkeypatch.setenv("MC_FORCE_TCP", "1") if forced else monkeypatch.delenv("MC_FORCE_TCP", raising=False)
        made = instance.Instance(instance.Place("127.0.0.1", "tcp", "", 10))
        assert (made.transport, made.network_devices) == (transport, ["mlx5_0"])
        made.close()


@pytest.mark.parametrize("given", [{}, {"MC_TCP_LANES_PER_PEER": "2"}, {"MC_TCP_MAX_CONNECTIONS_PER_PEER": "3"}])
def test_the_library_may_open_as_many_connections_to_a_peer_as_it_can_unless_that_is_set(monkeypatch, given):
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "10")
    for name in library.LANES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    library.set_environment(10, (0, 0), ipv6=False)
    assert {name: os.environ[name] for name in library.LANES if name in os.environ} == (
        given or {"MC_TCP_LANES_PER_PEER": "16"}
    )


# life


def test_an_engine_that_is_not_open_says_so_and_opens_once():
    engine = MooncakeEngine()
    engine.close()
    with pytest.raises(EngineError, match="not open"):
        engine.describe()
    config = EngineConfig(PeerId(1), GrantTable(), options=FAST)
    engine.open(config)
    with pytest.raises(EngineError, match="open already"):
        engine.open(config)
    engine.close()
    with pytest.raises(EngineError, match="not open"):
        engine.poll(0)


def test_closing_does_not_stop_pythons_threads_for_the_second_that_the_library_would_wait():
    seconds = []
    for _ in range(7):
        made = instance.Instance(instance.Place("127.0.0.1", "tcp", "", 10))
        time.sleep(0.01)
        began = time.monotonic()
        made.close()
        seconds.append(time.monotonic() - began)
    assert sorted(seconds)[3] < 0.5


def test_a_process_that_never_closed_its_engine_ends_with_0():
    code = (
        "from kvferry.engines import find; from kvferry.engines.seam import EngineConfig\n"
        "from kvferry.ids import PeerId; from kvferry.engines.grants import GrantTable\n"
        "engine = find.load('mooncake'); engine.open(EngineConfig(PeerId(1), GrantTable()))\n"
        "engine.attach(PeerId(1), engine.describe()); print(engine.poll(5)[0].outcome.value)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "landed\n"), ended.stderr


def test_memory_does_not_grow_with_peers_that_come_and_go(suite):
    sizes = []
    for _ in range(200):
        assert suite.pair.attach().outcome is Outcome.LANDED
        assert suite.pair.write(suite.pair.batch([0], [0], [10])).outcome is Outcome.LANDED
        suite.engine.detach(suite.pair.target.me)
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert sizes[-1] - sizes[99] < 4 * MIB, sizes[::20]


# registration


def test_a_region_that_can_not_be_registered_is_named_and_leaves_none(suite):
    engine, end = suite.engine, suite.pair.writer
    twice = [Region(end.address, MIB), Region(end.address, MIB)]
    with pytest.raises(EngineError, match=rf"region 1, {MIB} bytes at {end.address:#x}: it overlaps.*\[-7\]"):
        engine.register(twice)
    assert suite.pair.attach().outcome is Outcome.LANDED
    assert suite.pair.write(suite.pair.batch([0], [0], [10])).outcome is Outcome.FAILED_QUIET
    engine.register([Region(end.address, MIB)])
    assert suite.pair.write(suite.pair.batch([0], [0], [10])).outcome is Outcome.LANDED


@pytest.mark.parametrize(
    ("region", "why"),
    [
        (Region(0, 10), "region 0, 10 bytes at 0x0, is no memory"),
        (Region(4096, -1), "is no memory"),
        (Region((1 << 64) - 5, 10), "is no memory"),
        (Region(4096, 10, 0), "region 0 lies on device 0"),
    ],
)
def test_what_is_no_memory_of_this_host_is_not_registered(suite, region, why):
    with pytest.raises(EngineError, match=why):
        suite.engine.register([region])


def test_registering_replaces_also_for_peers_that_are_attached(suite):
    assert suite.pair.attach().outcome is Outcome.LANDED
    other = np.full(MIB, 77, np.uint8)
    suite.engine.register([Region(other.ctypes.data, MIB), Region(other.ctypes.data, 0)])
    assert suite.pair.write(suite.pair.batch([0], [0], [10])).outcome is Outcome.FAILED_QUIET
    src, dst = np.array([other.ctypes.data], np.uint64), np.array([suite.pair.target.address], np.uint64)
    done = suite.pair.write(Batch(src, dst, np.array([10], np.uint64), 10))
    assert done.outcome is Outcome.LANDED
    assert (suite.pair.target.pool[:10] == 77).all()


# blobs


def changed(raw, **values):
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(raw), **values})


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"version": 2}, "version 2, this side speaks 1"),
        ({"incarnation": 8}, "the blob is of process 0000000000000008"),
        ({"nonce_digest": b"x" * 32}, "another process than the peer"),
        ({"nonce_address": 4096}, "has not the memory that the peer named"),
        ({"session": "127.0.0.1:9"}, "no Mooncake engine answers at 127.0.0.1:9"),
        ({"session": "no-such-host.invalid:9"}, "no Mooncake engine answers"),
        ({"session": 7}, "not a blob of the mooncake engine"),
        ({"data_ports": [0]}, "not a blob of the mooncake engine"),
    ],
)
def test_a_blob_of_another_version_process_or_session_is_refused_with_the_reason(suite, values, why):
    good = suite.pair.target.engine.describe()
    peer = suite.pair.target.me
    done = suite.pair.settle(suite.engine.attach(peer, changed(good, **values)))
    assert done.outcome is Outcome.FAILED_QUIET
    assert why in done.cause
    assert suite.pair.write(suite.pair.batch([0], [0], [10])).outcome is Outcome.FAILED_QUIET
    assert suite.pair.attach().outcome is Outcome.LANDED
    assert suite.pair.write(suite.pair.batch([0], [0], [10])).outcome is Outcome.LANDED


def test_a_blob_is_small(suite):
    assert len(suite.engine.describe()) <= MAX_BLOB_BYTES // 64


def test_a_peer_that_was_restarted_is_another_session_and_the_old_blob_is_refused(attached):
    suite, first = attached
    first.kill()
    second = suite.spawn(16 * MIB)
    assert suite.settled_attach(first).outcome is Outcome.FAILED_QUIET
    stale = changed(first.blob, session=msgspec.msgpack.decode(second.blob)["session"])
    done = suite.pair.settle(suite.engine.attach(first.peer, stale))
    assert done.outcome is Outcome.FAILED_QUIET
    assert suite.settled_attach(second).outcome is Outcome.LANDED
    assert suite.write_to(second).outcome is Outcome.LANDED


# the library, and trying it out


def test_a_library_that_is_not_installed_is_said_with_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(EngineUnavailable, match=r"can't be imported.*pip install --no-deps mooncake.*libnuma1"):
        find.load("mooncake")
    monkeypatch.setitem(library.DEBIAN, "libnothing.so.7", "libnothing7")
    with pytest.raises(EngineUnavailable, match="Debian packages are missing: libnothing7"):
        find.load("mooncake")
    assert find.load("local").name == "local"


def test_the_try_out_writes_into_another_process():
    found = {finding.key: finding for finding in tryout.tryout()}
    assert list(found) == ["version", "debian_packages", "rdma_devices", "transfer"]
    assert found["transfer"].works, found["transfer"].text
    assert found["debian_packages"].works
    assert found["version"].value in library.WHEEL


@pytest.mark.parametrize(("program", "why"), [("false", "ended with 1"), ("no-such-command", "could not be tried")])
def test_a_try_out_that_fails_is_a_reason(program, why, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which(program) or program)
    found = tryout.tryout()[-1]
    assert not found.works
    assert why in found.text


def test_bytes_that_do_not_arrive_are_found(monkeypatch):
    hear = child.Child.hear

    def spoilt(process):
        answer = hear(process)
        return {"bytes": "00"} if "bytes" in answer else answer

    monkeypatch.setattr(child.Child, "hear", spoilt)
    assert "not those that arrived" in tryout.tryout()[-1].text


def test_packages_and_devices_are_told(monkeypatch):
    monkeypatch.setitem(library.DEBIAN, "libnothing.so.7", "libnothing7")
    monkeypatch.setattr(tryout, "rdma_devices", lambda: ["mlx5_0"])
    monkeypatch.setattr(tryout, "_transfer", lambda: None)
    _, packages, devices, _ = tryout.tryout()
    assert (packages.works, packages.text) == (False, "missing: apt-get install libnothing7")
    assert (devices.value, "mlx5_0" in devices.text) == (1, True)


# settings that count for the whole process

ALONE = """
import sys
from kvferry.engines import child, find
from kvferry.engines.seam import EngineConfig, Outcome
from kvferry.engines.grants import GrantTable
from kvferry.ids import PeerId

host, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
engines = [find.load("mooncake") for _ in range(2)]
for number, engine in enumerate(engines):
    engine.open(EngineConfig(PeerId(number), GrantTable(), advertise_host=host, data_ports=(first, last)))
engines[0].attach(PeerId(1), engines[1].describe())
print(engines[0].poll(10)[0].outcome.value, *[engine.info()["session"] for engine in engines])
"""


@pytest.mark.parametrize(("host", "ports"), [("::1", (0, 0)), ("[::1]", (0, 0)), ("127.0.0.1", (23100, 23140))])
def test_addresses_by_ipv6_and_a_range_of_ports(host, ports):
    command = [sys.executable, "-c", ALONE, host, *map(str, ports)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    outcome, *sessions = ended.stdout.split()
    assert outcome == "landed", ended.stderr
    for session in sessions:
        name, _, port = session.rpartition(":")
        assert name == ("127.0.0.1" if ports[0] else "[::1]")
        assert not ports[0] or ports[0] <= int(port) <= ports[1]
