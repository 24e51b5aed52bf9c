"""One side of a contestant, whichever: the same steps, the same clock, the same scheduler's habit.

`KVManager`, `KVSender` and `KVReceiver` of kvferry and of SGLang are called alike from the room's beginning to Success;
what differs is how a manager is made, which is what subclasses say.
"""

from __future__ import annotations

import time

import msgspec
from work import Memory, Work, poll_until

from kvferry.bench.child import note


class Setup(msgspec.Struct, frozen=True):
    """What a side is told: the backend by its engine's name, and where prefill's bootstrap server is to listen."""

    work: Work
    engine: str
    port: int


class Side:
    """A role of `kvferry.bench.child`. Subclasses set `states` (the API's KVPoll) and make `managers`."""

    takes = Setup
    side = ""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.work = setup, setup.work
        self.memory = Memory(setup.work)
        self.endpoints: dict[str, str] = {}
        self.room = None
        self.start()

    def start(self) -> None:
        raise NotImplementedError

    def hello(self) -> dict:
        return {"endpoints": self.endpoints, "page_bytes": self.memory.regions[0].page_bytes}

    def poll_until(self, state: str) -> None:
        wanted, failed = getattr(self.states, state), self.states.Failed
        poll_until(self.room.poll, wanted, failed, self.work.nap_us)

    def idle(self, seconds: float) -> float:
        """CPU of all threads while nothing is asked of the connected side, in percent of a processor."""
        cpu_s = time.process_time()
        time.sleep(seconds)
        return 100 * (time.process_time() - cpu_s) / seconds

    def close(self) -> None:
        """Nothing, unless a subclass has something to stop."""


class Prefill(Side):
    """Steps of the sending side."""

    side = "prefill"

    def offer(self, round_number: int, mode: str) -> None:
        """Write the round's bytes, open the room, wait until decode has named its pages."""
        self.memory.fill(round_number)
        self.room = self.sender(round_number, mode)
        self.poll_until("WaitingForInput")
        self.begin()
        time.sleep(self.work.forward_s)

    def send(self, round_number: int, order: str) -> dict:
        """Send and poll until Success; when it began, CPU seconds of all threads until then."""
        pages = self.work.page_list("prefill", order, round_number)
        cpu_s = time.process_time()
        begin_s = time.monotonic()
        self.hand_over(pages)
        self.poll_until("Success")
        cpu_s = time.process_time() - cpu_s
        self.room.clear()
        return {"begin_s": begin_s, "cpu_s": cpu_s}


class Decode(Side):
    """Steps of the receiving side."""

    side = "decode"

    def claim(self, round_number: int, order: str, mode: str, endpoint: str) -> None:
        """Open the room and name its pages."""
        pages = self.work.page_list("decode", order, round_number)
        self.room = self.receiver(round_number, pages, mode, endpoint)

    def receive(self) -> dict:
        """Poll until Success; when that was, CPU seconds of all threads, polling included."""
        note("waiting")
        cpu_s = time.process_time()
        self.poll_until("Success")
        end_s = time.monotonic()
        cpu_s = time.process_time() - cpu_s
        self.room.clear()
        return {"end_s": end_s, "cpu_s": cpu_s}

    def check(self, round_number: int, order: str) -> str:
        """What is wrong with the round's bytes; ""."""
        return self.memory.check(order, round_number)
