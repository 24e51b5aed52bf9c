"""Engines whose target can shut a writer out: a lost peer's pages come back at once, whether it is dead or stopped."""

import pytest

from engine_here import need
from kvferry import KVPoll
from kvferry.errors import Code

LOST_S = 5.0


@pytest.fixture(params=["mooncake"])
def engine(request):
    need(request.param)
    return request.param


def began(worker, decode, kit):
    """A room that both sides have opened, and of which nothing was sent yet."""
    receiver = kit.claim(decode, worker, 1, [4, 5])
    worker.do("offer", room=1, pages=[1, 2], seed=1, send=False)
    kit.until(lambda: receiver.poll() is KVPoll.Transferring)
    return receiver


def goes_on(prefill, decode, room, kit):
    receiver = kit.claim(decode, prefill, room, [4])
    prefill.do("offer", room=room, pages=[1], seed=room)
    assert receiver.wait(LOST_S) is KVPoll.Success, receiver.failure()


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_pages_of_a_lost_prefill_process_come_back_and_it_may_come_back_too(end, engine, make, spawn, kit):
    worker, decode = spawn("prefill", engine=engine), make("decode", engine)
    goes_on(worker, decode, 7, kit)
    receiver = began(worker, decode, kit)
    getattr(worker, end)()
    assert receiver.wait(LOST_S) is KVPoll.Failed
    assert receiver.failure().reason.code is Code.PEER_LOST
    kit.until(receiver.is_release_safe)
    if end == "stop":
        worker.go_on()
    goes_on(worker if end == "stop" else spawn("prefill", engine=engine), decode, 2, kit)


def test_the_source_pages_of_a_lost_decode_process_come_back(engine, make, spawn, kit):
    prefill, worker = make("prefill", engine), spawn("decode", engine=engine)
    prefill.fill([1, 2], seed=1)
    for room in (1, 2):
        worker.do("claim", room=room, pages=[room], endpoint=prefill.manager.endpoint)
        sender = kit.offer(prefill, room, [room], send=room == 1)
        if room == 1:
            assert sender.wait(LOST_S) is KVPoll.Success
    kit.until(lambda: sender.poll() is KVPoll.Transferring or sender.poll() is KVPoll.WaitingForInput)
    worker.kill()
    assert sender.wait(LOST_S) is KVPoll.Failed
    kit.until(sender.is_release_safe)
