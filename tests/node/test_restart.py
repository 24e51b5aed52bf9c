"""A prefill rank that is killed, replaced or re-registered is found again; a decode rank is never restarted."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvferry import KVArgs, KVBootstrapServer, KVPoll, KVReceiver
from kvferry.errors import Code, ConfigError
from kvferry.presets import page_major


class Forked:
    """A side in a process of its own, made by peer_zygote.py."""

    def __init__(self, path, mode, engine, **settings):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(20)
        self.socket.connect(path)
        self.stream = self.socket.makefile("rw")
        self.pid, self.endpoint = self._ask([mode, engine, settings])

    def do(self, what, **arguments):
        return self._ask({"do": what, **arguments})

    def kill(self):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            assert self.stream.read() == ""  # all its descriptors are closed
        self.pid = 0
        self.stream.close()
        self.socket.close()

    def _ask(self, message):
        self.stream.write(json.dumps(message) + "\n")
        self.stream.flush()
        return json.loads(self.stream.readline())


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("zygote") / "socket")
    command = [sys.executable, str(Path(__file__).parent / "peer_zygote.py"), path]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout.readline() == b"ready\n"
        yield path
        process.kill()


@pytest.fixture
def fork(zygote):
    workers = []
    yield lambda *facts, **settings: workers.append(Forked(zygote, *facts, **settings)) or workers[-1]
    for worker in workers:
        worker.kill()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def expected_rows(seed, kit, count=2):
    return np.random.default_rng(seed).integers(0, 255, (count, 3 * 2 * 2 * 16 * 16), np.uint8)


def served(decode, address, room, kit, worker=None, bootstrap=None):
    """A room that must succeed, byte for byte; the worker has filled its pages with this seed."""
    receiver = KVReceiver(decode.manager, bootstrap, room, peers=None if bootstrap else [address])
    receiver.init(0)
    receiver.send_metadata([room % 20 + 4, 2], 0)
    if worker is not None:
        worker.do("offer", room=room, pages=[1, 2], seed=room)
    assert receiver.wait(6) is KVPoll.Success, receiver.failure()
    assert (decode.pages([room % 20 + 4, 2]) == expected_rows(room, kit)).all()
    receiver.clear()


def test_a_prefill_killed_ten_times_with_rooms_running_is_found_again_on_its_port(make, kit, fork):
    decode, port = make("decode"), free_port()
    address, seen = f"127.0.0.1:{port}", set()
    worker = fork("prefill", "local", control_ports=str(port))
    for turn in range(10):
        served(decode, address, 100 + turn, kit, worker)
        waiting = [kit.claim(decode, address, 1000 * turn + number, [10 + number]) for number in range(5)]
        worker.do("offer", room=1000 * turn, pages=[1], send=False)
        kit.until(lambda waiting=waiting: waiting[0].poll() is KVPoll.Transferring)
        [peer] = decode.manager.node.conns.by_peer
        seen.add(peer.incarnation)
        worker.kill()
        for receiver in waiting:
            assert receiver.wait(2) is KVPoll.Failed
            assert receiver.failure().reason.code is Code.PEER_LOST
            kit.until(receiver.is_release_safe)
            receiver.clear()
        worker = fork("prefill", "local", control_ports=str(port))
    served(decode, address, 500, kit, worker)
    assert len(seen) == 10
    assert len(decode.manager.info()["peers"]) == 1
    assert decode.manager.health() == ""
    kit.until(lambda: len(decode.manager.node.book.peers) == 1)


def test_a_killed_prefill_comes_back_through_the_bootstrap_server(make, kit, fork):
    with KVBootstrapServer(port=0, ttl_s=0.9) as server:
        address = f"127.0.0.1:{server.port}"
        decode = make("decode")
        for turn in range(3):
            worker = fork("prefill", "local", bootstrap_addr=address)
            served(decode, None, 10 + turn, kit, worker, bootstrap=address)
            worker.kill()
        kit.until(lambda: not decode.manager.info()["peers"])
        for room, words in ((50, "Connection refused"), (51, "not registered")):  # its entry lives a little longer
            receiver = KVReceiver(decode.manager, address, room)
            receiver.init(0)
            assert receiver.wait(3) is KVPoll.Failed
            assert words in str(receiver.failure())
            time.sleep(1.0)


class Proxy:
    """A TCP proxy, as a service address is: new connections go to `target`, old ones end when it is switched."""

    def __init__(self, target):
        self.target = target
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.pairs = []
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def switch(self, target, *, cut=True):
        self.target = target
        if cut:
            for each in [end for pair in self.pairs for end in pair]:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.target = None
        self.thread.join()
        self.listener.close()

    def _serve(self):
        while self.target is not None:
            ready = select.select([self.listener, *(end for pair in self.pairs for end in pair)], [], [], 0.02)[0]
            for one in ready:
                if one is self.listener:
                    self._accept()
                else:
                    self._forward(one)
        for pair in list(self.pairs):
            self._end(pair)

    def _accept(self):
        client, _ = self.listener.accept()
        try:
            host, port = self.target.removeprefix("tcp://").rsplit(":", 1)
            self.pairs.append((client, socket.create_connection((host, int(port)), 1)))
        except OSError:
            client.close()

    def _forward(self, one):
        for pair in list(self.pairs):
            if one in pair:
                other = pair[1] if one is pair[0] else pair[0]
                try:
                    data = one.recv(65536)
                    if data:
                        other.sendall(data)
                        return
                except OSError:
                    pass
                self._end(pair)

    def _end(self, pair):
        self.pairs.remove(pair)
        for end in pair:
            end.close()


@pytest.fixture
def proxy():
    running = []
    yield lambda target: running.append(Proxy(target)) or running[-1]
    for each in running:
        each.close()


@pytest.mark.parametrize("cut", [True, False])
def test_a_prefill_replaced_behind_a_proxy(make, kit, proxy, cut):
    old, new, decode = make("prefill"), make("prefill"), make("decode")
    between = proxy(old.manager.endpoint)
    old.fill([1, 2], seed=1)
    new.fill([1, 2], seed=2)
    kit.offer(old, 1, [1, 2])
    receiver = kit.claim(decode, between.address, 1, [5, 6])
    assert receiver.wait(3) is KVPoll.Success
    between.switch(new.manager.endpoint, cut=cut)
    old.manager.shutdown()
    first = kit.claim(decode, between.address, 2, [7, 8])
    kit.offer(new, 2, [1, 2])
    if first.wait(5) is not KVPoll.Success:  # it may have met the old connection's end
        kit.until(first.is_release_safe)  # as a scheduler has to, before it uses the pages again
        kit.offer(new, 3, [1, 2])
        second = kit.claim(decode, between.address, 3, [7, 8])
        assert second.wait(5) is KVPoll.Success, second.failure()
    assert (decode.pages([7, 8]) == new.pages([1, 2])).all()


def pool_of(seed, pages=32):
    layout = page_major("toy", layers=3, kv_heads=2, head_dim=8, dtype="float16", pages=pages, page_tokens=16)
    pool = np.full(max(each.address + each.nbytes for each in layout.tensors), 0xEE, np.uint8)
    if seed is not None:
        pool[:] = np.random.default_rng(seed).integers(0, 255, pool.size, np.uint8)
    return layout, pool


@pytest.mark.parametrize("mechanism", ["auto", "tcp"])
def test_new_memory_on_either_side_is_used_from_the_next_room_on(make, kit, mechanism):
    more = {"engine_options": f"mechanism={mechanism}"}
    prefill, decode = make("prefill", **more), make("decode", **more)
    prefill.fill([1, 2], seed=1)
    room = 0
    for turn in range(3):
        room += 1
        receiver, sender = kit.claim(decode, prefill, room, [5, 6]), kit.offer(prefill, room, [1, 2])
        assert receiver.wait(3) is sender.wait(3) is KVPoll.Success
        receiver.clear()
        sender.clear()
        old = decode.pool
        layout, decode.pool = pool_of(None, pages=32 + turn)
        decode.manager.update_buffers(KVArgs(layout, [decode.pool], [decode.aux]))
        old[:] = 0xAA
        layout, prefill.pool = pool_of(turn)
        prefill.manager.update_buffers(KVArgs(layout, [prefill.pool], [prefill.aux]))
        room += 1
        receiver, sender = kit.claim(decode, prefill, room, [5, 6]), kit.offer(prefill, room, [1, 2])
        assert receiver.wait(3) is KVPoll.Success, receiver.failure()
        assert sender.wait(3) is KVPoll.Success
        rows = decode.pool.reshape(32 + turn, -1)
        assert (rows[[5, 6]] == prefill.pages([1, 2])).all()
        assert (np.delete(rows, [5, 6], axis=0) == kit.SENTINEL).all()
        assert (old == 0xAA).all()
        receiver.clear()
        sender.clear()
        _, decode.pool = pool_of(None)
        decode.manager.update_buffers(KVArgs(decode.layout, [decode.pool], [decode.aux]))
        prefill.fill([1, 2], seed=turn)
    assert decode.manager.info()["epoch"] == 6


def test_update_buffers_is_refused_while_rooms_are_in_use(make, kit):
    prefill, decode = make("prefill"), make("decode")
    receiver = kit.claim(decode, prefill, 1, [5])
    kit.offer(prefill, 1, [1], send=False)
    for side in (prefill, decode):
        with pytest.raises(ConfigError, match="update_buffers while 1 rooms are in use"):
            side.manager.update_buffers(KVArgs(side.layout, [side.pool], [side.aux]))
    assert receiver.poll() is not KVPoll.Failed


def test_update_buffers_is_refused_while_something_may_still_be_written(make, kit):
    prefill, decode = (make(mode, "faulty", drain_limit_s=0.4) for mode in ("prefill", "decode"))
    prefill.fill([1, 2], seed=1)
    prefill.engine.hold()
    receiver, sender = kit.claim(decode, prefill, 1, [5, 6]), kit.offer(prefill, 1, [1, 2])
    kit.until(lambda: prefill.engine.held)
    receiver.abort("no longer wanted")
    receiver.clear()
    sender.clear()
    for side in (decode, prefill):
        with pytest.raises(ConfigError, match="pages of 1 earlier rooms may still be in use"):
            side.manager.update_buffers(KVArgs(side.layout, [side.pool], [side.aux]))
    prefill.engine.release()
    kit.until(lambda: prefill.manager.node.book.idle and not prefill.engine.held)
    for side in (decode, prefill):
        side.manager.update_buffers(KVArgs(side.layout, [side.pool], [side.aux]))


def test_update_buffers_can_not_change_what_peers_rely_on(make):
    prefill = make("prefill")
    layout, pool = pool_of(None)
    other = page_major("toy", layers=3, kv_heads=2, head_dim=8, dtype="float16", pages=32, page_tokens=8)
    with pytest.raises(ConfigError, match="update_buffers can't change rank or spaces"):
        prefill.manager.update_buffers(KVArgs(other, [pool], [prefill.aux]))
    with pytest.raises(ConfigError, match="its buffer has 10"):
        prefill.manager.update_buffers(KVArgs(layout, [np.zeros(10, np.uint8)], [prefill.aux]))


def test_who_shakes_hands_during_update_buffers_hears_of_the_new_memory(make, kit, monkeypatch):
    prefill, decode, late = make("prefill"), make("decode"), make("decode")
    mover = prefill.manager.node.mover
    ask = mover.ask

    def slowly(question, timeout_s):
        answer = ask(question, timeout_s)
        # somebody connects when the engine has the new memory and peers are still told of the old one
        receiver = KVReceiver(late.manager, None, 77, peers=[prefill.manager.endpoint])
        receiver.init()
        kit.until(lambda: [each["ready"] for each in late.manager.info()["peers"]] == [True])
        return answer

    monkeypatch.setattr(mover, "ask", slowly)
    layout, prefill.pool = pool_of(5)
    updated = threading.Thread(
        target=prefill.manager.update_buffers, args=(KVArgs(layout, [prefill.pool], [prefill.aux]),)
    )
    updated.start()
    updated.join(10)
    assert prefill.manager.info()["epoch"] == 1
    kit.until(lambda: not any(each["ready"] for each in late.manager.info()["peers"]))  # the goodbye has come
    for number, side in enumerate([late, decode, late]):
        kit.offer(prefill, 10 + number, [1, 2])
        receiver = kit.claim(side, prefill, 10 + number, [5, 6])
        assert receiver.wait(5) is KVPoll.Success, receiver.failure()
        assert (side.pages([5, 6]) == prefill.pages([1, 2])).all()


def test_rooms_are_refused_by_name_while_the_memory_is_replaced(make, kit, monkeypatch):
    decode = make("decode")
    register, said = decode.engine.register, []

    def slowly(regions):
        try:
            KVReceiver(decode.manager, None, 5, peers=["127.0.0.1:5000"])
        except ConfigError as error:
            said.append(str(error))
        register(regions)

    monkeypatch.setattr(decode.engine, "register", slowly)
    decode.manager.update_buffers(KVArgs(decode.layout, [decode.pool], [decode.aux]))
    assert said == ["room 5: the manager is replacing its memory (send it to another worker)"]
    KVReceiver(decode.manager, None, 5, peers=["127.0.0.1:5000"])


def test_a_decode_that_restarts_on_its_port_is_served_anew(make, kit):
    prefill, port = make("prefill"), free_port()
    for turn in range(5):
        decode = make("decode", control_ports=str(port))
        prefill.fill([1, 2], seed=turn)
        receiver, sender = kit.claim(decode, prefill, 7, [5, 6]), kit.offer(prefill, 7, [1, 2])
        assert receiver.wait(3) is sender.wait(3) is KVPoll.Success
        sender.clear()
        decode.manager.shutdown()
    kit.until(lambda: not prefill.manager.info()["peers"])
    begin = time.monotonic()
    kit.until(lambda: not prefill.manager.node.book.peers, 3)
    assert time.monotonic() - begin < 3
