"""What does not fit is found at the handshake, told to both sides in words, and costs nobody else anything."""

import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvferry import KVArgs, KVClassType, KVPoll, KVReceiver, get_kv_class
from kvferry.engines import find
from kvferry.errors import Code
from kvferry.layout import Space
from kvferry.wire import Hello, Refused

sys.path.insert(0, str(Path(__file__).parent))

from peer_wire import raw_peer, toy_layout


def replaced(layout, **changes):
    """The layout with changes to every tensor's fields, or to its spaces."""
    tensors = tuple(
        msgspec.structs.replace(
            tensor,
            space=changes.get("space", tensor.space),
            fields=tuple(
                msgspec.structs.replace(each, format=changes.get("format", each.format)) for each in tensor.fields
            ),
        )
        for tensor in layout.tensors
    )
    spaces = tuple(Space(changes.get("space", space.name), space.page_tokens) for space in layout.spaces)
    return msgspec.structs.replace(layout, tensors=tensors, spaces=spaces)


MISMATCHES = {
    "model": (toy_layout(model="toy@2"), ["model", "'toy'", "'toy@2'", "use the same model"]),
    "dtype": (toy_layout(dtype="bfloat16"), ["dtype", "'float16'", "'bfloat16'", "use the same"]),
    "dtype of another width": (toy_layout(dtype="float32"), ["dtype", "'float16'", "'float32'", "use the same"]),
    "kv_heads": (toy_layout(kv_heads=4), ["kv_heads", "prefill has 2", "decode has 4", "use the same"]),
    "head_dim": (toy_layout(head_dim=16), ["head_dim", "prefill has 8", "decode has 16", "use the same"]),
    "layers": (toy_layout(layers=5), ["layer 3", "layers 3-4", "load the same layers on both sides"]),
    "spaces": (replaced(toy_layout(), space="kv2"), ["spaces", "['kv']", "['kv2']", "use the same space names"]),
    "format": (replaced(toy_layout(), format="packed"), ["format of field 'k'", "'float16'", "'packed'", "same"]),
}


def rejected(decode, prefill, room, kit):
    """A room that is refused; returns the reason as text, and how long it took to learn it."""
    begin = time.monotonic()
    receiver = KVReceiver(decode.manager, None, room, peers=[prefill.manager.endpoint])
    receiver.init()
    if "kv" in decode.manager.spaces.spaces:
        receiver.send_metadata(np.arange(3), 0)
    assert receiver.wait(3) is KVPoll.Failed
    error = receiver.failure()
    assert error.reason.code is Code.INCOMPATIBLE
    kit.until(receiver.is_release_safe, 0.5)
    return str(error), time.monotonic() - begin


def refused_peers(side):
    return [peer["refused"] for peer in side.manager.info()["peers"] if peer["refused"]]


@pytest.mark.parametrize("name", MISMATCHES)
def test_both_sides_learn_a_mismatch_in_words_within_a_second(make, kit, name):
    layout, words = MISMATCHES[name]
    prefill, decode, good = make("prefill"), make("decode", layout=layout), make("decode")
    prefill.fill([1, 2, 3], seed=1)
    sender = kit.offer(prefill, 5, [1, 2, 3]) if name == "layers" else None
    text, took_s = rejected(decode, prefill, 5, kit)
    kit.until(lambda: refused_peers(prefill), 1.0)
    assert took_s < 1.0
    for said in (text, refused_peers(prefill)[0]):
        assert "incompatible" in said
        assert [word for word in words if word not in said] == []
    assert (decode.pool == kit.SENTINEL).all()
    if sender is not None:
        assert sender.wait(1) is KVPoll.Failed
        assert words[0] in str(sender.failure())
    receiver = kit.claim(good, prefill, 6, [4, 5, 6])
    kit.offer(prefill, 6, [1, 2, 3])
    assert receiver.wait(3) is KVPoll.Success
    assert (good.pages([4, 5, 6]) == prefill.pages([1, 2, 3])).all()


def test_pools_of_other_sizes_and_page_sizes_are_fine(make, kit):
    prefill, decode = make("prefill"), make("decode", layout=toy_layout(pages=400, page_tokens=32))
    prefill.fill([1, 2, 3, 4], seed=1)
    receiver = kit.claim(decode, prefill, 5, [300, 7])
    kit.offer(prefill, 5, [1, 2, 3, 4])
    assert receiver.wait(3) is KVPoll.Success
    ours = prefill.pages([1, 2, 3, 4]).reshape(2, 2, 3, 2, 2, 16, 16)
    theirs = decode.pool.reshape(400, 3, 2, 2, 32, 16)[[300, 7]]
    assert (ours.transpose(0, 2, 3, 4, 1, 5, 6).reshape(theirs.shape) == theirs).all()


def test_metadata_rows_of_another_size(make, kit):
    prefill = make("prefill")
    pool = np.full(prefill.pool.size, kit.SENTINEL, np.uint8)
    manager = get_kv_class("local", KVClassType.MANAGER)
    args = KVArgs(toy_layout(), [pool], [np.zeros((8, 5), np.int64)])
    with manager(args, "decode", environ={}, **kit.FAST) as mgr:
        receiver = KVReceiver(mgr, None, 5, peers=[prefill.manager.endpoint])
        receiver.init()
        assert receiver.wait(1) is KVPoll.Failed
        for text in (str(receiver.failure()), refused_peers(prefill)[0]):
            assert "aux row bytes: prefill [32] != decode [40]; give both sides the same metadata buffers" in text


def test_engines_of_different_names(make, kit, monkeypatch):
    monkeypatch.setattr(find, "_registered", dict(find._registered))
    find.register("other", "kvferry.testing.faulty:FaultyEmbedded")
    prefill, decode = make("prefill", "local"), make("decode", "other")
    text, took_s = rejected(decode, prefill, 5, kit)
    assert took_s < 1.0
    assert "engine: prefill has local, decode has other; start both with the same engine" in text
    assert "engine: prefill has local" in refused_peers(prefill)[0]


def test_two_decode_ranks(make, kit):
    one, two = make("decode"), make("decode")
    text, took_s = rejected(one, two, 5, kit)
    assert took_s < 1.0
    assert "side: both ends are decode; connect a decode worker to a prefill worker" in text
    assert "both ends are decode" in refused_peers(two)[0]


def test_two_prefill_ranks(make, kit):
    prefill = make("prefill")
    with raw_peer(prefill.manager.endpoint, side="prefill") as peer:
        peer.say(peer.hello())
        peer.say(peer.registration())
        assert "side: both ends are prefill" in str(peer.hear(Refused).reason)
        assert "both ends are prefill" in refused_peers(prefill)[0]


def test_another_major_version_is_refused_with_both_numbers(make, kit):
    prefill, decode = make("prefill"), make("decode")
    with raw_peer(prefill.manager.endpoint) as peer:
        peer.say(peer.hello(version=(7, 3)))
        peer.say(peer.registration())
        hello = peer.hear(Hello)
        assert hello.version[0] != 7
        text = str(peer.hear(Refused, 1.0).reason)
        assert "protocol version: prefill 1.0, the peer 7.3" in text
        assert "upgrade the older one" in text
        [shown] = [each for each in prefill.manager.info()["peers"] if each["refused"]]
        assert shown["peer"] == str(peer.me)
        assert "7.3" in shown["refused"]
    receiver = kit.claim(decode, prefill, 6, [4])
    kit.offer(prefill, 6, [1])
    assert receiver.wait(3) is KVPoll.Success


def test_another_minor_version_with_fields_that_are_not_known_is_fine(make, kit):
    prefill = make("prefill")
    with raw_peer(prefill.manager.endpoint) as peer:
        frame = [
            msgspec.to_builtins(peer.me), None,
            {"kind": "hello", "version": (1, 99), "peer": msgspec.to_builtins(peer.me), "shoe_size": 46},
        ]  # fmt: skip
        peer.socket.send(b"kvf1" + msgspec.msgpack.encode(frame))
        assert peer.shake().side == "prefill"
        kit.until(lambda: [each["ready"] for each in prefill.manager.info()["peers"]] == [True])


def test_a_refusal_is_repeated_to_every_room_at_once(make, kit):
    prefill, decode = make("prefill"), make("decode", layout=toy_layout(model="else"))
    rejected(decode, prefill, 1, kit)
    for room in range(2, 12):
        _, took_s = rejected(decode, prefill, room, kit)
        assert took_s < 0.3


def test_a_refused_peer_that_was_restarted_with_the_right_model_is_served(make, kit):
    prefill, decode = make("prefill"), make("decode", layout=toy_layout(model="else"))
    rejected(decode, prefill, 1, kit)
    decode.manager.shutdown()
    better = make("decode")
    receiver = kit.claim(better, prefill, 1, [4])
    kit.offer(prefill, 1, [1])
    assert receiver.wait(3) is KVPoll.Success
    kit.until(lambda: not refused_peers(prefill))
