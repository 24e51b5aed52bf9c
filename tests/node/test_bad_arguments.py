"""Arguments of other kinds than the documented ones: a clear error at the call, or words that travel."""

import contextlib
import math
import threading

import numpy as np
import pytest

from kvferry import KVArgs, KVClassType, KVPoll, KVReceiver, KVSender, get_kv_class
from kvferry.errors import AddressError, Code, ConfigError, InputError, LayoutError
from kvferry.layout import Rows, Slot, Window
from kvferry.pool import allocate_pool
from kvferry.presets import layouts_of, page_major, parse_grid
from kvferry.presets.model import Block, Item, ModelShape


class Unshowable:
    def __str__(self):
        raise RuntimeError("no")

    __repr__ = __str__


@pytest.mark.parametrize(
    "reason",
    [
        ValueError("nobody wants it"),
        np.int64(3),
        5,
        b"xx",
        ["a"],
        {1: 2},
        "\ud800 half",
        Unshowable(),
        "x" * 80_000_000,
    ],
    ids=lambda reason: type(reason).__name__,
)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_whatever_is_given_as_a_reason_ends_the_room_on_both_sides_and_no_other(make, kit, reason, side):
    prefill, decode = make("prefill"), make("decode")
    rows = prefill.fill([1, 2], seed=1)
    other = kit.claim(decode, prefill, 6, [5, 6])
    receiver, sender = kit.claim(decode, prefill, 5, [3]), kit.offer(prefill, 5, [1], send=False)
    kit.until(lambda: receiver.poll() is KVPoll.Transferring)
    (sender if side == "prefill" else receiver).abort(reason)
    for room in (receiver, sender):
        assert room.wait(3) is KVPoll.Failed
        assert room.failure().reason.code is Code.ABORTED
        assert len(str(room.failure())) < 5000
        kit.until(room.is_release_safe)
    kit.offer(prefill, 6, [1, 2])
    assert other.wait(3) is KVPoll.Success
    assert (decode.pages([5, 6]) == rows).all()
    assert prefill.manager.health() == decode.manager.health() == ""


class Event:
    def __init__(self, query):
        self.query = query


def raising(error):
    def query():
        raise error

    return query


class Undecided:
    def __bool__(self):
        raise ValueError("neither")


@pytest.mark.parametrize(
    "query",
    [lambda: np.array([True, False]), Undecided, raising(SystemExit(1)), raising(GeneratorExit()),
     raising(RuntimeError("\ud800")), raising(type("Odd", (Exception,), {"__str__": lambda self: 1 / 0})())],
    ids=["array", "undecided", "exit", "generator exit", "surrogate", "unshowable"],
)  # fmt: skip
def test_an_event_that_can_not_be_asked_fails_its_room_and_nothing_else(make, kit, query):
    prefill, decode = make("prefill"), make("decode")
    prefill.fill([1], seed=1)
    receiver, sender = kit.claim(decode, prefill, 5, [3]), kit.offer(prefill, 5, [1], send=False)
    sender.send([1], after=Event(query))
    for room in (receiver, sender):
        assert room.wait(3) is KVPoll.Failed
        assert "`after`" in str(room.failure())
    kit.offer(prefill, 6, [1])
    assert kit.claim(decode, prefill, 6, [4]).wait(3) is KVPoll.Success


def test_what_is_no_event_is_refused_and_the_room_is_as_it_was(make, kit):
    prefill, decode = make("prefill"), make("decode")
    receiver = kit.claim(decode, prefill, 5, [3, 4])
    sender = KVSender(prefill.manager, None, 5)
    sender.init(2, 0, num_tokens=32)
    with pytest.raises(InputError, match="after: int has no query"):
        sender.send([1], num_kv_tokens=16, after=5)
    sender.send([1], num_kv_tokens=16)
    with pytest.raises(InputError, match="the chunks hold 26 tokens, init\\(\\) said 32"):
        sender.send([2], num_kv_tokens=10)
    with pytest.raises(InputError, match="1 tokens do not fill 0 pages"):
        sender.send([], num_kv_tokens=1)
    sender.send([2], num_kv_tokens=16)
    assert receiver.wait(3) is KVPoll.Success


def test_times_to_wait(make, kit):
    room = kit.claim(make("decode"), make("prefill"), 5, [1])
    for value in (math.nan, "1", None, 1j):
        with pytest.raises(InputError, match="timeout_s"):
            room.wait(value)
    assert room.wait(-1) is not KVPoll.Failed
    thread = threading.Timer(0.2, room.abort)
    thread.start()
    assert room.wait(math.inf) is KVPoll.Failed
    assert room.wait(1e300) is KVPoll.Failed
    thread.join()


@pytest.mark.parametrize("peers", [[5], [None], [b"127.0.0.1:1"], ["127.0.0.1:²"], 5, b"127.0.0.1:1"])
def test_peers_of_other_kinds(make, peers):
    with pytest.raises((AddressError, InputError)):
        KVReceiver(make("decode").manager, None, 5, peers=peers)


@pytest.mark.parametrize("address", ["", "x:y:z", "a b", 5, b"127.0.0.1:1"])
def test_addresses_of_bootstrap_servers(make, address):
    """They come with a request, from a client: the room fails, and no call of the scheduler's."""
    receiver = KVReceiver(make("decode").manager, address, 5)
    receiver.init()
    assert receiver.wait(3) is KVPoll.Failed
    assert f"bootstrap address {address!r}" in str(receiver.failure())


@pytest.mark.parametrize("state", [5, "ab", {5: [1], "a": [2]}])
def test_state_lists_of_other_kinds(make, kit, state):
    sender = kit.offer(make("prefill"), 5, [1], send=False)
    with pytest.raises(InputError, match="state_indices"):
        sender.send([1], state)


MANAGER = get_kv_class("local", KVClassType.MANAGER)
LAYOUT = page_major("toy", layers=1, kv_heads=1, head_dim=8, dtype="float16", pages=8, page_tokens=16)
POOL = np.zeros(max(tensor.address + tensor.nbytes for tensor in LAYOUT.tensors), np.uint8)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (None, "args is NoneType"), (LAYOUT, "args is Layout"), (KVArgs(5, [POOL]), "it is int, not Layout"),
        (KVArgs(LAYOUT, None), "buffers is NoneType"), (KVArgs(LAYOUT, [POOL], None), "aux is NoneType"),
        (KVArgs(LAYOUT, [POOL], [], None), "group is NoneType"), (KVArgs(LAYOUT, [POOL], [], [5]), "layout 0 of group"),
        (KVArgs(LAYOUT, [("a", "b")]), "whole numbers"), (KVArgs(LAYOUT, [(None, None)]), "whole numbers"),
        (KVArgs(LAYOUT, [(math.nan, 8)]), "whole numbers"),
        (KVArgs(LAYOUT, [POOL], [("a", "b", "c")]), "whole numbers"),
        (KVArgs(LAYOUT, [POOL], [(0, 64, 8)]), "no system maps page 0"),
        (KVArgs(LAYOUT, [POOL], [np.zeros((8, 2), "U10")]), "no plain data"),
        (KVArgs(LAYOUT, [POOL], [np.zeros((8, 2), object)]), "no plain data"),
        (KVArgs(LAYOUT, [np.zeros(4096, "datetime64[s]")]), "no plain data"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
def test_what_is_registered(args, words):
    before = threading.active_count()
    with pytest.raises((ConfigError, LayoutError), match=words):
        MANAGER(args, "prefill", environ={})
    assert threading.active_count() == before


def test_a_structured_buffer_has_the_bytes_of_its_rows(make, kit):
    aux = np.zeros((8,), np.dtype([("token", "i4"), ("logit", "f8", 3)]))
    manager = MANAGER(KVArgs(LAYOUT, [POOL], [aux]), "prefill", environ={})
    assert manager.node.aux.item_bytes == (28,)
    manager.shutdown()


def state_layout(coverage, per="token"):
    shape = ModelShape(
        "st",
        (Block("kv", (0,), (Item("k", values=8, heads=0),)),
         Block("state", (1,), (Item("c", values=64, heads=0),), coverage, per=per)),
        dtype="bfloat16",
    )  # fmt: skip
    return layouts_of(shape, parse_grid(""), 8)[0]


@contextlib.contextmanager
def room_over(layout, pages, tokens):
    """A sender and a receiver of a room, both begun."""
    nbytes = max(tensor.address + tensor.nbytes for tensor in layout.tensors)
    with (
        MANAGER(KVArgs(layout, [np.ones(nbytes, np.uint8)]), "prefill", environ={}) as prefill,
        MANAGER(KVArgs(layout, [np.zeros(nbytes, np.uint8)]), "decode", environ={}) as decode,
    ):
        sender, receiver = KVSender(prefill, None, 5), KVReceiver(decode, None, 5, peers=[prefill.endpoint])
        sender.init(pages, num_tokens=tokens)
        receiver.init()
        yield sender, receiver


@pytest.mark.parametrize(
    ("coverage", "per", "right", "wrong"),
    [(Window(16), "token", [3], [0, 1, 2, 3]), (Window(20), "token", [2, 3], [3]), (Slot(), "request", [1], [1, 2]),
     (Slot(), "request", [1], [])],
    ids=["window", "window 2", "slot", "no slot"],
)  # fmt: skip
def test_a_state_list_of_another_length_is_refused_at_the_call_on_both_sides(coverage, per, right, wrong):
    with room_over(state_layout(coverage, per), 4, 64) as (sender, receiver):
        with pytest.raises(InputError, match=f"has {len(wrong)} pages, .* needs {len(right)}"):
            receiver.send_metadata([0, 1, 2, 3], None, {"state": wrong}, num_tokens=64)
        with pytest.raises(InputError, match=f"has {len(wrong)} pages, .* needs {len(right)}"):
            sender.send([0, 1, 2, 3], {"state": wrong})
        receiver.send_metadata([0, 1, 2, 3], None, {"state": right}, num_tokens=64)
        sender.send([0, 1, 2, 3], {"state": right})
        assert receiver.wait(3) is KVPoll.Success


@pytest.mark.parametrize(("here", "there"), [([1, 2], [3]), ([1], [3, 4])])
def test_lists_of_rows_of_unequal_length_fail_the_room_with_both_lengths(kit, here, there):
    with room_over(state_layout(Rows()), 1, 16) as (sender, receiver):
        receiver.send_metadata([0], None, {"state": there}, num_tokens=16)
        sender.send([0], {"state": here})
        assert receiver.wait(3) is KVPoll.Failed
        assert f"prefill sends {len(here)} rows, decode has named {len(there)}" in str(receiver.failure())
        kit.until(receiver.is_release_safe, 3)


def test_a_host_name_that_is_no_text_leaves_nothing_behind():
    before = threading.active_count()
    for _ in range(2):
        with pytest.raises((ConfigError, UnicodeError)):
            MANAGER(KVArgs(LAYOUT, [POOL]), "prefill", environ={}, advertise_host="\udcff")
    assert threading.active_count() == before


def test_further_arguments_of_other_kinds():
    with pytest.raises(ConfigError, match="config is dict"):
        MANAGER(KVArgs(LAYOUT, [POOL]), "prefill", environ={}, config={"tick_s": 1})
    with pytest.raises(InputError, match="is no engine's name"):
        get_kv_class(None, KVClassType.MANAGER)
    with pytest.raises(InputError, match="is no integer"):
        allocate_pool(np.array([5]))
