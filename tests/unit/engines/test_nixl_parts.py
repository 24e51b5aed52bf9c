"""Parts of the NIXL engine that need no library: options, errors, a ticket on its way, rows, a missing library."""

import os
import subprocess
import sys

import numpy as np
import pytest

from kvferry.engines import devices, find
from kvferry.engines.nixl import library, native, tryout
from kvferry.engines.nixl.flight import Flight
from kvferry.engines.nixl.memory import Memory, split
from kvferry.engines.nixl.options import parse
from kvferry.engines.nixl.transfer import Here
from kvferry.engines.seam import Batch, Outcome, Region
from kvferry.errors import ConfigError, EngineUnavailable

# options


def test_the_defaults_are_ucx_and_nothing_else():
    assert parse({}) == ("UCX", {}, 10.0, 30.0, min(2, os.cpu_count()))


def test_parameters_reach_the_backend_under_its_own_names():
    options = {
        "devices": "mlx5_0,mlx5_1", "num_workers": "2", "ucx_error_handling_mode": "none",
        "param.engine_config": "TLS=tcp",
    }  # fmt: skip
    assert parse(options).parameters == {
        "ucx_devices": "mlx5_0,mlx5_1", "num_workers": "2", "ucx_error_handling_mode": "none",
        "engine_config": "TLS=tcp",
    }  # fmt: skip
    assert parse({"backend": "LIBFABRIC", "param.x": "y"})[:2] == ("LIBFABRIC", {"x": "y"})


def test_devices_by_gpu():
    devices = '{"0": "mlx5_0", "1": "mlx5_1,mlx5_2"}'
    assert parse({"devices": devices}).parameters == {"ucx_devices": "mlx5_0"}
    assert parse({"devices": devices, "gpu": "1"}).parameters == {"ucx_devices": "mlx5_1,mlx5_2"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "mlx5_0"}, r"no option 'device' .*'backend', 'devices', .*'param.<name>'"),
        ({"param.": "x"}, "no option 'param.'"),
        ({"num_workers": "0"}, "'num_workers' of the NIXL engine is '0' .a number from 1 to 64"),
        ({"copy_threads": "17"}, "'copy_threads' of the NIXL engine is '17' .a number from 1 to 16"),
        ({"ucx_error_handling_mode": "maybe"}, "one of peer, none"),
        ({"transfer_timeout_s": "soon"}, "'transfer_timeout_s' .* is 'soon'"),
        ({"attach_timeout_s": "nan"}, "more than 0"),
        ({"devices": "{"}, "a JSON object with names for each GPU"),
        ({"devices": '{"0": "a"}', "gpu": "7"}, "has an entry for GPU 0"),
        ({"devices": "a", "backend": "LIBFABRIC"}, "only UCX takes it"),
    ],
)
def test_what_is_no_option_or_no_value_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        parse(options)


# errors


def test_every_exception_of_the_table_has_words_and_keeps_its_native_code():
    for name, words in native.ERRORS.items():
        error = type(name, (Exception,), {})("NIXL_ERR_X")
        assert native.explain(error) == (words, "NIXL_ERR_X")


def test_an_exception_that_is_not_in_the_table_speaks_for_itself():
    assert native.explain(ValueError("odd")) == ("ValueError: odd", "ValueError")


# a ticket's way, with a library that does what it is told


class Told:
    """Transfers by name, and what is said of them, in turn: True is over, False is not, an exception is raised."""

    def __init__(self, **said):
        self.said, self.released, self.posted = said, [], []

    def post(self, handle):
        self.posted.append(handle)
        return self.is_done(handle)

    def is_done(self, handle):
        answer = self.said[handle].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def release(self, handle):
        self.released.append(handle)


def flown(agent, *times, deadline=10.0):
    flight = Flight(5, "peer", [Here(agent, handle) for handle in agent.said], deadline, deadline)
    flight.post()
    found = list(flight.news(0.0))
    for now in times:
        found += flight.look(now)
    assert all(done.ticket == 5 for done in found)
    return flight, [done.outcome for done in found]


def test_it_lands_when_all_parts_are_over_and_not_before():
    agent = Told(a=[True], b=[False, False, True])
    flight, outcomes = flown(agent, 1.0)
    assert (flight.over, outcomes) == (False, [])
    assert [done.outcome for done in flight.look(2.0)] == [Outcome.LANDED]
    assert flight.over
    assert agent.released == ["a", "b"]


def test_a_part_that_fails_is_unknown_and_no_proof_follows_though_the_rest_is_done():
    agent = Told(a=[False, RuntimeError("x")], b=[False, False, True])
    flight, outcomes = flown(agent, 1.0, 2.0)
    assert (flight.over, outcomes) == (True, [Outcome.FAILED_UNKNOWN])


def test_nothing_more_is_posted_after_a_part_that_could_not_be():
    agent = Told(a=[RuntimeError("x")], b=[True])
    flight, outcomes = flown(agent)
    assert (flight.over, outcomes, agent.posted) == (True, [Outcome.FAILED_UNKNOWN], ["a"])
    assert agent.released == ["a", "b"]


def test_after_the_deadline_it_is_unknown_once_and_quiet_when_it_is_over():
    agent = Told(a=[False, False, False, True])
    flight, outcomes = flown(agent, 10.0, 11.0, 12.0)
    assert (flight.over, outcomes) == (True, [Outcome.FAILED_UNKNOWN, Outcome.QUIET])


def test_after_the_deadline_a_failure_proves_nothing():
    agent = Told(a=[False, False, RuntimeError("x")])
    flight, outcomes = flown(agent, 10.0, 11.0)
    assert (flight.over, outcomes) == (True, [Outcome.FAILED_UNKNOWN])


# rows


def batch(src, dst, nbytes):
    columns = [np.array(column, np.uint64) for column in (src, dst, nbytes)]
    return Batch(*columns, int(columns[2].sum()))


def test_rows_of_host_memory_are_one_transfer():
    memory = Memory.of([Region(1000, 100), Region(5000, 100)])
    ((here, there),) = split(batch([1000, 5010], [5000, 1000], [10, 20]), memory, memory)
    assert (here.kind, there.kind) == ("DRAM", "DRAM")
    assert here.table.tolist() == [[1000, 10, 0], [5010, 20, 0]]
    assert there.table.tolist() == [[5000, 10, 0], [1000, 20, 0]]


def test_rows_of_several_kinds_of_memory_are_one_transfer_each_and_carry_their_device():
    here = Memory.of([Region(1000, 100, 3), Region(5000, 100), Region(9000, 100, 0)])
    there = Memory.of([Region(100, 100), Region(300, 100, 1)])
    parts = list(split(batch([1000, 5000, 9000, 5050], [100, 110, 300, 310], [1, 2, 3, 4]), here, there))
    found = {(mine.kind, theirs.kind): (mine.table.tolist(), theirs.table.tolist()) for mine, theirs in parts}
    assert found == {
        ("DRAM", "DRAM"): ([[5000, 2, 0]], [[110, 2, 0]]),
        ("DRAM", "VRAM"): ([[5050, 4, 0]], [[310, 4, 1]]),
        ("VRAM", "DRAM"): ([[1000, 1, 3]], [[100, 1, 0]]),
        ("VRAM", "VRAM"): ([[9000, 3, 0]], [[300, 3, 1]]),
    }


# the library


def test_a_missing_library_comes_with_the_install_line_and_disturbs_no_other_engine(monkeypatch):
    monkeypatch.setattr(library, "BUILDS", ("no_such_nixl",))
    with pytest.raises(EngineUnavailable, match=r"no_such_nixl is installed \(pip install --no-deps nixl-"):
        find.load("nixl")
    assert find.load("local").name == "local"


def test_a_broken_library_says_so_when_it_is_opened(monkeypatch, tmp_path):
    (tmp_path / "broken_nixl").mkdir()
    (tmp_path / "broken_nixl" / "__init__.py").write_text("")
    (tmp_path / "broken_nixl" / "_api.py").write_text("raise OSError('libucp.so: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(library, "BUILDS", ("broken_nixl",))
    assert find.load("nixl").name == "nixl"
    with pytest.raises(EngineUnavailable, match=r"broken_nixl can't be imported: OSError: libucp.so: cannot open"):
        library.load()


def test_nothing_is_imported_before_it_is_opened():
    code = "import sys; from kvferry.engines import find; find.known(); print([n for n in sys.modules if 'nixl' in n])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "[]"


# RDMA devices


@pytest.fixture
def rdma(monkeypatch, tmp_path):
    """Two empty folders in the place of the kernel's."""
    folders = tmp_path / "infiniband", tmp_path / "infiniband_verbs"
    monkeypatch.setattr(devices, "RDMA", folders)
    for name in ("UCX_RC_VERBS_RETRY_COUNT", "UCX_RC_RETRY_COUNT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return folders


def test_rdma_devices_are_those_that_the_kernel_lists_and_not_its_other_files(rdma):
    first, second = rdma
    assert devices.rdma_devices() == []
    second.mkdir()
    (second / "abi_version").touch()  # there as soon as the module is loaded
    assert devices.rdma_devices() == []
    (second / "uverbs0").mkdir()
    assert devices.rdma_devices() == ["uverbs0"]
    first.mkdir()
    for name in ("mlx5_1", "mlx5_0"):
        (first / name).mkdir()
    assert devices.rdma_devices() == ["mlx5_0", "mlx5_1"]


def test_a_peer_that_does_not_answer_by_rdma_is_given_up_unless_something_else_is_set(rdma, monkeypatch):
    assert library.limit_retries() == ""
    assert "UCX_RC_VERBS_RETRY_COUNT" not in os.environ
    (rdma[0] / "mlx5_0").mkdir(parents=True)
    monkeypatch.setenv("UCX_RC_RETRY_COUNT", "7")
    assert library.limit_retries() == "7"
    monkeypatch.delenv("UCX_RC_RETRY_COUNT")
    assert library.limit_retries() == "6"
    assert os.environ["UCX_RC_VERBS_RETRY_COUNT"] == "6"
    monkeypatch.setenv("UCX_RC_VERBS_RETRY_COUNT", "3")
    assert library.limit_retries() == "3"


def test_the_try_out_says_what_holds_by_rdma(rdma):
    assert tryout._rdma() == []
    (rdma[0] / "mlx5_0").mkdir(parents=True)
    (found,) = tryout._rdma()
    assert (found.key, found.value) == ("rdma_devices", "mlx5_0")
    assert "after 6 retries (UCX_RC_VERBS_RETRY_COUNT)" in found.text
