"""The receiver's room: the rows of its table, and the rules that concern one claim."""

import pytest

from kvferry.errors import Blame, Code, InputError, ProtocolError, Reason
from kvferry.ids import KVPoll
from kvferry.proto.effects import Changed, Expose, Kind, Release, Revoke, Send, WriteAux
from kvferry.proto.rules import ClaimEvent, ClaimState
from kvferry.wire import InfoPhase, StatusPhase, TransferInfo, TransferStatus, unpack_pages

# -- RESOLVING


@pytest.mark.row(ClaimState.RESOLVING, ClaimEvent.METADATA)
def test_pages_named_before_the_sources_are_known_are_told_after_open(net, prefill, decode):
    number = decode.claim(7)
    decode.place(number)
    assert decode.took(Expose, Send) == []
    decode.resolved(number, [decode.source(prefill)])
    assert decode.sent(TransferInfo)[-1].phase is InfoPhase.PAGES
    assert decode.claimed(number).state is ClaimState.PAGES


@pytest.mark.row(ClaimState.RESOLVING, ClaimEvent.RESOLVED)
def test_a_resolved_claim_opens_at_every_source(net, prefill, decode):
    other = net.end("prefill", 1002)
    net.join(other, decode)
    number = decode.open_claim([prefill, other], tag=5)
    assert decode.claimed(number).state is ClaimState.OPEN
    assert [effect.peer for effect in decode.took(Send)] == [decode.peer(prefill), decode.peer(other)]
    for info in decode.sent(TransferInfo):
        assert (info.phase, info.room, info.tag, info.pages) == (InfoPhase.OPEN, 7, 5, {})
    assert decode.claimed(number).poll is KVPoll.Bootstrapping
    prefill.open_offer()
    net.deliver()
    assert decode.claimed(number).poll is KVPoll.Bootstrapping
    other.open_offer()
    net.deliver()
    assert decode.claimed(number).poll is KVPoll.WaitingForInput


@pytest.mark.row(ClaimState.RESOLVING, ClaimEvent.FAIL)
def test_a_claim_that_fails_before_anything_was_exposed_is_quiet_at_once(prefill, decode, aborted):
    number = decode.claim(7)
    decode.fail(Kind.CLAIM, number, aborted)
    assert decode.claimed(number).state is ClaimState.QUIET
    assert decode.claimed(number).poll is KVPoll.Failed
    assert decode.took(Release) == [Release(Kind.CLAIM, number)]
    assert decode.took(Send) == []


def test_what_is_resolved_or_named_after_the_end_is_late(prefill, decode, aborted):
    number = decode.claim(7)
    decode.fail(Kind.CLAIM, number, aborted)
    decode.resolved(number, [decode.source(prefill)])
    decode.place(number)
    assert decode.claimed(number).state is ClaimState.QUIET
    assert [info.phase for info in decode.sent(TransferInfo)] == [InfoPhase.CLOSED]
    assert decode.took(Expose) == []
    assert decode.book.counts["late"] == 1


def test_a_claim_whose_source_was_lost_meanwhile_fails(net, prefill, decode):
    number = decode.claim(7)
    net.part(decode, prefill)
    decode.resolved(number, [decode.source(prefill)])
    reason = decode.claimed(number).reason
    assert (reason.code, reason.stage, reason.peer) == (
        Code.PEER_LOST,
        "handshake",
        str(decode.peer(prefill)),
    )
    assert "was lost before the room began" in reason.cause


# -- OPEN


@pytest.mark.row(ClaimState.OPEN, ClaimEvent.METADATA)
def test_pages_are_granted_before_they_are_told(net, prefill, decode):
    number = decode.open_claim([prefill])
    decode.place(number, pages=3, prefix_tokens=5, num_tokens=13)
    steps = [effect for effect in decode.effects if isinstance(effect, (Expose, Send))]
    assert steps[-2] == Expose(number, (decode.peer(prefill),))
    info = steps[-1].message
    assert (info.phase, info.prefix_tokens, info.num_tokens, info.expected_bytes) == (
        InfoPhase.PAGES,
        5,
        13,
        8,
    )
    assert unpack_pages(info.pages["kv"]).tolist() == [0, 1, 2]
    assert decode.claimed(number).poll is KVPoll.Transferring


@pytest.mark.row(ClaimState.OPEN, ClaimEvent.STATUS)
def test_a_claim_that_every_source_accepted_waits_for_its_pages(net, prefill, decode):
    prefill.open_offer()
    number = decode.open_claim([prefill])
    net.deliver()
    assert decode.claimed(number).poll is KVPoll.WaitingForInput


@pytest.mark.row(ClaimState.OPEN, ClaimEvent.FAIL)
def test_an_open_claim_that_fails_closes_at_its_sources_and_is_quiet(net, prefill, decode, aborted):
    number = decode.open_claim([prefill])
    decode.fail(Kind.CLAIM, number, aborted)
    info = decode.sent(TransferInfo)[-1]
    assert (info.phase, info.success, info.reason) == (InfoPhase.CLOSED, False, aborted)
    assert decode.claimed(number).state is ClaimState.QUIET
    assert decode.took(Release) == [Release(Kind.CLAIM, number)]
    assert decode.took(Revoke) == []


def test_numbers_that_make_no_request_fail_the_claim_and_nothing_else(net, prefill, decode):
    number = decode.open_claim([prefill])
    decode.place(number, prefix_tokens=9, num_tokens=8)
    reason = decode.claimed(number).reason
    assert (reason.code, reason.stage) == (Code.REFUSED, "send_metadata")
    assert "prefix_tokens 9, num_tokens 8" in reason.cause
    assert decode.claimed(number).state is ClaimState.QUIET
    assert decode.took(Expose) == []
    assert decode.sent(TransferInfo)[-1].phase is InfoPhase.CLOSED


def test_a_claim_that_reads_delivered_before_its_pages_were_named_fails(net, prefill, decode):
    number = decode.open_claim([prefill])
    decode.receive(decode.peer(prefill), TransferStatus(7, number, 1, StatusPhase.DELIVERED))
    assert decode.claimed(number).reason.code is Code.BYTES_DIFFER


# -- PAGES


@pytest.mark.row(ClaimState.PAGES, ClaimEvent.STATUS)
def test_progress_of_a_source_is_seen(decode, alone):
    number, say = alone
    say(StatusPhase.SENDING, chunks_total=2, chunks_landed=1, bytes_landed=4)
    assert decode.claimed(number).bytes_landed == 4
    assert decode.claimed(number).poll is KVPoll.Transferring


@pytest.mark.row(ClaimState.PAGES, ClaimEvent.COMPLETE)
def test_the_metadata_row_is_written_just_before_success_is_visible(net, prefill, decode, room):
    _number, claim, job = room
    before = len(decode.effects)
    prefill.job_landed(job, 8)
    net.deliver()
    assert decode.claimed(claim).poll is KVPoll.Success
    effects = [effect for effect in decode.effects[before:] if not isinstance(effect, Send)]
    write = effects.index(WriteAux(claim, b"first token"))
    shown = [effect.poll for effect in effects[:write] if isinstance(effect, Changed)]
    assert KVPoll.Success not in shown
    assert Changed(Kind.CLAIM, claim, KVPoll.Success, 8) in effects[write:]
    assert decode.took(Revoke) == [Revoke(claim, (decode.peer(prefill),))]
    info = decode.sent(TransferInfo)[-1]
    assert (info.phase, info.success, info.reason) == (InfoPhase.CLOSED, True, None)


def test_what_is_shown_is_the_state_of_the_moment_though_it_is_performed_later(net, prefill, decode):
    """Two sources end before anything of it is performed: Success must not overtake the metadata row."""
    other = net.end("prefill", 1002)
    net.join(other, decode)
    claim = decode.open_claim([prefill, other])
    decode.place(claim, wants_aux=True)
    net.lose()
    decode.effects.clear()
    for end in (prefill, other):
        status = TransferStatus(7, claim, 1, StatusPhase.DELIVERED, bytes_landed=8, quiet=True, aux=b"first token")
        decode.book.receive(net.now, decode.peer(end), status)
    effects = decode.book.take_effects()
    write = effects.index(WriteAux(claim, b"first token"))
    assert [each.poll for each in effects[:write] if isinstance(each, Changed)] == [KVPoll.Transferring]
    assert [each.poll for each in effects[write:] if isinstance(each, Changed)] == [KVPoll.Success]


@pytest.mark.row(ClaimState.PAGES, ClaimEvent.FAIL)
@pytest.mark.row(ClaimState.DRAINING, ClaimEvent.STATUS)
@pytest.mark.row(ClaimState.DRAINING, ClaimEvent.DRAINED)
def test_an_exposed_claim_that_fails_keeps_its_pages_until_every_source_is_quiet(net, prefill, decode, room):
    number, claim, job = room
    decode.abort(Kind.CLAIM, claim)
    assert decode.claimed(claim).poll is KVPoll.Failed
    assert decode.took(Revoke) == [Revoke(claim, (decode.peer(prefill),))]
    net.deliver()
    assert prefill.offered(number).poll is KVPoll.Failed
    assert prefill.offered(number).reason == decode.claimed(claim).reason
    assert decode.claimed(claim).state is ClaimState.DRAINING
    assert decode.took(Release) == []
    prefill.job_failed(job, "stopped", quiet=True)
    net.deliver()
    assert decode.claimed(claim).state is ClaimState.QUIET
    assert decode.took(Release) == [Release(Kind.CLAIM, claim)]


def test_success_needs_every_source(net, prefill, decode):
    other = net.end("prefill", 1002)
    net.join(other, decode)
    claim = decode.open_claim([prefill, other])
    decode.place(claim)
    for source in (prefill, other):
        number = source.open_offer()
        net.deliver()
        assert decode.claimed(claim).poll is KVPoll.Transferring
        source.chunk(number)
        source.job_landed(source.jobs()[0], 8)
        net.deliver()
    assert decode.claimed(claim).poll is KVPoll.Success


def test_the_metadata_row_comes_from_the_first_source_that_has_one(net, prefill, decode):
    other, third = net.end("prefill", 1002), net.end("prefill", 1003)
    net.join(other, decode)
    net.join(third, decode)
    claim = decode.open_claim([prefill, other, third])
    decode.place(claim)
    net.deliver()
    for source, aux in ((third, b"third"), (other, b"other"), (prefill, b"")):
        number = source.open_offer()
        source.chunk(number, aux=aux)
        source.job_landed(source.jobs()[0], 8)
    net.deliver()
    assert decode.took(WriteAux) == [WriteAux(claim, b"other")]


def test_no_metadata_row_is_written_where_no_source_has_one(decode, alone):
    number, say = alone
    say(StatusPhase.DELIVERED, bytes_landed=8, quiet=True)
    assert decode.claimed(number).poll is KVPoll.Success
    assert decode.took(WriteAux) == []


def test_another_number_of_bytes_is_never_a_success(prefill, decode, alone):
    number, say = alone
    say(StatusPhase.DELIVERED, bytes_landed=7, quiet=True)
    reason = decode.claimed(number).reason
    assert (reason.code, reason.stage, reason.peer) == (
        Code.BYTES_DIFFER,
        "delivery",
        str(decode.peer(prefill)),
    )
    assert reason.cause == "the source says 7 bytes landed, 8 were expected"
    assert decode.claimed(number).state is ClaimState.QUIET


def test_a_source_that_fails_hands_its_reason_on(decode, alone):
    number, say = alone
    first = Reason(Code.WRITE_FAILED, "prefill", "tp1", cause="cable pulled", blame=Blame.ENGINE)
    say(StatusPhase.FAILED, reason=first, quiet=True)
    assert decode.claimed(number).reason == first
    assert decode.claimed(number).state is ClaimState.QUIET


def test_a_source_that_fails_without_a_reason_fails_the_claim_all_the_same(decode, alone):
    number, say = alone
    say(StatusPhase.FAILED)
    assert decode.claimed(number).reason.code is Code.INTERNAL
    assert decode.claimed(number).reason.cause == "the source gave no reason"


def test_a_terminal_state_never_changes(net, prefill, decode, room, aborted):
    _number, claim, job = room
    prefill.job_landed(job, 8)
    net.deliver()
    late = decode.book.counts["late"]
    decode.fail(Kind.CLAIM, claim, aborted)
    decode.receive(decode.peer(prefill), TransferStatus(7, claim, 99, StatusPhase.FAILED, reason=aborted, quiet=True))
    assert decode.book.counts["late"] == late + 2
    net.part(decode, prefill)
    assert decode.claimed(claim).poll is KVPoll.Success
    assert decode.claimed(claim).reason is None
    assert decode.took(Release) == []


# -- calls


def test_naming_pages_twice_is_a_mistake_of_the_caller(decode, alone):
    number, _ = alone
    with pytest.raises(ProtocolError, match="claim in state 'pages' has no event 'metadata'"):
        decode.place(number)


def test_a_tag_that_comes_with_the_pages_replaces_the_earlier_one(net, prefill, decode):
    number = decode.open_claim([prefill], tag=3)
    decode.place(number, tag=4)
    assert [info.tag for info in decode.sent(TransferInfo)] == [3, 4]


def test_a_receiver_that_is_cleared_early_fails_and_tells(net, prefill, decode, room):
    number, claim, _job = room
    decode.clear(Kind.CLAIM, claim)
    reason = decode.claimed(claim).reason
    assert (reason.code, reason.cause, reason.stage) == (Code.ABORTED, "cleared before it was done", "clear")
    net.deliver()
    assert prefill.offered(number).reason == reason


def test_events_of_claims_that_are_not_known_change_nothing(prefill, decode):
    before = len(decode.effects)
    decode.place(99)
    decode.resolved(99, [])
    decode.clear(Kind.CLAIM, 99)
    assert decode.effects[before:] == []


def test_state_rows_count_into_the_expected_bytes(net, prefill, decode):
    number = decode.open_claim([prefill])
    decode.place(number, rows={"state": 3})
    assert decode.sent(TransferInfo)[-1].expected_bytes == 8 + 12


def test_the_route_of_the_tests_refuses_as_the_real_one_does(decode, prefill):
    with pytest.raises(InputError):
        decode.source(prefill).size.request_bytes(-1, 4)
