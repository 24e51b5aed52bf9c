"""The NIXL engine: one agent of the native library, driven by one thread at a time, with deadlines of its own."""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import time
from collections.abc import Sequence

from kvferry.engines.findings import Finding
from kvferry.engines.host import this_process
from kvferry.engines.nixl import library
from kvferry.engines.nixl.agent import NONCE_BYTES, Agent
from kvferry.engines.nixl.blob import VERSION, Blob, decode, encode
from kvferry.engines.nixl.farewell import Attachment, Farewells
from kvferry.engines.nixl.flight import Flight
from kvferry.engines.nixl.lanes import Lanes
from kvferry.engines.nixl.memory import Memory, split, why_not_there
from kvferry.engines.nixl.native import explain
from kvferry.engines.nixl.options import Options, parse
from kvferry.engines.nixl.peers import Peers
from kvferry.engines.nixl.probe import Probe
from kvferry.engines.nixl.serving import Serving
from kvferry.engines.nixl.transfer import Transfer
from kvferry.engines.owner import Owner, not_open
from kvferry.engines.rows import SPLIT_BYTES, why_not
from kvferry.engines.seam import Caps, Done, EngineConfig, Outcome, Region, Ticket
from kvferry.engines.unproven import Unproven
from kvferry.errors import EngineError, WireError
from kvferry.ids import PeerId
from kvferry.plan.batch import Batch, Limits

_LONGEST_NAP_S = 0.0005

_CLOSE_S = 2.0
"""How long `close` waits for batches that wait to be copied."""

_STEP_EVERY_S = 0.001
"""How often the library is driven at least while outcomes come without that."""

_STEP_IDLE_S = 0.04
"""The same while nothing is under way here; polls that find no outcome drive it besides, also for peers."""


class NixlEngine:
    """Moves batches with NIXL, by default over UCX: RDMA, cross-memory attach, TCP or what else UCX finds.

    Options: `backend` is the NIXL plug-in (UCX); `devices` are the network devices that UCX may use, names with commas
    between them, or a JSON object with one such text per GPU of which option `gpu` says the one that counts;
    `ucx_error_handling_mode` ("peer": a lost peer is noticed; "none": it is not, and shared memory may be used) and
    `num_workers` go to UCX; `param.<name>` goes to any backend under that name, for instance
    `param.engine_config=TLS=tcp` (UCX's settings without their UCX_). `attach_timeout_s` and `transfer_timeout_s` are
    the engine's own deadlines, since NIXL has none. `copy_threads` copy large batches where the library copies in the
    call that begins a transfer (see `lanes`).

    Capabilities, after `open`: NEEDS_TARGET_POLL, ANY_THREAD. DEVICE_MEMORY if the backend says so and a CUDA driver is
    here; that was never run, for lack of a GPU. FENCE over UCX with its error handling, for host memory, without RDMA
    and a CUDA driver (`serving.why_no_fence`). No GRANTS: who is attached is trusted with all registered memory, even
    after it was deregistered if the pages are still there.

    A fence waits for the end of all attachments of the peer, whatever claim it is asked for. It lands when their engine
    has said that their last batch is over, by `detach` or `close`, or when their process has ended, on this host, and
    nothing that it has sent by TCP is on its way any more (`writers`). A stopped process, one of another host, and one
    that can't say how it writes prove nothing: then it waits. Where a fence has landed the peer is let in no more.

    What is claimed: LANDED when the library says that a transfer is done; FAILED_QUIET when nothing was posted;
    FAILED_UNKNOWN for all else, and QUIET when such a transfer is done after all, or when it has failed and its target,
    a process of this host, has ended.
    """

    name = "nixl"
    limits = Limits(rows=16384, bytes=16 << 20)

    def __init__(self) -> None:
        """Raises EngineUnavailable when the library is not installed; it is imported by `open`."""
        library.find()
        self.caps = Caps.NEEDS_TARGET_POLL | Caps.ANY_THREAD
        self._agent: Agent | None = None
        self._tickets = itertools.count(1)
        self._memory = Memory.of(())
        self._regions: list[tuple[int, int, int]] = []
        self._remotes: dict[PeerId, Attachment] = {}
        self._probes: list[Probe] = []
        self._flights: list[Flight] = []
        self._unproven = Unproven()
        self._done: list[Done] = []
        self._stepped_at = 0.0

    # -- the nine calls

    def open(self, config: EngineConfig) -> None:
        """Import the library and start an agent.

        Raises:
            ConfigError: an option is unknown or has a value that isn't.
            EngineUnavailable: the library can't be imported, or the backend can't be created.
            EngineError: the engine is open already.
        """
        if self._agent is not None:
            raise EngineError("the NIXL engine is open already", hint="make a new one with find.load('nixl')")
        self._options: Options = parse(config.options)
        self._library = library.load()
        self._incarnation = config.me.incarnation
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._agent = self._new_agent(self._nonce)
        self._lanes = Lanes(self._options.copy_threads, self._new_lane, self._options.attach_timeout_s)
        self._peers = Peers(self._agent)
        self._farewells = Farewells(self._agent)
        self._serving = Serving(self._agent, self._options, self._nonce)
        self._owner = Owner(self.name)
        if self._agent.has_device_memory:
            self.caps |= Caps.DEVICE_MEMORY
        if not self._serving.why_no_fence:
            self.caps |= Caps.FENCE

    def register(self, regions: Sequence[Region]) -> None:
        """Replace the memory that batches are read from and that peers may write to.

        Raises:
            EngineError: a region, which it names, can't be registered; then none is.
        """
        agent = self._opened()
        self._memory, self._regions = Memory.of(()), []
        for number, region in enumerate(regions):
            if region.address <= 0 or region.nbytes <= 0 or region.address + region.nbytes > 1 << 62:
                raise EngineError(f"region {number}, {region.nbytes} bytes at {region.address:#x}, is no memory")
        if not self._lanes.drain(self._options.transfer_timeout_s):
            raise EngineError(f"batches are still being copied after {self._options.transfer_timeout_s:g} s")
        try:
            agent.replace_memory(regions)
        except EngineError:
            self._lanes.register(())
            raise
        self._lanes.register(regions)
        self._memory = Memory.of(regions)
        self._regions = [(region.address, region.nbytes, region.device) for region in regions]

    def describe(self) -> bytes:
        """The blob that peers hand to `attach`.

        Raises:
            EngineError: it has more than 64 KiB: too many regions are registered.
        """
        agent = self._opened()
        metadata = agent.metadata()
        return encode(
            Blob(
                version=VERSION,
                incarnation=self._incarnation,
                name=agent.name,
                backend=self._options.backend,
                metadata=metadata,
                digest=hashlib.sha256(metadata).digest(),
                page=agent.page,
                nonce_digest=hashlib.sha256(self._nonce).digest(),
                answers=self._serving.answers,
                process=this_process(),
                regions=self._regions,
            )
        )

    def attach(self, peer: PeerId, blob: bytes) -> Ticket:
        """Begin to connect; LANDED when the peer was read from, written to and asked, else FAILED_QUIET and why."""
        agent = self._opened()
        ticket = next(self._tickets)
        self._leave(peer, "attached anew")
        try:
            said = decode(blob, peer, self._options.backend)
            self._peers.load(said, self._in_use())
        except WireError as error:
            self._done.append(Done(ticket, Outcome.FAILED_QUIET, str(error), "blob"))
            return ticket
        except Exception as error:  # noqa: BLE001 - whatever it raises: this peer can't be attached, nothing else
            self._done.append(Done(ticket, Outcome.FAILED_QUIET, *explain(error)))
            return ticket
        slot = agent.take_slot()
        if slot is None:
            self._done.append(Done(ticket, Outcome.FAILED_QUIET, "too many peers are being attached", "refused"))
            return ticket
        timeout_s = self._options.attach_timeout_s
        # where this side may write by other ways than those that a target sees the end of, it names no process
        process = None if self._serving.why_no_fence else this_process()
        deadline = time.monotonic() + timeout_s
        probe = Probe(peer, ticket, said, slot, deadline, timeout_s, self._incarnation, process)
        probe.begin(agent)
        self._probes.append(probe)
        return ticket

    def submit(self, peer: PeerId, batch: Batch) -> Ticket:
        """Begin to write a batch; by cross-memory attach it is written when this returns."""
        agent = self._opened()
        ticket = next(self._tickets)
        remote = self._remotes.get(peer)
        reason = why_not(batch, self._memory.intervals, self.limits)
        if remote is None:
            reason = reason or f"peer {peer} was never attached, is not attached yet, or is detached"
        else:
            reason = reason or why_not_there(batch, remote.memory, peer)
        if reason or remote is None:
            self._done.append(Done(ticket, Outcome.FAILED_QUIET, reason, "refused"))
        elif not len(batch):
            self._done.append(Done(ticket, Outcome.LANDED))
        else:
            self._write(agent, ticket, remote, batch)
        return ticket

    def poll(self, budget_s: float) -> list[Done]:
        """Collect outcomes and serve peers that write here, waiting up to budget_s while none is there."""
        agent = self._opened()
        began = time.monotonic()
        waits = self._flights or self._probes
        if self._done and began - self._stepped_at < (_STEP_EVERY_S if waits else _STEP_IDLE_S):
            return self._take_done()
        until = began + budget_s
        while True:
            self._lanes.listen()
            self._step(agent)
            now = time.monotonic()
            if self._done or now >= until:
                return self._take_done()
            # short at first, when an answer is near
            self._lanes.rest(min((now - began) / 4, _LONGEST_NAP_S, until - now))

    def fence(self, peer: PeerId, claim: int | None = None) -> Ticket:
        """Wait until the peer can't write any more; without FENCE it ends FAILED_QUIET at once with the reason."""
        self._opened()
        ticket = next(self._tickets)
        self._done += self._serving.fence(ticket, peer, claim)
        return ticket

    def detach(self, peer: PeerId) -> None:
        """Forget a peer; batches that are on their way to it end by themselves."""
        agent = self._opened()
        self._leave(peer, "detached while it was being attached")
        self._say_farewell()
        self._forget_unused(agent)

    def close(self) -> None:
        """Stop; ends connections and registrations. May be called twice."""
        agent, self._agent = self._agent, None
        if agent is None or not self._owner.is_here:
            return
        self._end_copies()
        under_way = [flight.attachment for flight in self._flights if not flight.over]
        self._farewells.close(self._remotes.values(), under_way)
        self._peers.forget_all()
        self._lanes.forget_all()
        for probe in self._probes:
            probe.drop(agent)
        for flight in self._flights:
            flight.drop()
        for left in (self._probes, self._flights, self._done, self._remotes):
            left.clear()
        self._lanes.close()
        agent.close()

    # -- for people

    def info(self) -> dict[str, object]:
        """Library, backend and devices, peers, what is on its way, and troubles that concern no single ticket."""
        agent = self._opened()
        return {
            "library": f"{self._library.build} {self._library.version}",
            "backend": self._options.backend,
            "parameters": dict(self._options.parameters),
            "environment": {name: value for name, value in os.environ.items() if name.startswith("UCX_")},
            "plugins": agent.plugins,
            "agent": agent.name,
            "peers": {str(peer): f"{self._options.backend}, {one.name}" for peer, one in list(self._remotes.items())},
            "attaching": len(self._probes),
            "in_flight": len(self._flights),
            "overdue": sum(flight.overdue for flight in list(self._flights)),
            **self._lanes.info(),
            **self._serving.info(),
        }

    def tryout(self) -> list[Finding]:
        """See which library is here, and have two processes of this host write from one to the other with it."""
        from kvferry.engines.nixl.tryout import tryout

        return tryout()

    # -- helpers

    def _end_copies(self) -> None:
        self._lanes.drain(_CLOSE_S)
        self._lanes.end_threads()
        for flight in self._flights:
            for _ in flight.look(time.monotonic()):
                pass
            self._note(flight)

    def _take_done(self) -> list[Done]:
        done, self._done = self._done, []
        return done

    def _opened(self) -> Agent:
        if self._agent is None:
            raise not_open(self.name)
        self._owner.check()
        return self._agent

    def _new_agent(self, nonce: bytes) -> Agent:
        name = f"kvferry-{self._incarnation:016x}-{secrets.token_hex(4)}"
        return Agent(self._library, name, self._options.backend, self._options.parameters, nonce)

    def _new_lane(self) -> Agent:
        return self._new_agent(bytes(NONCE_BYTES))

    def _in_use(self) -> set[str]:
        """Agents that something is under way to which an outcome is owed, or a later proof."""
        return {each.name for each in self._flights} | {probe.name for probe in self._probes if probe.done is None}

    def _forget_unused(self, agent: Agent) -> None:
        attached = {remote.name for remote in self._remotes.values()}
        wanted = self._in_use() | attached | self._farewells.names
        forgotten = self._peers.forget_unused(wanted)
        self._lanes.forget_unused(wanted)
        # attempts to attach that were given up: nothing of value can be written by them
        for probe in [probe for probe in self._probes if probe.name in forgotten]:
            probe.drop(agent)
            self._probes.remove(probe)

    def _leave(self, peer: PeerId, cause: str) -> None:
        left = self._remotes.pop(peer, None)
        if left is not None:
            self._farewells.add(left)
            self._lanes.leave(left)
        for probe in self._probes:
            if probe.peer == peer:
                probe.give_up(cause)
                self._tell(probe)

    def _say_farewell(self) -> None:
        attaching = {probe.peer for probe in self._probes if probe.done is None}
        self._farewells.step([flight.attachment for flight in self._flights if not flight.over], attaching)

    def _write(self, agent: Agent, ticket: Ticket, remote: Attachment, batch: Batch) -> None:
        transfers: list[Transfer] = []
        try:
            parts = self._lanes.parts(remote, batch)
            writer: Agent | Lanes = self._lanes if parts else agent
            for part in parts or [batch]:
                for here, there in split(part, self._memory, remote.memory):
                    transfers.append(writer.write(remote.name, here, there))
        except Exception as error:  # noqa: BLE001 - whatever it raises: nothing was posted
            for transfer in transfers:
                transfer.free()
            self._done.append(Done(ticket, Outcome.FAILED_QUIET, *explain(error)))
            return
        timeout_s = self._options.transfer_timeout_s
        flight = Flight(ticket, remote.name, transfers, time.monotonic() + timeout_s, timeout_s, remote)
        flight.post()
        if flight.over and not flight.failed and batch.total_bytes >= SPLIT_BYTES:
            self._lanes.want(remote)
        self._note(flight)
        self._done += flight.news(time.monotonic())
        if not flight.over:
            self._flights.append(flight)

    def _step(self, agent: Agent) -> None:
        self._done += self._serving.step(time.monotonic())
        self._stepped_at = now = time.monotonic()
        for flight in self._flights:
            self._done += flight.look(now)
            self._note(flight)
        self._done += self._unproven.news(now)
        for probe in self._probes:
            self._advance(agent, probe, now)
        self._lanes.step(self._in_use, now)
        self._say_farewell()
        flights = [flight for flight in self._flights if not flight.over]
        probes = [probe for probe in self._probes if not probe.over]
        if len(flights) + len(probes) < len(self._flights) + len(self._probes):
            self._flights, self._probes = flights, probes
            self._forget_unused(agent)

    def _advance(self, agent: Agent, probe: Probe, now: float) -> None:
        probe.step(agent, now)
        if probe.lands:
            self._remotes[probe.peer] = probe.attachment
        if probe.failed:
            self._peers.doubt(probe.name)
        self._tell(probe)
        if probe.over:
            if probe.counts_there:
                self._farewells.say(probe.name, probe.number)
            probe.drop(agent)

    def _note(self, flight: Flight) -> None:
        if flight.failed:
            self._peers.doubt(flight.name)
            self._lanes.doubt(flight.name)
            assert flight.attachment is not None
            flight.attachment.is_doubtful = True
            if flight.over:
                self._unproven.add(flight.ticket, flight.attachment.process)

    def _tell(self, probe: Probe) -> None:
        news = probe.take_news()
        if news is not None:
            self._done.append(news)
