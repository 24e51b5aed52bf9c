"""The public way to test an integration: a cluster of any layouts, with faults, whose every byte is checked."""

import threading
import time

import numpy as np
import pytest

from engine_here import ENGINES, need, of_cluster
from kvferry.presets import attention, layouts_of, parse_grid
from kvferry.testing.cluster import Cluster
from kvferry.testing.suite_memory import KINDS

MODEL = attention("gqa", layers=3, kv_heads=4, head_dim=8)
QUICK = {"tick_s": 0.05, "heartbeat_s": 0.2, "heartbeat_timeout_s": 0.8, "stall_s": 3.0}
IMPATIENT = {**QUICK, "claim_timeout_s": 4.0, "bootstrap_timeout_s": 4.0}


@pytest.fixture(params=ENGINES)
def engine(request):
    need(request.param)
    return of_cluster(request.param)


def sides(prefill="tp=2,page=16", decode="page=64,order=hnd", pages=80):
    return [layouts_of(MODEL, parse_grid(text), pages) for text in (prefill, decode)]


def until(condition, timeout_s=10):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_named(words):
    """What is noticed first is chance: the connection, the write, or that a claim never came."""
    return any(f": {code}: " in words for code in ("peer_lost", "write_failed", "no_claim"))


def peers_of(cluster):
    return {peer["peer"] for rank in cluster.decode for peer in rank.manager.info()["peers"]}


def carry(cluster, num_tokens, **facts):
    request = cluster.request(num_tokens, **facts)
    request.wait()
    request.check()
    request.clear()


@pytest.mark.parametrize("processes", [False, True])
def test_requests_of_unequal_sides(processes, engine):
    with Cluster(*sides("page=16", "page=16"), processes=processes, **engine) as first:
        carry(first, 20)  # a native library keeps some of what it opens when it is used for the first time
    before = threading.active_count()
    with Cluster(*sides("tp=2,page=16", "tp=4,page=8"), processes=processes, **engine) as cluster:
        open_at_once = [cluster.request(count, prefix=5, chunk_pages=2, sends=False) for count in (17, 130, 64)]
        for request in open_at_once:
            request.send(1)
        for request in open_at_once[::-1]:
            request.send()
            request.wait()
            assert request.landed_bytes == request.wanted_bytes
        open_at_once[0].check()
        for request in open_at_once:
            request.clear()
        assert cluster.clean() == []
    assert cluster.clean() == []
    assert threading.active_count() == before


def test_a_control_plane_that_loses_repeats_and_delays_messages_changes_nothing(engine):
    with Cluster(*sides(), proxy=True, **QUICK, **engine) as cluster:
        for proxy in cluster.proxies:
            proxy.drop, proxy.duplicate, proxy.delay_s = 0.2, 0.2, 0.05
        for _ in range(10):
            carry(cluster, 100, prefix=3, chunk_pages=2)
        assert all(proxy.lost > 3 for proxy in cluster.proxies)
        assert cluster.clean() == []


@pytest.mark.parametrize("when", ["before", "between two chunks", "after"])
def test_a_connection_that_is_cut_fails_what_is_open_by_name_and_the_next_request_is_right(when, engine):
    with Cluster(*sides(), proxy=True, **IMPATIENT, **engine) as cluster:
        carry(cluster, 100)
        request = cluster.request(100, chunk_pages=2, sends=False)
        until(lambda: {rank.poll(request.room) for rank in request.decode} == {"Transferring"})
        if when != "before":
            request.send(1 if when == "between two chunks" else None)
        if when == "after":
            request.wait()
        before = peers_of(cluster)
        for proxy in cluster.proxies:
            proxy.cut()
        if when != "after":
            assert request.ends(10) == ["Failed"] * 3
            assert all(is_named(words) for words in request.failures()), request.failures()
        until(lambda: not before & peers_of(cluster))  # what begins before it is noticed fails as well
        request.clear(10)
        carry(cluster, 100)
        assert cluster.clean() == []


def test_a_control_plane_that_is_silent_ends_a_request_in_time(engine):
    with Cluster(*sides(), proxy=True, **IMPATIENT, **engine) as cluster:
        carry(cluster, 100)
        for proxy in cluster.proxies:
            proxy.holding = True
        request = cluster.request(100)
        assert set(request.ends(10)) == {"Failed"}
        for proxy in cluster.proxies:
            proxy.holding = False
        request.clear(10)
        carry(cluster, 100)
        assert cluster.clean() == []


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_rank_that_is_killed_fails_its_requests_by_name_on_the_others(side, engine):
    with Cluster(*sides("page=16", "page=16"), processes=True, **QUICK, **engine) as cluster:
        carry(cluster, 100)
        request = cluster.request(100, chunk_pages=2, sends=False)
        request.send(1)
        (victim,), (other,) = (
            (cluster.prefill, cluster.decode) if side == "prefill" else (cluster.decode, cluster.prefill)
        )
        victim.kill()
        assert other.wait(request.room, 10) == "Failed"
        words = other.failure(request.room)
        assert is_named(words), words
        if side == "prefill" and "FENCE" not in other.caps():
            time.sleep(3)  # more than the drain limit
            assert not other.clear(request.room), "what can't be proven to be quiet stays held"
            return
        until(lambda: other.clear(request.room))
        (words,) = cluster.clean(2)
        assert "the process has ended with -9" in words


def test_a_rank_that_was_stopped_goes_on(engine):
    with Cluster(
        *sides("page=16", "page=16"), processes=True, **{**QUICK, "heartbeat_timeout_s": 5.0}, **engine
    ) as cluster:
        carry(cluster, 100)
        request = cluster.request(100, sends=False)
        cluster.decode[0].stop()
        request.send()
        cluster.decode[0].go_on()
        request.wait()
        request.check()
        request.clear()
        assert cluster.clean() == []


def test_an_abort_gives_every_page_back(engine):
    with Cluster(*sides(), **QUICK, **engine) as cluster:
        for side in ("prefill", "decode"):
            request = cluster.request(100, chunk_pages=2, sends=False)
            until(lambda request=request: {rank.poll(request.room) for rank in request.decode} == {"Transferring"})
            request.send(1)
            request.abort(side, "enough")
            assert request.ends() == ["Failed"] * 3
            assert all("enough" in words for words in request.failures()), request.failures()
            request.clear()
        carry(cluster, 100)
        assert cluster.clean() == []


def test_what_is_wrong_is_found():
    """A byte, a metadata row, a room and a thread that are left."""
    with Cluster(*sides()) as cluster:
        request = cluster.request(100)
        with pytest.raises(AssertionError, match="are not free"):
            cluster.request(50, sends=False).clear(0.1)
        request.wait()
        (decode,) = cluster.decode
        decode.memory.buffer[np.flatnonzero(decode.memory.buffer != 0xEE)[3]] ^= 1
        with pytest.raises(AssertionError, match="1 bytes differ"):
            request.check()
        decode.memory.buffer[:] = decode.memory.expected
        request.check()
        decode.aux[request.room, 1] += 1
        with pytest.raises(AssertionError, match="metadata row"):
            request.check()
        left = " ".join(cluster.clean(0.1))
        assert "rooms in use" in left
        assert "pages of kv" in left
    thread = threading.Timer(30, print)
    thread.start()
    assert cluster.clean(0.1) == ["+1 threads"]
    thread.cancel()
    thread.join()
    assert cluster.clean() == []


@pytest.mark.parametrize("processes", [False, True])
def test_memory_comes_from_where_it_is_said(processes):
    """By "shm" nothing can be written into memory of another kind."""
    kind = {"memory": KINDS["memfd"], "engine_options": "mechanism=shm"}
    with Cluster(*sides(), processes=processes, **kind) as cluster:
        carry(cluster, 100, prefix=3)
        assert cluster.clean() == []


def test_a_rank_that_can_not_start_says_so_in_either_kind():
    prefill, decode = sides()
    for processes in (False, True):
        with pytest.raises(Exception, match="no engine is called 'lokal'"):
            Cluster(prefill, decode, engine="lokal", processes=processes)
