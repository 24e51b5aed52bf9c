"""NIXL's fence: what it waits for, what it does not take for a proof, and where none is claimed."""

import time

import numpy as np
import pytest
from nixl_pairs import POOL, TCP, a_pair, a_suite

from engine_here import need
from kvferry.engines import devices
from kvferry.engines.host import Process, this_process
from kvferry.engines.nixl import NixlEngine, engine, serving, writers
from kvferry.engines.nixl.greeting import Bye, Hello, answer_to, pack, place_of, unpack
from kvferry.engines.nixl.options import parse
from kvferry.engines.nixl.writers import Writers
from kvferry.engines.seam import Caps, Outcome
from kvferry.ids import PeerId
from kvferry.testing.suite_pair import open_end

need("nixl")


@pytest.fixture(params=[{}, TCP], ids=["cma", "tcp"])
def pair(request):
    with a_pair(**request.param) as made:
        yield made


@pytest.fixture
def suite():
    with a_suite() as made:
        yield made


def waits(end, ticket, seconds=0.3):
    """Whether a ticket of one end has no outcome meanwhile; only that end is polled."""
    try:
        end.wait(ticket, seconds)
    except TimeoutError:
        return True
    return False


def why(end):
    return " ".join(end.engine.info()["fences_waiting"].values())


# a writer whose process has ended


def test_it_does_not_land_while_rows_of_a_killed_writer_lie_in_a_socket(suite, monkeypatch):
    process, target = suite.flooding(), suite.pair.target
    time.sleep(0.5)  # nobody polls: the sockets fill
    process.kill()
    ticket, before = target.engine.fence(process.peer), target.pool.copy()
    with monkeypatch.context() as patch:
        patch.setattr(target.engine._agent, "progress", list)
        assert waits(target, ticket)
        assert "bytes may still be on their way" in why(target)
        assert np.array_equal(target.pool, before)
    assert target.wait(ticket, 10).outcome is Outcome.LANDED
    suite.assert_still_for(2.0)
    assert target.engine.info()["writers"] == 0


def test_a_killed_writer_is_forgotten_without_a_fence(suite):
    process = suite.flooding()
    assert suite.pair.target.engine.info()["writers"] == 1
    process.kill()
    suite.wait_until(lambda: suite.pair.target.engine.info()["writers"] == 0)
    assert suite.pair.target.engine.info()["writers"] == 0


def test_a_stopped_writer_is_waited_for_and_what_it_writes_then_is_no_surprise(suite):
    process, target = suite.flooding(), suite.pair.target
    process.stop()
    ticket = target.engine.fence(process.peer)
    assert waits(target, ticket)
    assert "has not ended" in why(target)
    process.go_on()
    before = target.pool.copy()
    suite.wait_until(lambda: not np.array_equal(target.pool, before))
    assert ticket not in target.ended
    process.kill()
    assert target.wait(ticket, 10).outcome is Outcome.LANDED


def test_a_process_of_another_host_proves_nothing_but_its_word(pair, monkeypatch):
    monkeypatch.setattr(engine, "this_process", lambda: Process("elsewhere", 1, 1))
    assert pair.attach().outcome is Outcome.LANDED
    ticket = pair.target.engine.fence(pair.writer.me)
    assert waits(pair.target, ticket)
    assert "as on another host" in why(pair.target)
    pair.writer.engine.detach(pair.target.me)
    assert pair.target.wait(ticket, 5).outcome is Outcome.LANDED


def test_a_writer_that_may_use_shared_memory_names_no_process(monkeypatch):
    """Its target's own settings say nothing of what the writer uses."""
    made = open_end(NixlEngine(), 1, POOL, {"ucx_error_handling_mode": "none"})
    with a_pair() as pair:
        told = []
        monkeypatch.setattr(pair.target.engine._serving._writers, "_admit", lambda hello: told.append(hello) or True)
        made.engine.attach(pair.target.me, pair.target.engine.describe())
        until = time.monotonic() + 10
        while not told and time.monotonic() < until:
            made.poll(0.001)
            pair.target.poll()
        made.engine.close()
    assert told[0].process is None
    assert (told[0].peer, told[0].nonce) == (PeerId(1), pair.target.engine._nonce)


# a writer that says good-bye


def test_a_batch_that_is_under_way_when_its_writer_detaches_is_waited_for():
    with a_pair(**TCP) as pair:
        assert pair.attach().outcome is Outcome.LANDED
        written = pair.submit(pair.batch([0], [0], [POOL]))
        pair.writer.engine.detach(pair.target.me)
        ticket = pair.target.engine.fence(pair.writer.me)
        assert waits(pair.target, ticket), "the writer does not know yet that it is over"
        assert pair.settle(written).outcome is Outcome.LANDED
        assert pair.target.wait(ticket, 5).outcome is Outcome.LANDED


def test_after_a_write_that_failed_nothing_is_said(pair, monkeypatch):
    assert pair.attach().outcome is Outcome.LANDED
    with monkeypatch.context() as patch:

        def broken(_):
            raise RuntimeError("on purpose")

        patch.setattr(pair.writer.engine._agent, "post", broken)
        assert pair.write(pair.batch([0], [0], [10])).outcome is Outcome.FAILED_UNKNOWN
    pair.writer.engine.detach(pair.target.me)
    pair.step()
    assert waits(pair.target, pair.target.engine.fence(pair.writer.me))


def test_closing_says_good_bye(pair):
    assert pair.attach().outcome is Outcome.LANDED
    pair.writer.engine.close()
    assert pair.target.wait(pair.target.engine.fence(pair.writer.me), 5).outcome is Outcome.LANDED


def test_attaching_anew_is_no_good_bye_for_a_fence_of_one_claim(pair):
    assert pair.attach().outcome is Outcome.LANDED
    ticket = pair.target.engine.fence(pair.writer.me, 7)
    for _ in range(3):
        assert pair.attach().outcome is Outcome.LANDED
        assert pair.write(pair.batch([0], [0], [10])).outcome is Outcome.LANDED
    pair.step()
    assert waits(pair.target, ticket)
    assert pair.target.engine.info()["writers"] == 1, "the earlier attachments are over"
    pair.writer.engine.detach(pair.target.me)
    assert pair.target.wait(ticket, 5).outcome is Outcome.LANDED
    assert pair.attach().native == "barred", "what is proven stays true"


def test_an_attempt_that_is_given_up_is_no_writer_for_ever(pair):
    for _ in range(3):
        pair.writer.engine.attach(pair.target.me, pair.target.engine.describe())
        for _ in range(20):
            pair.step()
        pair.writer.engine.detach(pair.target.me)
    for _ in range(20):
        pair.step()
    assert pair.target.wait(pair.target.engine.fence(pair.writer.me), 5).outcome is Outcome.LANDED


def test_who_is_barred_is_told_why_and_others_are_let_in(pair):
    assert pair.target.wait(pair.target.engine.fence(pair.writer.me), 5).outcome is Outcome.LANDED
    done = pair.attach()
    assert (done.outcome, done.native) == (Outcome.FAILED_QUIET, "barred")
    assert "nothing of this connection can land there any more" in done.cause
    next_epoch = PeerId(pair.target.me.incarnation, 1)
    again = pair.writer.engine.attach(next_epoch, pair.target.engine.describe())
    assert pair.settle(again).outcome is Outcome.LANDED, "another connection of the same process"


# the target's book


class Page:
    """An agent as far as answers go."""

    def __init__(self):
        self.answers = {}

    def answer(self, number, raw):
        self.answers[number] = raw


def hello(number, peer=9, nonce=b"n", process=None):
    return pack(Hello(number * 16, nonce, peer, 0, process))


def test_what_makes_no_sense_or_comes_from_a_stranger_is_ignored():
    page = Page()
    book = Writers(page, b"n")
    book.hear([b"", b"\xc1", b"hello", hello(b"a", nonce=b"m"), pack(Bye(b"b" * 16)), hello(b"a" * 2)])
    assert (len(book), page.answers) == (0, {})
    assert unpack(hello(b"a")).peer == PeerId(9)


def test_who_asks_again_is_answered_again_and_counts_once(monkeypatch):
    monkeypatch.setattr(writers, "MAX_WRITERS", 1)
    page = Page()
    book = Writers(page, b"n")
    book.hear([hello(b"a"), hello(b"a"), hello(b"b")])
    assert len(book) == 1
    for number, let_in in ((b"a" * 16, True), (b"b" * 16, False)):
        assert page.answers[place_of(number)] == answer_to(number, let_in=let_in)
    book.hear([pack(Bye(b"a" * 16)), hello(b"b")])
    assert page.answers[place_of(b"b" * 16)] == answer_to(b"b" * 16, let_in=True)


def test_a_fence_waits_for_every_process_that_writes_under_the_name(monkeypatch):
    ended = []
    monkeypatch.setattr(writers, "has_ended", ended.__contains__)
    monkeypatch.setattr(writers, "own_sockets", dict)
    monkeypatch.setattr(writers, "awaits_acceptance", lambda: False)
    one, other = (Process("here", pid, 1) for pid in (1, 2))
    book = Writers(Page(), b"n")
    book.hear([hello(b"a", process=one), hello(b"b", process=other), hello(b"c", process=one)])
    book.fence(1, PeerId(9), None)

    def landed(began):
        return [done.outcome for turn in range(9) for done in book.news(began + turn)]

    assert landed(10.0) == []
    ended.append(one)
    assert landed(20.0) == []
    assert len(book) == 1
    ended.append(other)
    assert landed(30.0) == [Outcome.LANDED]


# where it is not claimed


def test_it_is_claimed_where_it_holds_and_nowhere_else(monkeypatch, tmp_path):
    def reason(has_device_memory=False, **options):
        return serving.why_no_fence(parse(options), has_device_memory=has_device_memory)

    (tmp_path / "mlx5_0").mkdir()
    for words, found in (
        ("backend 'LIBFABRIC'", reason(backend="LIBFABRIC")),
        ("shared memory", reason(ucx_error_handling_mode="none")),
        ("device memory", reason(has_device_memory=True)),
    ):
        assert words in found
    monkeypatch.setattr(devices, "RDMA", (tmp_path / "none", tmp_path / "mlx5_0"))
    assert reason() == reason(ucx_error_handling_mode="peer") == ""
    monkeypatch.setattr(devices, "RDMA", (tmp_path,))
    assert "RDMA" in reason()
    monkeypatch.setattr(devices, "RDMA", ())
    monkeypatch.setattr(serving, "this_process", lambda: None)
    assert "which process" in reason()
    monkeypatch.setattr("kvferry.engines.nixl.connections.TABLES", (str(tmp_path / "tcp"),))
    assert "does not say what is on its way" in reason()
    assert this_process() is not None


def test_without_it_a_fence_says_why_at_once_and_peers_are_not_asked(monkeypatch, tmp_path):
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(devices, "RDMA", (tmp_path,))
    with a_pair() as pair:
        assert Caps.FENCE not in pair.target.engine.caps
        assert pair.attach().outcome is Outcome.LANDED
        done = pair.target.wait(pair.target.engine.fence(pair.writer.me), 5)
        assert (done.outcome, done.native) == (Outcome.FAILED_QUIET, "no fence")
        assert "RDMA devices" in done.cause
        assert pair.target.engine.info()["writers"] == 0
