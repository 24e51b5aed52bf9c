"""An engine whose peers can not attach or write unless it is polled: the node does that, and not too often."""

import time
from typing import ClassVar

import pytest

from kvferry import KVPoll
from kvferry.engines import find
from kvferry.engines.seam import Caps
from kvferry.testing.faulty import FaultyEmbedded

ATTACH_POLLS, WRITE_POLLS = 5, 3
"""How often the target must have been polled before an attach, or a write, can end."""


class Served(FaultyEmbedded):
    """Holds outcomes back until the target was polled a few times, as a library does that has no thread there."""

    everyone: ClassVar = {}

    def open(self, config):
        super().open(config)
        self.polls, self.waiting, self.by_ticket = 0, [], {}
        self.everyone[config.me.incarnation] = self

    @property
    def caps(self):
        return super().caps | Caps.NEEDS_TARGET_POLL

    def attach(self, peer, blob):
        ticket = super().attach(peer, blob)
        self.by_ticket[ticket] = (peer, ATTACH_POLLS + self.everyone[peer.incarnation].polls)
        return ticket

    def submit(self, peer, batch):
        ticket = super().submit(peer, batch)
        self.by_ticket[ticket] = (peer, WRITE_POLLS + self.everyone[peer.incarnation].polls)
        return ticket

    def poll(self, budget_s):
        self.polls += 1
        self.waiting += super().poll(budget_s)
        ended = [done for done in self.waiting if self.is_served(done)]
        self.waiting = [done for done in self.waiting if done not in ended]
        return ended

    def is_served(self, done):
        peer, polls = self.by_ticket.get(done.ticket, (None, 0))
        return peer is None or self.everyone[peer.incarnation].polls >= polls


class NotServed(Served):
    """The same, and it does not say that it has to be polled."""

    @property
    def caps(self):
        return super().caps & ~Caps.NEEDS_TARGET_POLL


@pytest.fixture
def named(monkeypatch):
    monkeypatch.setattr(find, "_registered", dict(find._registered))
    monkeypatch.setattr("kvferry.testing.faulty.FaultyEmbedded", Served)
    find.register("faulty", "kvferry.testing.faulty:FaultyEmbedded")


def seconds_for_a_room(prefill, decode, kit, room):
    began = time.monotonic()
    receiver, sender = kit.claim(decode, prefill, room, [room]), kit.offer(prefill, room, [1])
    assert receiver.wait(20) is KVPoll.Success, receiver.failure()
    assert sender.wait(20) is KVPoll.Success
    return time.monotonic() - began


def polls_of(side, seconds):
    before = side.engine.polls
    time.sleep(seconds)
    return side.engine.polls - before


def test_a_peer_attaches_and_writes_without_waiting_for_a_poll_that_comes_once_a_second(named, make, kit):
    prefill, decode = make("prefill", "faulty"), make("decode", "faulty")
    rows = prefill.fill([1], seed=1)
    assert seconds_for_a_room(prefill, decode, kit, 1) < 1.0
    assert seconds_for_a_room(prefill, decode, kit, 2) < 1.0
    assert (decode.pages([2]) == rows).all()


def test_without_the_capability_the_peer_waits_in_vain(named, make, kit, monkeypatch):
    """Once a second is too seldom, so that the tests above show something."""
    monkeypatch.setattr("kvferry.testing.faulty.FaultyEmbedded", NotServed)
    prefill, decode = make("prefill", "faulty"), make("decode", "faulty")
    receiver = kit.claim(decode, prefill, 1, [1])
    assert receiver.wait(20) is KVPoll.Failed
    words = str(receiver.failure())
    assert prefill.manager.endpoint in words
    assert "nothing was heard: it is no kvferry rank, it hangs, or its engine is still connecting to this one" in words


def test_it_is_polled_often_while_pages_are_granted_and_seldom_otherwise(named, make, kit):
    prefill, decode = make("prefill", "faulty"), make("decode", "faulty")
    seconds_for_a_room(prefill, decode, kit, 1)
    time.sleep(0.1)
    idle = polls_of(decode, 1.0)
    receiver = kit.claim(decode, prefill, 2, [2])
    kit.until(lambda: decode.manager.node.exposed)
    granted = polls_of(decode, 1.0)
    receiver.abort()
    kit.until(lambda: not decode.manager.node.exposed)
    time.sleep(0.1)
    after = polls_of(decode, 1.0)
    assert max(idle, after) <= 60, "an idle node is to use less than a hundredth of a processor"
    assert min(idle, after) >= 5
    assert granted > 3 * max(idle, after)


def test_an_engine_that_needs_none_is_left_alone(make, monkeypatch):
    monkeypatch.setattr(find, "_registered", dict(find._registered))
    monkeypatch.setattr("kvferry.testing.faulty.FaultyEmbedded", NotServed)
    find.register("faulty", "kvferry.testing.faulty:FaultyEmbedded")
    assert polls_of(make("decode", "faulty"), 1.0) <= 3
