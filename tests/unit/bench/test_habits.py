"""How the measured schedulers wait: every habit sees the end, sees a failure, and gives up in time."""

import sys
import threading
import time

import pytest

from kvferry import KVPoll, KVTransferError
from kvferry.bench import habits
from kvferry.bench.failure import BenchError
from kvferry.bench.habits import WAITS, busy, pass_time, until_claimed, until_success
from kvferry.bench.rooms_side import switch_interval
from kvferry.bench.window import Window
from kvferry.errors import Code, Reason
from kvferry.node.view import RoomView


class FakeRoom:
    """A room whose view the test writes."""

    def __init__(self, number=1):
        self.bootstrap_room = number
        self.view = RoomView(number)
        self.is_cleared = False

    def become(self, poll):
        reason = Reason(Code.ABORTED, cause="by the test") if poll is KVPoll.Failed else None
        self.view.update(poll, reason, foreign=False, bytes_landed=0)

    def poll(self):
        return self.view.poll

    def wait(self, timeout_s):
        return self.view.wait(timeout_s)

    def fileno(self):
        return self.view.fileno()

    def failure_exception(self):
        raise KVTransferError(self.bootstrap_room, self.view.reason)

    def clear(self):
        self.is_cleared = True
        self.view.close()


@pytest.fixture
def later():
    """later(room, *states): another thread writes these states, a moment apart."""
    threads = []

    def write(room, *states):
        def run():
            for state in states:
                time.sleep(0.02)
                room.become(state)

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield write
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("habit", WAITS)
class TestEveryHabit:
    def test_sees_success_of_all_rooms(self, habit, later):
        rooms = [FakeRoom(1), FakeRoom(2)]
        later(rooms[1], KVPoll.Transferring, KVPoll.Success)
        later(rooms[0], KVPoll.Success)
        until_success(rooms, habit, 10)
        assert [room.poll() for room in rooms] == [KVPoll.Success] * 2

    def test_sees_that_the_pages_are_named(self, habit, later):
        room = FakeRoom()
        later(room, KVPoll.WaitingForInput)
        until_claimed([room], habit, 10)
        assert room.poll() is KVPoll.WaitingForInput

    @pytest.mark.parametrize("until", [until_success, until_claimed])
    def test_raises_the_error_of_a_failed_room(self, habit, until, later):
        rooms = [FakeRoom(1), FakeRoom(7)]
        rooms[0].become(KVPoll.Success)
        later(rooms[1], KVPoll.Failed)
        with pytest.raises(KVTransferError, match="room 7 failed: aborted: by the test"):
            until(rooms, habit, 10)

    def test_gives_up_in_time_and_says_the_state(self, habit):
        with pytest.raises(BenchError, match=r"room 1 is Bootstrapping after 0.05 s, Success was awaited"):
            until_success([FakeRoom()], habit, 0.05)
        with pytest.raises(BenchError, match=r"room 1 is Bootstrapping after 0.05 s, Success, WaitingForInput was aw"):
            until_claimed([FakeRoom()], habit, 0.05)

    def test_lets_time_pass(self, habit):
        begin_s = time.monotonic()
        pass_time(habit, 0.01)
        assert time.monotonic() - begin_s >= 0.01


def test_a_busy_scheduler_keeps_the_interpreter_for_itself(monkeypatch):
    monkeypatch.setattr(habits, "BUSY_S", 0.05)
    counted = [0]
    stop = threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1

    with switch_interval(0.5):  # nobody takes the interpreter from a thread that does not give it away
        counter = threading.Thread(target=count)
        counter.start()
        before = counted[0]
        busy()
        after = counted[0]
        stop.set()
        time.sleep(0)
        counter.join()
    assert after == before


def test_the_switch_interval_is_set_back_even_after_an_error():
    before = sys.getswitchinterval()
    seen = []

    def fail():
        with switch_interval(0.0005):
            seen.append(sys.getswitchinterval())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == [pytest.approx(0.0005)]
    with switch_interval(None):
        assert sys.getswitchinterval() == before
    assert sys.getswitchinterval() == before


class TestWindow:
    def test_never_has_more_in_flight_than_it_holds_and_each_has_its_own_page(self):
        live, ended, most = {}, [], []

        def begin(page, number):
            assert page not in live
            room = live[page] = FakeRoom(number)
            most.append(len(live))
            if len(live) == 3 or number == 10:
                for each in live.values():
                    each.become(KVPoll.Success)
            return room

        def end(page, number):
            assert live.pop(page).is_cleared
            ended.append(number)

        Window(3, 10).run(range(1, 11), begin, end)
        assert max(most) == 3
        assert sorted(ended) == list(range(1, 11))

    def test_raises_the_error_of_a_failed_room(self):
        def begin(_, number):
            room = FakeRoom(number)
            room.become(KVPoll.Failed if number == 2 else KVPoll.Success)
            return room

        with pytest.raises(KVTransferError, match="room 2 failed"):
            Window(2, 10).run(range(1, 5), begin)

    def test_gives_up_when_nothing_ends(self):
        with pytest.raises(BenchError, match=r"none of 2 rooms has ended for 0.05 s"):
            Window(2, 0.05).run(range(5), lambda _, number: FakeRoom(number))
