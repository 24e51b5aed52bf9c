"""What engines share whose peers have a thread and an instance of the library each; no library is needed."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from kvferry.engines.per_peer import MAIN, Attaching, PeerThread, Served, Writing
from kvferry.engines.per_peer.tickets import Tickets
from kvferry.engines.seam import Batch, Done, Outcome, Region
from kvferry.errors import EngineError
from kvferry.ids import PeerId


def nothing(_now):
    return ()


# -- tickets


def test_what_was_reported_is_collected_in_its_order_and_what_was_found_by_looking_comes_after_it():
    tickets = Tickets()
    first, second = tickets.new(), tickets.new()
    tickets.report(Done(first, Outcome.FAILED_UNKNOWN, "slow", "7"))
    tickets.refuse(second, "no", "refused")
    done = tickets.collect(0, lambda _: [Done(first, Outcome.QUIET)], 1.0)
    assert [(one.ticket, one.outcome) for one in done] == [
        (first, Outcome.FAILED_UNKNOWN), (second, Outcome.FAILED_QUIET), (first, Outcome.QUIET),
    ]  # fmt: skip


def test_an_attachment_that_is_late_fails_once():
    tickets = Tickets()
    late, until = tickets.attaching(0.05)
    assert tickets.collect(0, nothing, 1.0) == []
    began = time.monotonic()
    (done,) = tickets.collect(5, nothing, 5.0)
    assert (done.ticket, done.outcome, done.native) == (late, Outcome.FAILED_QUIET, "deadline")
    assert "no answer within 0.05 s" in done.cause
    assert until <= time.monotonic() < began + 2
    tickets.report(Done(late, Outcome.LANDED))
    assert tickets.collect(0, nothing, 1.0) == []
    in_time, _ = tickets.attaching(0.05)
    tickets.report(Done(in_time, Outcome.LANDED))
    assert tickets.collect(0, nothing, 1.0) == [Done(in_time, Outcome.LANDED)]
    assert tickets.collect(0.2, nothing, 1.0) == []


def test_while_it_waits_it_looks_again_and_again_and_a_report_wakes_it():
    tickets, times = Tickets(), []

    def look(now):
        times.append(now)
        return [Done(1, Outcome.QUIET)] if len(times) > 3 else []

    found = tickets.collect(5, look, 0.01)
    assert found == [Done(1, Outcome.QUIET)]
    assert len(times) == 4
    threading.Timer(0.05, tickets.report, [Done(2, Outcome.LANDED)]).start()
    began = time.monotonic()
    assert tickets.collect(5, nothing, 5.0) == [Done(2, Outcome.LANDED)]
    assert time.monotonic() - began < 3


# -- what peers write to


class Instance:
    def __init__(self, number):
        self.number, self.regions, self.ended = number, None, ""

    def register(self, regions):
        if any(region.address == 13 for region in regions):
            raise EngineError("region 0 can't be registered")
        self.regions = regions


class Instances(Served):
    def __init__(self, never=""):
        self.made, self.fails, self.never, self.unproven = [], False, never, ""
        super().__init__("fake")

    def _new(self):
        if self.fails:
            raise EngineError("no port is free")
        self.made.append(Instance(len(self.made)))
        return self.made[-1]

    def _end(self, instance):
        instance.ended = "shut"
        return self.unproven

    def _forget(self, instance):
        instance.ended = "forgotten"

    def _blob_of(self, instance):
        return instance.number

    def _why_never(self):
        return self.never


def test_each_connection_is_told_of_an_instance_of_its_own_and_always_of_the_same():
    served = Instances()
    assert [served.blob(epoch) for epoch in (MAIN, 5, 6, 5, MAIN)] == [0, 1, 2, 1, 0]
    assert len(served) == 3
    served.forget(5)
    served.forget(MAIN)
    assert [one.ended for one in served.made] == ["", "forgotten", ""]
    served.close()
    assert all(one.ended for one in served.made)


def test_who_was_shut_out_stays_so_and_the_others_are_left_alone():
    served = Instances()
    assert (served.blob(5), served.blob(6)) == (1, 2)
    assert served.shut_out(5) == served.shut_out(5) == ""
    assert [one.ended for one in served.made] == ["", "shut", ""]
    assert served.blob(5) == 1, "it is told of what is no more"
    assert served.shut_out(7) == "", "before it was told of anything"
    assert served.blob(7) == served.made[3].number
    assert served.made[3].ended == "shut"
    served.unproven = "its port could not be kept"
    assert served.shut_out(6) == "its port could not be kept"


def test_where_no_instance_can_be_made_the_main_one_is_shared_and_nobody_is_shut_out():
    served = Instances()
    served.fails = True
    assert (served.blob(5), served.blob(6)) == (0, 0)
    for epoch in (5, 7):
        assert "no instance of its own" in served.shut_out(epoch)
    assert not served.made[0].ended
    served.forget(5)
    served.fails = False
    assert served.blob(5) == 1
    never = Instances(never="nothing is in between")
    assert (never.blob(5), never.shut_out(5)) == (0, "nothing is in between")


def test_memory_is_registered_with_all_instances_or_with_none():
    served = Instances()
    served.blob(5)
    wanted = (Region(4096, 10),)
    served.register(wanted)
    served.blob(6)
    assert [one.regions for one in served.made] == [wanted] * 3
    with pytest.raises(EngineError, match="region 0"):
        served.register((Region(13, 10),))
    assert [one.regions for one in served.made] == [()] * 3
    served.blob(7)
    assert served.made[3].regions == ()


# -- what writes to a peer


def batch(nbytes=1):
    return Batch(np.zeros(1, np.uint64), np.zeros(1, np.uint64), np.array([nbytes], np.uint64), nbytes, 0)


class Peer(PeerThread):
    """Says what it was told to do; works that are called "bad" raise."""

    where = "somewhere"

    def __init__(self, together=1):
        self.said, self.goes_on, self.begun, self.together = [], threading.Event(), threading.Event(), together
        super().__init__("fake", PeerId(7), self.said.append)
        self.did, self.idle_s, self.breaks = [], None, False
        self.start()

    def _attach(self, work):
        self.begun.set()
        assert self.goes_on.wait(10)
        if work.blob == "bad":
            raise RuntimeError("it broke")
        self.did.append("attach")
        self._tell([work], Outcome.LANDED)

    def _write(self, works):
        self.did.append([work.ticket for work in works])
        self._tell(works, Outcome.LANDED)

    def _goes_with(self, works, following):
        return len(works) < self.together

    def _broke(self, works, cause, native):
        self._tell(works, Outcome.FAILED_UNKNOWN, cause, native)

    def _drop(self):
        self.did.append("drop")

    def _end(self):
        self.did.append("end")

    def _idle_s(self):
        return self.idle_s

    def _idle(self):
        self.did.append("idle")
        self.idle_s = None
        self.begun.set()
        if self.breaks:
            raise RuntimeError("it broke")

    def done(self):
        self.goes_on.set()
        self.leave()
        self.join(10)
        assert not self.alive
        return [(one.ticket, one.outcome) for one in self.said]


@pytest.mark.parametrize(("together", "calls"), [(1, [[2], [3], [5]]), (2, [[2, 3], [5]])])
def test_works_are_done_in_their_order_and_batches_that_may_go_together_in_one_call(together, calls):
    peer = Peer(together)
    peer.post(Attaching(1, "good", 0.0))
    assert peer.begun.wait(10)
    for ticket in (2, 3):
        peer.post(Writing(ticket, batch()))
    peer.post(Attaching(4, "good", 0.0))
    peer.post(Writing(5, batch()))
    assert peer.done() == [(ticket, Outcome.LANDED) for ticket in range(1, 6)]
    assert peer.did == ["attach", *calls[:-1], "attach", calls[-1], "drop", "end"]


def test_a_library_that_raises_costs_that_work_and_the_thread_lives():
    peer = Peer()
    peer.post(Attaching(1, "bad", 0.0))
    peer.post(Writing(2, batch()))
    assert peer.done() == [(1, Outcome.FAILED_UNKNOWN), (2, Outcome.LANDED)]
    assert "it broke" in peer.said[0].cause
    assert peer.said[0].native == "RuntimeError"


@pytest.mark.parametrize(("breaks", "then"), [(False, []), (True, ["drop"])])
def test_what_has_nothing_to_do_is_told_so_and_a_library_that_raises_then_is_dropped_and_the_thread_lives(breaks, then):
    peer = Peer()
    peer.breaks, peer.idle_s = breaks, 0.01
    peer.goes_on.set()
    peer.post(Writing(1, batch()))
    assert peer.begun.wait(10)
    peer.post(Writing(2, batch()))
    assert peer.done() == [(1, Outcome.LANDED), (2, Outcome.LANDED)]
    assert peer.did == [[1], "idle", *then, [2], "drop", "end"]


class Kept(Served):
    """Instances that can't be ended well."""

    def __init__(self, how):
        self.how = how
        super().__init__("kept")

    def _new(self):
        return SimpleNamespace(register=lambda regions: None)

    def _end(self, instance):
        if isinstance(self.how, Exception):
            raise self.how
        return self.how

    def _forget(self, instance):
        pass

    def _blob_of(self, instance):
        return "blob"


@pytest.mark.parametrize("how", ["its port could not be kept", OSError(24, "Too many open files"), ""])
def test_a_second_fence_says_what_the_first_one_said(how):
    served = Kept(how)
    served.blob(5)
    if isinstance(how, Exception):
        with pytest.raises(OSError, match="Too many"):
            served.shut_out(5)
    else:
        assert served.shut_out(5) == how
    assert bool(served.shut_out(5)) is bool(how)
    assert served.blob(5) == "blob"


class Broken(PeerThread):
    where = "there"

    def _attach(self, work):
        raise RuntimeError("the library broke")

    _write = _attach

    def _broke(self, works, cause, native):
        raise OSError(24, "Too many open files")

    def _drop(self):
        raise OSError(24, "Too many open files")

    def _end(self):
        self.has_ended = True


def test_an_instance_that_can_not_be_ended_leaves_no_ticket_without_an_answer(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda given: None)
    told = []
    peer = Broken("broken", PeerId(5, 1), told.append)
    peer.start()
    peer.post(Writing(42, SimpleNamespace(total_bytes=1)))
    deadline = time.monotonic() + 5
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [(done.ticket, done.outcome) for done in told] == [(42, Outcome.FAILED_UNKNOWN)]
    peer.leave()
    peer.join(5)
    assert peer.has_ended, "what is not proven is looked after all the same"
