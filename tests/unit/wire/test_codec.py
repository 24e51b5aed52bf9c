"""Frames: what is tolerated, what is refused, and that nothing but WireError comes out of hostile bytes."""

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.errors import WireError
from kvferry.ids import PeerId
from kvferry.wire import (
    FEATURES,
    NEEDS_FEATURE,
    AnyMessage,
    Bye,
    Frame,
    Hello,
    InfoPhase,
    Tick,
    TransferInfo,
    codec,
    decode,
    encode,
    pack_pages,
    unpack_pages,
)

ME = PeerId(1, 2)


def raw(message, source=None, destination=None):
    """A frame made by hand."""
    return codec.MAGIC + msgspec.msgpack.encode([source or {"incarnation": 1}, destination, message])


# -- a newer or an older minor version


def test_unknown_fields_are_tolerated_everywhere():
    data = raw(
        {"kind": "tick", "seq": 3, "from the future": {"a": [1, None]}},
        {"incarnation": 1, "epoch": 2, "colour": "red"},
        {"incarnation": 4, "epoch": 5, "colour": b"blue"},
    )
    assert decode(data) == Frame(ME, PeerId(4, 5), Tick(3))


def test_a_frame_may_grow_at_its_end():
    data = codec.MAGIC + msgspec.msgpack.encode([{"incarnation": 1}, None, {"kind": "bye"}, "signature"])
    assert decode(data).message == Bye()


def test_missing_optional_fields_take_their_default():
    info = decode(raw({"kind": "info", "room": 7, "claim": 1, "rev": 1, "phase": "open"})).message
    assert info == TransferInfo(7, 1, 1, InfoPhase.OPEN)
    assert (info.fan_in, info.sends, info.num_tokens, info.expected_bytes, info.pages) == (
        1,
        None,
        None,
        None,
        {},
    )


def test_a_default_is_not_shared_between_messages():
    one, two = (TransferInfo(7, 1, 1, InfoPhase.OPEN) for _ in range(2))
    one.pages["kv"] = b""
    assert two.pages == {}


def test_a_bytes_like_object_decodes_as_bytes_do(name, frame):
    assert decode(memoryview(encode(frame))) == frame


def test_the_tags_of_the_messages_are_the_ones_of_version_1():
    tags = {kind.__struct_config__.tag for kind in AnyMessage.__args__}
    assert tags == {"hello", "register", "refused", "info", "status", "credits", "tick", "bye"}


def test_each_feature_is_named_by_the_kind_of_message_that_needs_it():
    assert set(FEATURES) <= set(NEEDS_FEATURE.values())
    assert set(NEEDS_FEATURE) <= set(AnyMessage.__args__)


# -- what is refused


def test_each_missing_required_field_is_refused(name, frame):
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(frame.message))
    required = [field.name for field in msgspec.structs.fields(frame.message) if field.required]
    for field in ["kind", *required]:
        less = {key: value for key, value in fields.items() if key != field}
        with pytest.raises(WireError, match=field):
            decode(raw(less))


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "telepathy"},
        {"kind": 3},
        {"kind": "tick", "seq": "1"},
        {"kind": "tick", "seq": 1.5},
        {"kind": "tick", "seq": None},
        {"kind": "tick", "seq": 1, "want_ack": 1},
        {"kind": "hello", "version": [1], "peer": {"incarnation": 1}},
        {"kind": "hello", "version": [1, 0, 0], "peer": {"incarnation": 1}},
        {"kind": "hello", "version": [1, 0], "peer": {}},
        {"kind": "hello", "version": [1, 0], "peer": {"incarnation": 1}, "features": [b"credits"]},
        {"kind": "info", "room": 7, "claim": 1, "rev": 1, "phase": "ajar"},
        {"kind": "info", "room": 7, "claim": 1, "rev": 1, "phase": "pages", "pages": {"kv": [1, 2]}},
        {"kind": "info", "room": 7, "claim": 1, "rev": 1, "phase": "pages", "pages": [b"kv"]},
        {"kind": "status", "room": 7, "claim": 1, "rev": 1, "phase": "delivered", "aux": "text"},
        {"kind": "refused", "reason": {"code": "bad mood"}},
        {"kind": "refused", "reason": None},
        ["tick", 1],
        "tick",
        None,
    ],
)
def test_wrong_types_and_unknown_values_are_refused(message):
    with pytest.raises(WireError, match="does not parse"):
        decode(raw(message))


@pytest.mark.parametrize("data", [b"", b"k", b"kvf", b"kvf2" + bytes(40), b"GET / HTTP/1.1\r\n\r\n"])
def test_what_is_not_ours_is_refused_by_its_first_bytes(data):
    with pytest.raises(WireError, match="not b'kvf1'"):
        decode(data)


def test_a_frame_above_the_limit_is_refused_before_it_is_looked_at(monkeypatch):
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 100)
    with pytest.raises(WireError, match="frame of 101 bytes is above the limit of 100"):
        decode(codec.MAGIC + bytes(97))
    with pytest.raises(WireError, match="does not parse"):
        decode(codec.MAGIC + bytes(96))


def test_a_frame_that_is_cut_anywhere_is_refused(name, frame):
    data = encode(frame)
    for end in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:end])


def test_a_frame_with_something_behind_it_is_refused(name, frame):
    with pytest.raises(WireError):
        decode(encode(frame) + b"\x00")


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\xdd\x00\x00\x00\x01"])
@pytest.mark.parametrize("depth", [10_000, 1_000_000])
def test_deep_nesting_is_refused(opening, depth):
    head = b"\x93\x81\xabincarnation\x01\xc0\x82\xa4kind\xa3bye\xa6future"
    for start in (b"", head):
        with pytest.raises(WireError, match="does not parse"):
            decode(codec.MAGIC + start + opening * depth)


@pytest.mark.parametrize("length", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_a_length_that_the_bytes_do_not_have_allocates_nothing(length):
    whole = encode(Frame(ME, None, Hello((1, 0), ME, ("a",))))
    start = whole.index(b"\x91\xa1a")
    for data in (codec.MAGIC + length, whole[:start] + length + b"\xa1a"):
        with pytest.raises(WireError):
            decode(data)


def test_text_that_is_no_utf8_is_refused():
    with pytest.raises(WireError, match="UTF-8"):
        decode(raw({"kind": "bye"}).replace(b"\xa3bye", b"\xa3\xff\xfee"))


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200))
@example(b"\xc1")
@example(b"\xd6\xff\x00\x00\x00\x00")
def test_random_bytes_raise_wire_error_and_nothing_else(data):
    for frame in (data, codec.MAGIC + data):
        with pytest.raises(WireError):
            decode(frame)


def test_changed_bytes_decode_or_raise_wire_error_and_nothing_else(name, frame):
    data = encode(frame)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(st.integers(4, len(data) - 1), st.integers(0, 255)), min_size=1, max_size=4))
    def change(changes):
        changed = bytearray(data)
        for index, value in changes:
            changed[index] = value
        with contextlib.suppress(WireError):
            found = decode(bytes(changed))
            assert decode(encode(found)) == found  # what was taken can be said again

    change()


# -- page lists


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50), st.sampled_from([np.int32, np.int64, ">i4", "<i8"]))
def test_page_lists_come_back_as_they_were(pages, dtype):
    data = pack_pages(np.array(pages, dtype))
    assert len(data) == 4 * len(pages)
    assert unpack_pages(data).tolist() == pages


def test_page_lists_are_little_endian_on_every_machine():
    assert pack_pages(np.array([1, 256], ">i4")) == b"\x01\x00\x00\x00\x00\x01\x00\x00"


def test_unpacking_copies_nothing_and_can_not_write():
    data = bytes(8)
    pages = unpack_pages(data)
    assert not pages.flags.owndata
    assert not pages.flags.writeable


@pytest.mark.parametrize("size", [1, 2, 3, 5, 4097])
def test_an_odd_length_is_refused(size):
    with pytest.raises(WireError, match=f"page list of {size} bytes is no whole number of int32"):
        unpack_pages(bytes(size))


def test_a_negative_index_is_refused():
    with pytest.raises(WireError, match="page list holds the negative index -7"):
        unpack_pages(pack_pages(np.array([3, -7, -1], np.int32)))
