"""What the suite does not ask: late and failed copies, the end of the target's process, what can't be used."""

import threading

import mori_here
import msgspec
import numpy as np
import pytest

from kvferry.cli import engines as command
from kvferry.engines import find
from kvferry.engines.grants import GrantTable
from kvferry.engines.mori import blob, door, instance, limbo, precautions
from kvferry.engines.seam import EngineConfig, Outcome, Region
from kvferry.errors import EngineError, EngineUnavailable
from kvferry.ids import PeerId
from kvferry.testing.suite_memory import device_of

pytestmark = pytest.mark.mori

TIMEOUT_S = 0.2


@pytest.fixture
def standin():
    made = mori_here.Standin()
    yield made
    made.release()
    made.refuse_copies(0)


@pytest.fixture
def suite():
    yield from mori_here.opened()


@pytest.fixture
def impatient():
    yield from mori_here.opened(transfer_timeout_s=str(TIMEOUT_S))


def test_a_batch_that_is_late_is_unknown_then_quiet_and_the_peer_is_attached_anew(impatient, standin):
    pair = impatient.pair
    assert pair.attach().outcome is Outcome.LANDED
    standin.hold()
    ticket = pair.submit(pair.batch([0], [0], [1000]))
    done = pair.settle(ticket)
    assert (done.outcome, done.native) == (Outcome.FAILED_UNKNOWN, "IN_PROGRESS")
    with pytest.raises(TimeoutError):
        pair.settle(ticket, 0.3)
    assert (pair.target.pool[:1000] == 0xEE).all()
    assert impatient.engine.info()["on_their_way"] == 1
    refused = pair.write(pair.batch([0], [0], [10]))
    assert (refused.outcome, refused.native) == (Outcome.FAILED_QUIET, "refused")
    standin.release()
    assert pair.settle(ticket).outcome is Outcome.QUIET
    assert np.array_equal(pair.target.pool[:1000], pair.writer.pool[:1000]), "it came after all"
    assert pair.attach().outcome is Outcome.LANDED
    assert pair.write(pair.batch([0], [0], [10])).outcome is Outcome.LANDED
    info = impatient.engine.info()
    assert (info["on_their_way"], info["rebuilds"]) == (0, 1)


def test_a_batch_has_not_landed_before_its_event_is_over(suite, standin):
    pair = suite.pair
    assert pair.attach().outcome is Outcome.LANDED
    standin.hold()
    ticket = pair.submit(pair.batch([0], [0], [1000]))
    with pytest.raises(TimeoutError):
        pair.settle(ticket, 0.3)
    standin.release()
    assert pair.settle(ticket).outcome is Outcome.LANDED
    assert np.array_equal(pair.target.pool[:1000], pair.writer.pool[:1000])


def test_closing_with_a_batch_on_its_way_keeps_what_the_library_writes_to(impatient, standin):
    pair = impatient.pair
    assert pair.attach().outcome is Outcome.LANDED
    standin.hold()
    assert pair.write(pair.batch([0], [0], [1000])).outcome is Outcome.FAILED_UNKNOWN
    kept = len(limbo._never_freed)
    pair.writer.engine.close()
    assert len(limbo._never_freed) == kept + 1
    standin.release()
    impatient.wait_until(lambda: bool(pair.target.pool[999] != 0xEE))
    assert np.array_equal(pair.target.pool[:1000], pair.writer.pool[:1000])


def test_closing_while_a_batch_is_waited_for_keeps_it_as_well(suite, standin, monkeypatch):
    """The peer's thread gives it up when the engine is closed already."""
    monkeypatch.setattr("kvferry.engines.per_peer.engine.CLOSE_S", 0.0)
    pair = suite.pair
    assert pair.attach().outcome is Outcome.LANDED
    standin.hold()
    kept, begun = len(limbo._never_freed), threading.Event()
    (peer,) = suite.engine._peers.values()
    peer._timeout_s = 1.0
    write = instance.Instance.write
    monkeypatch.setattr(instance.Instance, "write", lambda *args: begun.set() or write(*args))
    pair.submit(pair.batch([0], [0], [1000]))
    assert begun.wait(10)
    pair.writer.engine.close()
    suite.wait_until(lambda: len(limbo._never_freed) > kept)
    assert len(limbo._never_freed) == kept + 1


def test_a_copy_that_fails_is_unknown_and_quiet_when_its_target_has_ended(suite, standin):
    process = suite.spawn_target()
    standin.refuse_copies(1)
    ticket = suite.submit_to(process, [0], [0], [100])
    done = suite.pair.settle(ticket)
    assert (done.outcome, done.native) == (Outcome.FAILED_UNKNOWN, "ERR_GPU_OP")
    assert "the GPU's copy failed: XGMI" in done.cause
    with pytest.raises(TimeoutError):
        suite.pair.settle(ticket, 0.3)
    process.kill()
    assert suite.pair.settle(ticket).outcome is Outcome.QUIET


def test_what_was_copied_to_a_process_that_ended_meanwhile_has_not_landed(suite, standin):
    process = suite.spawn_target()
    standin.hold()
    ticket = suite.submit_to(process, [0], [0], [100])
    with pytest.raises(TimeoutError):
        suite.pair.settle(ticket, 0.3)
    process.kill()
    standin.release()
    done = suite.pair.settle(ticket)
    assert (done.outcome, done.native) == (Outcome.FAILED_QUIET, "ended")


def test_a_target_that_has_ended_is_not_written_to(suite):
    process = suite.spawn_target()
    process.kill()
    done = suite.write_to(process)
    assert done.outcome is Outcome.FAILED_QUIET
    assert "its process has ended" in done.cause


def test_rows_go_between_regions_on_both_devices_and_none_may_lie_in_two(suite):
    """The pair's pools lie on different devices; here the writer registers one pool in two pieces."""
    pair = suite.pair
    assert {device_of(pair.writer.pool), device_of(pair.target.pool)} == {0, 1}
    device, half = device_of(pair.writer.pool), pair.writer.pool.nbytes // 2
    pair.writer.engine.register([Region(pair.writer.address + at, half, device) for at in (half, 0)])
    assert pair.attach().outcome is Outcome.LANDED
    assert pair.write(pair.batch([0, half], [half, 0], [1000, 2000])).outcome is Outcome.LANDED
    assert np.array_equal(pair.target.pool[half : half + 1000], pair.writer.pool[:1000])
    assert np.array_equal(pair.target.pool[:2000], pair.writer.pool[half : half + 2000])
    done = pair.write(pair.batch([0, half - 5], [0, 0], [10, 10]))
    assert done.outcome is Outcome.FAILED_QUIET
    assert "row 1 of 2" in done.cause


@pytest.mark.parametrize(("device", "words"), [(-1, "host memory"), (2, "HIP finds 2 devices")])
def test_memory_that_xgmi_does_not_move_is_refused_by_number(suite, device, words):
    pool = suite.pair.writer.pool
    good = Region(suite.pair.writer.address, pool.nbytes, device_of(pool))
    with pytest.raises(EngineError, match=f"region 1.*{words}"):
        suite.engine.register([good, Region(good.address, 10, device)])


def test_device_memory_that_hip_does_not_know_is_refused_by_number(suite):
    pool = np.zeros(4096, np.uint8)
    with pytest.raises(EngineError, match=r"region 0.*HIP gives no handle"):
        suite.engine.register([Region(int(pool.ctypes.data), 4096, 0)])
    assert suite.pair.write(suite.pair.batch([0], [0], [10])).outcome is Outcome.FAILED_QUIET


def test_more_regions_than_a_description_may_hold_are_refused(suite):
    pair = suite.pair
    regions = [Region(pair.writer.address + at * 4096, 4096, device_of(pair.writer.pool)) for at in range(400)]
    pair.writer.engine.register(regions)
    with pytest.raises(EngineError, match="400 regions take"):
        pair.writer.engine.describe()


def altered(raw, **changes):
    return blob.encode(msgspec.structs.replace(msgspec.msgpack.decode(raw, type=blob.Blob), **changes))


def test_a_peer_of_another_host_or_another_backend_is_refused(suite):
    pair = suite.pair
    good = pair.target.engine.describe()
    process = msgspec.msgpack.decode(good, type=blob.Blob).process
    elsewhere = msgspec.structs.replace(process, host="another")
    for changes, words in (
        ({"process": elsewhere}, "another host"),
        ({"process": None}, "another host, or does not say where"),
        ({"backend": "rdma"}, "uses MORI's backend rdma, this side xgmi"),
        ({"engine": b"\x91\x01"}, "damaged"),
        ({"incarnation": 77}, "is of process"),
    ):
        done = pair.settle(pair.writer.engine.attach(pair.target.me, altered(good, **changes)))
        assert done.outcome is Outcome.FAILED_QUIET
        assert words in done.cause


def test_somebody_else_behind_the_door_is_not_the_peer(suite):
    process = suite.spawn(1 << 20)
    said = msgspec.msgpack.decode(process.blob, type=blob.Blob)
    ours = msgspec.msgpack.decode(suite.pair.target.engine.describe(), type=blob.Blob)
    assert "as it says" in door.why_nobody(said.door, ours.process)
    assert door.why_nobody(said.door, said.process) == ""


def test_rdma_that_is_not_there_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(precautions, "DEVICES", tmp_path)
    with pytest.raises(EngineUnavailable, match="no RDMA device with a port that is up"):
        find.load("mori").open(EngineConfig(PeerId(1), GrantTable(), options={"backend": "rdma"}))


def test_a_device_that_the_library_does_not_find_is_met_by_a_child_process(tmp_path, monkeypatch):
    """The name lies in /sys/class/infiniband, and libibverbs has nothing of it."""
    state = tmp_path / "rxe9" / "ports" / "1" / "state"
    state.parent.mkdir(parents=True)
    state.write_text("4: ACTIVE\n")
    monkeypatch.setattr(precautions, "DEVICES", tmp_path)
    made = find.load("mori")
    with pytest.raises(EngineUnavailable, match="tried in a process of its own: no active RDMA device"):
        made.open(EngineConfig(PeerId(1), GrantTable(), options={"backend": "rdma"}))
    made.open(EngineConfig(PeerId(1), GrantTable(), options={"backend": "xgmi"}))
    made.close()


def test_the_command_shows_what_there_is():
    found = {view.name: view for view in command.look()}["mori"]
    assert (found.usable, found.reason) == (True, "")
    findings = {one.key: one for one in found.tryout}
    assert findings["version"].value == "1.2.4"
    assert (findings["xgmi"].works, findings["xgmi"].value) == (True, 2)


def test_settings_of_the_environment_are_kept_and_shown(monkeypatch):
    monkeypatch.setenv("MORI_IO_QP_RETRY_CNT", "7")
    monkeypatch.setenv("MORI_IO_POLL_CQ_MODE", "polling")
    made = find.load("mori")
    made.open(EngineConfig(PeerId(1), GrantTable(), options={**mori_here.XGMI, "qp_per_transfer": "2"}))
    info = made.info()
    made.close()
    assert (info["qp_retry_count"], info["poll_cq_mode"], info["qp_per_transfer"]) == (7, "polling", 2)
    assert info["environment"]["MORI_IO_QP_RETRY_CNT"] == "7"
    assert info["environment"]["MORI_IO_QP_PER_TRANSFER"] == "2"
