"""Pools under managers: shared ones, and those that go away while rooms use them."""

import numpy as np
import pytest

from kvferry import KVArgs, KVClassType, KVPoll, KVReceiver, KVSender, allocate_pool, get_kv_class
from kvferry.presets import page_major

PAGES = 32


class PoolSide:
    """A manager over a pool of its own, of which it was told the address only, unless `lent`."""

    def __init__(self, mode, kind, fast, lent=False, **more):
        self.layout = page_major(
            "toy", layers=3, kv_heads=2, head_dim=8, dtype="float16", pages=PAGES, page_tokens=16
        )  # fmt: skip
        size = max(tensor.address + tensor.nbytes for tensor in self.layout.tensors)
        self.kv = allocate_pool(size, kind=kind)
        self.aux = np.zeros((16, 4), np.int64)
        memory = self.kv if lent else (self.kv.address, size)
        make = get_kv_class("local", KVClassType.MANAGER)
        self.manager = make(KVArgs(self.layout, [memory], [self.aux]), mode, environ={}, **{**fast, **more})

    def page(self, number):
        return self.kv.array.reshape(PAGES, -1)[number]


@pytest.fixture
def sides(kit):
    """sides(prefill_kind, decode_kind): two managers."""
    made = []

    def make(prefill, decode, **more):
        made.extend([PoolSide("prefill", prefill, kit.FAST, **more), PoolSide("decode", decode, kit.FAST, **more)])
        return made[-2:]

    yield make
    for side in made:
        side.manager.shutdown()


def mechanism(prefill):
    (explained,) = prefill.manager.info()["engine_info"]["peers"].values()
    return explained.partition(" ")[0]


def hand_over(kit, prefill, decode, room):
    sender = kit.offer(prefill, room, [1, 2])
    receiver = kit.claim(decode, prefill, room, [5, 3])
    return sender.wait(5), receiver.wait(5), sender, receiver


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ("private", "memfd", "shm"),
        ("memfd", "memfd", "shm"),
        ("memfd", "private", "cma"),
        ("private", "private", "cma"),
    ],
)
def test_pools_are_taken_as_they_are_and_the_receivers_kind_decides(kit, sides, prefill, decode, expected):
    first, second = sides(prefill, decode, lent=True)
    first.kv.array[:] = np.random.default_rng(1).integers(0, 256, first.kv.nbytes, np.uint8)
    sent, received, *_ = hand_over(kit, first, second, 1)
    assert (sent, received) == (KVPoll.Success, KVPoll.Success)
    assert np.array_equal(second.page(5), first.page(1))
    assert np.array_equal(second.page(3), first.page(2))
    assert mechanism(first) == expected


def test_a_receivers_pool_that_is_unmapped_fails_its_rooms_with_the_reason_and_both_processes_live(kit, sides):
    prefill, decode = sides("private", "private", lent=False)
    assert hand_over(kit, prefill, decode, 1)[:2] == (KVPoll.Success, KVPoll.Success)
    decode.kv.close()
    for room in (2, 3):
        *states, sender, receiver = hand_over(kit, prefill, decode, room)
        assert states == [KVPoll.Failed, KVPoll.Failed]
        for side in (sender, receiver):
            assert "EFAULT" in str(side.failure())
        kit.until(receiver.is_release_safe)


def test_a_shared_pool_that_its_owner_closes_stays_until_the_manager_lets_it_go(kit, sides):
    prefill, decode = sides("private", "memfd", lent=True)
    view = np.asarray(decode.kv)
    decode.kv.close()
    prefill.kv.array[:] = 7
    assert hand_over(kit, prefill, decode, 1)[:2] == (KVPoll.Success, KVPoll.Success)
    assert mechanism(prefill) == "shm"
    assert (view.reshape(PAGES, -1)[[5, 3]] == 7).all()


def peak_bytes():
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) << 10


@pytest.mark.parametrize("digest", ["off", "sample", "full"])
def test_a_huge_request_takes_little_memory_beside_its_pools(kit, digest):
    layout = page_major("m", layers=4, kv_heads=2, head_dim=64, dtype="float16", pages=12_000, page_tokens=16)
    size = max(tensor.address + tensor.nbytes for tensor in layout.tensors)
    pools = [allocate_pool(size) for _ in range(2)]
    words = [pool.array.view(np.uint64) for pool in pools]
    words[0][:] = np.arange(len(words[0]))
    make = get_kv_class("local", KVClassType.MANAGER)
    sides = [
        make(KVArgs(layout, [pool], [np.zeros((1, 4))]), mode, environ={}, digest=digest)
        for pool, mode in zip(pools, ["prefill", "decode"], strict=True)
    ]
    pages = np.random.default_rng(1).permutation(12_000)[:10_000].astype(np.int32)
    with sides[0] as prefill, sides[1] as decode:
        receiver, sender = KVReceiver(decode, None, 5, peers=[prefill.endpoint]), KVSender(prefill, None, 5)
        with open("/proc/self/clear_refs", "w", encoding="ascii") as clear:
            clear.write("5")  # the peak starts anew
        before = peak_bytes()
        receiver.init()
        receiver.send_metadata(pages[::-1].copy())
        sender.init(len(pages))
        sender.send(pages)
        assert receiver.wait(60) is KVPoll.Success, receiver.failure()
        grown = peak_bytes() - before
        moved = receiver.get_transfer_metric().transfer_total_bytes
    print(f"digest {digest}: {moved >> 20} MiB moved, {grown >> 20} MiB more memory at the peak")
    assert moved == 10_000 * size // 12_000
    assert grown < max(64 << 20, moved // 8)
    rows = [each.reshape(12_000, -1) for each in words]
    assert (rows[1][pages[::-1]] == rows[0][pages]).all()
