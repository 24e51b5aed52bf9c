"""A writer is stopped with writes in flight, shut out, and let go on: nothing may change, and no key may be left."""

import json
import subprocess
import time

import numpy as np
import pytest

from kvferry.engines.seam import Outcome
from kvferry.ids import PeerId
from kvferry.testing.suite_base import FLOOD_BYTES
from kvferry.testing.suite_pair import CLAIM, GUARD, SETTLE_S

SENTINEL = 0x5A
EPOCH = 10
ALL = ("qp", "mr", "ctx")
STILL_S = 4.0


def resources():
    """How many queue pairs, memory registrations and opened devices the kernel has, of all processes."""
    said = subprocess.run(["rdma", "-j", "resource", "show"], capture_output=True, check=True).stdout
    (device,) = json.loads(said)
    return {name: device[name] for name in ("qp", "mr", "ctx")}


class StoppedWriters:
    """What a process that writes FLOOD_BYTES without a pause does to the target's pool after it was stopped."""

    def lands_after(self, process, deed=lambda: None):
        """Stop it, do something, fill the pool with a sentinel, let it go on: whether it writes over that."""
        pool = self.pair.target.pool
        process.stop()
        deed()
        pool[:] = SENTINEL
        process.go_on()
        self.wait_until(lambda: bool((pool != SENTINEL).any()), SETTLE_S)
        return bool((pool != SENTINEL).any())

    def assert_still_after(self, process, deed, gone):
        """The same, and nothing may change until the writer's library has had time to try again.

        The kernel's count of what `gone` names falls by it, too.
        """
        pool = self.pair.target.pool
        process.stop()
        before = resources()
        deed()
        after = resources()
        assert all(after[name] < before[name] for name in gone), (before, after)
        pool[:] = SENTINEL
        process.go_on()
        until = time.monotonic() + STILL_S
        while time.monotonic() < until:
            time.sleep(0.05)
            written = np.flatnonzero(pool[:FLOOD_BYTES] != SENTINEL)
            assert not len(written), written[:5]


class FencedWriters(StoppedWriters):
    """For engines whose fence lands though the writer is stopped, and which tell each connection of its own place."""

    @pytest.mark.parametrize("after_s", [0.0, 0.05, 0.1], ids=["at_once", "a_moment_later", "later"])
    def test_nothing_of_a_stopped_writer_lands_after_its_fence(self, after_s):
        """Without the fence it lands; another peer writes to the same pool before and afterwards."""
        assert self._attach_other().outcome is Outcome.LANDED
        process = self._flooding_as(EPOCH)
        assert self.lands_after(process)
        time.sleep(after_s)
        self.assert_still_after(process, lambda: self._fence(process, EPOCH), ALL)
        self._write_as_other()
        process.kill()

    def test_nothing_of_a_stopped_writer_lands_in_memory_that_is_registered_no_more(self):
        """Not what a fence does, since it concerns all peers at once."""
        process = self._flooding_as(EPOCH)
        self.assert_still_after(process, lambda: self.pair.target.engine.register([]), ("mr",))
        process.kill()

    def _flooding_as(self, epoch):
        """A process that writes without a pause by a connection of its own; its writes are in flight."""
        target = self.pair.target
        process = self.spawn(incarnation=100 + epoch)
        said = target.engine.personal(target.engine.describe(), epoch)
        target.pool[:] = GUARD
        name = PeerId(target.me.incarnation, epoch)
        assert process.attach(name, said)["outcome"] == Outcome.LANDED.value
        process.flood(name, CLAIM, target.address)
        self.wait_until(lambda: bool(target.pool[0] != GUARD), SETTLE_S)
        assert target.pool[0] != GUARD
        return process

    def _fence(self, process, epoch):
        target = self.pair.target
        ticket = target.engine.fence(PeerId(process.peer.incarnation, epoch))
        assert target.wait(ticket).outcome is Outcome.LANDED

    def _attach_other(self):
        writer, target = self.pair.writer, self.pair.target
        self._other = PeerId(target.me.incarnation, 5)
        said = target.engine.personal(target.engine.describe(), self._other.epoch)
        return self.pair.settle(writer.engine.attach(self._other, said))

    def _write_as_other(self):
        """The place that a fence ends is nobody else's."""
        pool, nbytes = self.pair.target.pool, 1 << 20
        ticket = self.pair.writer.engine.submit(self._other, self.pair.batch([0], [FLOOD_BYTES], [nbytes]))
        assert self.pair.settle(ticket).outcome is Outcome.LANDED
        assert np.array_equal(pool[FLOOD_BYTES : FLOOD_BYTES + nbytes], self.pair.writer.pool[:nbytes])
