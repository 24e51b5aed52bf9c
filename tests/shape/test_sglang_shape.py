"""The connector interface, driven by schedulers in SGLang's order of calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from pools import FREE, make_request
from sglang_scheduler import PrefillOptions, World
from stopped_peer import StoppablePeer

from kvferry import KVPoll
from kvferry.engines.seam import Batch, Done
from kvferry.ids import PeerId

MakeWorld = Callable[..., World]

EARLY = PrefillOptions(early_send=True)
OVERLAP = PrefillOptions(overlap=True, chunk_tokens=24)


def test_a_request_goes_through_all_queues_and_its_bytes_are_right(make_world: MakeWorld) -> None:
    world, request = make_world(), make_request(71, 45)
    world.submit(request)
    world.check_success(request)


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "order"), [(2, 2, "page_major"), (2, 1, "layer_major")])
def test_eight_requests_at_once_get_their_own_bytes_and_metadata_rows(
    make_world: MakeWorld, prefill_tp: int, decode_tp: int, order: str
) -> None:
    world = make_world(prefill_tp=prefill_tp, decode_tp=decode_tp, decode_order=order)
    requests = [make_request(100 + i, 9 + 11 * i, decode_prefix=16 * (i % 3) if i > 3 else 0) for i in range(8)]
    world.submit(*requests)
    world.check_success(*requests)


@pytest.mark.parametrize("num_tokens", [40, 64, 73])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_chunked_prefill_sends_whole_pages_first_and_the_rest_last(
    make_world: MakeWorld, num_tokens: int, overlap: bool
) -> None:
    world = make_world(prefill_tp=2, decode_tp=2, options=PrefillOptions(24, overlap=overlap))
    requests = [make_request(200, num_tokens), make_request(201, num_tokens, decode_prefix=32)]
    world.submit(*requests)
    world.check_success(*requests)


def test_pages_are_read_only_after_the_event_of_their_forward(make_world: MakeWorld) -> None:
    world, request = make_world(options=OVERLAP), make_request(300, 60)
    world.prefill.tell("hold", "stream")
    world.submit(request)
    world.wait(
        lambda: world.prefill.where(300) == "inflight" and world.decode.where(300) == "transfer",
        "the hand-over",
    )
    time.sleep(0.2)
    (entry,) = world.decode_ranks[0].queues["transfer"].values()
    assert (world.decode_pools[0].cells[entry.pages] == FREE).all()
    world.prefill.tell("resume", "stream")
    world.check_success(request)


@pytest.mark.parametrize("decode_prefix", [0, 32])
def test_everything_may_be_sent_before_any_claim_came(make_world: MakeWorld, decode_prefix: int) -> None:
    world, request = make_world(options=EARLY), make_request(400, 45, decode_prefix)
    world.prefill.tell("add", request)
    world.wait(lambda: world.prefill.where(400) == "inflight", "the early send")
    world.decode.tell("add", request)
    world.check_success(request)


def test_an_optimistic_prefill_goes_on_when_its_claim_comes(make_world: MakeWorld) -> None:
    world, request = make_world(options=PrefillOptions(attempts=1)), make_request(500, 45, 16)
    world.prefill.tell("add", request)
    world.wait(
        lambda: any(e.events for e in world.prefill.ranks[0].queues["bootstrap"].values()),
        "the first forward",
    )
    world.decode.tell("add", request)
    world.check_success(request)


@pytest.mark.parametrize(("num_tokens", "decode_prefix"), [(45, 16), (45, 32), (48, 48)])
def test_only_what_lies_beyond_the_decode_prefix_is_written(
    make_world: MakeWorld, num_tokens: int, decode_prefix: int
) -> None:
    world, request = make_world(prefill_tp=2, decode_tp=1), make_request(600, num_tokens, decode_prefix)
    world.submit(request)
    world.check_success(request)


STATES = {
    "bootstrap and prealloc": ("bootstrap", "prealloc", PrefillOptions()),
    "waiting and transfer": ("waiting", "transfer", PrefillOptions()),
    "inflight and transfer": ("inflight", "transfer", OVERLAP),
    "inflight and prealloc": ("inflight", "prealloc", EARLY),
}


def hold_in(world: World, state: str) -> None:
    """Have requests stay in the two queues of a state."""
    if "waiting" in state:
        world.prefill.tell("hold", "forward")
    if "inflight and transfer" in state:
        world.prefill.tell("hold", "stream")
    if "prealloc" in state:
        world.decode.tell("hold", "prealloc")


def wait_for_state(world: World, state: str, room: int) -> None:
    """Until the room is in both queues on all ranks, and the two sides have heard of each other."""
    queues = STATES[state][:2]
    world.wait(lambda: (world.prefill.where(room), world.decode.where(room)) == queues, state)

    def met() -> bool:
        entries = [e for rank in world.decode.ranks for e in list(rank.queues[queues[1]].values())]
        return all(e.receiver.poll() > KVPoll.Bootstrapping for e in entries if e.request.room == room)

    world.wait(met, f"room {room} accepted by its sources")


def resume(world: World) -> None:
    for name in ("forward", "stream"):
        world.prefill.tell("resume", name)
    world.decode.tell("resume", "prealloc")


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("state", STATES)
def test_an_abort_in_any_queue_ends_both_sides_with_its_reason_and_the_number_can_be_used_again(
    make_world: MakeWorld, state: str, side: str
) -> None:
    prefill_queue, decode_queue, options = STATES[state]
    world, request = make_world(options=options), make_request(7, 45)
    hold_in(world, state)
    world.submit(request)
    wait_for_state(world, state, 7)
    (world.prefill if side == "prefill" else world.decode).tell("abort", 7)
    world.wait_ended(7)
    resume(world)
    world.wait_released(7)
    for fleet, queue in ((world.prefill, prefill_queue), (world.decode, decode_queue)):
        outcome = fleet.outcome(7)
        assert outcome is not None
        assert outcome.queue == queue
        assert "aborted: the client of room 7 went away" in outcome.text
        assert f"noticed by {side} dp0" in outcome.text
    world.submit(request)  # the same request, the same tag, the same room number
    world.check_success(request, nth=1)


def test_a_decode_side_that_comes_after_the_abort_hears_its_reason(make_world: MakeWorld) -> None:
    world, request = make_world(), make_request(8, 45)
    world.prefill.tell("add", request)
    world.wait(lambda: world.prefill.where(8) == "bootstrap", "the sender")
    world.prefill.tell("abort", 8)
    world.wait(lambda: world.prefill.outcome(8), "the end of the sender")
    world.decode.tell("add", request)
    world.wait_ended(8)
    world.wait_released(8)
    outcome = world.decode.outcome(8)
    assert outcome is not None
    assert outcome.queue == "prealloc"
    assert "the client of room 8 went away" in outcome.text


def test_a_prefill_side_that_comes_after_the_abort_ends_for_want_of_a_claim_or_with_the_reason(
    make_world: MakeWorld,
) -> None:
    world, request = make_world(options=EARLY), make_request(9, 45)
    world.decode.tell("add", request)
    world.wait(lambda: world.decode.where(9) == "prealloc", "the receiver")
    world.decode.tell("abort", 9)
    world.wait(lambda: world.decode.outcome(9), "the end of the receiver")
    world.prefill.tell("add", request)
    world.wait_ended(9)
    world.wait_released(9)
    outcome = world.prefill.outcome(9)
    assert outcome is not None
    # the close of the claim may come before the offer (then nobody comes), or after it (then it names the reason)
    assert outcome.queue in {"inflight", "bootstrap"}
    assert outcome.text.split(":")[1].strip() in {"no_claim", "aborted"}


def test_a_room_number_in_use_is_refused_and_the_first_request_goes_on(make_world: MakeWorld) -> None:
    world, first, second = make_world(prefill_tp=2, decode_tp=2), make_request(10, 45), make_request(10, 60)
    world.prefill.tell("hold", "forward")
    world.submit(first)
    world.wait(lambda: world.decode.where(10) == "transfer", "the first request")
    world.submit(second)
    world.wait_ended(10)
    for fleet in (world.prefill, world.decode):
        refusal = fleet.outcome(10)
        assert refusal is not None
        assert refusal.queue == "rejected"
        assert "room 10 has a" in refusal.text
    resume(world)
    world.check_success(first, nth=1)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_pages_of_a_failed_room_are_held_on_both_sides_while_a_write_may_still_run(
    make_world: MakeWorld, side: str
) -> None:
    world, request = make_world(), make_request(11, 45)
    engine = world.prefill_managers[0].node.engine
    poll, begun, is_held = engine.poll, threading.Event(), True
    reports: list[Done] = []

    def withhold(budget_s: float) -> list[Done]:
        """An engine whose write is under way: what it would say of it is kept back."""
        reports.extend(poll(budget_s))
        if is_held and begun.is_set():
            return []
        told = reports.copy()
        reports.clear()
        return told

    def submit(peer: PeerId, batch: Batch) -> int:
        begun.set()
        return engine_submit(peer, batch)

    engine_submit = engine.submit
    engine.poll, engine.submit = withhold, submit  # type: ignore[method-assign]
    world.submit(request)
    world.wait(begun.is_set, "the write")
    (world.prefill if side == "prefill" else world.decode).tell("abort", 11)
    world.wait_ended(11)
    time.sleep(0.3)
    assert (world.prefill.where(11), world.decode.where(11)) == ("held", "held")
    is_held = False
    world.wait_released(11)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("state", STATES)
def test_an_abort_on_one_rank_alone_removes_the_room_from_all_ranks_in_the_same_step(
    make_world: MakeWorld, state: str, side: str
) -> None:
    world = make_world(prefill_tp=2, decode_tp=2, options=STATES[state][2])
    requests = [make_request(room, 45) for room in (20, 21, 22)]
    hold_in(world, state)
    world.submit(*requests)
    for room in (20, 21, 22):
        wait_for_state(world, state, room)
    (world.prefill if side == "prefill" else world.decode).tell("abort_on_rank", (21, 1))
    world.wait_ended(21)
    resume(world)
    world.check_success(requests[0], requests[2])
    world.wait_released(21)
    for fleet in (world.prefill, world.decode):
        assert fleet.outcome(21)  # in the same step
        own = fleet.ranks[1].outcome(21)
        assert own is not None
        assert "the client of room 21 went away" in own.text
        assert {outcome.room for rank in fleet.ranks for outcome in rank.log if outcome.text} == {21}


def test_no_call_of_a_scheduler_waits_for_a_stopped_peer(nothing_left_behind: None) -> None:
    rounds, rooms = 6, 100
    with StoppablePeer(rounds * rooms) as peer:
        peer.meet()
        peer.stop()
        took = np.array([peer.timed_calls(room) for room in range(rounds * rooms)]) * 1e3
    each_ms = np.quantile(took.reshape(rounds, -1), (0.5, 0.99, 1.0), axis=1).T
    for p50, p99, longest in each_ms:
        print(f"{took.size // rounds} calls, peer stopped: p50 {p50:.3f} ms, p99 {p99:.3f} ms, max {longest:.3f} ms")
    assert took.size // rounds >= 1000
    assert each_ms[:, 1].min() < 1.0  # of the quietest round: other processes disturb some, a wait would be in all
