"""A peer that has shaken hands and then lies: its numbers cost one room, or itself, and no memory."""

import os
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from kvferry import KVPoll, KVSender
from kvferry.errors import Code, Reason
from kvferry.ids import PeerId
from kvferry.layout import Cyclic, Space
from kvferry.wire import (
    Frame,
    Hello,
    InfoPhase,
    KVArgsRegisterInfo,
    Refused,
    StatusPhase,
    Tick,
    TransferInfo,
    TransferStatus,
    decode,
    encode,
    pack_pages,
)

sys.path.insert(0, str(Path(__file__).parent))

from peer_wire import HUGE, peak_bytes, raw_peer, toy_layout, works


@pytest.mark.parametrize("number", [*HUGE, 0])
def test_hostile_numbers_in_a_transfer_info_are_refused(make, kit, number):
    prefill, decode = make("prefill"), make("decode")
    before = peak_bytes()
    pages = {"kv": pack_pages(np.arange(3))}
    good = TransferInfo(0, 0, 1, InfoPhase.PAGES, pages=pages, num_tokens=48, expected_bytes=9216, tag=3)
    with raw_peer(prefill.manager.endpoint) as peer:
        peer.shake()
        for room, name in enumerate(["num_tokens", "prefix_tokens", "expected_bytes", "fan_in", "ack"]):
            sender = kit.offer(prefill, 100 + room, [1, 2, 3], tag=3, num_tokens=48)
            value = {"num_tokens": 0} if number == 0 and name == "num_tokens" else {name: number}
            peer.say(msgspec.structs.replace(good, room=100 + room, claim=10 + room, **value))
            if name == "ack" or (number == 0 and name == "prefix_tokens"):
                continue
            kit.until(lambda sender=sender, name=name: sender.poll() is KVPoll.Failed or name == "fan_in")
            sender.abort()
            assert sender.wait(1) is KVPoll.Failed
        for claim, message in enumerate(
            [TransferInfo(number, number, number, InfoPhase.OPEN), TransferInfo(7, 500, number, InfoPhase.CLOSED),
             TransferStatus(number, number, number, StatusPhase.DELIVERED, bytes_landed=number),
             Tick(number, number, number, number)]
        ):  # fmt: skip
            del claim
            peer.say(message)
        time.sleep(0.1)
        assert (peer.pool == kit.SENTINEL).mean() > 0.6  # only the rooms whose numbers were all right were written
    assert peak_bytes() - before < 64 << 20
    works(prefill, decode, kit, 5)


@pytest.mark.parametrize("expected", [None, 9216])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("pages", "cause"),
    [
        ([0, 1, 32], "the pool has pages 0 to 31"),
        ([0, 1, 2**31 - 1], "the pool has pages 0 to 31"),
        ([0, 1, -1], "negative index -1"),
        ([0, 1], "decode page list"),
        ([], "decode page list"),
    ],
)
def test_pages_outside_of_the_claims_own_pool_fail_that_room_only(make, kit, pages, cause, early, expected):
    """Whether something is to be sent already when they are named, or is prepared for."""
    prefill, decode = make("prefill"), make("decode")
    with raw_peer(prefill.manager.endpoint) as peer:
        peer.shake()
        sender = kit.offer(prefill, 5, [1, 2, 3], num_tokens=48, send=early)
        data = {"kv": np.array(pages, "<i4").tobytes()}
        peer.say(TransferInfo(5, 1, 1, InfoPhase.PAGES, pages=data, num_tokens=48, expected_bytes=expected))
        if not early:
            kit.until(lambda: sender.poll() is KVPoll.WaitingForInput)
            sender.send(np.array([1, 2, 3], np.int32))
        assert sender.wait(2) is KVPoll.Failed
        assert cause in str(sender.failure())
        assert (peer.pool == kit.SENTINEL).all()
    works(prefill, decode, kit, 6)


@pytest.mark.parametrize("expected", [None, 9216])
@pytest.mark.parametrize("early", [True, False])
def test_page_lists_of_odd_length_or_of_unknown_spaces(make, kit, early, expected):
    prefill, decode = make("prefill"), make("decode")
    bystander = kit.offer(prefill, 99, [5], send=False)
    with raw_peer(prefill.manager.endpoint) as peer:
        peer.shake()
        for room, pages in enumerate([{"kv": b"\0" * 7}, {"nowhere": b"\0" * 12}, {"kv": b"\0" * 11, "x": b"1"}]):
            sender = kit.offer(prefill, 10 + room, [1, 2, 3], num_tokens=48, send=early)
            named = {"pages": pages, "num_tokens": 48, "expected_bytes": expected}
            peer.say(TransferInfo(10 + room, 1 + room, 1, InfoPhase.PAGES, **named))
            if not early:
                kit.until(lambda sender=sender: sender.poll() in {KVPoll.WaitingForInput, KVPoll.Failed})
                sender.send(np.array([1, 2, 3], np.int32))
            assert sender.wait(2) is KVPoll.Failed
        assert (peer.pool == kit.SENTINEL).all()
        assert bystander.poll() is not KVPoll.Failed
    works(prefill, decode, kit, 6)


@pytest.mark.parametrize("expected", [None, 9216])
@pytest.mark.parametrize(
    ("sends", "words"), [({"nowhere": ("k",)}, "space 'nowhere'"), ({"kv": ("k", "x")}, "field 'x'")]
)
def test_a_claim_that_wants_what_nobody_has_fails_that_room_only(make, kit, expected, sends, words):
    prefill, decode = make("prefill"), make("decode")
    with raw_peer(prefill.manager.endpoint) as peer:
        peer.shake()
        sender = kit.offer(prefill, 5, [1, 2, 3], num_tokens=48, tag=3)
        pages = {"kv": pack_pages(np.arange(3))}
        info = TransferInfo(5, 1, 1, InfoPhase.PAGES, pages=pages, num_tokens=48, tag=3, expected_bytes=expected)
        peer.say(msgspec.structs.replace(info, sends=sends))
        assert sender.wait(2) is KVPoll.Failed
        assert words in str(sender.failure())
        assert (peer.pool == kit.SENTINEL).all()
    works(prefill, decode, kit, 6)


def hostile_layouts():
    base = toy_layout()
    tensor = base.tensors[0]
    change = msgspec.structs.replace

    def tensors(**changes):
        return change(base, tensors=(change(tensor, **changes), base.tensors[1]))

    yield "2**31 heads", change(base, kv_heads=2**31)
    yield "negative heads", change(base, kv_heads=-2)
    yield "2**63 pages", tensors(pages=2**63)
    yield "2**62 bytes", tensors(nbytes=2**62)
    yield "negative address", tensors(address=-(2**63))
    yield "huge strides", tensors(strides_bytes=change(tensor.strides_bytes, page=2**63 - 1, token=2**62))
    yield "head intervals without end", tensors(heads=((0, 2**40),))
    yield "a million heads", change(tensors(heads=((0, 10**6),)), kv_heads=10**6)
    yield "layers without end", tensors(layers=tuple(range(70_000)))
    yield "a layer twice", tensors(layers=(0, 0, 1))
    yield "a negative layer", tensors(layers=(-1, 0, 1))
    yield "no fields", tensors(fields=())
    yield "2**40 page tokens", change(base, spaces=(Space("kv", 2**40),))
    yield "no page tokens", change(base, spaces=(Space("kv", 0),))
    yield "a deal among 2**31", change(base, spaces=(Space("kv", 16, Cyclic(1, 2**31, 5)),))
    yield "a deal among none", change(base, spaces=(Space("kv", 16, Cyclic(0, 0, 0)),))
    yield "ten thousand tensors", change(base, tensors=base.tensors * 5000)


@pytest.mark.parametrize(("name", "layout"), list(hostile_layouts()))
def test_hostile_layouts_are_refused_in_words_and_cost_no_memory(make, kit, name, layout):
    prefill, decode = make("prefill"), make("decode")
    before = peak_bytes()
    with raw_peer(prefill.manager.endpoint) as peer:
        peer.say(peer.hello())
        peer.say(peer.registration(layout=layout))
        text = str(peer.hear(Refused, 3.0).reason)
        assert text.startswith("incompatible: ")
        assert [each["refused"] for each in prefill.manager.info()["peers"]] == [text]
    assert peak_bytes() - before < 32 << 20
    works(prefill, decode, kit, 5)


@pytest.mark.parametrize("blob", [b"", b"x", os.urandom(500), b"\xff" * 70_000])
def test_an_engines_blob_that_is_none_refuses_that_peer_only(make, kit, blob):
    prefill, decode = make("prefill"), make("decode")
    with raw_peer(prefill.manager.endpoint) as peer:
        peer.say(peer.hello())
        peer.say(peer.registration(engines={"local": blob}))
        assert "blob" in str(peer.hear(Refused).reason)
    works(prefill, decode, kit, 5)


def test_a_peer_that_refuses_after_the_handshake_loses_its_rooms_at_once(make, kit):
    prefill, decode = make("prefill", bootstrap_timeout_s=30.0), make("decode")
    with raw_peer(prefill.manager.endpoint) as peer:
        peer.shake()
        sender = kit.offer(prefill, 5, [1, 2, 3], send=False)
        peer.say(TransferInfo(5, 1, 1, InfoPhase.OPEN))
        kit.until(lambda: prefill.manager.node.book.links)
        peer.say(Refused(Reason(Code.INCOMPATIBLE, cause="second thoughts")))
        assert sender.wait(1) is KVPoll.Failed
        assert "second thoughts" in str(sender.failure())
    works(prefill, decode, kit, 6)


def test_a_refused_claims_prefix_is_not_that_of_the_request(make, kit):
    prefill, decode = make("prefill"), make("decode")
    prefill.fill([1, 2, 3], seed=1)
    sender = KVSender(prefill.manager, None, 5)
    with raw_peer(prefill.manager.endpoint) as peer:
        peer.shake()
        peer.say(TransferInfo(5, 1, 1, InfoPhase.PAGES, tag=99, prefix_tokens=2**40))
        kit.until(lambda: sender.poll() is KVPoll.WaitingForInput)
        sender.init(3, 0, num_tokens=48, tag=7)
        peer.hear(TransferStatus)
    receiver = kit.claim(decode, prefill, 5, [8, 9], tag=7, num_tokens=48, prefix=16)
    kit.until(lambda: sender.pop_decode_prefix_len() == 16)
    sender.send([1, 2, 3])
    assert receiver.wait(3) is KVPoll.Success


def test_a_prefill_that_lies_about_what_it_delivered_fails_the_room(make, kit):
    decode = make("decode")
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        with raw_peer(decode.manager.endpoint, side="prefill") as liar:
            claims = []
            for room, status in enumerate([
                {"phase": StatusPhase.DELIVERED, "bytes_landed": 2**63},
                {"phase": StatusPhase.DELIVERED, "bytes_landed": -1}, {"phase": StatusPhase.FAILED},
                {"phase": StatusPhase.DELIVERED, "bytes_landed": 1, "aux": b"x" * 5000},
            ]):  # fmt: skip
                pages = range(3 * room, 3 * room + 3)
                claims.append((kit.claim(decode, _At(port), room + 1, pages, num_tokens=48), status))
            _answer(router, liar, [status for _, status in claims])
            for receiver, _ in claims:
                assert receiver.wait(3) is KVPoll.Failed
            assert decode.manager.health() == ""
    finally:
        router.close(0)
        context.term()


class _At:
    def __init__(self, port):
        self.manager = self
        self.endpoint = f"127.0.0.1:{port}"


def _answer(router, liar, statuses):
    """Play a prefill rank for one connection: shake hands, then answer the n-th claim with the n-th status."""
    seen = {}
    deadline = time.monotonic() + 3
    while len(seen) < len(statuses) and time.monotonic() < deadline:
        if not router.poll(50):
            continue
        routing_id, data = router.recv_multipart()
        if not data:
            continue
        frame = decode(data)
        me = PeerId(liar.me.incarnation, frame.source.epoch)
        if isinstance(frame.message, KVArgsRegisterInfo):
            for message in (Hello((1, 0), me), liar.registration()):
                router.send_multipart([routing_id, encode(Frame(me, frame.source, message))])
        elif isinstance(frame.message, TransferInfo) and frame.message.phase is InfoPhase.PAGES:
            info = frame.message
            if info.claim not in seen:
                seen[info.claim] = TransferStatus(info.room, info.claim, 1, offer=1, **statuses[info.room - 1])
                router.send_multipart([routing_id, encode(Frame(me, frame.source, seen[info.claim]))])
