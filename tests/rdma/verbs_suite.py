"""The groups of the engine suite that run over verbs: exactness with LANDED, the proof table, the death of peers."""

from packets import least_packets, sent_packets

from kvferry.engines.seam import Outcome
from kvferry.testing.groups.peer_death import PeerDeath
from kvferry.testing.groups.proofs import Proofs
from kvferry.testing.groups.scatter_gather import ScatterGather

MIB = 1 << 20


class VerbsSuite(ScatterGather, Proofs, PeerDeath):
    """Subclasses set `engine_name`, `options` and `label`."""

    def test_rows_are_roce_packets(self):
        """Inside a process, and to another one."""
        assert self.pair.attach().outcome is Outcome.LANDED
        process = self.spawn_target(MIB)
        for write in (
            lambda: self.pair.submit(self.pair.batch([0], [0], [MIB])),
            lambda: self.submit_to(process, [0], [0], [MIB]),
        ):
            before = sent_packets()
            assert self.pair.settle(write()).outcome is Outcome.LANDED
            assert sent_packets() - before >= least_packets(MIB)
