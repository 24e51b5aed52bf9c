"""The writer's end of shared memory against a target that says anything; its map, and its copies."""

import ctypes
import gc
import os
import socket
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import allocate_pool
from kvferry.engines.host import host_identity
from kvferry.engines.local import blob, frames, shared_map
from kvferry.engines.local.iovec import merged_rows
from kvferry.engines.local.link import State
from kvferry.engines.local.shared_link import SharedLink, copy_rows
from kvferry.engines.local.shared_map import SharedMap
from kvferry.errors import WireError
from kvferry.ids import PeerId


class Scripted:
    """A target that says what a test has it say, with descriptors."""

    def __init__(self):
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(f"\0kvferry-scripted-{os.getpid()}-{time.monotonic_ns()}")
        self.listener.listen(1)
        self.link = SharedLink(
            blob.Blob(blob.VERSION, b"t" * 32, host_identity(), self.listener.getsockname()[1:].decode()),
            PeerId(1),
        )
        self.connection, _ = self.listener.accept()
        self.heard = frames.decode_packet(self.connection.recv(4096))

    def say(self, packet, fds=()):
        socket.send_fds(self.connection, [frames.encode_packet(packet)], fds)
        self.link.step()

    def close(self):
        self.link.close()
        self.connection.close()
        self.listener.close()


@pytest.fixture
def scripted():
    before = set(os.listdir("/proc/self/fd"))
    made = Scripted()
    yield made
    made.close()
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.fixture
def file():
    with allocate_pool(8192, kind="memfd") as pool:
        yield pool


def test_the_knock_names_the_mechanism_and_its_proof_is_bound_to_it(scripted):
    assert scripted.heard.mechanism == "shm"
    proofs = {frames.knock_proof(b"t" * 32, b"", PeerId(1), name) for name in ("shm", "cma")}
    assert scripted.heard.proof in proofs
    assert len(proofs) == 2


def test_a_probe_is_written_where_the_target_says(scripted, file):
    scripted.say(frames.Probe(100, b"0123456789abcdef"), [file.fd])
    assert file.array[100:116].tobytes() == b"0123456789abcdef"
    assert isinstance(frames.decode_packet(scripted.connection.recv(4096)), frames.Probed)


@pytest.mark.parametrize(
    ("packet", "count", "why"),
    [
        (frames.Probe(0, b"x" * 16), 0, "0 descriptors with its probe"),
        (frames.Probe(0, b"x" * 16), 2, "2 descriptors with its probe"),
        (frames.Probe(8192 - 15, b"x" * 16), 1, "a probe of 16 bytes at 8177"),
        (frames.Probe(-1, b"x" * 16), 1, "a probe of 16 bytes at -1"),
        (frames.Probe(0, b"x" * 999), 1, "a probe of 999 bytes"),
        (frames.Share([frames.Part(1 << 20, 10, 1, 0)]), 1, "file 1 of 1"),
        (frames.Share([frames.Part(1 << 20, 8193, 0, 0)]), 1, "8193 bytes at 0 of a file of 8192"),
        (frames.Share([frames.Part(1 << 20, 10, 0, 8183)]), 1, "10 bytes at 8183"),
        (frames.Bye(), 0, "Bye out of turn"),
        (frames.No("not today"), 0, "the peer refused: not today"),
    ],
)
def test_what_makes_no_sense_ends_the_link_and_no_descriptor_stays(scripted, file, packet, count, why):
    scripted.say(packet, [file.fd] * count)
    assert scripted.link.state is State.LOST
    assert why in scripted.link.why


def test_nothing_is_mapped_after_yes(scripted, file):
    scripted.say(frames.Share([frames.Part(1 << 20, 100, 0, 0)]), [file.fd])
    scripted.say(frames.Yes())
    assert scripted.link.state is State.READY
    scripted.say(frames.Share([frames.Part(2 << 20, 100, 0, 0)]), [file.fd])
    assert "Share out of turn" in scripted.link.why


def test_a_file_that_comes_twice_is_mapped_once(file):
    mapped = SharedMap()
    mapped.add([frames.Part(1 << 20, 100, 0, 0)], [file.fd])
    mapped.add([frames.Part(2 << 20, 100, 0, 4096)], [file.fd])
    mapped.complete()
    here, outside = mapped.here(np.array([(2 << 20) + 7, 1 << 20], np.uint64), np.array([9, 9], np.uint64))
    assert outside is None
    assert int(here[0]) - int(here[1]) == 4096 + 7
    mapped.close()
    assert mapped.here(np.array([1 << 20], np.uint64), np.array([9], np.uint64))[1] == 0


def test_parts_without_their_file_are_refused():
    with pytest.raises(WireError, match="file 0 of 0"):
        SharedMap().add([frames.Part(0, 1, 0, 0)], [])


def test_filling_page_tables_stops_when_the_map_is_closed(file, monkeypatch):
    calls = []
    monkeypatch.setattr(shared_map, "_STEP_BYTES", 4096)
    mapped = SharedMap()
    monkeypatch.setattr(shared_map, "make_present", lambda *args: calls.append(args) or mapped.close() or True)
    mapped.add([frames.Part(1 << 20, 100, 0, 0)], [file.fd])
    memory = next(iter(mapped._files.values()))
    mapped._fill([memory])
    assert calls == [(ctypes.addressof(memory), 4096)]


# copies


rows = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(1, 9)), min_size=1, max_size=40)


@given(rows)
def test_merged_rows_are_the_same_bytes_in_the_same_order(found):
    src, dst, nbytes = np.array(found, np.uint64).T.copy()
    merged = merged_rows(src, dst, nbytes)
    pairs = [
        [(s + i, d + i) for s, d, n in zip(*(array.tolist() for array in three), strict=True) for i in range(n)]
        for three in ((src, dst, nbytes), merged)
    ]
    assert pairs[0] == pairs[1]
    ends = [array[1:] == array[:-1] + merged[2][:-1] for array in merged[:2]]
    assert not (ends[0] & ends[1]).any()


@given(rows)
def test_copied_rows_are_those_of_a_loop(found):
    source = np.random.default_rng(4).integers(0, 256, 100, np.uint8)
    target, expected = np.zeros(100, np.uint8), np.zeros(100, np.uint8)
    src, dst, nbytes = np.array(found, np.uint64).T.copy()
    copy_rows(src + np.uint64(source.ctypes.data), dst + np.uint64(target.ctypes.data), nbytes)
    for here, there, size in found:
        expected[there : there + size] = source[here : here + size]
    assert np.array_equal(target, expected)
