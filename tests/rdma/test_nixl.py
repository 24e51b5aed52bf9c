"""NIXL over UCX's rc_verbs."""

from typing import ClassVar

from fenced import ALL, StoppedWriters
from verbs_suite import VerbsSuite
from whole_run import carry

from engine_here import need
from kvferry.engines.seam import Caps

need("nixl")
OPTIONS = {"devices": "rxe0:1", "attach_timeout_s": "20", "transfer_timeout_s": "60"}


class TestNixl(StoppedWriters, VerbsSuite):
    engine_name = "nixl"
    options: ClassVar = OPTIONS
    label = "NIXL verbs"

    def test_of_all_that_a_target_can_do_only_the_end_of_its_agent_stops_a_writer(self):
        """So that no fence is claimed: UCX keeps registrations, and the end of the agent is that of all its peers."""
        engine = self.pair.target.engine
        assert Caps.FENCE not in engine.caps
        process = self.flooding()
        name = process.do("info")["info"]["agent"]
        assert self.lands_after(process, lambda: engine.register([]))
        assert self.lands_after(process, lambda: engine._agent.forget(name))
        engine.poll = lambda _budget_s: []  # it is closed next
        self.assert_still_after(process, engine.close, ALL)


def test_a_whole_run():
    carry("nixl", OPTIONS)
