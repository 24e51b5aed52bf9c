"""What goes wrong ends with an HTTP error in time; both servers live on, and the next request is right."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
from checks import check
from client import Answer, Exchange, at_once, exchange, generation, new_room, post
from matrix import ALWAYS_TO_HOST, TCP
from models import Reference, references
from servers import ENGINE, Pair, Setup, free_port

from kvferry.testing.strangers import listeners, shout

StartPair = Callable[[Setup], Pair]
LIMIT_S = 30.0
ORDERED = Setup(args=("--disable-radix-cache",), env={"KVFERRY_ENGINE": "ordered"})


@pytest.fixture(params=["device", "host"])
def ordered(request: pytest.FixtureRequest) -> Setup:
    """Decode receives into either of its pools."""
    return ORDERED if request.param == "device" else replace(ORDERED, decode_args=ALWAYS_TO_HOST)


@pytest.fixture
def reference(model_folder: Callable[[str], Path]) -> Reference:
    return references(model_folder("llama"), "bfloat16")[1]


class Running:
    """A request that is on its way while the test does something else."""

    def __init__(self, pair: Pair, reference: Reference, **extra: Any) -> None:
        self._done: list[Exchange] = []
        self._begun_s = time.monotonic()
        self._thread = threading.Thread(
            target=lambda: self._done.append(exchange(pair, reference, **extra)), daemon=True
        )  # fmt: skip
        self._thread.start()

    def wait(self, limit_s: float = LIMIT_S) -> Exchange:
        """Both answers. Fails if they are not there in time."""
        self._thread.join(limit_s)
        assert self._done, f"no answers {time.monotonic() - self._begun_s:.1f} s after the request"
        return self._done[0]


def ports_of(pair: Pair) -> list[int]:
    """Of both servers."""
    return [server.port for server in pair.servers]


def wait_until_held(orders: Path) -> None:
    """Until prefill has computed, and its engine holds what it should write."""
    deadline = time.monotonic() + LIMIT_S
    while not (orders / "holding").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def check_error(answer: Answer, cause: str) -> None:
    """The client is told what happened."""
    assert answer.status == 500, answer
    assert cause in answer.body["message"], answer


def check_healthy(pair: Pair, reference: Reference) -> None:
    """Both servers live, and serve."""
    assert [server.name for server in pair.servers if not server.is_alive()] == []
    check(pair, exchange(pair, reference))


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_abort_during_the_transfer(
    side: str, ordered: Setup, start_pair: StartPair, orders: Path, reference: Reference
) -> None:
    pair = start_pair(ordered)
    (orders / "hold").touch()
    running = Running(pair, reference, rid="to-be-aborted")
    wait_until_held(orders)
    assert post(getattr(pair, side).port, "/abort_request", {"rid": "to-be-aborted"}).status == 200
    done = running.wait()
    check_error(done.decode, "abort")
    (orders / "hold").unlink()
    check_healthy(pair, reference)


def test_a_client_that_hangs_up_during_the_transfer(
    ordered: Setup, start_pair: StartPair, orders: Path, reference: Reference
) -> None:
    pair = start_pair(ordered)
    (orders / "hold").touch()
    body = generation(reference, **pair.rendezvous(new_room()))
    answers = at_once([lambda port=port: post(port, "/generate", body, 2.0) for port in ports_of(pair)])
    assert [answer.status for answer in answers] == [0, 0]
    (orders / "hold").unlink()
    check_healthy(pair, reference)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_partner_that_never_comes(side: str, start_pair: StartPair, reference: Reference) -> None:
    pair = start_pair(Setup())
    body = generation(reference, **pair.rendezvous(new_room()))
    answer = post(getattr(pair, side).port, "/generate", body, LIMIT_S)
    check_error(answer, {"prefill": "no_claim", "decode": "bootstrap_timeout"}[side])
    check_healthy(pair, reference)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_server_that_is_killed_and_started_again(
    side: str, ordered: Setup, start_pair: StartPair, orders: Path, reference: Reference
) -> None:
    pair = start_pair(ordered)
    check_healthy(pair, reference)
    (orders / "hold").touch()
    running = Running(pair, reference)
    wait_until_held(orders)
    getattr(pair, side).kill()
    done = running.wait()
    check_error(done.decode if side == "prefill" else done.prefill, "peer_lost")
    (orders / "hold").unlink()
    setattr(pair, side, getattr(pair, side).restarted())
    check_healthy(pair, reference)


def test_a_slow_engine(start_pair: StartPair, orders: Path, reference: Reference) -> None:
    pair = start_pair(ORDERED)
    (orders / "hold").touch()
    running = Running(pair, reference)
    wait_until_held(orders)
    time.sleep(4.0)
    (orders / "hold").unlink()
    done = running.wait()
    check(pair, done)
    assert done.decode.took_s > 4.0


def test_an_engine_that_stands_still(start_pair: StartPair, orders: Path, reference: Reference) -> None:
    pair = start_pair(ORDERED)
    (orders / "hold").touch()
    done = Running(pair, reference).wait()
    check_error(done.decode, "stall")
    (orders / "hold").unlink()
    check_healthy(pair, reference)


def test_garbage_at_the_ports(start_pair: StartPair, reference: Reference) -> None:
    ports = {side: (free_port(), range(first := free_port(), first + 40)) for side in ("prefill", "decode")}
    env = {
        side: {"KVFERRY_CONTROL_PORTS": str(control), "KVFERRY_DATA_PORTS": f"{data[0]}-{data[-1]}"}
        for side, (control, data) in ports.items()
    }
    tcp = {"KVFERRY_ENGINE_OPTIONS": TCP.get(ENGINE, "")}
    pair = start_pair(Setup(env=tcp, prefill_env=env["prefill"], decode_env=env["decode"]))
    check_healthy(pair, reference)
    for server, (control, data) in zip(pair.servers, ports.values(), strict=True):
        shout_frames(control)
        found = {address for pid in server.processes() for address in listeners(pid)}
        ours = sorted(address for address in found if address[1] == control or address[1] in data)
        assert len(ours) > (ENGINE != "nixl"), "the control port, and data ports unless UCX chooses them"
        assert shout([*ours, ("127.0.0.1", pair.bootstrap_port)]) > len(ours)
    check_healthy(pair, reference)
    at_once([lambda: check_healthy(pair, reference)] * 4)


def shout_frames(port: int) -> None:
    """Messages that are no messages, in the socket's own protocol."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 500
        peer.connect(f"tcp://127.0.0.1:{port}")
        for frames in ([b"hello"], [b""], [b"", b""], [b"None", b"1", b"2"], [os.urandom(64)] * 3, [b"\x80" * 4096]):
            peer.send_multipart(frames)
        time.sleep(0.3)
