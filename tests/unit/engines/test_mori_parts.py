"""What of the MORI engine needs no library: settings, precautions, descriptions, outcomes, and why it is not here."""

import json
import os
import resource
import socket
import sys
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from kvferry.engines import find
from kvferry.engines.host import Process, this_process
from kvferry.engines.mori import blob, door, library, options, precautions
from kvferry.engines.mori.flight import Flight
from kvferry.engines.mori.memory import Held, Memory, parts_of, why_not_between
from kvferry.engines.mori.native import verdict_of
from kvferry.engines.seam import Outcome, Region
from kvferry.errors import ConfigError, EngineError, EngineUnavailable, WireError
from kvferry.ids import PeerId
from kvferry.plan.batch import Batch

LOOPBACK = "127.0.0.1"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("MORI_", "KVFERRY_MORI")):
            monkeypatch.delenv(name)


# -- settings


def test_the_defaults_give_a_dead_peer_up():
    found = options.parse({})
    assert found.qp_retry_count < options.ENDLESS_RETRY
    assert (found.backend, found.poll_cq_mode, found.qp_per_transfer) == ("auto", "event", 1)


def test_an_option_goes_before_the_environment_and_that_before_the_default(monkeypatch):
    monkeypatch.setenv("MORI_IO_QP_RETRY_CNT", "7")
    monkeypatch.setenv("MORI_RDMA_DEVICES", "mlx5_7")
    assert options.parse({}).qp_retry_count == 7
    assert options.parse({}).devices == "mlx5_7"
    found = options.parse({"qp_retry_count": "2", "devices": '{"0": "a", "1": "b,c"}', "gpu": "1"})
    assert (found.qp_retry_count, found.devices) == (2, "b,c")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backend", "tcp"), ("qp_retry_count", "8"), ("qp_retry_count", "-1"), ("poll_cq_mode", "busy"),
        ("qp_per_transfer", "0"), ("attach_timeout_s", "0"), ("transfer_timeout_s", "soon"), ("devices", "{"),
        ("no_such_option", "1"),
    ],
)  # fmt: skip
def test_a_value_that_is_none_is_named(name, value):
    with pytest.raises(ConfigError, match=name):
        options.parse({name: value})


def test_a_value_of_the_environment_that_is_none_is_named_with_its_variable(monkeypatch):
    monkeypatch.setenv("MORI_IO_QP_RETRY_CNT", "many")
    with pytest.raises(ConfigError, match="MORI_IO_QP_RETRY_CNT"):
        options.parse({})


@pytest.mark.parametrize(("name", "value"), [("MORI_DISABLE_AUTO_XGMI", "0"), ("MORI_IO_ENABLE_NOTIFICATION", "1")])
def test_an_environment_under_which_outcomes_would_not_be_true_is_refused(monkeypatch, name, value):
    library.check_environment()
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        library.check_environment()


def test_settings_are_handed_on_by_the_environment(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    library.set_environment(options.parse({"qp_retry_count": "3", "devices": "mlx5_0"}))
    assert os.environ["MORI_IO_QP_RETRY_CNT"] == "3"
    assert os.environ["MORI_IO_ENABLE_NOTIFICATION"] == "0"
    assert os.environ["MORI_RDMA_DEVICES"] == "mlx5_0"


# -- why it is not here


def test_another_python_is_named_where_there_is_no_wheel(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for running, says in (("3.11", True), ("3.13", True), ("3.10", False)):
        monkeypatch.setattr(library, "python_version", lambda running=running: running)
        with pytest.raises(EngineUnavailable, match="there is no module mori") as caught:
            library.check_installed()
        assert (f"wheels for Python 3.10 and 3.12 alone, this is {running}" in str(caught.value)) is says
        assert "pip install amd-mori" in caught.value.hint


def test_libraries_that_are_missing_are_named_with_what_has_them(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(library, "_loads", lambda file: not file.startswith(("libamdhip64", "libpci")))
    with pytest.raises(EngineUnavailable, match=r"libamdhip64.so.7 \(ROCm 7's HIP runtime\), libpci.so.3 \(libpci3\)"):
        find.load("mori")


def test_a_library_that_can_not_be_imported_is_no_exception(monkeypatch):
    monkeypatch.setitem(sys.modules, "mori", None)
    with pytest.raises(EngineUnavailable, match="MORI can't be imported: ModuleNotFoundError"):
        library.load()


def test_a_library_that_is_too_new_for_the_system_says_so():
    with pytest.raises(EngineUnavailable, match=r"GLIBC_2.38.*the wheel for 3.12 needs glibc 2.39"):
        library._unavailable("version `GLIBC_2.38' not found")


def test_where_it_is_missing_the_others_are_not_disturbed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineUnavailable):
        find.load("mori")
    assert find.load("local").name == "local"


# -- precautions


def test_a_port_that_somebody_listens_on_is_passed_over_or_named():
    with socket.socket() as busy:
        busy.bind((LOOPBACK, 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(EngineError, match=f"ports {port} to {port}: .*in use"):
            precautions.bindable(LOOPBACK, (port, port))
        assert precautions.bindable(LOOPBACK, (port, port + 20)) > port
    assert precautions.bindable(LOOPBACK, (0, 0)) == 0


@pytest.mark.parametrize(("host", "words"), [("10.99.99.99", "can't listen on"), ("::1", "IPv4"), ("name", "IPv4")])
def test_an_address_that_is_not_of_this_host_is_refused(host, words):
    with pytest.raises(EngineError, match=words):
        precautions.bindable(host, (0, 0))


def test_memory_that_is_not_mapped_is_refused_by_number():
    pool = np.zeros(1 << 16, np.uint8)
    good = Region(int(pool.ctypes.data), pool.nbytes)
    precautions.check_host_memory([good])
    with pytest.raises(EngineError, match="region 1, 100 bytes at 0x1000, is not mapped"):
        precautions.check_host_memory([good, Region(4096, 100)])
    precautions.check_host_memory([good, Region(4096, 100, device=0), Region(4096, 0)])


@pytest.mark.parametrize("may_lock", [False, True])
def test_more_memory_than_may_be_locked_is_refused_unless_the_limit_does_not_hold(monkeypatch, may_lock):
    pool = np.zeros(1 << 16, np.uint8)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (4096, 4096))
    monkeypatch.setattr(precautions, "_may_lock", lambda: may_lock)
    if may_lock:
        precautions.check_host_memory([Region(int(pool.ctypes.data), pool.nbytes)])
        return
    with pytest.raises(EngineError, match=r"65536 bytes of memory are to be registered.*may lock 4096"):
        precautions.check_host_memory([Region(int(pool.ctypes.data), pool.nbytes)])


def test_devices_are_those_with_a_port_that_is_up(tmp_path, monkeypatch):
    monkeypatch.setattr(precautions, "DEVICES", tmp_path)
    assert precautions.active_devices() == []
    for name, port, state in (("b", "1", "1: DOWN"), ("b", "2", "4: ACTIVE"), ("a", "1", "1: DOWN")):
        (tmp_path / name / "ports" / port).mkdir(parents=True)
        (tmp_path / name / "ports" / port / "state").write_text(state)
    assert precautions.active_devices() == ["b"]


def trial(monkeypatch, tmp_path, code):
    """A module in the place of the child that creates a backend."""
    (tmp_path / "mori_trial.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(precautions, "_CHILD", "mori_trial")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import sys; sys.stderr.write('librocm is missing'); sys.exit(255)",
            "ended with 255 .*librocm",
        ),
        ("import time; time.sleep(9)", "said nothing"),
        ("import os; os.abort()", "ended with -6"),
        ('print(\'{"why": "no active RDMA device"}\')', "no active RDMA device"),
        ("print('nonsense')", "tried in a process of its own"),
    ],
)
def test_what_ends_or_hangs_a_process_does_so_in_a_child(monkeypatch, tmp_path, code, words):
    monkeypatch.setattr(precautions, "TRIAL_S", 1.0 if "sleep" in code else 20.0)
    trial(monkeypatch, tmp_path, code)
    with pytest.raises(EngineUnavailable, match=words):
        precautions.try_backend("rdma", LOOPBACK)
    assert precautions.TRIED not in os.environ


def test_what_went_well_is_not_tried_again_with_the_same_settings(monkeypatch, tmp_path):
    monkeypatch.setenv(precautions.TRIED, "")
    log = tmp_path / "log"
    says = json.dumps({"why": "", "gpus": 0})
    trial(monkeypatch, tmp_path, f"open({str(log)!r}, 'a').write('x'); print({says!r})")
    for expected in (1, 1):
        precautions.try_backend("rdma", LOOPBACK)
        assert len(log.read_text()) == expected
    monkeypatch.setenv("MORI_RDMA_DEVICES", "mlx5_1")
    precautions.try_backend("rdma", LOOPBACK)
    assert len(log.read_text()) == 2


# -- what is said to peers

DESCRIBED = blob.Described(4096, 100, -1, b"descriptor")


def a_blob(**changes):
    engine, memory = b"engine", [DESCRIBED]
    facts = {
        "version": blob.VERSION, "backend": "rdma", "incarnation": 5, "engine": engine, "memory": memory,
        "nonce": DESCRIBED, "nonce_digest": b"", "door": "", "process": None,
        "checksum": blob.checksum_of(engine, memory, DESCRIBED),
    }  # fmt: skip
    return blob.Blob(**{**facts, **changes})


def test_a_blob_comes_back():
    assert blob.decode(blob.encode(a_blob()), PeerId(5), "rdma") == a_blob()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"incarnation": 6}, "is of process"), ({"engine": b"Engine"}, "damaged"), ({"memory": []}, "damaged"),
        ({"nonce": None}, "damaged"), ({"version": 9}, "version 9"),
    ],
)  # fmt: skip
def test_a_blob_of_somebody_else_or_a_damaged_one_is_refused(changes, words):
    with pytest.raises(WireError, match=words):
        blob.decode(blob.encode(a_blob(**changes)), PeerId(5), "rdma")


def test_both_sides_need_the_same_backend():
    with pytest.raises(WireError, match="backend rdma, this side xgmi"):
        blob.decode(blob.encode(a_blob()), PeerId(5), "xgmi")


def test_a_door_is_known_by_the_kernels_word():
    here = this_process()
    made = door.Door()
    assert door.why_nobody(made.name, here) == ""
    for _ in range(3):
        made.welcome()
    made.close()
    assert "closed" in door.why_nobody(made.name, here)
    assert "has ended" in door.why_nobody(made.name, Process(here.host, (1 << 22) + 1, 0))


def test_another_process_behind_a_door_is_not_the_peer(monkeypatch):
    made = door.Door()
    monkeypatch.setattr(door, "has_ended", lambda process: False)
    words = door.why_nobody(made.name, Process("here", os.getppid(), 0))
    made.close()
    assert words == f"its engine is process {os.getpid()}, not {os.getppid()} as it says"


# -- rows and outcomes


def test_rows_are_given_by_pairs_of_regions_with_offsets():
    here = Memory.of([Held(5000, 1000, "H1"), Held(1000, 1000, "H0")])
    there = Memory.of([Held(100, 50, "T0"), Held(900, 100, "T1")])
    columns = ([1000, 5000, 1500, 5990], [100, 900, 149, 990], [10, 20, 1, 10])
    batch = Batch(*(np.array(column, np.uint64) for column in columns), 41)
    assert why_not_between(batch, here, there, PeerId(2)) == ""
    found = {(part.here, part.there): (part.src, part.dst, part.nbytes) for part in parts_of(batch, here, there)}
    assert found == {("H0", "T0"): ([0, 500], [0, 49], [10, 1]), ("H1", "T1"): ([0, 990], [0, 90], [20, 10])}


@pytest.mark.parametrize(("src", "dst", "words"), [(1995, 100, "row 0 of 1.*no single region"), (1000, 145, "0x91")])
def test_a_row_that_lies_in_two_regions_or_none_is_refused_by_number(src, dst, words):
    here = Memory.of([Held(1000, 1000, "H0"), Held(2000, 1000, "H1")])
    there = Memory.of([Held(100, 50, "T0")])
    batch = Batch(np.array([src], np.uint64), np.array([dst], np.uint64), np.array([10], np.uint64), 10)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(why_not_between(batch, here, there, PeerId(2)))


@pytest.mark.parametrize(
    ("codes", "outcome", "native"),
    [
        (["SUCCESS", "SUCCESS"], Outcome.LANDED, ""),
        (["SUCCESS", "ERR_INVALID_ARGS"], Outcome.FAILED_QUIET, "ERR_INVALID_ARGS"),
        (["ERR_BAD_STATE", "ERR_RDMA_OP"], Outcome.FAILED_UNKNOWN, "ERR_RDMA_OP"),
        (["SUCCESS", "IN_PROGRESS"], Outcome.FAILED_UNKNOWN, "IN_PROGRESS"),
        (["ERR_OF_A_LATER_VERSION"], Outcome.FAILED_UNKNOWN, "ERR_OF_A_LATER_VERSION"),
    ],
)
def test_what_may_still_land_outweighs_the_rest(codes, outcome, native):
    found = verdict_of(codes, ["words"] * len(codes))
    assert (found.outcome, found.native) == (outcome, native)
    assert bool(found.cause) is (outcome is not Outcome.LANDED)


class Status:
    """A status object that is over after so many looks."""

    def __init__(self, code, looks=0):
        self.looks, self._code = looks, code

    def InProgress(self):
        self.looks -= 1
        return self.looks >= 0

    def Code(self):
        return SimpleNamespace(name="IN_PROGRESS" if self.looks > 0 else self._code)

    def Message(self):
        return "said"

    def WaitFor(self, _timeout_ms):
        pass


def test_a_flight_is_waited_for_until_it_is_over():
    flight = Flight([Status("SUCCESS", 3), Status("SUCCESS")])
    assert flight.wait(time.monotonic() + 5)
    assert flight.verdict().outcome is Outcome.LANDED


def test_a_flight_that_is_not_over_in_time_may_still_land():
    flight = Flight([Status("SUCCESS", 1 << 40)])
    assert not flight.wait(time.monotonic())
    assert flight.verdict().outcome is Outcome.FAILED_UNKNOWN


@pytest.mark.parametrize(
    ("codes", "outcome"),
    [(["INIT", "INIT"], Outcome.FAILED_QUIET), (["SUCCESS", "INIT"], Outcome.FAILED_QUIET), (["ERR_RDMA_OP"], None)],
)
def test_what_was_begun_before_an_exception_counts(codes, outcome):
    raised = RuntimeError("connect(10.0.0.1:5): Connection refused")
    found = Flight([Status(code) for code in codes], raised).verdict()
    assert found.outcome is (outcome or Outcome.FAILED_UNKNOWN)
    assert (found.cause, found.native) == (str(raised), "RuntimeError")


def test_a_blob_takes_no_address_that_is_none():
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode((0, 1, -1, b"")), type=blob.Described)
