"""Two live rooms may not fill the same page, and no room fills one twice."""

import numpy as np
import pytest

from kvferry import KVPoll, request_tag
from kvferry.api.held import HeldPages
from kvferry.errors import Code, InputError, Reason
from kvferry.node.view import RoomView


def pages(*numbers):
    return {"kv": np.array(numbers, np.int32)}


@pytest.fixture
def held():
    return HeldPages({"kv": 8, "swa": 4})


def test_a_page_that_is_named_twice_is_refused_and_nothing_is_taken(held):
    with pytest.raises(InputError, match="decode room 1: page 5 of space 'kv' is named 2 times"):
        held.take(RoomView(1), pages(4, 5, 5))
    held.take(RoomView(2), pages(4, 5))


def test_a_page_of_a_live_room_is_refused_with_both_rooms(held):
    held.take(RoomView(1), pages(1, 2))
    with pytest.raises(InputError, match="decode room 2: page 2 of space 'kv' was named for room 1, which is Boots"):
        held.take(RoomView(2), pages(0, 2))
    held.take(RoomView(3), pages(0, 3))
    held.take(RoomView(4), {"swa": np.array([1, 2], np.int32)})


@pytest.mark.parametrize("end", ["success", "released", "failed"])
def test_a_page_is_free_again_when_nothing_can_write_it(held, end):
    first = RoomView(1)
    held.take(first, pages(1, 2))
    if end == "success":
        first.update(KVPoll.Success, None, foreign=False, bytes_landed=1)
    else:
        first.update(KVPoll.Failed, Reason(Code.ABORTED), foreign=False, bytes_landed=0)
    if end == "released":
        first.release()
    if end == "failed":
        with pytest.raises(InputError, match="which is Failed and may still write it"):
            held.take(RoomView(2), pages(2))
    else:
        held.take(RoomView(2), pages(2))


def test_rooms_without_pages_hold_nothing(held):
    held.take(RoomView(1), pages())
    held.take(RoomView(2), {})


def test_a_request_tag_is_of_token_ids():
    assert request_tag([1, 2, 3]) == request_tag(np.array([1, 2, 3], np.int32)) != request_tag([1, 2])
    assert request_tag([]) > 0
    for wrong in ("hello", ["a"], [1.5], [[1]]):
        with pytest.raises(InputError, match="no list of token ids"):
            request_tag(wrong)
