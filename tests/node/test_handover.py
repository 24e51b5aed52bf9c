"""The same manager code over each engine: what arrives, and what does not change."""

import numpy as np
import pytest

from engine_here import need
from kvferry import KVPoll, KVReceiver, KVSender, KVTransferError
from kvferry.errors import InputError


@pytest.fixture(params=["local", "faulty", "nixl", "mooncake"])
def both(request, make):
    need(request.param)
    return make("prefill", request.param), make("decode", request.param)


def test_pages_and_aux_arrive_and_nothing_else_changes(both, kit):
    prefill, decode = both
    rows = prefill.fill([7, 3, 20], seed=1)
    prefill.aux[2] = (10, 20, 30, 40)
    receiver = kit.claim(decode, prefill, 5, [5, 9, 1], aux_index=6, tag=77)
    sender = kit.offer(prefill, 5, [7, 3, 20], aux_index=2, tag=77)
    assert receiver.wait(5) is KVPoll.Success
    assert sender.wait(5) is KVPoll.Success
    assert (decode.pages([5, 9, 1]) == rows).all()
    others = [page for page in range(32) if page not in {5, 9, 1}]
    assert (decode.pages(others) == kit.SENTINEL).all()
    assert decode.aux[6].tolist() == [10, 20, 30, 40]
    assert receiver.is_release_safe()
    assert sender.is_release_safe()
    assert receiver.get_transfer_metric().transfer_total_bytes == rows.nbytes


def test_chunks_in_any_number_and_an_event_that_is_late(both, kit):
    prefill, decode = both
    rows = prefill.fill([1, 2, 3, 4], seed=2)
    happened = []

    class Event:
        def query(self):
            return bool(happened)

    sender = KVSender(prefill.manager, None, 6)
    sender.init(4, 0)
    sender.send(np.array([1]))
    sender.send(np.array([2, 3]), after=Event())
    sender.send(np.array([4]))
    receiver = kit.claim(decode, prefill, 6, [10, 11, 12, 13])
    kit.until(lambda: receiver.poll() is KVPoll.Transferring)
    assert receiver.wait(0.3) is KVPoll.Transferring
    happened.append(True)
    assert receiver.wait(5) is KVPoll.Success
    assert (decode.pages([10, 11, 12, 13]) == rows).all()


@pytest.mark.parametrize("prefix_pages", [0, 1, 3])
def test_the_prefix_that_decode_has_is_never_written(both, kit, prefix_pages):
    prefill, decode = both
    rows = prefill.fill([1, 2, 3], seed=3)
    own = decode.fill([8, 9, 10], seed=4)
    receiver = kit.claim(decode, prefill, 7, [8, 9, 10][prefix_pages:], prefix=16 * prefix_pages, num_tokens=48)
    sender = kit.offer(prefill, 7, [1, 2, 3], num_tokens=48)
    assert receiver.wait(5) is KVPoll.Success
    assert sender.wait(5) is KVPoll.Success
    assert sender.pop_decode_prefix_len() == 16 * prefix_pages
    assert (decode.pages([8, 9, 10][:prefix_pages]) == own[:prefix_pages]).all()
    assert (decode.pages([8, 9, 10][prefix_pages:]) == rows[prefix_pages:]).all()


def test_another_requests_room_number_does_not_join(both, kit):
    prefill, decode = both
    prefill.fill([1], seed=5)
    kit.offer(prefill, 8, [1], tag=111)
    receiver = kit.claim(decode, prefill, 8, [2], tag=222)
    assert receiver.wait(5) is KVPoll.Failed
    with pytest.raises(KVTransferError, match=r"request tag 0xde .* is not 0x6f"):
        receiver.failure_exception()
    assert (decode.pages([2]) == kit.SENTINEL).all()


def test_a_room_number_runs_again_after_clear(both, kit):
    prefill, decode = both
    for seed in range(3):
        rows = prefill.fill([1, 2], seed)
        sender, receiver = kit.offer(prefill, 9, [1, 2]), kit.claim(decode, prefill, 9, [4, 5])
        assert receiver.wait(5) is KVPoll.Success
        assert sender.wait(5) is KVPoll.Success
        assert (decode.pages([4, 5]) == rows).all()
        sender.clear()
        receiver.clear()


def test_a_metadata_row_that_decode_waits_for_and_prefill_did_not_send_fails_the_room(both, kit):
    prefill, decode = both
    prefill.fill([1], seed=6)
    decode.aux[3] = (999, 999, 999, 999)
    receiver = kit.claim(decode, prefill, 11, [2], aux_index=3)
    kit.offer(prefill, 11, [1], aux_index=-1)
    assert receiver.wait(5) is KVPoll.Failed
    assert "decode wants a metadata row, prefill sent none; pass aux_index on both sides" in str(receiver.failure())


def test_two_rooms_can_not_fill_one_page(both, kit):
    prefill, decode = both
    receiver = kit.claim(decode, prefill, 12, [2, 3])
    other = KVReceiver(decode.manager, None, 13, peers=[prefill.manager.endpoint])
    other.init()
    with pytest.raises(InputError, match="page 3 of space 'kv' was named for room 12"):
        other.send_metadata([3, 4])
    other.send_metadata([4, 5])
    prefill.fill([1, 2], seed=7)
    kit.offer(prefill, 12, [1, 2])
    assert receiver.wait(5) is KVPoll.Success


def test_the_chunks_hold_the_tokens_that_init_said(both):
    sender = KVSender(both[0].manager, None, 14)
    with pytest.raises(InputError, match="tokens 0 to 16 need 1 pages of 16 tokens, 2 were given"):
        sender.init(2, 0, num_tokens=16)
    sender.init(2, 0, num_tokens=30)
    sender.send([1], num_kv_tokens=16)
    with pytest.raises(InputError, match=r"the chunks hold 32 tokens, init\(\) said 30"):
        sender.send([2], num_kv_tokens=16)
