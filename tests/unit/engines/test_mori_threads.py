"""What the MORI engine does about two faults of the library: it closes descriptor 0, and a thread never sleeps."""

import os
import platform
import threading
import time

import pytest

from kvferry.engines.mori import spinner, zero


@pytest.fixture
def standard_input():
    """Put back whatever becomes of it."""
    saved = os.dup(0)
    yield
    os.dup2(saved, 0)
    os.close(saved)


def inode(descriptor):
    return os.fstat(descriptor).st_ino


def test_closing_descriptor_0_does_nothing_in_there_and_closing_others_does(standard_input):
    before, (reads, writes) = inode(0), os.pipe()

    def close_all():
        for each in (0, 0, reads, writes):
            os.close(each)

    assert zero.without_closing_it(close_all)
    assert inode(0) == before
    for each in (reads, writes):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(each)


def test_all_other_threads_close_descriptor_0_as_ever(standard_input):
    inside, over = threading.Event(), threading.Event()
    waits = threading.Thread(target=zero.without_closing_it, args=(lambda: inside.set() or over.wait(),))
    waits.start()
    assert inside.wait(5)
    os.close(0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(0)
    over.set()
    waits.join()


def test_what_another_thread_opens_in_that_moment_is_not_closed(standard_input):
    ends = os.pipe()

    def close_it():
        os.dup2(ends[0], 0)
        os.close(0)

    assert zero.without_closing_it(close_it)
    assert inode(0) == inode(ends[0])
    for each in ends:
        os.close(each)


def test_an_error_in_there_comes_out(standard_input):
    with pytest.raises(ZeroDivisionError):
        zero.without_closing_it(lambda: 1 / 0)


@pytest.mark.parametrize("lacks", ["a filter", "this machine"])
def test_where_the_kernel_has_no_such_filter_nothing_is_called(lacks, monkeypatch):
    if lacks == "a filter":
        monkeypatch.setattr(zero, "_PR_SET_SECCOMP", -1)
    else:
        monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    called = []
    assert not zero.without_closing_it(lambda: called.append(1))
    assert not called


@pytest.mark.parametrize("is_open", [True, False])
def test_descriptor_0_is_never_free(is_open, standard_input):
    ends = os.pipe()
    os.dup2(ends[0], 0)
    if not is_open:
        os.close(0)
    zero.occupy()
    assert (inode(0) == inode(ends[0])) is is_open
    for each in ends:
        os.close(each)
    assert is_open or os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev


class Library:
    """Starts three threads, as the library does: two that sleep, and one in their middle that does not."""

    def __init__(self):
        self.over = threading.Event()
        self.threads = []

    def start(self):
        for target in (self.sleep, self.spin, self.sleep):
            self.threads.append(threading.Thread(target=target))
            self.threads[-1].start()

    def sleep(self):
        while not self.over.wait(0.005):
            pass

    def spin(self):
        while not self.over.is_set():
            time.sleep(0)

    def end(self):
        self.over.set()
        for each in self.threads:
            each.join()


def test_the_thread_that_never_sleeps_is_parked_and_no_other():
    library, others = Library(), Library()
    others.start()
    everywhere = os.sched_getaffinity(0)
    try:
        found = spinner.started_by(library.start)
        sleeps, spins, sleeps_too = (each.native_id for each in library.threads)
        assert found.thread == spins
        found.park()
        assert os.getpriority(os.PRIO_PROCESS, spins) == spinner.NICE
        assert os.sched_getaffinity(spins) == {max(everywhere)}
        for each in (sleeps, sleeps_too, *(one.native_id for one in others.threads), threading.get_native_id()):
            assert os.getpriority(os.PRIO_PROCESS, each) == 0
            assert os.sched_getaffinity(each) == everywhere
        found.wake()
        assert os.sched_getaffinity(spins) == (everywhere - {max(everywhere)} or everywhere)
        found.rest()
        assert os.sched_getaffinity(spins) == {max(everywhere)}
    finally:
        for each in (library, others):
            each.end()


def test_what_starts_no_thread_has_no_spinner_and_an_error_comes_out():
    for make in (spinner.started_by, spinner.Spinner.none):
        found = make(lambda: None)
        assert found.thread == 0
        found.park()
        found.wake()
        with pytest.raises(ZeroDivisionError):
            make(lambda: 1 / 0)


def test_a_thread_that_has_ended_is_left_alone():
    ended = threading.Thread(target=int)
    ended.start()
    ended.join()
    one = spinner.Spinner(ended.native_id)
    one.park()
    one.wake()
