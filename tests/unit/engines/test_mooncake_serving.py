"""What peers write to by Mooncake: one instance per connection, and how one of them is shut out."""

import re
import socket
import threading
import time

import msgspec
import pytest
from mooncake_here import MIB, opened

from engine_here import need
from kvferry.engines.mooncake import quiet, serving, sockets
from kvferry.engines.seam import Outcome, Region
from kvferry.errors import EngineError
from kvferry.ids import PeerId

need("mooncake")


@pytest.fixture
def suite():
    yield from opened()


def told(suite, epoch):
    """What the peer of a connection is told, and the target's name there."""
    engine, me = suite.pair.target.engine, suite.pair.target.me
    return engine.personal(engine.describe(), epoch), PeerId(me.incarnation, epoch)


def attach_as(suite, epoch):
    said, name = told(suite, epoch)
    return suite.pair.settle(suite.engine.attach(name, said)), name


def write_as(suite, name):
    batch = suite.pair.batch([0], [0], [10])
    return suite.pair.settle(suite.engine.submit(name, batch)).outcome


def test_a_stopped_writer_is_shut_out_and_others_go_on(suite):
    process, target = suite.spawn(), suite.pair.target
    said, name = told(suite, 5)
    assert process.attach(name, said)["outcome"] == "landed"
    done, other = attach_as(suite, 6)
    assert done.outcome is Outcome.LANDED
    process.flood(name, 7, target.address)
    while not target.pool[MIB:].any() or target.pool[MIB] == 0xEE:
        time.sleep(0.01)
    process.stop()
    ticket = target.engine.fence(PeerId(process.peer.incarnation, 5))
    assert [(one.ticket, one.outcome) for one in target.engine.poll(1)] == [(ticket, Outcome.LANDED)]
    before = target.pool[MIB:].copy()
    assert write_as(suite, other) is Outcome.LANDED
    process.go_on()
    time.sleep(2)
    assert (target.pool[MIB:] == before).all()
    assert write_as(suite, other) is Outcome.LANDED


def test_a_connection_keeps_its_session_and_loses_it_for_good(suite):
    first, again, second = told(suite, 5)[0], told(suite, 5)[0], told(suite, 6)[0]
    assert first == again
    sessions = {
        msgspec.msgpack.decode(said)["session"] for said in (first, second, suite.pair.target.engine.describe())
    }
    assert len(sessions) == 3
    engine = suite.pair.target.engine
    for _ in range(2):
        engine.fence(PeerId(1, 5))
        assert engine.poll(1)[0].outcome is Outcome.LANDED
    assert told(suite, 5)[0] == first
    assert attach_as(suite, 5)[0].outcome is Outcome.FAILED_QUIET
    assert attach_as(suite, 6)[0].outcome is Outcome.LANDED
    said = msgspec.msgpack.decode(first)
    for port in (*said["data_ports"], int(said["session"].rpartition(":")[2])):
        with socket.socket() as one, pytest.raises(OSError, match="in use"):
            one.bind(("", port))
    assert engine.info()["served"] == 2


def test_a_batch_to_a_target_that_shut_its_writer_out_is_quiet_at_once(suite):
    done, name = attach_as(suite, 5)
    assert done.outcome is Outcome.LANDED
    suite.pair.target.engine.fence(PeerId(suite.pair.writer.me.incarnation, 5))
    ticket = suite.engine.submit(name, suite.pair.batch([0], [0], [10]))
    assert suite.pair.settle(ticket).outcome is Outcome.FAILED_UNKNOWN
    assert suite.quiet(ticket)
    assert suite.engine.info()["unproven"] == 0


@pytest.mark.parametrize("then", ["stays", "is detached"])
def test_a_target_that_is_still_on_its_way_out_when_the_batch_fails_is_looked_at_again(suite, monkeypatch, then):
    """It closes its connections first, and refuses new ones a moment later."""
    looks = iter([False] * 4)
    is_gone = quiet.is_gone
    monkeypatch.setattr(quiet, "is_gone", lambda *where: next(looks, None) is None and is_gone(*where))
    name = attach_as(suite, 5)[1]
    suite.pair.target.engine.fence(PeerId(suite.pair.writer.me.incarnation, 5))
    ticket = suite.engine.submit(name, suite.pair.batch([0], [0], [10]))
    assert suite.pair.settle(ticket).outcome is Outcome.FAILED_UNKNOWN
    peer = suite.engine._peers[name]
    if then == "is detached":
        suite.engine.detach(name)
    assert suite.quiet(ticket)
    peer.join(1)
    assert peer.alive is (then == "stays")


def test_listeners_are_told_apart_while_other_threads_look_at_them():
    """A duplicate that another thread has for a moment is no other owner."""
    over = threading.Event()

    def look():
        while not over.is_set():
            sockets.listening_ports()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(200):
            with socket.create_server(("127.0.0.1", 0)) as one:
                port = one.getsockname()[1]
                found = sockets.held([port])
            with found[port]:
                assert sockets.refuse(found[port])
    finally:
        over.set()
        looking.join()


def test_a_listener_is_found_once_where_its_duplicate_has_the_number_of_a_descriptor_that_was_just_closed(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as one:
        names = [str(number) for number in (one.fileno(), *range(one.fileno() + 1000))]
        monkeypatch.setattr("os.listdir", lambda _: names)
        port = one.getsockname()[1]
        with sockets.held([port])[port] as kept:
            assert str(kept.fileno()) in names[1:]


def test_a_port_that_is_not_the_librarys_is_left_alone(suite):
    told(suite, 5)
    engine = suite.pair.target.engine
    with socket.create_server(("127.0.0.1", 0)) as others:
        port = others.getsockname()[1]
        engine._served._open[5].ports.append(port)
        engine.fence(PeerId(1, 5))
        done = engine.poll(1)[0]
        assert done.outcome is Outcome.FAILED_QUIET
        assert f"port {port} could not be kept" in done.cause
        socket.create_connection(("127.0.0.1", port), 5).close()


def test_who_was_told_nothing_yet_is_told_what_leads_nowhere(suite):
    engine = suite.pair.target.engine
    engine.fence(PeerId(1, 8))
    assert engine.poll(1)[0].outcome is Outcome.LANDED
    assert attach_as(suite, 8)[0].outcome is Outcome.FAILED_QUIET
    engine.fence(PeerId(1, 0))
    assert engine.poll(1)[0].outcome is Outcome.LANDED
    assert attach_as(suite, 9)[0].outcome is Outcome.LANDED


def test_where_no_instance_can_be_made_the_main_one_is_shared_and_no_fence_is_claimed(suite, monkeypatch):
    engine = suite.pair.target.engine
    monkeypatch.setattr(serving, "Instance", failing)
    for epoch in (5, 6):
        done, name = attach_as(suite, epoch)
        assert done.outcome is Outcome.LANDED
        assert write_as(suite, name) is Outcome.LANDED
    for epoch, why in ((5, "no instance of its own"), (7, "no instance of its own|no instance could be made")):
        engine.fence(PeerId(1, epoch))
        done = engine.poll(1)[0]
        assert done.outcome is Outcome.FAILED_QUIET
        assert re.search(why, done.cause)


def failing(_place):
    raise EngineError("no port is free")


def test_instances_of_writers_that_are_gone_are_ended(suite, monkeypatch):
    engine = suite.pair.target.engine
    done, name = attach_as(suite, 5)
    assert done.outcome is Outcome.LANDED
    told(suite, 6)
    assert engine.info()["served"] == 3
    monkeypatch.setattr(serving, "SWEEP_AFTER_S", 0.0)
    told(suite, 7)
    assert engine.info()["served"] == 3  # nobody has connected to 6
    assert write_as(suite, name) is Outcome.LANDED
    suite.engine.detach(name)
    engine.detach(PeerId(1, 7))
    assert engine.info()["served"] == 2
    suite.pair.settle(suite.engine.attach(suite.pair.target.me, engine.describe()))
    told(suite, 8)
    assert engine.info()["served"] == 2


def test_by_rdma_no_connection_shows_that_a_writer_is_there_so_that_none_is_taken_for_gone(suite, monkeypatch):
    engine = suite.pair.target.engine
    monkeypatch.setattr(serving, "SWEEP_AFTER_S", 0.0)
    for each in (5, 6):
        told(suite, each)
        engine._served._open[each].transport = "rdma"
    told(suite, 7)
    assert engine.info()["served"] == 4
    engine.detach(PeerId(1, 5))
    assert engine.info()["served"] == 3


def test_registering_reaches_all_instances_or_none(suite):
    engine, pool = suite.pair.target.engine, suite.pair.target
    done, name = attach_as(suite, 5)
    assert done.outcome is Outcome.LANDED
    with pytest.raises(EngineError, match="region 1"):
        engine.register([Region(pool.address, MIB), Region(pool.address, MIB)])
    assert write_as(suite, name) is Outcome.FAILED_UNKNOWN
    engine.register([Region(pool.address, MIB)])
    assert attach_as(suite, 5)[0].outcome is Outcome.LANDED
    assert write_as(suite, name) is Outcome.LANDED
