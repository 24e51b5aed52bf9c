"""Bytes that are wrong never reach a user: the canary compares what was sent with what landed."""

import contextlib
import ctypes
import errno
import mmap
import signal
import threading
import time

import numpy as np
import pytest

from engine_here import need
from kvferry import KVArgs, KVClassType, KVPoll, get_kv_class
from kvferry.engines.seam import Region
from kvferry.errors import Blame, Code, ConfigError, EngineError
from kvferry.layout import Device
from kvferry.node import control, digests, memory_reader
from kvferry.node.memory_reader import Mapped, read_few, read_many
from kvferry.presets import page_major
from pages_away import out_of_reach

MAP_FIXED = 0x10  # not in the mmap module


@pytest.fixture(params=["sample", "full"])
def digest(request):
    return request.param


@pytest.fixture
def sides(make, digest):
    return make("prefill", "faulty", digest=digest), make("decode", "faulty", digest=digest)


def test_exchanged_bytes_of_the_right_number_fail_the_room_on_the_decode_side(sides, kit):
    prefill, decode = sides
    prefill.fill([7, 3], seed=1)
    prefill.engine.mix_up()
    receiver = kit.claim(decode, prefill, 5, [4, 9], num_tokens=32)
    sender = kit.offer(prefill, 5, [7, 3], num_tokens=32)
    assert receiver.wait(5) is KVPoll.Failed
    reason = receiver.failure().reason
    assert (reason.code, reason.stage, reason.blame) == (Code.CONTENT_DIFFERS, "delivery", Blame.ENGINE)
    assert "space 'kv': layers 0, 1, 2, page 0 (page 4 of the pool) of the request" in reason.cause
    kit.until(sender.is_release_safe)
    kit.until(receiver.is_release_safe)


def test_a_source_page_that_changes_under_way_is_seen(sides, kit):
    prefill, decode = sides
    prefill.fill([7], seed=1)
    prefill.engine.hold()
    receiver = kit.claim(decode, prefill, 5, [4], num_tokens=16)
    kit.offer(prefill, 5, [7], num_tokens=16)
    kit.until(lambda: prefill.engine.held == 1)
    time.sleep(0.1)  # the digest is taken beside the write
    prefill.fill([7], seed=2)
    prefill.engine.release()
    assert receiver.wait(5) is KVPoll.Failed
    assert receiver.failure().reason.code is Code.CONTENT_DIFFERS


def test_the_room_after_it_is_right(sides, kit):
    prefill, decode = sides
    prefill.fill([7], seed=1)
    prefill.engine.mix_up()
    first = kit.claim(decode, prefill, 5, [4])
    kit.offer(prefill, 5, [7])
    assert first.wait(5) is KVPoll.Failed
    rows = prefill.fill([8, 2], seed=3)
    second = kit.claim(decode, prefill, 6, [1, 5])
    kit.offer(prefill, 6, [8, 2])
    assert second.wait(5) is KVPoll.Success
    assert (decode.pages([1, 5]) == rows).all()


@pytest.mark.parametrize("prefix", [0, 16, 21])
@pytest.mark.parametrize("chunks", [1, 3])
def test_prefixes_and_chunks_give_equal_digests(sides, kit, prefix, chunks):
    prefill, decode = sides
    rows = prefill.fill([7, 3, 20], seed=1)
    receiver = kit.claim(decode, prefill, 5, [4, 9, 11][prefix // 16 :], num_tokens=45, prefix=prefix)
    sender = kit.offer(prefill, 5, [7, 3, 20], num_tokens=45, send=False)
    for part in np.array_split(np.array([7, 3, 20], np.int32), chunks):
        sender.send(part)
    assert receiver.wait(5) is KVPoll.Success, receiver.failure()
    assert (decode.pages([11])[0, :8] == rows[2, :8]).all()


@pytest.mark.parametrize(("mine", "theirs", "found"), [
    ("off", "off", KVPoll.Success), ("off", "sample", KVPoll.Failed), ("full", "off", KVPoll.Failed),
])  # fmt: skip
def test_of_two_wishes_the_stronger_counts(make, kit, mine, theirs, found):
    prefill, decode = make("prefill", "faulty", digest=mine), make("decode", "faulty", digest=theirs)
    prefill.fill([7], seed=1)
    prefill.engine.mix_up()
    receiver = kit.claim(decode, prefill, 5, [4], num_tokens=16)
    kit.offer(prefill, 5, [7], num_tokens=16)
    assert receiver.wait(5) is found


def test_a_full_digest_sees_one_bit_that_no_sample_need_see(make, kit):
    prefill, decode = make("prefill", "faulty", digest="full"), make("decode", "faulty")
    prefill.fill([7], seed=1)
    prefill.engine.hold()
    receiver = kit.claim(decode, prefill, 5, [4], num_tokens=16)
    kit.offer(prefill, 5, [7], num_tokens=16)
    kit.until(lambda: prefill.engine.held == 1)
    time.sleep(0.1)
    prefill.pool.reshape(kit.PAGES, -1)[7, 100] ^= 1
    prefill.engine.release()
    assert receiver.wait(5) is KVPoll.Failed


def test_large_rooms_are_digested_on_threads_of_their_own(make, kit):
    layout = page_major("m", layers=2, kv_heads=8, head_dim=128, dtype="float16", pages=kit.PAGES, page_tokens=64)
    prefill, decode = make("prefill", "faulty", layout), make("decode", "faulty", layout)
    pages = list(range(2, 10))
    rows = prefill.fill(pages, seed=1)
    receiver = kit.claim(decode, prefill, 5, [page + 3 for page in pages])
    kit.offer(prefill, 5, pages)
    assert receiver.wait(10) is KVPoll.Success, receiver.failure()
    assert rows.nbytes > 1 << 20
    assert (decode.pages([page + 3 for page in pages]) == rows).all()
    prefill.engine.mix_up()
    receiver = kit.claim(decode, prefill, 6, pages)
    kit.offer(prefill, 6, pages)
    assert receiver.wait(10) is KVPoll.Failed
    assert "pages 0 (page 2 of the pool), 1 (page 3 of the pool)" in receiver.failure().reason.cause


def map_again(address, size):
    """What an allocator may do with addresses that were given back: keep them in reserve."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
    assert libc.mmap(address, size, 0, kind, -1, 0) == address


def test_memory_that_is_gone_is_found_and_named():
    size = 8 * mmap.PAGESIZE
    there, gone = mmap.mmap(-1, size), mmap.mmap(-1, size)
    addresses = [np.frombuffer(each, np.uint8).ctypes.data for each in (there, gone)]
    whole, rest = Mapped([Region(each, size) for each in addresses]), Mapped([Region(addresses[0], size)])
    many = Mapped([Region(addresses[0], size)] * 700 + [Region(addresses[1] + 1, size - 2)])
    for each in (whole, rest, many, Mapped([]), Mapped([Region(addresses[0], 0)])):
        each.check()
    gone.close()
    for each, nbytes, at in ((whole, size, addresses[1]), (many, size - 2, addresses[1] + 1)):
        with pytest.raises(EngineError, match=f"of {nbytes} bytes at {at:#x} is not mapped any more"):
            each.check()
    map_again(addresses[1], size)
    for each, nbytes, at in ((whole, size, addresses[1]), (many, size - 2, addresses[1] + 1)):
        with pytest.raises(EngineError, match=f"of {nbytes} bytes at {at:#x} can't be read any more"):
            each.check()
    rest.check()


@pytest.mark.parametrize("nbytes", [1, 24, 64, 4096])
@pytest.mark.parametrize("count", [0, 1, 64, 65, 1024, 2500])
def test_the_kernel_and_numpy_read_the_same(nbytes, count):
    random = np.random.default_rng(count + nbytes)
    memory = random.integers(0, 256, 1 << 20, np.uint8)
    addresses = memory.ctypes.data + random.integers(0, memory.nbytes - nbytes, count)
    few, many = read_few(addresses, nbytes), read_many(addresses, nbytes)
    assert few.tobytes() == many.tobytes()
    assert len(few) == len(many) == count
    assert few.itemsize == nbytes


def test_the_kernel_says_which_of_few_places_is_gone():
    size = 4 * mmap.PAGESIZE
    memory, there = mmap.mmap(-1, size), np.zeros(64, np.uint8)
    gone = np.frombuffer(memory, np.uint8).ctypes.data + mmap.PAGESIZE
    memory.close()
    map_again(gone - mmap.PAGESIZE, size)
    for before in (0, 1, 1023, 1024, 1500):
        addresses = np.array([there.ctypes.data] * before + [gone, there.ctypes.data], np.int64)
        with pytest.raises(EngineError, match=f"registered memory at {gone:#x} can't be read any more"):
            read_few(addresses, 64)


def test_where_the_kernel_does_not_let_a_process_read_itself_numpy_does(make, kit, monkeypatch):
    def refused(*_):
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(memory_reader, "_process_vm_readv", refused)
    assert read_few(np.array([1], np.int64), 64) is None
    prefill, decode = make("prefill", "faulty"), make("decode", "faulty")
    rows = prefill.fill([1, 2], seed=1)
    receiver = kit.claim(decode, prefill, 1, [5, 6])
    kit.offer(prefill, 1, [1, 2])
    assert receiver.wait(5) is KVPoll.Success
    assert (decode.pages([5, 6]) == rows).all()


def test_memory_that_was_unmapped_fails_the_room_and_not_the_process(make, kit):
    layout = page_major("toy", layers=3, kv_heads=2, head_dim=8, dtype="float16", pages=32, page_tokens=16)
    size = max(tensor.address + tensor.nbytes for tensor in layout.tensors)
    memory = mmap.mmap(-1, size)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    decode = make("decode", "faulty")
    manager = get_kv_class("faulty", KVClassType.MANAGER)
    args = KVArgs(layout, [(address, size)], [np.zeros((16, 4), np.int64)])
    with manager(args, "prefill", environ={}, **kit.FAST) as owner:
        owner.node.engine.hold()
        receiver = kit.claim(decode, owner.endpoint, 5, [4])
        sender = kit.offer(type("Side", (), {"manager": owner}), 5, [7])
        kit.until(lambda: owner.node.engine.held == 1)
        memory.close()
        map_again(address, size)  # at once: whatever a thread allocates could come and go there
        owner.node.engine.release()
        assert receiver.wait(5) is KVPoll.Failed
        assert sender.wait(5) is KVPoll.Failed
        receiver = kit.claim(decode, owner.endpoint, 6, [5])  # those of the first may still be held
        sender = kit.offer(type("Side", (), {"manager": owner}), 6, [7])
        assert receiver.wait(5) is KVPoll.Failed


@pytest.mark.parametrize("engine", ["local", "nixl", "mooncake"])
@pytest.mark.parametrize("of", ["prefill", "decode"])
def test_a_page_that_is_out_of_reach_fails_the_room_whatever_the_engine_says(kit, engine, of):
    need(engine)
    layout = page_major("toy", layers=8, kv_heads=8, head_dim=64, dtype="float16", pages=8, page_tokens=16)
    size = max(tensor.address + tensor.nbytes for tensor in layout.tensors)
    manager, memory = get_kv_class(engine, KVClassType.MANAGER), {}
    with contextlib.ExitStack() as stack:
        sides = []
        for side in ("prefill", "decode"):
            memory[side] = mmap.mmap(-1, size)
            address = np.frombuffer(memory[side], np.uint8).ctypes.data
            args = KVArgs(layout, [(address, size)], [np.zeros((16, 4), np.int64)])
            sides.append(stack.enter_context(manager(args, side, environ={}, **kit.FAST)))
            if side == of:
                lost = address + 3 * (size // 8)  # the beginning of page 3
        prefill, decode = (type("Side", (), {"manager": each}) for each in sides)
        receiver = kit.claim(decode, prefill, 1, [1, 2])
        sender = kit.offer(prefill, 1, [4, 5])
        assert receiver.wait(10) is KVPoll.Success
        with out_of_reach(lost):
            receiver, sender = kit.claim(decode, prefill, 2, [3, 4]), kit.offer(prefill, 2, [3, 6])
            assert receiver.wait(10) is KVPoll.Failed
            assert sender.wait(10) in {KVPoll.Failed, KVPoll.Success}, "it has delivered what it had"
        # NIXL may notice only with the next write that its connection is gone
        ends = []
        for room, page in enumerate((5, 6, 7), start=3):
            receiver = kit.claim(decode, prefill, room, [page])
            kit.offer(prefill, room, [1])
            ends.append(receiver.wait(10))
        assert KVPoll.Success in ends[:2]
        assert ends[2] is KVPoll.Success


def test_a_digest_that_is_none_is_refused_by_name(make):
    with pytest.raises(ConfigError, match="digest = 'crc' is none of off, sample, full"):
        make("prefill", digest="crc")


def test_memory_of_a_device_is_not_read():
    from kvferry.node.switchboard import stronger

    assert [stronger(*pair) for pair in [("", "full"), ("full", ""), ("off", "off"), ("off", "sample")]] == [
        "", "", "", "sample",
    ]  # fmt: skip
    assert Device(0)


def test_a_digest_that_gets_no_thread_takes_the_callers_time(make, kit, monkeypatch):
    layout = page_major("m", layers=2, kv_heads=8, head_dim=128, dtype="float16", pages=kit.PAGES, page_tokens=64)
    prefill, decode = make("prefill", "faulty", layout), make("decode", "faulty", layout)
    started, refused = threading.Thread.start, []

    def refuse(thread):
        if thread.name == "kvferry-digest":
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    prefill.fill(range(2, 10), seed=1)
    receiver = kit.claim(decode, prefill, 5, list(range(5, 13)))
    sender = kit.offer(prefill, 5, list(range(2, 10)))
    assert receiver.wait(10) is KVPoll.Success, receiver.failure()
    assert sender.wait(5) is KVPoll.Success
    assert refused


def test_what_several_threads_have_read_is_put_together_once(monkeypatch):
    from kvferry.canary import Sums
    from kvferry.node.digests import _Shares

    class Place:
        def __init__(self, number):
            self.number = number

        def sums(self, read, *, full, share):
            return Sums(np.array([share[0] + 1], np.uint64), np.array([1], np.uint64))

    class Looks:
        full = False

        def places(self, pages):
            return [Place(1)]

    for _ in range(200):
        found = []
        shares = _Shares(8, lambda looks: None, lambda places, sums: found.append(sums), found.append)  # noqa: B023
        threads = [threading.Thread(target=shares.read, args=(Looks(), {}, (number, 8))) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ((sums,),) = found
        assert (sums.layers.tolist(), sums.pages.tolist()) == ([36], [8])


def test_a_signal_handler_that_polls_in_the_middle_of_a_digest_does_not_disturb_it(make, kit, monkeypatch):
    prefill, decode = make("prefill"), make("decode")
    prefill.fill(list(range(32)), seed=1)
    claims = [kit.claim(decode, prefill, room, [room]) for room in range(1, 11)]
    caller, state = threading.get_ident(), {"deep": False, "hits": 0}

    def disturbed(original):
        def call(*args):
            if threading.get_ident() == caller and not state["deep"]:
                state["deep"] = True
                signal.raise_signal(signal.SIGUSR1)
                state["deep"] = False
            return original(*args)

        return call

    def handler(*_):
        state["hits"] += 1
        for claim in claims:
            claim.poll()

    monkeypatch.setattr(digests, "words", disturbed(digests.words))
    monkeypatch.setattr(memory_reader, "_process_vm_readv", disturbed(memory_reader._process_vm_readv))
    monkeypatch.setattr(control, "LOOK_S", 0.0)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        senders = [kit.offer(prefill, room, [room + 11], send=False) for room in range(1, 11)]
        kit.until(lambda: all(sender.poll() is KVPoll.WaitingForInput for sender in senders))
        for room, sender in enumerate(senders, 1):
            sender.send(np.array([room + 11], np.int32))
        kit.until(lambda: all(claim.poll() in {KVPoll.Success, KVPoll.Failed} for claim in claims))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert state["hits"]
    assert [claim.failure() for claim in claims] == [None] * 10
