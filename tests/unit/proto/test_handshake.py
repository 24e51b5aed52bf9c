"""The handshake of one connection: the same verdict, in the same words, at both ends."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import Blame, Code, Reason
from kvferry.ids import PeerId
from kvferry.presets import page_major
from kvferry.proto.effects import Where
from kvferry.proto.handshake import Handshake, incompatible
from kvferry.proto.rules import PeerState
from kvferry.wire import MAJOR, MINOR, Hello, KVArgsRegisterInfo, Refused

PREFILL, DECODE = 1001, 2001


def layout(**changes):
    shape = {"layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "float16", "pages": 4, "page_tokens": 4}
    return page_major("model", **{**shape, **changes})


def register(side, **more):
    fields = {"layout": layout(), "engines": {"local": b"blob"}, "side": side, "aux_bytes": (64, 8)}
    return KVArgsRegisterInfo(**{**fields, **more})


def ends(prefill=None, decode=None):
    """The dialling end (decode) and the end that is dialled (prefill)."""
    dialled = Handshake(PREFILL, prefill or register("prefill"), Where("prefill", "tp0"), None)
    dialling = Handshake(DECODE, decode or register("decode"), Where("decode", "tp1"), 5)
    return dialling, dialled


def carry(source, target, *, repeat=False):
    said = source.say(repeat)
    for message in said:
        target.hear(message)
    return said


def shaken(**registers):
    """Both ends after the whole exchange."""
    dialling, dialled = ends(**registers)
    carry(dialling, dialled)
    if dialled.state is PeerState.SHAKING:
        dialled.attached("")
    carry(dialled, dialling)
    carry(dialling, dialled)
    return dialling, dialled


def test_both_ends_are_ready_when_each_has_heard_the_other_and_the_engine_reaches():
    dialling, dialled = ends()
    assert carry(dialling, dialled) == [Hello((MAJOR, MINOR), PeerId(DECODE, 5)), dialling.mine]
    assert dialled.state is PeerState.SHAKING
    assert dialled.say(repeat=True) == []
    dialled.attached("")
    assert dialled.state is PeerState.READY
    assert carry(dialled, dialling) == [Hello((MAJOR, MINOR), PeerId(PREFILL, 5)), dialled.mine]
    assert dialling.state is PeerState.READY
    assert (dialling.peer, dialled.peer) == (PeerId(PREFILL, 5), PeerId(DECODE, 5))
    assert (dialling.theirs, dialled.theirs) == (dialled.mine, dialling.mine)
    assert dialling.say(repeat=True) == []
    assert dialled.say(repeat=True) == []


def test_the_end_that_dials_repeats_until_it_is_answered():
    dialling, _ = ends()
    assert len(dialling.say(repeat=False)) == 2
    assert dialling.say(repeat=False) == []
    assert len(dialling.say(repeat=True)) == 2
    assert len(dialling.say(repeat=True)) == 2


def test_a_repeated_hello_means_that_the_answer_was_lost_and_is_answered_again():
    dialling, dialled = ends()
    carry(dialling, dialled)
    dialled.attached("")
    assert len(dialled.say(repeat=False)) == 2
    carry(dialling, dialled, repeat=True)
    assert carry(dialled, dialling)
    assert dialling.state is PeerState.READY
    assert dialled.say(repeat=False) == []


def test_the_dialled_end_takes_the_epoch_of_the_connection():
    _, dialled = shaken()
    assert dialled.me == PeerId(PREFILL, 5)


def test_a_registration_before_a_hello_is_not_heard():
    dialling, dialled = ends()
    dialled.hear(dialling.mine)
    assert dialled.theirs is None


def test_a_second_registration_is_not_heard():
    dialling, dialled = shaken()
    dialled.hear(register("decode", address="elsewhere"))
    assert dialled.theirs == dialling.mine


def test_who_has_registered_can_not_become_someone_else():
    dialling, dialled = shaken()
    for end in (dialling, dialled):
        before = (end.me, end.peer)
        end.hear(Hello((MAJOR, MINOR), PeerId(666, 6)))
        assert (end.me, end.peer) == before
        assert end.state is PeerState.READY


def test_a_peer_that_restarts_before_it_registered_is_taken_as_it_is_now():
    dialling, dialled = ends()
    dialling.hear(Hello((MAJOR, MINOR), PeerId(PREFILL - 1, 5)))
    carry(dialling, dialled)
    dialled.attached("")
    carry(dialled, dialling)
    assert dialling.peer == PeerId(PREFILL, 5)


# -- refusals


@pytest.mark.parametrize("minor", [MINOR, MINOR + 1, 99])
def test_another_minor_version_is_fine(minor):
    _, dialled = ends()
    dialled.hear(Hello((MAJOR, minor), PeerId(DECODE, 5), ("new kind",)))
    assert dialled.reason is None
    assert dialled.peer == PeerId(DECODE, 5)


def test_another_major_version_is_refused_with_both_numbers():
    dialling, dialled = ends()
    dialled.hear(Hello((MAJOR + 1, 4), PeerId(DECODE, 5)))
    assert dialled.state is PeerState.REFUSED
    assert dialled.reason.code is Code.INCOMPATIBLE
    assert dialled.reason.blame is Blame.CONFIG
    assert dialled.reason.cause == "protocol version: prefill 1.0, the peer 2.4; upgrade the older one"
    carry(dialled, dialling)
    assert dialling.reason == dialled.reason


REFUSALS = {
    "side: both ends are prefill; connect a decode worker to a prefill worker": {"decode": register("prefill")},
    "side: one end is 'prefill', the other 'encode'; a side is 'prefill' or 'decode'": {"decode": register("encode")},
    "engine: prefill has local, decode has nixl; start both with the same engine": {
        "decode": register("decode", engines={"nixl": b""})
    },
    "engine: prefill has none, decode has none; start both with the same engine": {
        "prefill": register("prefill", engines={}), "decode": register("decode", engines={}),
    },
    "aux row bytes: prefill [64, 8] != decode [64]": {"decode": register("decode", aux_bytes=(64,))},
    "dtype: prefill has 'float16', decode has 'bfloat16'": {
        "decode": register("decode", layout=layout(dtype="bfloat16"))
    },
    "layout: decode layout: head_dim is -8, must be in [0, 1048575]": {
        "decode": register("decode", layout=msgspec.structs.replace(layout(), head_dim=-8))
    },
    "layout: prefill layout: kv_heads is -1": {
        "prefill": register("prefill", layout=msgspec.structs.replace(layout(), kv_heads=-1))
    },
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSALS)
def test_what_can_not_work_is_refused_in_the_same_words_at_both_ends(text):
    dialling, dialled = shaken(**REFUSALS[text])
    for end in (dialling, dialled):
        assert end.state is PeerState.REFUSED
        assert end.reason.code is Code.INCOMPATIBLE
        assert text in end.reason.cause
    assert dialling.reason == dialled.reason


@pytest.mark.parametrize("text", [text for text in REFUSALS if not text.startswith("side")])
def test_each_end_alone_would_come_to_the_same_verdict(text):
    registers = {"prefill": register("prefill"), "decode": register("decode"), **REFUSALS[text]}
    verdict = incompatible(registers["prefill"], registers["decode"])
    assert text in verdict
    dialling, dialled = ends(**registers)
    for end, other in ((dialling, dialled), (dialled, dialling)):
        end.hear(Hello((MAJOR, MINOR), other.me))
        end.hear(other.mine)
        assert end.reason.cause == verdict


def test_two_registrations_that_fit_are_compatible():
    assert incompatible(register("prefill"), register("decode")) == ""
    engines = {"nixl": b"", "local": b""}
    assert incompatible(register("prefill", engines=engines), register("decode")) == ""


def test_a_refusal_is_said_once_and_heard():
    dialling, dialled = ends(decode=register("decode", aux_bytes=()))
    carry(dialling, dialled)
    said = carry(dialled, dialling)
    assert [type(message) for message in said] == [Hello, Refused]
    assert dialled.say(repeat=True) == []
    assert dialling.state is PeerState.REFUSED
    carry(dialling, dialled)
    assert dialling.say(repeat=True) == []
    assert dialled.say(repeat=True) == []


def test_the_first_refusal_wins():
    _dialling, dialled = shaken(decode=register("decode", aux_bytes=()))
    first = dialled.reason
    dialled.hear(Refused(Reason(Code.INTERNAL)))
    assert dialled.reason == first


def test_a_peer_that_was_ready_can_still_refuse():
    _, dialled = shaken()
    dialled.hear(Refused(Reason(Code.INTERNAL, cause="something else")))
    assert dialled.state is PeerState.REFUSED


def test_an_engine_that_can_not_reach_the_peer_refuses_the_connection():
    dialling, dialled = ends()
    carry(dialling, dialled)
    dialled.attached("no route to host")
    assert dialled.state is PeerState.REFUSED
    assert (dialled.reason.code, dialled.reason.blame) == (Code.UNREACHABLE, Blame.ENGINE)
    assert dialled.reason.cause == "the engine can't reach the peer: no route to host"
    assert dialled.reason.peer == str(PeerId(DECODE, 5))
    carry(dialled, dialling)
    assert dialling.reason == dialled.reason


def test_what_the_engine_says_after_a_refusal_changes_nothing():
    dialling, dialled = ends(decode=register("decode", aux_bytes=()))
    carry(dialling, dialled)
    dialled.attached("")
    assert dialled.state is PeerState.REFUSED


def test_a_registration_after_a_refusal_is_not_heard():
    _, dialled = ends()
    dialled.hear(Hello((MAJOR, MINOR), PeerId(DECODE, 5)))
    dialled.hear(Refused(Reason(Code.INTERNAL)))
    dialled.hear(register("decode"))
    assert dialled.theirs is None


# -- hostile registrations

NUMBERS = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 7, 2**20, 2**31, 2**53, 2**63, 2**64 - 1])


@st.composite
def hostile_layouts(draw):
    """A sound layout with some numbers, names and lists replaced."""
    plain = msgspec.to_builtins(layout())
    for _ in range(draw(st.integers(1, 3))):
        spot, keys = plain, []
        while isinstance(spot, dict | list) and spot:
            key = draw(st.sampled_from(sorted(spot) if isinstance(spot, dict) else range(len(spot))))
            keys.append((spot, key))
            spot = spot[key]
        node, key = draw(st.sampled_from(keys))
        node[key] = draw(st.one_of(NUMBERS, st.just([]), st.text(max_size=3), st.lists(NUMBERS, max_size=3)))
    try:
        return msgspec.convert(plain, type(layout()))
    except msgspec.ValidationError:
        return layout()


@settings(max_examples=300, deadline=None)
@given(hostile_layouts())
def test_no_layout_of_a_peer_raises_anything(strange):
    _, dialled = shaken(decode=register("decode", layout=strange))
    assert dialled.state in {PeerState.READY, PeerState.REFUSED}


def test_each_end_knows_what_the_other_one_understands():
    _, dialled = ends()
    assert dialled.features == frozenset()
    dialled.hear(Hello((MAJOR, MINOR), PeerId(DECODE, 5), ("credits",)))
    assert dialled.features == {"credits"}
