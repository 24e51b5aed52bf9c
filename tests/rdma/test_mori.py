"""MORI over its RDMA backend."""

import os
import subprocess
import time
from pathlib import Path
from typing import ClassVar

from fenced import FencedWriters
from verbs_suite import MIB, VerbsSuite
from whole_run import carry

from engine_here import need
from kvferry.engines.mori.spinner import NICE
from kvferry.engines.seam import Outcome
from kvferry.testing.suite_base import FAILED
from kvferry.testing.suite_pair import SETTLE_S

need("mori")
OPTIONS = {"backend": "rdma", "qp_retry_count": "3", "attach_timeout_s": "60", "transfer_timeout_s": "60"}


def port(state):
    subprocess.run(["ip", "link", "set", "roce", state], check=True)


def ran_ns():
    """How long each thread of this process has run."""
    tasks = Path("/proc/self/task")
    return {int(each.name): int((each / "schedstat").read_text().split()[0]) for each in tasks.iterdir()}


class TestMori(FencedWriters, VerbsSuite):
    engine_name = "mori"
    options: ClassVar = OPTIONS
    label = "MORI verbs"

    def test_threads_that_never_sleep_give_way_where_there_is_nothing_to_look_for(self):
        """MORI has one in each engine; those of the pair are only written to as yet."""
        before = ran_ns()
        time.sleep(1.0)
        busy = [thread for thread, ran in ran_ns().items() if ran - before.get(thread, ran) > 50e6]
        assert len(busy) == 2
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in busy} == {NICE}

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
