"""Many rooms at once, from many threads: every byte right, nothing left over."""

import os
import random
import threading
import time

import numpy as np
import pytest

from kvferry import KVPoll, KVReceiver, KVSender
from kvferry.engines.seam import Outcome

THREADS, ROOMS = 16, 20
TERMINAL = {KVPoll.Success, KVPoll.Failed}


def nothing_left(side):
    node = side.manager.node
    book = node.book
    return (
        book.idle and not book.parked and not node.views and not len(node.grants) and not node.opening
        and not book.claim_of and not book.offer_of and not node.claims.aux_slots and not side.manager._rooms
    )  # fmt: skip


@pytest.fixture(autouse=True)
def one_end(one_end_per_room):
    """Checked for every room of this file."""


class Client:
    """One thread: rooms one after the other on its own two pages and its own aux row."""

    def __init__(self, number, pair, kit, abort):
        self.number, self.kit, self.abort = number, kit, abort
        self.prefill, self.decode = pair
        self.random = random.Random(number)
        self.pages = [2 * number, 2 * number + 1]
        self.outcomes = []
        self.rooms = ROOMS

    def run(self):
        for index in range(self.rooms):
            self.outcomes.append(self.one(1000 * self.number + index))

    def one(self, room):
        rows = self.prefill.fill(self.pages, seed=room)
        self.prefill.aux[self.number] = room
        self.decode.fill(self.pages, seed=room + 500_000)
        steps = [self.send, self.receive]
        self.random.shuffle(steps)
        ends = [step(room) for step in steps]
        if self.random.random() < self.abort:
            time.sleep(self.random.random() * 0.02)
            self.random.choice(ends).abort("client gone")
        for end in ends:
            assert end.wait(10) in TERMINAL
        receiver = next(end for end in ends if isinstance(end, KVReceiver))
        if receiver.poll() is KVPoll.Success:
            assert (self.decode.pages(self.pages) == rows).all()
            assert (self.decode.aux[self.number] == room).all()
        else:
            assert any(word in str(receiver.failure()) for word in ("client gone", "EIO")), receiver.failure()
        self.kit.until(lambda: all(end.is_release_safe() for end in ends))
        for end in ends:
            end.clear()
        return receiver.poll()

    def send(self, room):
        sender = KVSender(self.prefill.manager, None, room)
        sender.init(2, self.number, tag=room + 1)
        if self.random.random() < 0.5:
            sender.send(np.array(self.pages))
        else:
            sender.send(np.array(self.pages[:1]))
            sender.send(np.array(self.pages[1:]))
        return sender

    def receive(self, room):
        return self.kit.claim(self.decode, self.prefill, room, self.pages, aux_index=self.number, tag=room + 1)


def run_all(clients):
    problems = []

    def guarded(client):
        try:
            client.run()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=guarded, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []


@pytest.mark.parametrize("abort", [0.0, 0.3])
def test_sixteen_threads_with_delays_and_aborts_get_every_byte_right_and_leave_nothing(make, kit, abort):
    pair = make("prefill", "faulty", batch_rows=1), make("decode", "faulty")
    pair[0].engine.delay_s = 0.005
    clients = [Client(number, pair, kit, abort) for number in range(THREADS)]
    run_all(clients)
    outcomes = [outcome for client in clients for outcome in client.outcomes]
    assert len(outcomes) == THREADS * ROOMS
    assert outcomes.count(KVPoll.Success) == len(outcomes) if not abort else outcomes.count(KVPoll.Success) > 100
    if abort:
        assert outcomes.count(KVPoll.Failed) > 20
    for side in pair:
        kit.until(lambda side=side: nothing_left(side))
        assert side.manager.health() == ""


def test_a_quarter_of_all_messages_lost_costs_time_and_nothing_else(make, kit, monkeypatch):
    patient = {"stall_s": 9.0, "claim_timeout_s": 9.0, "bootstrap_timeout_s": 9.0}
    pair = make("prefill", "faulty", **patient), make("decode", "faulty", **patient)
    assert Client(0, pair, kit, 0.0).one(1) is KVPoll.Success  # the handshake is not what is lost here
    lottery = random.Random(7)
    for side in pair:
        send = side.manager.node.links.send
        monkeypatch.setattr(
            side.manager.node.links, "send",
            lambda link, data, send=send: lottery.random() < 0.25 or send(link, data),
        )  # fmt: skip
    clients = [Client(number, pair, kit, 0.2) for number in range(THREADS)]
    for client in clients:
        client.rooms = 5
    run_all(clients)
    for side in pair:
        kit.until(lambda side=side: nothing_left(side))


def test_failed_writes_among_many_rooms_cost_their_rooms_only(make, kit):
    pair = make("prefill", "faulty"), make("decode", "faulty")
    pair[0].engine.fail(Outcome.FAILED_QUIET, "EIO", count=40)
    clients = [Client(number, pair, kit, 0.0) for number in range(THREADS)]
    run_all(clients)
    outcomes = [outcome for client in clients for outcome in client.outcomes]
    assert 20 <= outcomes.count(KVPoll.Failed) <= 40
    for side in pair:
        kit.until(lambda side=side: nothing_left(side))


def test_two_hundred_rooms_leave_threads_and_descriptors_as_they_were(pair, kit):
    prefill, decode = pair

    def some(first, count):
        for room in range(first, first + count):
            receiver, sender = kit.claim(decode, prefill, room, [room % 32]), kit.offer(prefill, room, [room % 32])
            assert receiver.fileno() >= 0
            assert sender.fileno() >= 0
            if room % 4 == 3:
                (sender if room % 8 == 3 else receiver).abort()
            assert receiver.wait(5) in TERMINAL
            assert sender.wait(5) in TERMINAL
            sender.clear()
            receiver.clear()
        for side in pair:
            kit.until(lambda side=side: nothing_left(side))

    some(0, 20)
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    some(100, 200)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
