"""Threads that are there before anything is given to them."""

import threading

import pytest

from kvferry.workers import Workers


def test_each_task_is_done_once_and_its_result_or_error_is_handed_on():
    made, done = Workers(2, "kvferry-test"), []

    def fail():
        raise ValueError("a mistake")

    given = [made.submit(lambda number=number: done.append(number) or number) for number in range(100)]
    assert [each.result(5) for each in given] == list(range(100))
    with pytest.raises(ValueError, match="a mistake"):
        made.submit(fail).result(5)
    assert sorted(done) == list(range(100))
    made.close()
    made.close()
    assert "kvferry-test" not in {thread.name for thread in threading.enumerate()}


def test_closing_cancels_what_was_not_begun_and_waits_for_what_was():
    made, begun, go = Workers(1, "kvferry-test"), threading.Event(), threading.Event()

    def slow():
        begun.set()
        return go.wait(5)

    first, second = made.submit(slow), made.submit(lambda: 1)
    assert begun.wait(5)
    closing = threading.Thread(target=made.close)
    closing.start()
    while not second.cancelled():
        assert closing.is_alive()
    assert not first.done()
    go.set()
    closing.join(5)
    assert first.result(0) is True
    assert made.submit(lambda: 1).cancelled()


@pytest.mark.parametrize("had", [0, 1])
def test_where_fewer_threads_are_to_be_had_it_says_so_and_keeps_nothing_for_later(monkeypatch, had):
    started, left = threading.Thread.start, [None] * had

    def start(thread):
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        started(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        made = Workers(3, "kvferry-test")
    assert (made.running, made.problem) == (had, "can't start new thread")
    assert made.submit(lambda: 1).cancelled() == (had == 0)
    made.close()
