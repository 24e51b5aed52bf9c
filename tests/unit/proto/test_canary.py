"""What is digested, when, and that nothing is a success before it was compared."""

import pytest

from kvferry.errors import Blame, Code
from kvferry.ids import KVPoll
from kvferry.proto.effects import Changed, Digest, Kind, Prepare, Release, Source, Submit, Verify
from kvferry.proto.rules import ClaimEvent, ClaimState, OfferState
from kvferry.wire import Canary, InfoPhase, StatusPhase, TransferInfo, TransferStatus

CANARY = Canary({"kv": (b"12345678", b"abcdefgh")})


@pytest.fixture
def prefill(net):
    return net.end("prefill", 1001)


@pytest.fixture
def decode(net, prefill):
    end = net.end("decode", 2001)
    net.join(prefill, end, digest="sample")
    return end


@pytest.fixture
def landed(net, prefill, decode, room):
    """A room whose bytes have landed: (offer, claim, job of the digest)."""
    number, claim, job = room
    [digest] = prefill.took(Digest)
    prefill.job_landed(job, 8)
    net.deliver()
    return number, claim, digest.job


@pytest.fixture
def verifying(net, prefill, decode, landed):
    """The same, with the canary at the claim: (claim, peer)."""
    _, claim, job = landed
    prefill.job_digested(job, CANARY)
    net.deliver()
    return claim, decode.peer(prefill)


def test_the_digest_of_all_chunks_is_asked_for_when_the_last_one_is_posted(net, prefill, decode):
    number = prefill.open_offer(pages=4)
    decode.place(decode.open_claim([prefill]), pages=4)
    net.deliver()
    prefill.chunk(number, 0, last=False)
    assert prefill.took(Digest) == []
    prefill.chunk(number, 1)
    [digest] = prefill.took(Digest)
    assert [chunk.number for chunk in digest.chunks] == [0, 1]
    assert (digest.peer, digest.full, digest.nbytes) == (prefill.peer(decode), False, 16)
    assert (digest.first_token, digest.end_tokens) == (0, 16)
    assert digest.job not in prefill.jobs()


def test_every_byte_is_digested_where_one_side_wishes_it(net, prefill):
    other = net.end("decode", 2002)
    net.join(prefill, other, digest="full")
    number = prefill.open_offer()
    other.place(other.open_claim([prefill]))
    net.deliver()
    prefill.chunk(number)
    assert [digest.full for digest in prefill.took(Digest)] == [True]


@pytest.mark.parametrize("elected", [True, False])
def test_no_digest_is_taken_of_nothing_nor_where_none_is_wished(net, prefill, decode, elected):
    other = net.end("decode", 2002)
    net.join(prefill, other)
    number = prefill.open_offer()
    end = other if elected else decode
    end.place(end.open_claim([prefill], elected=elected))
    net.deliver()
    prefill.chunk(number)
    assert len(prefill.took(Submit)) == elected
    assert prefill.took(Digest) == []


def test_a_source_has_not_delivered_before_its_digest_is_there(net, prefill, decode, landed):
    number, _, job = landed
    assert prefill.offered(number).state is OfferState.SENDING
    assert prefill.took(Release) == []
    prefill.job_digested(job, CANARY)
    last = prefill.sent(TransferStatus)[-1]
    assert (last.phase, last.canary, last.bytes_landed, last.chunks_landed) == (StatusPhase.DELIVERED, CANARY, 8, 1)
    assert prefill.offered(number).state is OfferState.DELIVERED


def test_a_digest_that_can_not_be_taken_fails_the_room_on_both_sides(net, prefill, decode, landed):
    number, claim, job = landed
    prefill.job_failed(job, "the pool is not mapped", quiet=True)
    net.deliver()
    reason = decode.claimed(claim).reason
    assert (reason.code, reason.cause) == (Code.WRITE_FAILED, "the pool is not mapped")
    assert prefill.offered(number).state is OfferState.QUIET


def test_pages_are_not_free_while_a_digest_reads_them(net, prefill, decode, landed):
    number, _, job = landed
    prefill.abort(Kind.OFFER, number)
    assert prefill.offered(number).state is OfferState.DRAINING
    prefill.job_digested(job, CANARY)
    assert prefill.took(Release) == [Release(Kind.OFFER, number)]
    assert prefill.sent(TransferStatus)[-1].canary is None


def test_a_digest_that_nobody_waits_for_changes_nothing(prefill):
    prefill.job_digested(99, CANARY)
    assert prefill.effects == []


@pytest.mark.row(ClaimState.PAGES, ClaimEvent.VERIFIED)
def test_what_landed_is_compared_before_it_is_a_success(decode, verifying):
    claim, peer = verifying
    [verify] = decode.took(Verify)
    assert (verify.claim, verify.peer, verify.canary, verify.nbytes) == (claim, peer, CANARY, 8)
    assert verify.facts.num_pages == 2
    assert decode.claimed(claim).poll is KVPoll.Transferring
    decode.verified(claim, peer, "")
    assert decode.claimed(claim).poll is KVPoll.Success


def test_it_is_compared_once(net, decode, verifying):
    net.wait(3)
    assert len(decode.took(Verify)) == 1


def test_bytes_that_differ_fail_the_room_and_name_the_place(net, prefill, decode, verifying):
    claim, peer = verifying
    decode.verified(claim, peer, "space 'kv': layer 3, page 1")
    reason = decode.claimed(claim).reason
    assert (reason.code, reason.stage, reason.blame) == (Code.CONTENT_DIFFERS, "delivery", Blame.ENGINE)
    assert reason.cause == "the bytes that landed are not those that were sent: space 'kv': layer 3, page 1"
    assert decode.claimed(claim).state is ClaimState.QUIET


def test_each_source_is_compared_on_its_own(net, prefill, decode):
    other = net.end("prefill", 1002)
    net.join(other, decode, digest="sample")
    claim = decode.open_claim([prefill, other])
    decode.place(claim)
    net.deliver()
    for source in (prefill, other):
        number = source.open_offer()
        source.chunk(number)
        source.job_landed(source.jobs()[0], 8)
        source.job_digested(source.took(Digest)[0].job, CANARY)
    net.deliver()
    assert {verify.peer for verify in decode.took(Verify)} == {decode.peer(prefill), decode.peer(other)}
    decode.verified(claim, decode.peer(other), "")
    assert decode.claimed(claim).poll is KVPoll.Transferring
    decode.verified(claim, decode.peer(prefill), "")
    assert decode.claimed(claim).poll is KVPoll.Success


@pytest.mark.row(ClaimState.DRAINING, ClaimEvent.VERIFIED)
def test_an_aborted_claim_keeps_its_pages_while_they_are_read(decode, verifying, aborted):
    claim, peer = verifying
    decode.fail(Kind.CLAIM, claim, aborted)
    assert decode.claimed(claim).state is ClaimState.DRAINING
    decode.verified(claim, peer, "")
    assert decode.took(Release) == [Release(Kind.CLAIM, claim)]
    assert decode.claimed(claim).reason == aborted


@pytest.mark.row(ClaimState.QUARANTINED, ClaimEvent.VERIFIED)
def test_a_comparison_that_takes_too_long_is_no_reason_to_hand_pages_out(net, decode, verifying, aborted):
    claim, peer = verifying
    decode.fail(Kind.CLAIM, claim, aborted)
    net.wait(6)
    assert decode.claimed(claim).state is ClaimState.QUARANTINED
    decode.verified(claim, peer, "")
    assert decode.took(Release) == [Release(Kind.CLAIM, claim)]


def test_a_comparison_that_comes_late_changes_nothing(net, prefill, decode, verifying):
    claim, peer = verifying
    decode.verified(claim, peer, "")
    decode.verified(claim, peer, "a second word")
    assert decode.claimed(claim).poll is KVPoll.Success
    decode.verified(99, peer, "")
    decode.verified(claim, decode.peer(net.end("prefill", 1003)), "")
    assert decode.claimed(claim).poll is KVPoll.Success


def test_a_room_that_looks_the_same_is_shown_once(decode, alone):
    _, say = alone
    decode.effects.clear()
    say(StatusPhase.DELIVERED, bytes_landed=8, quiet=True)
    changed = [effect for effect in decode.effects if isinstance(effect, Changed)]
    assert len(changed) == len([a for a, b in zip(decode.effects, [None, *decode.effects], strict=False)
                                if isinstance(a, Changed) and a != b])  # fmt: skip


class Large:
    """A route that moves a megabyte per token."""

    def request_bytes(self, prefix_tokens, num_tokens, rows=None, sends=None):
        return 0 if sends == {} else (num_tokens - prefix_tokens) << 20


@pytest.mark.parametrize("digest", ["sample", "full", ""])
def test_the_canary_of_a_large_link_is_prepared_when_its_pages_are_named_once(net, prefill, digest):
    other = net.end("decode", 2002)
    for one, two in ((prefill, other), (other, prefill)):
        one.peer_ready(one.peer(two), Large(), digest=digest)
    number = prefill.open_offer()
    claim = other.claim(7)
    other.resolved(claim, [Source(other.peer(prefill), 1, True, Large())])
    net.deliver()
    assert prefill.took(Prepare) == []
    other.place(claim)
    net.deliver()
    prefill.chunk(number)
    (prepare,) = prefill.took(Prepare)
    assert (prepare.offer, prepare.peer) == (number, prefill.peer(other))
    assert (prepare.digested, prepare.full) == (digest != "", digest == "full")
    assert (prepare.first_token, prepare.end_tokens) == (0, 8)


@pytest.mark.parametrize("digest", ["sample", ""])
def test_what_is_sent_at_once_is_prepared_for_its_digest_alone(net, prefill, digest):
    other = net.end("decode", 2002)
    for one, two in ((prefill, other), (other, prefill)):
        one.peer_ready(one.peer(two), Large(), digest=digest)
    prefill.chunk(prefill.open_offer())
    claim = other.claim(7)
    other.resolved(claim, [Source(other.peer(prefill), 1, True, Large())])
    net.deliver()
    other.place(claim)
    net.deliver()
    assert [effect.digested for effect in prefill.took(Prepare)] == ([True] if digest else [])


def test_nothing_is_prepared_for_a_claim_that_does_not_say_how_much_it_expects(net, prefill):
    other = net.end("decode", 2002)
    prefill.peer_ready(prefill.peer(other), Large(), digest="sample")
    number = prefill.open_offer()
    pages = {"kv": bytes(8)}
    for claim, expected in ((1, None), (2, 0)):
        info = TransferInfo(7, claim, 2, InfoPhase.PAGES, pages=pages, num_tokens=8, expected_bytes=expected)
        prefill.receive(prefill.peer(other), info)
    prefill.chunk(number)
    assert prefill.took(Prepare) == []


@pytest.mark.parametrize("canary", [None, Canary({"kv": (b"", b"")}, full=True)])
def test_a_source_that_sends_no_canary_or_another_one_than_agreed_fails_the_room(net, prefill, decode, canary):
    claim = decode.open_claim([prefill])
    decode.place(claim)
    status = TransferStatus(7, claim, 1, StatusPhase.DELIVERED, bytes_landed=8, quiet=True, canary=canary)
    decode.receive(decode.peer(prefill), status)
    reason = decode.claimed(claim).reason
    assert (reason.code, reason.blame) == (Code.CONTENT_DIFFERS, Blame.PEER)
    assert "both sides agreed on a digest (sample)" in reason.cause
    assert decode.took(Verify) == []


def test_of_nothing_no_canary_is_wanted(net, prefill, decode):
    claim = decode.open_claim([prefill], elected=False)
    decode.place(claim)
    decode.receive(decode.peer(prefill), TransferStatus(7, claim, 1, StatusPhase.DELIVERED, quiet=True))
    assert decode.claimed(claim).poll is KVPoll.Success


def test_a_digest_that_takes_long_is_no_stall(net, prefill, decode, landed):
    number, _, job = landed
    net.wait(9)
    assert prefill.offered(number).state is OfferState.SENDING
    prefill.job_digested(job, CANARY)
    assert prefill.offered(number).state is OfferState.DELIVERED
