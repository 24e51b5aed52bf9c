"""MORI over its RDMA backend."""

import subprocess
from typing import ClassVar

from fenced import FencedWriters
from verbs_suite import MIB, VerbsSuite
from whole_run import carry

from engine_here import need
from kvferry.engines.seam import Outcome
from kvferry.testing.suite_base import FAILED
from kvferry.testing.suite_pair import SETTLE_S

need("mori")
OPTIONS = {"backend": "rdma", "qp_retry_count": "3", "attach_timeout_s": "60", "transfer_timeout_s": "60"}


def port(state):
    subprocess.run(["ip", "link", "set", "roce", state], check=True)


class TestMori(FencedWriters, VerbsSuite):
    engine_name = "mori"
    options: ClassVar = OPTIONS
    label = "MORI verbs"

    def test_a_port_that_was_lost_ends_attachments_and_what_is_attached_afterwards_is_written_to(self):
        """MORI does not rebuild its queue pairs when a port comes back: both sides take new engines of its."""
        pair, target = self.pair, self.pair.target.engine
        batch = pair.batch([0], [0], [MIB])
        assert pair.attach().outcome is Outcome.LANDED
        assert pair.write(batch).outcome is Outcome.LANDED
        port("down")
        try:
            self.wait_until(lambda: bool(target.info()["events"]), SETTLE_S)
            assert "PORT_DOWN" in target.info()["events"][-1]
            assert pair.write(batch).outcome in FAILED
        finally:
            port("up")
        self.wait_until(lambda: target.info()["rebuilds"] == 1, SETTLE_S)
        assert pair.attach().outcome is Outcome.LANDED
        pair.target.pool[:] = 0
        assert pair.write(batch).outcome is Outcome.LANDED
        assert (pair.target.pool[:MIB] == pair.writer.pool[:MIB]).all()


def test_a_whole_run():
    carry("mori", OPTIONS)
