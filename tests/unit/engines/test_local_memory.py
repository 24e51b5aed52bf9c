"""Cross-memory attach: who is let in, why not, the fall-back to TCP, and copies that stop half-way."""

import ctypes
import errno
import mmap
import os
import shutil
import socket
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvferry.engines.local import LocalEngine, blob, copier, frames, memory_door, memory_link, pick, unix_link
from kvferry.engines.local.copier import copy_rows
from kvferry.engines.seam import Batch, Outcome, Region
from kvferry.ids import PeerId
from kvferry.testing.suite import EngineSuite
from kvferry.testing.suite_pair import GUARD, Pair, open_end, wait_for

CAP_SYS_PTRACE = 19


def make_pair(writer="auto", target="auto"):
    made = Pair(
        open_end(LocalEngine(), 1, 1 << 20, {"mechanism": writer}),
        open_end(LocalEngine(), 2, 1 << 20, {"mechanism": target}),
    )
    made.writer.pool[:] = np.random.default_rng(3).integers(0, 256, made.writer.pool.nbytes, np.uint8)
    return made


@pytest.fixture
def pair():
    made = make_pair()
    yield made
    made.close()


@pytest.fixture
def suite():
    made = EngineSuite()
    made.options = {"mechanism": "auto"}
    made.setup_method()
    yield made
    made.teardown_method()


def assert_falls_back(pair, reason, raw=None):
    """It attaches by TCP, writes, and keeps the reason."""
    pair.target.grant(pair.writer.me)
    attached = pair.settle(pair.writer.engine.attach(pair.target.me, raw or pair.target.engine.describe()))
    assert attached.outcome is Outcome.LANDED, attached
    explained = pair.writer.engine.info()["peers"][str(pair.target.me)]
    assert explained == pair.writer.engine.explain(pair.target.me)
    assert explained.startswith("tcp (ready); shm: the peer")
    assert reason in explained.split("; cma: ")[1]
    assert pair.write(pair.batch([1], [2], [100])).outcome is Outcome.LANDED
    assert np.array_equal(pair.target.pool[2:102], pair.writer.pool[1:101])


def has_ptrace_rights_to_lose():
    status = Path("/proc/self/status").read_text()
    effective = int(status.split("CapEff:")[1].split()[0], 16)
    return bool(effective >> CAP_SYS_PTRACE & 1) and shutil.which("setpriv") is not None


if has_ptrace_rights_to_lose():

    def test_a_writer_without_ptrace_rights_falls_back_to_tcp_and_says_eperm(suite):
        process = suite.spawn(4096, ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"))
        target = suite.pair.target
        target.grant(process.peer)
        assert process.attach(target.me, target.engine.describe())["outcome"] == Outcome.LANDED.value
        explained = process.do("info")["info"]["peers"][str(target.me)]
        assert explained.startswith("tcp (ready)")
        assert "EPERM" in explained
        answer = process.do("write", peer=[2, 0], claim=7, dst=target.address, fill=0x33)
        assert answer["outcome"] == Outcome.LANDED.value
        assert (target.pool[:4096] == 0x33).all()


def refuse(number):
    def call(*_):
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("call", ["read_memory", "write_memory"])
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_with_a_substituted_system_call_that_says_no_it_falls_back(pair, monkeypatch, call, number):
    monkeypatch.setattr(memory_link, call, refuse(number))
    assert_falls_back(pair, errno.errorcode[number])


def test_with_a_substituted_write_that_does_nothing_the_target_says_no(pair, monkeypatch):
    monkeypatch.setattr(memory_link, "write_memory", lambda *_: 16)
    assert_falls_back(pair, "did not arrive")


def test_with_substituted_credentials_of_another_user_the_target_says_no(pair, monkeypatch):
    monkeypatch.setattr(memory_door, "peer_credentials", lambda _: (1, os.geteuid() + 1))
    assert_falls_back(pair, f"runs as user {os.geteuid() + 1}, the target as user {os.geteuid()}")


def test_with_substituted_credentials_of_another_user_the_writer_says_no(pair, monkeypatch):
    monkeypatch.setattr(unix_link, "peer_credentials", lambda _: (1, os.geteuid() + 1))
    assert_falls_back(pair, f"runs as user {os.geteuid() + 1}, this process as {os.geteuid()}")


@pytest.mark.parametrize("side", [memory_door, unix_link])
def test_with_a_substituted_kernel_without_pidfds_it_falls_back(pair, monkeypatch, side):
    monkeypatch.setattr(side, "peer_pidfd", refuse(errno.ENOSYS))
    assert_falls_back(pair, "no pidfd")


def changed(pair, **values):
    return blob.encode(msgspec.structs.replace(blob.decode(pair.target.engine.describe()), **values))


def test_another_host_falls_back(pair):
    assert_falls_back(pair, "another host", changed(pair, host="elsewhere"))


def test_a_socket_name_that_nobody_has_falls_back(pair):
    assert_falls_back(pair, "ECONNREFUSED", changed(pair, unix="kvferry-nobody"))


def test_a_nonce_that_is_not_the_blobs_falls_back(pair):
    assert_falls_back(pair, "another nonce", changed(pair, nonce_digest=bytes(32)))


def test_a_nonce_address_that_is_no_memory_falls_back(pair):
    assert_falls_back(pair, "EFAULT", changed(pair, nonce_address=4096))


def test_a_target_without_memory_attach_falls_back():
    pair = make_pair("auto", "tcp")
    assert_falls_back(pair, "does not offer")
    pair.close()


def test_a_blob_with_another_token_is_refused_by_both_mechanisms_with_both_reasons(pair):
    done = pair.settle(pair.writer.engine.attach(pair.target.me, changed(pair, token=bytes(32))))
    assert done.outcome is Outcome.FAILED_QUIET
    assert "the proof is wrong" in done.cause
    assert "tcp: " in done.cause
    assert pair.target.engine.info()["garbage"] == 2  # shared memory was not even tried


def test_memory_alone_does_not_fall_back():
    pair = make_pair("cma", "auto")
    done = pair.settle(pair.writer.engine.attach(pair.target.me, changed(pair, host="elsewhere")))
    assert done.outcome is Outcome.FAILED_QUIET
    assert "tcp" not in done.cause
    pair.close()


def test_a_target_that_does_not_answer_is_given_up_within_the_limit(pair, monkeypatch):
    monkeypatch.setattr(pick, "OPENING_S", 0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind("\0kvferry-silent-test")
        silent.listen(1)
        assert_falls_back(pair, "no answer within", changed(pair, unix="kvferry-silent-test"))


def strange_connection(pair):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(5)
    connection.connect("\0" + blob.decode(pair.target.engine.describe()).unix)
    return connection


@pytest.mark.parametrize(
    "said",
    [
        os.urandom(300),
        b"\x91" * 4000,
        b"\xc1" * 200_000,
        frames.encode_packet(frames.Knock(PeerId(9), b"x" * 32))[:-5],
        frames.encode_packet(frames.Probed()),
        frames.encode_packet(frames.Yes()),
    ],
    ids=["random", "nested", "200 kB", "truncated", "out of turn", "the other's line"],
)
def test_nonsense_on_the_unix_socket_ends_its_connection_and_is_counted(pair, said):
    connection = strange_connection(pair)
    connection.send(said)
    assert connection.recv(100) == b""
    connection.close()
    assert pair.target.engine.info()["garbage"] == 1
    assert pair.attach().outcome is Outcome.LANDED


def test_a_proof_without_the_nonce_is_refused_and_counted(pair):
    connection = strange_connection(pair)
    connection.send(frames.encode_packet(frames.Knock(PeerId(9), b"x" * 32)))
    assert isinstance(frames.decode_packet(connection.recv(4096)), frames.No)
    connection.close()
    assert pair.target.engine.info()["writers"] == {}
    assert pair.attach().outcome is Outcome.LANDED


def test_whoever_says_nothing_on_the_unix_socket_is_hung_up_on(pair, monkeypatch):
    monkeypatch.setattr(memory_door, "HANDSHAKE_S", 0.1)
    connection = strange_connection(pair)
    assert connection.recv(100) == b""
    connection.close()


def test_an_attached_process_that_hangs_up_without_a_word_stays_on_record_until_it_ends(suite):
    suite.options = {"mechanism": "cma"}
    process, target = suite.spawn(4096), suite.pair.target
    assert process.attach(target.me, target.engine.describe())["outcome"] == Outcome.LANDED.value
    door = target.engine._target.memory_door
    guest = next(iter(door._guests))
    target.engine._target._loop.call(lambda: door._hang_up(guest))
    fence = target.engine.fence(process.peer)
    assert wait_for(target.engine, fence, 0.3) is None
    process.kill()
    assert wait_for(target.engine, fence, 5) is Outcome.LANDED


def test_a_target_that_detaches_stops_the_writer_and_is_told_so(pair):
    assert pair.attach().outcome is Outcome.LANDED
    pair.target.engine.detach(pair.writer.me)
    fence = pair.target.engine.fence(pair.writer.me)
    until = time.monotonic() + 5
    while "closed" not in pair.writer.engine.explain(pair.target.me) and time.monotonic() < until:
        pair.writer.engine.poll(0.01)
    assert wait_for(pair.target.engine, fence, 5) is Outcome.LANDED
    assert pair.write(pair.batch([0], [0], [10])).outcome is Outcome.FAILED_QUIET
    assert (pair.target.pool == GUARD).all()


def test_a_fence_on_a_claim_keeps_the_peer_from_memory_but_not_from_tcp(pair):
    assert wait_for(pair.target.engine, pair.target.engine.fence(pair.writer.me, 99), 5) is Outcome.LANDED
    assert_falls_back(pair, "a fence was asked")
    assert pair.write(pair.batch([0], [0], [10], claim=99)).outcome is Outcome.FAILED_QUIET


# copies


@pytest.fixture
def hole():
    """Three pages of which the middle one can't be written."""
    page = mmap.PAGESIZE
    area = mmap.mmap(-1, 3 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(area, np.uint8)
    address = int(memory.ctypes.data)
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(address + page, page, mmap.PROT_READ) == 0
    yield memory, address, page
    assert protect(address + page, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0


def test_a_row_that_can_not_be_written_is_named_and_the_rows_before_it_are_counted(pair, hole):
    memory, address, page = hole
    pair.attach()
    dst = np.array([address, address + 2 * page, address + page + 8, address + 100], np.uint64)
    batch = pair.batch([0, 1000, 2000, 3000], [0] * 4, [50, 60, 70, 80])
    done = pair.write(Batch(batch.src, dst, batch.nbytes, batch.total_bytes, 7))
    assert done.outcome is Outcome.FAILED_QUIET
    assert done.native == "EFAULT"
    assert "in row 2 of 4" in done.cause
    assert "110 of 260 bytes are written" in done.cause
    assert np.array_equal(memory[:50], pair.writer.pool[:50])
    assert np.array_equal(memory[2 * page : 2 * page + 60], pair.writer.pool[1000:1060])
    assert not memory[100:180].any()
    assert pair.write(pair.batch([0], [0], [10])).outcome is Outcome.LANDED


def test_a_source_that_is_no_memory_any_more_is_named(pair):
    pair.attach()
    pair.writer.engine.register([Region(4096, 4096)])
    done = pair.write(
        Batch(
            np.array([4096], np.uint64),
            np.array([pair.target.address], np.uint64),
            np.array([9], np.uint64),
            9,
            7,
        )
    )
    assert done.outcome is Outcome.FAILED_QUIET
    assert "row 0 of 1" in done.cause


def test_short_counts_are_continued_exactly(monkeypatch):
    """With a substituted call that copies at most 1000 bytes at a time."""
    real = memory_link.write_memory

    def short(pid, here, there):
        first = np.array([[here[0, 0], min(int(here[0, 1]), 1000)]], np.uint64)
        return real(pid, first, there)

    monkeypatch.setattr(copier, "write_memory", short)
    random = np.random.default_rng(8)
    source, target = random.integers(0, 256, 1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    nbytes = random.integers(1, 3000, 300).astype(np.uint64)
    src, dst = (random.permutation(300).astype(np.uint64) * np.uint64(3400) for _ in range(2))
    here, there = (np.uint64(array.ctypes.data) for array in (source, target))
    landed, error = copy_rows(os.getpid(), Batch(src + here, dst + there, nbytes, int(nbytes.sum())))
    assert (landed, error) == (int(nbytes.sum()), None)
    expected = np.zeros_like(target)
    for a, b, n in zip(src.astype(int), dst.astype(int), nbytes.astype(int), strict=True):
        expected[b : b + n] = source[a : a + n]
    assert np.array_equal(target, expected)


def test_a_call_that_copies_nothing_ends_the_copy(monkeypatch):
    monkeypatch.setattr(copier, "write_memory", lambda *_: 0)
    one = np.array([1], np.uint64)
    landed, error = copy_rows(1, Batch(one, one, one, 1))
    assert landed == 0
    assert error.errno == errno.EIO


def test_strangers_that_fill_the_door_do_not_keep_an_honest_writer_out(pair, monkeypatch):
    monkeypatch.setattr(memory_door, "MAX_GUESTS", 4)
    strangers = [strange_connection(pair) for _ in range(10)]
    assert pair.attach().outcome is Outcome.LANDED
    assert pair.writer.engine.explain(pair.target.me).startswith("cma (ready)")
    for stranger in strangers:
        stranger.close()
