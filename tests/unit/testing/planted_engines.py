"""Engines with one defect each; the engine suite must find it."""

import itertools
import mmap
import os
import threading
from typing import ClassVar

import msgspec
import numpy as np

from kvferry.engines.local import LocalEngine
from kvferry.engines.owner import Owner
from kvferry.engines.seam import Caps, Done, Limits, Outcome
from kvferry.errors import ConfigError


class NoFence(LocalEngine):
    """Honest: it can't prove anything, and says so."""

    def open(self, config):
        super().open(config)
        self.caps &= ~Caps.FENCE

    def fence(self, peer, claim=None):
        ticket = next(self._tickets)
        self._done.append(Done(ticket, Outcome.FAILED_QUIET, "this engine has no fence", "ENOTSUP"))
        return ticket


class ProvesWithoutFence(NoFence):
    def fence(self, peer, claim=None):
        ticket = next(self._tickets)
        self._done.append(Done(ticket, Outcome.LANDED))
        return ticket


class ProvesTooMuch(ProvesWithoutFence):
    """Its fence is a wish."""

    def open(self, config):
        super().open(config)
        self.caps |= Caps.FENCE


class TooEarly(LocalEngine):
    """LANDED when the batch is taken; it is written two polls later."""

    def __init__(self):
        super().__init__()
        self._late, self._numbers, self._said = [], itertools.count(1 << 40), []

    def submit(self, peer, batch):
        ticket = next(self._numbers)
        self._late.append([2, peer, batch])
        self._said.append(Done(ticket, Outcome.LANDED))
        return ticket

    def poll(self, budget_s):
        for late in self._late:
            late[0] -= 1
            if not late[0]:
                super().submit(*late[1:])
        self._late = [late for late in self._late if late[0] > 0]
        said, self._said = self._said, []
        return said + [done for done in super().poll(0) if done.ticket in self._attach_tickets or not said]


class OneByteTooMany(LocalEngine):
    def submit(self, peer, batch):
        nbytes = batch.nbytes.copy()
        nbytes[-1:] += np.uint64(1)
        longer = msgspec.structs.replace(batch, nbytes=nbytes, total_bytes=batch.total_bytes + min(1, len(nbytes)))
        return super().submit(peer, longer)


class NoLimits(LocalEngine):
    """It says what it takes and does not look."""

    def submit(self, peer, batch):
        told, self.limits = self.limits, Limits(rows=1 << 30, bytes=1 << 40)
        try:
            return super().submit(peer, batch)
        finally:
            self.limits = told


class AnyRegion(LocalEngine):
    def register(self, regions):
        super().register([region for region in regions if region.device < 0])


class AnyOption(LocalEngine):
    def open(self, config):
        try:
            super().open(config)
        except ConfigError:
            super().open(msgspec.structs.replace(config, options={}))


class AnyGrant(LocalEngine):
    def open(self, config):
        config.grants.begin = lambda *_: ""
        config.grants.end = lambda *_: None
        super().open(config)


class Speechless(LocalEngine):
    def poll(self, budget_s):
        return [msgspec.structs.replace(done, native="") for done in super().poll(budget_s)]


class SaysItTwice(LocalEngine):
    def poll(self, budget_s):
        return [done for done in super().poll(budget_s) for _ in range(2)]


class LeaksDescriptors(LocalEngine):
    def close(self):
        if self._target is not None:
            os.dup(0)
        super().close()


class LeaksThreads(LocalEngine):
    def close(self):
        if self._target is not None:
            threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()
        super().close()


class LeaksMemory(LocalEngine):
    kept: ClassVar = []

    def close(self):
        self.kept.append(mmap.mmap(-1, 96 << 10))  # no memory that an allocator has left over
        self.kept[-1].write(b"x" * (96 << 10))
        super().close()


class UsedInForks(LocalEngine):
    """It does not look where it is."""

    @property
    def _owner(self):
        return Owner("local")

    @_owner.setter
    def _owner(self, value):
        pass


class ForgetsTheOldBlob(LocalEngine):
    """A later attach is ignored while an earlier one stands."""

    def attach(self, peer, blob):
        if peer in self._attachments:
            ticket = next(self._tickets)
            self._done.append(Done(ticket, Outcome.LANDED))
            return ticket
        return super().attach(peer, blob)
