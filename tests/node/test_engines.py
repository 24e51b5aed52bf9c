"""Engines that fail in every way: it costs a room or a peer's connection, and what can heal heals by itself."""

import time

import pytest

from kvferry import KVPoll
from kvferry.engines.seam import Outcome
from kvferry.errors import Code
from kvferry.testing.faulty import FaultyEmbedded


class Raising(FaultyEmbedded):
    """Raises whatever it is told to, from the call that it is told."""

    def __init__(self):
        super().__init__()
        self.errors = {}

    def _maybe(self, call):
        if call in self.errors:
            raise self.errors.pop(call)

    def attach(self, peer, blob):
        self._maybe("attach")
        return super().attach(peer, blob)

    def submit(self, peer, batch):
        self._maybe("submit")
        return super().submit(peer, batch)

    def fence(self, peer, claim=None):
        self._maybe("fence")
        return super().fence(peer, claim)

    def detach(self, peer):
        self._maybe("detach")
        super().detach(peer)

    def poll(self, budget_s):
        self._maybe("poll")
        return super().poll(budget_s)


@pytest.fixture
def raising(make, monkeypatch):
    monkeypatch.setattr("kvferry.testing.faulty.FaultyEmbedded", Raising)
    return make("prefill", "faulty"), make("decode", "faulty")


def idents(side):
    return side.manager.node.control.thread.ident, side.manager.node.mover._thread.ident


@pytest.mark.parametrize("error", [RuntimeError("nixl_status -7"), KeyError("agent"), OSError(5, "EIO")])
def test_an_engine_that_raises_fails_its_room_only(raising, kit, error):
    prefill, decode = raising
    rows = prefill.fill([1, 2], seed=1)
    before = idents(prefill), idents(decode)
    prefill.engine.errors["submit"] = error
    receiver, sender = kit.claim(decode, prefill, 1, [4]), kit.offer(prefill, 1, [1])
    assert receiver.wait(3) is KVPoll.Failed
    assert sender.wait(1) is KVPoll.Failed
    assert repr(error) in str(receiver.failure())
    assert repr(error) in str(sender.failure())
    time.sleep(0.1)
    assert not receiver.is_release_safe()
    receiver, sender = kit.claim(decode, prefill, 2, [5, 6]), kit.offer(prefill, 2, [1, 2])
    assert receiver.wait(3) is KVPoll.Success
    assert (decode.pages([5, 6]) == rows).all()
    assert (idents(prefill), idents(decode)) == before
    assert prefill.manager.health() == decode.manager.health() == ""


@pytest.mark.parametrize("call", ["detach", "fence"])
def test_an_engine_that_raises_when_a_peer_is_lost_harms_nobody_else(raising, make, kit, call):
    prefill, decode = raising
    other = make("prefill", "faulty") if call == "fence" else make("decode", "faulty")
    mine = decode if call == "fence" else prefill
    mine.engine.errors[call] = RuntimeError("not supported")
    prefill.engine.hold()
    receiver = kit.claim(decode, prefill, 1, [4])
    sender = kit.offer(prefill, 1, [1])
    kit.until(lambda: prefill.engine.held)
    (prefill if call == "fence" else decode).manager.shutdown()
    assert (receiver if call == "fence" else sender).wait(2) is KVPoll.Failed
    kit.until(lambda: not mine.engine.errors)
    prefill.engine.release()
    if call == "fence":
        receiver = kit.claim(decode, other, 2, [5])
        kit.offer(other, 2, [1])
    else:
        receiver = kit.claim(other, prefill, 2, [5])
        kit.offer(prefill, 2, [1])
    assert receiver.wait(3) is KVPoll.Success
    assert mine.manager.health() == ""


def cut_data_connections(side):
    """What a firewall does to a connection that was idle for long; the control plane does not notice."""
    writers = side.engine._target.writers
    for receiver in writers.receivers():
        receiver.cut(None)
    deadline = time.monotonic() + 5
    while writers.receivers():  # the engine's own threads do it
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_cut_data_connection_costs_at_most_one_room_and_its_pages_come_back(make, kit):
    tcp = {"engine_options": "mechanism=tcp"}
    prefill, decode = make("prefill", **tcp), make("decode", **tcp)
    rows = prefill.fill([1], seed=1)
    receiver, _ = kit.claim(decode, prefill, 1, [4]), kit.offer(prefill, 1, [1])
    assert receiver.wait(3) is KVPoll.Success
    cut_data_connections(decode)
    receiver, sender = kit.claim(decode, prefill, 2, [5]), kit.offer(prefill, 2, [1])
    receiver.wait(3)
    kit.until(lambda: receiver.is_release_safe() and sender.is_release_safe())
    for room in (3, 4):
        receiver = kit.claim(decode, prefill, room, [room + 3])
        kit.offer(prefill, room, [1])
        assert receiver.wait(3) is KVPoll.Success, receiver.failure()
        assert (decode.pages([room + 3]) == rows).all()


def test_rooms_of_other_peers_go_on_while_the_engine_connects_anew(make, kit):
    prefill, one, other = make("prefill", "faulty"), make("decode", "faulty"), make("decode", "faulty")
    for room, side in ((1, one), (2, other)):
        receiver = kit.claim(side, prefill, room, [4])
        kit.offer(prefill, room, [1])
        assert receiver.wait(3) is KVPoll.Success
    prefill.engine.hold()
    waits = kit.claim(one, prefill, 3, [5])
    kit.offer(prefill, 3, [1])
    kit.until(lambda: prefill.engine.held)
    prefill.engine.fail(Outcome.FAILED_QUIET, "EIO")
    fails = kit.claim(other, prefill, 4, [5])
    kit.offer(prefill, 4, [1])
    assert fails.wait(2) is KVPoll.Failed
    assert waits.poll() is KVPoll.Transferring
    prefill.engine.release()
    assert waits.wait(2) is KVPoll.Success


def test_a_peer_that_the_engine_can_not_reach_any_more_is_left_and_found_again(raising, kit):
    prefill, decode = raising
    warm = kit.claim(decode, prefill, 1, [4])
    kit.offer(prefill, 1, [1])
    assert warm.wait(3) is KVPoll.Success
    waiting = kit.claim(decode, prefill, 2, [5])
    kit.until(lambda: waiting.poll() is KVPoll.Transferring)
    prefill.engine.errors["attach"] = RuntimeError("no route to the port")
    prefill.engine.fail(Outcome.FAILED_QUIET, "EIO")
    failed = kit.claim(decode, prefill, 3, [6])
    kit.offer(prefill, 3, [1])
    assert failed.wait(2) is KVPoll.Failed
    assert waiting.wait(2) is KVPoll.Failed
    assert waiting.failure().reason.code is Code.UNREACHABLE
    assert "can't reach the peer any more: no route to the port" in str(waiting.failure())
    receiver = kit.claim(decode, prefill, 4, [7])
    kit.offer(prefill, 4, [1])
    assert receiver.wait(3) is KVPoll.Success
    kit.until(lambda: failed.is_release_safe() and waiting.is_release_safe())
