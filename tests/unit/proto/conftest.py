"""Real books joined by hand: no thread, no clock, no socket; the test decides what is delivered, and when."""

import dataclasses

import numpy as np
import pytest

from kvferry.errors import Code, InputError, Reason
from kvferry.ids import PeerId
from kvferry.proto import book, claim, handshake, joining, offer, rules
from kvferry.proto.effects import Chunk, ClaimFacts, OfferFacts, Send, Source, Submit, Times, Where
from kvferry.wire import TransferStatus, pack_pages

PAGE_TOKENS = 4
TIMES = Times(
    tick_s=0.25, heartbeat_s=1.0, bootstrap_timeout_s=8.0, claim_timeout_s=6.0, stall_s=3.0, drain_limit_s=5.0
)


class Size:
    """A route that moves one byte per token, and four per row of the space "state"."""

    def request_bytes(self, prefix_tokens, num_tokens, rows=None, sends=None):
        if not 0 <= prefix_tokens <= num_tokens <= 1 << 24:
            raise InputError(f"prefix_tokens {prefix_tokens}, num_tokens {num_tokens}")
        if sends == {}:
            return 0
        return num_tokens - prefix_tokens + 4 * (rows or {}).get("state", 0)


class End:
    """One process: a book, and all effects that it asked for."""

    def __init__(self, net, side, incarnation, times):
        self.net = net
        self.incarnation = incarnation
        self.book = book.Book(times, Where(side, f"tp{incarnation % 100}"))
        self.effects = []

    def __getattr__(self, name):
        """Each event of the book, at the net's time."""
        event = getattr(self.book, name)

        def act(*args, **more):
            result = event(self.net.now, *args, **more)
            self.net.collect(self)
            return result

        return act

    def took(self, *kinds):
        return [effect for effect in self.effects if isinstance(effect, kinds)]

    def sent(self, kind):
        return [effect.message for effect in self.took(Send) if isinstance(effect.message, kind)]

    def jobs(self):
        return [effect.job for effect in self.took(Submit)]

    def peer(self, other, epoch=1):
        return PeerId(other.incarnation, epoch)

    # -- the sender's side

    def open_offer(self, room=7, pages=2, **facts):
        number = self.offer(room)
        if pages is not None:
            self.init_offer(number, OfferFacts(**{"num_pages": pages, "page_tokens": PAGE_TOKENS, **facts}))
        return number

    def chunk(self, number, chunk=0, pages=2, *, last=True, first_page=None, aux=b"", ready=True):
        first_page = chunk * pages if first_page is None else first_page
        data = pack_pages(np.arange(first_page, first_page + pages, dtype=np.int32))
        self.send(number, Chunk(chunk, first_page, {"kv": data}, last), ready=ready, aux=aux)

    def offered(self, number):
        return self.book.offers[number]

    # -- the receiver's side

    def open_claim(self, sources, room=7, *, tag=0, fan_in=1, elected=True, epoch=1):
        number = self.claim(room, tag=tag)
        self.resolved(number, [self.source(each, fan_in, elected=elected, epoch=epoch) for each in sources])
        return number

    def source(self, other, fan_in=1, *, elected=True, epoch=1):
        return Source(self.peer(other, epoch), fan_in, None if elected else {}, Size())

    def place(self, number, pages=2, *, rows=None, **facts):
        rows = rows or {}
        counts = {"kv": pages, **rows}
        data = {space: pack_pages(np.arange(count, dtype=np.int32)) for space, count in counts.items()}
        self.metadata(number, ClaimFacts(data, PAGE_TOKENS, pages, rows=rows, **facts))

    def claimed(self, number):
        return self.book.claims[number]

    def abort(self, kind, number, cause="the client went away"):
        self.fail(kind, number, self.book.where.reason(Code.ABORTED, cause))


@dataclasses.dataclass
class Flight:
    """A message on its way."""

    sender: PeerId
    target: End
    message: object


class Net:
    """The ends and what flies between them."""

    def __init__(self):
        self.now = 100.0
        self.ends = {}
        self.flying = []

    def end(self, side, incarnation, **times):
        settings = Times(**{name: getattr(TIMES, name) for name in TIMES.__struct_fields__} | times)
        self.ends[incarnation] = end = End(self, side, incarnation, settings)
        return end

    def join(self, one, other, epoch=1, digest=""):
        one.peer_ready(one.peer(other, epoch), Size(), digest=digest)
        other.peer_ready(other.peer(one, epoch), Size(), digest=digest)

    def part(self, one, other, epoch=1):
        """One end notices that the connection is gone."""
        peer = one.peer(other, epoch)
        one.peer_lost(peer, one.book.where.reason(Code.PEER_LOST, "heartbeats stopped", peer=str(peer)))

    def collect(self, end):
        for effect in end.book.take_effects():
            end.effects.append(effect)
            target = self.ends.get(effect.peer.incarnation) if isinstance(effect, Send) else None
            if target is not None:
                self.flying.append(Flight(PeerId(end.incarnation, effect.peer.epoch), target, effect.message))

    def deliver(self):
        """Everything that flies arrives, in order, and what that causes too."""
        while self.flying:
            flight = self.flying.pop(0)
            flight.target.receive(flight.sender, flight.message)

    def lose(self):
        """Everything that flies is lost."""
        lost, self.flying = self.flying, []
        return lost

    def wait(self, seconds, *, deliver=True):
        """Let time pass, tick by tick."""
        for _ in range(round(seconds / TIMES.tick_s)):
            self.now += TIMES.tick_s
            for end in list(self.ends.values()):
                end.on_tick()
            if deliver:
                self.deliver()


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def prefill(net):
    return net.end("prefill", 1001)


@pytest.fixture
def decode(net, prefill):
    end = net.end("decode", 2001)
    net.join(prefill, end)
    return end


@pytest.fixture
def room(net, prefill, decode):
    """A room of two pages in full swing: (offer, claim, job), the job's write is out."""
    number = prefill.open_offer()
    claimed = decode.open_claim([prefill])
    decode.place(claimed)
    net.deliver()
    prefill.chunk(number, aux=b"first token")
    net.deliver()
    return number, claimed, prefill.jobs()[-1]


@pytest.fixture
def aborted():
    return Reason(Code.ABORTED, "decode", "tp0", cause="the client went away")


@pytest.fixture
def alone(net, prefill, decode):
    """A claim in PAGES whose source says only what the test says: (number, say)."""
    number = decode.open_claim([prefill])
    decode.place(number)
    net.lose()
    revs = iter(range(1, 100))

    def say(phase, **more):
        decode.receive(decode.peer(prefill), TransferStatus(7, number, next(revs), phase, **more))
        net.lose()

    return number, say


def pytest_configure(config):
    config.addinivalue_line("markers", "row(state, event): the row of the room tables that the test takes")


@pytest.fixture(autouse=True)
def _takes_its_rows(request, monkeypatch):
    """A test that is marked with a row of a table has to take it."""
    rows = {mark.args for mark in request.node.iter_markers("row")}
    if not rows:
        yield
        return
    taken = set()
    fire = rules.fire

    def noted(table, thing, event, *args):
        state = thing.state
        result = fire(table, thing, event, *args)
        if (state, event) in table:
            taken.add((state, event))
        return result

    for module in (rules, book, joining, claim, offer, handshake):
        monkeypatch.setattr(module, "fire", noted)
    yield
    assert rows <= taken, f"not taken: {rows - taken}"
