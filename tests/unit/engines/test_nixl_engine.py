"""What the engine suite does not show of NIXL: what is refused and how it is said, blobs, attaching, the try-out."""

import mmap
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest
from nixl_pairs import POOL, TCP, a_pair, build, changed

from engine_here import need
from kvferry.engines import find
from kvferry.engines.grants import GrantTable
from kvferry.engines.nixl import NixlEngine, blob, peers
from kvferry.engines.seam import Batch, Caps, EngineConfig, Outcome, Region
from kvferry.errors import EngineError, EngineUnavailable
from kvferry.ids import PeerId
from kvferry.testing.suite_pair import GUARD, open_end, wait_for
from pages_away import out_of_reach

need("nixl")


@pytest.fixture
def pair():
    with a_pair() as made:
        yield made


# what is refused, and how it is said


def test_a_destination_that_the_peer_has_not_registered_is_refused_by_number(pair):
    assert pair.attach().outcome is Outcome.LANDED
    done = pair.write(pair.batch([0, 1, 2], [0, POOL - 10, POOL - 9], [10, 10, 10]))
    assert (done.outcome, done.native) == (Outcome.FAILED_QUIET, "refused")
    assert "row 2 of 3, 10 bytes at" in done.cause
    assert "registered region of peer" in done.cause
    assert (pair.target.pool == GUARD).all()


def test_memory_that_the_library_does_not_know_ends_the_ticket_before_anything_is_posted(pair, monkeypatch):
    """As when both sides' own checks were wrong: the library's refusal is mapped."""
    assert pair.attach().outcome is Outcome.LANDED
    monkeypatch.setattr("kvferry.engines.nixl.engine.why_not_there", lambda *_: "")
    done = pair.write(pair.batch([0], [POOL * 4], [10]))
    assert (done.outcome, done.native) == (Outcome.FAILED_QUIET, "NIXL_ERR_NOT_FOUND")
    assert "not known to the library" in done.cause


def test_memory_that_is_none_can_not_be_registered(pair):
    engine = pair.writer.engine
    with pytest.raises(EngineError, match=r"region 1, 0 bytes at 0x10, is no memory"):
        engine.register([Region(pair.writer.address, 10), Region(16, 0)])
    assert pair.attach().outcome is Outcome.LANDED
    done = pair.write(pair.batch([0], [0], [10]))
    assert done.outcome is Outcome.FAILED_QUIET, "nothing is registered after a failure"


def test_device_memory_without_a_device_is_named(pair):
    if Caps.DEVICE_MEMORY in pair.writer.engine.caps:
        pytest.skip("a CUDA driver is here")
    with pytest.raises(EngineError, match=r"region 1, 4096 bytes of memory of device 3 at .*NIXL_ERR_BACKEND"):
        pair.writer.engine.register([Region(pair.writer.address, 10), Region(pair.writer.address, 4096, 3)])


def test_a_backend_that_can_not_be_created_is_unavailable_and_says_which_there_are():
    for options, words in (({"backend": "NOPE"}, "NIXL_ERR_NOT_FOUND"), ({"param.num_workers": "x"}, "BACKEND")):
        with pytest.raises(EngineUnavailable, match=rf"(?s)can't be created.*{words}.*plug-ins for .*UCX"):
            NixlEngine().open(EngineConfig(PeerId(1), GrantTable(), options=options))


def test_opening_twice_using_it_closed_and_closing_twice(pair):
    engine = pair.writer.engine
    with pytest.raises(EngineError, match="open already"):
        engine.open(EngineConfig(PeerId(1), GrantTable()))
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="not open"):
        engine.poll(0)


# blobs


def refused(pair, raw, peer=None):
    done = pair.settle(pair.writer.engine.attach(peer or pair.target.me, raw))
    assert done.outcome is Outcome.FAILED_QUIET
    return done.cause


def test_a_blob_of_another_process_version_backend_or_agent_is_noticed(pair):
    raw = pair.target.engine.describe()
    assert len(raw) < 4096
    assert "is that of process 0000000000000002, not of 0000000000000005.0" in refused(pair, raw, PeerId(5))
    assert "version 1, this side speaks 2" in refused(pair, changed(raw, version=1))
    assert "backend 'POSIX', this side 'UCX'" in refused(pair, changed(raw, backend="POSIX"))
    assert "its agent is 'other', its metadata says 'kvferry-" in refused(pair, changed(raw, name="other"))
    said = msgspec.msgpack.decode(raw, type=blob.Blob)
    assert "is damaged" in refused(pair, changed(raw, metadata=said.metadata[:-1] + b"\0"))
    assert pair.attach().outcome is Outcome.LANDED


def test_an_own_blob_is_refused(pair):
    assert "does not take" in refused(pair, pair.writer.engine.describe(), pair.writer.me)


def test_a_process_that_answers_with_another_nonce_is_not_the_peer(pair):
    """As when an address is used again by a process that came later."""
    raw = changed(pair.target.engine.describe(), nonce_digest=bytes(32))
    assert "another process answers" in refused(pair, raw)
    assert pair.write(pair.batch([0], [0], [10])).outcome is Outcome.FAILED_QUIET


def test_more_regions_than_a_blob_holds_are_an_error_that_says_so(pair):
    pieces = [Region(pair.writer.address + number * 4096, 64) for number in range(2000)]
    pair.writer.engine.register(pieces)
    with pytest.raises(EngineError, match=r"2000 registered regions takes \d+ bytes, more than 65536.*larger pools"):
        pair.writer.engine.describe()


# attaching


def test_a_target_that_does_not_poll_is_not_attached_and_nobody_is_held_up():
    made = build(attach_timeout_s="0.3")
    ticket = made.writer.engine.attach(made.target.me, made.target.engine.describe())
    began = time.monotonic()
    assert made.writer.engine.poll(0.05) == []
    assert time.monotonic() - began < 0.25
    assert wait_for(made.writer.engine, ticket, 5) is Outcome.FAILED_QUIET
    assert made.write(made.batch([0], [0], [10])).outcome is Outcome.FAILED_QUIET
    assert made.attach().outcome is Outcome.LANDED, "an attempt that failed is no obstacle to the next one"
    assert made.write(made.batch([0], [0], [10])).outcome is Outcome.LANDED
    made.close()


def test_a_peer_that_is_detached_or_attached_anew_meanwhile_ends_the_first_ticket(pair):
    engine, raw = pair.writer.engine, pair.target.engine.describe()
    first = engine.attach(pair.target.me, raw)
    second = engine.attach(pair.target.me, raw)
    assert pair.settle(first).cause == "attached anew"
    assert pair.settle(second).outcome is Outcome.LANDED
    third = engine.attach(pair.target.me, raw)
    engine.detach(pair.target.me)
    assert pair.settle(third).outcome is Outcome.FAILED_QUIET
    assert pair.write(pair.batch([0], [0], [10])).outcome is Outcome.FAILED_QUIET


def test_more_attempts_at_once_than_there_is_room_for_are_refused_and_room_comes_back(pair):
    engine, raw = pair.writer.engine, pair.target.engine.describe()
    tickets = [engine.attach(PeerId(2, epoch), raw) for epoch in range(70)]
    ended = [pair.settle(ticket) for ticket in tickets]
    assert [done.outcome for done in ended].count(Outcome.LANDED) == 64
    assert {done.cause for done in ended if done.outcome is not Outcome.LANDED} == {"too many peers are being attached"}
    assert pair.attach().outcome is Outcome.LANDED


def test_two_epochs_of_a_peer_share_its_agent_and_one_may_leave(pair):
    """Connections overlap when a peer connects anew: the older one's end must not cut the newer one."""
    engine, raw = pair.writer.engine, pair.target.engine.describe()
    older, newer = PeerId(2, 0), PeerId(2, 1)
    for peer in (older, newer):
        assert pair.settle(engine.attach(peer, raw)).outcome is Outcome.LANDED
    engine.detach(older)
    pair.step()
    assert pair.settle(engine.submit(newer, pair.batch([0], [0], [10]))).outcome is Outcome.LANDED
    assert pair.settle(engine.submit(older, pair.batch([0], [0], [10]))).outcome is Outcome.FAILED_QUIET


def test_memory_that_was_registered_later_is_written_after_attaching_again(pair):
    assert pair.attach().outcome is Outcome.LANDED
    later = np.full(4096, GUARD, np.uint8)
    pair.target.engine.register([Region(later.ctypes.data, later.nbytes)])
    batch = pair.batch([0], [0], [100])
    elsewhere = Batch(batch.src, np.array([later.ctypes.data], np.uint64), batch.nbytes, 100, 7)
    assert pair.write(elsewhere).outcome is Outcome.FAILED_QUIET
    assert pair.attach().outcome is Outcome.LANDED
    assert pair.write(elsewhere).outcome is Outcome.LANDED
    assert (later[:100] == pair.writer.pool[:100]).all()
    assert pair.write(batch).outcome is Outcome.FAILED_QUIET, "it is not registered any more"


def test_memory_that_was_registered_anew_is_not_taken_while_the_old_is_written():
    made = build(**TCP)
    assert made.attach().outcome is Outcome.LANDED
    ticket = made.writer.engine.submit(made.target.me, made.batch([0], [0], [POOL]))
    made.target.engine.register([Region(made.target.address, POOL // 2)])
    again = made.writer.engine.attach(made.target.me, made.target.engine.describe())
    done = made.settle(again)
    assert done.outcome is Outcome.FAILED_QUIET
    assert "still under way" in done.cause
    assert made.settle(ticket).outcome is Outcome.LANDED
    assert made.attach().outcome is Outcome.LANDED
    assert made.write(made.batch([0], [POOL // 2], [10])).outcome is Outcome.FAILED_QUIET
    assert made.write(made.batch([0], [0], [10])).outcome is Outcome.LANDED
    made.close()


def test_agents_that_nobody_needs_are_forgotten_when_there_are_many(pair, monkeypatch):
    monkeypatch.setattr(peers, "KEPT", 2)
    others = [open_end(NixlEngine(), number, 4096, {}) for number in range(10, 14)]
    for other in others:
        ticket = pair.writer.engine.attach(other.me, other.engine.describe())
        until = time.monotonic() + 10
        while not (ended := pair.writer.engine.poll(0.001)) and time.monotonic() < until:
            other.engine.poll(0)
        assert [(done.ticket, done.outcome) for done in ended] == [(ticket, Outcome.LANDED)]
        pair.writer.engine.detach(other.me)
    assert len(pair.writer.engine._peers) == 2
    for other in others:
        other.engine.close()


@pytest.mark.parametrize("options", [{}, TCP], ids=["cma", "tcp"])
def test_a_target_that_deregistered_is_written_to_by_who_was_not_told(options):
    """Why no GRANTS are claimed: the writer is trusted, and it is the node that tells it."""
    made = build(**options)
    assert made.attach().outcome is Outcome.LANDED
    made.target.engine.register([])
    assert made.write(made.batch([0], [0], [100])).outcome is Outcome.LANDED
    assert (made.target.pool[:100] == made.writer.pool[:100]).all()
    assert not made.target.engine.caps & Caps.GRANTS
    made.close()


def test_a_process_that_has_outcomes_all_the_time_serves_its_peers_all_the_same(pair):
    nobody, target = PeerId(77), pair.target.engine
    ticket = pair.writer.engine.attach(pair.target.me, target.describe())
    until = time.monotonic() + 10
    while not any(done.ticket == ticket for done in pair.writer.engine.poll(0.001)):
        refused = target.submit(nobody, pair.batch([0], [0], [10]))
        assert [done.ticket for done in target.poll(0)] == [refused]
        assert time.monotonic() < until
    assert pair.write(pair.batch([0], [0], [10])).outcome is Outcome.LANDED


def test_a_row_that_meets_a_page_that_is_out_of_reach_is_done_to_the_library(pair):
    """Why a digest is taken of what landed: it is the library's word, and it is wrong."""
    assert pair.attach().outcome is Outcome.LANDED
    assert pair.write(pair.batch([0], [0], [10])).outcome is Outcome.LANDED
    at = -pair.target.address % mmap.PAGESIZE + (1 << 20)
    starts = np.arange(0, 2 << 20, 65536)
    with out_of_reach(pair.target.address + at):
        done = pair.write(pair.batch(starts, starts, [65536] * len(starts)))
    assert done.outcome is Outcome.LANDED
    assert (pair.target.pool[at : at + mmap.PAGESIZE] == GUARD).all()


# the process's end


def test_a_process_that_used_it_ends_with_0_and_prints_nothing():
    code = """
from kvferry.engines.nixl import NixlEngine
from kvferry.testing.suite_pair import Pair, open_end
pair = Pair(*[open_end(NixlEngine(), number, 1 << 20, {}) for number in (1, 2)])
assert pair.attach().outcome.value == "landed"
assert pair.write(pair.batch([0], [0], [10])).outcome.value == "landed"
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_it_is_found_by_name_and_says_what_it_uses(pair):
    assert isinstance(find.load("NIXL"), NixlEngine)
    info = pair.writer.engine.info()
    assert info["library"].startswith("nixl_cu1")
    assert (info["backend"], "UCX" in info["plugins"]) == ("UCX", True)
    assert pair.attach().outcome is Outcome.LANDED
    assert list(pair.writer.engine.info()["peers"]) == [str(pair.target.me)]


@pytest.mark.parametrize(("transports", "expected"), [("tcp", "tcp/"), ("cma,tcp", "cma/memory")])
def test_the_try_out_writes_between_two_processes_and_names_the_transport(monkeypatch, transports, expected):
    monkeypatch.setenv("UCX_TLS", transports)
    found = {finding.key: finding for finding in NixlEngine().tryout()}
    assert list(found) == ["library", "plugins", "transfer", "transports"]
    assert (found["library"].works, found["transfer"].works) == (True, True)
    assert found["transports"].value.startswith(expected)


def test_a_try_out_that_can_not_work_says_why(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "nonsense")
    found = {finding.key: finding for finding in NixlEngine().tryout()}
    assert found["library"].works is False
    assert "can't be created" in found["library"].text
