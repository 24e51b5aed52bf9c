"""A worker process of `kvferry demo` that does one thing wrong, if it is the rank WHO: KIND WHO SIDE."""

import os
import sys
import time

import numpy as np

from kvferry.serve import rank, steps, worker
from kvferry.serve.share import Share

KIND, WHO = sys.argv[1:3]
AUX_COLUMNS = {"another room's row": 0, "another first token": 1}


class Spoilt(rank.RankWorker):
    """A rank that spoils its pool before it is looked at."""

    def wait_for(self, room):
        moved = super().wait_for(room)
        if self.start.name == WHO and KIND in AUX_COLUMNS:
            self.aux[steps.AUX_INDEX, AUX_COLUMNS[KIND]] += 1
        return moved

    def spoil(self):
        if self.start.name != WHO:
            return
        held = self.pool.copy()
        self.share.store(np.zeros_like(self.landed.values))
        mine = np.flatnonzero(held != self.pool)
        self.pool[:] = held
        if KIND == "one bit":
            self.pool[mine[len(mine) // 2]] ^= 0x08
        elif KIND == "a stray byte":
            self.pool[np.setdiff1d(np.arange(len(held)), mine)[-1]] ^= 0x08
        elif KIND == "death":
            os._exit(9)
        elif KIND == "a hang":
            time.sleep(600)


def put_together(who, file):
    who.spoil()
    steps_put_together(who, file)


def forgetful(share, cache):
    """Write nothing, and find no fault."""


if __name__ == "__main__":
    side = sys.argv[3]
    steps_put_together = steps._put_together
    worker.RankWorker = Spoilt
    steps._put_together = put_together
    if KIND == "a hole" and WHO.startswith(side):
        Share.merge = forgetful
    sys.exit(worker.main([side]))
