"""The worker half of one rank: its memory, its rooms, and what it reports; no vLLM is imported here."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.api import KVArgs, KVClassType, KVManager, KVPoll, KVReceiver, KVSender, get_kv_class
from kvferry.api.room import Room
from kvferry.compat.vllm.measures import Measures
from kvferry.compat.vllm.orders import Orders, Receive, Send
from kvferry.errors import ConfigError, KvferryError
from kvferry.ids import Side
from kvferry.layout import Layout

log = logging.getLogger("kvferry.vllm")

SIDES = {"kv_producer": (Side.PREFILL,), "kv_consumer": (Side.DECODE,), "kv_both": (Side.PREFILL, Side.DECODE)}
"""vLLM's kv_role -> the sides that a worker takes."""


@dataclass
class Results:
    """Rooms that have ended and whose blocks nothing touches any more, by vLLM's request id."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class WorkerHalf:
    """One rank.

    Attributes:
        measures: what was measured since they were last taken.
    """

    def __init__(self, role: str, extra: dict[str, Any]) -> None:
        """Read the settings; memory comes with `register`.

        Args:
            role: kv_producer, kv_consumer or kv_both.
            extra: kv_connector_extra_config: `engine`, and settings by name (see kvferry.config).
        """
        settings = dict(extra)
        self._engine = str(settings.pop("engine", "local"))
        self._settings, self._role = settings, role
        self.measures = Measures()
        self._managers: dict[Side, KVManager] = {}
        self._senders: dict[str, KVSender | None] = {}
        self._receivers: dict[str, KVReceiver | None] = {}
        self._releases: list[KVReceiver] = []
        self._blocks: dict[str, list[int]] = {}
        self._load_errors: set[int] = set()

    def register(self, layout: Layout, group: Sequence[Layout], kept_alive: Any) -> None:
        """Register the memory that `layout` is bound to.

        Args:
            layout: this rank's.
            group: those of all ranks of this engine.
            kept_alive: what owns the memory.

        Raises:
            ConfigError (LayoutError, UnknownEngine, ...): the engine of vLLM does not start.
        """
        self._kept_alive = kept_alive
        if self._role not in SIDES:
            raise ConfigError(f"kv_role {self._role!r} is none of {', '.join(SIDES)}", hint="see --kv-transfer-config")
        for side in SIDES[self._role]:
            args = KVArgs(layout, group=() if side is Side.PREFILL else list(group))
            manager = get_kv_class(self._engine, KVClassType.MANAGER)(args, side, **self._settings)
            self._managers[side] = manager
            log.info("kvferry %s %s, engine %s, at %s", side.value, layout.rank, self._engine, manager.endpoint)

    @property
    def endpoint(self) -> str:
        """The prefill side's control plane; "" where there is none."""
        manager = self._managers.get(Side.PREFILL)
        return manager.endpoint if manager else ""

    def carry_out(self, orders: Orders) -> None:
        """Open what the scheduler half decided in this step."""
        for request_id, send in orders.sends.items():
            self._senders[request_id] = self._open_sender(request_id, send)
        for request_id, receive in orders.receives.items():
            self._blocks[request_id] = receive.blocks
            self._receivers[request_id] = self._open_receiver(request_id, receive)
        for facts in orders.releases:
            with contextlib.suppress(KvferryError):  # prefill keeps the blocks for as long as for any claim, then
                self._releases.append(KVReceiver.from_facts(self._managers[Side.DECODE], facts))
        for request_id in orders.aborts:
            if (receiver := self._receivers.get(request_id)) is not None:
                receiver.abort(f"request {request_id} was aborted")

    def take_results(self) -> Results:
        """What has ended since the last call; every room is reported once."""
        results = Results()
        for release in [each for each in self._releases if _is_over(each)]:
            self._releases.remove(release)
            release.clear()
        for request_id, sender in _over(self._senders):
            del self._senders[request_id]
            self._end(request_id, sender, "send")
            results.sent.add(request_id)
        for request_id, receiver in _over(self._receivers):
            del self._receivers[request_id]
            results.received.add(request_id)
            blocks = self._blocks.pop(request_id)
            if not self._end(request_id, receiver, "load"):
                results.failed.add(request_id)
                self._load_errors.update(blocks)
        return results

    def take_load_errors(self) -> set[int]:
        """Blocks whose load has failed since the last call."""
        found, self._load_errors = self._load_errors, set()
        return found

    def shutdown(self) -> None:
        """Stop all threads."""
        for manager in self._managers.values():
            manager.shutdown()

    # -- helpers

    def _open_sender(self, request_id: str, send: Send) -> KVSender | None:
        """The room; None if it can't be opened. One that fails later tells so itself."""
        try:
            sender = KVSender.from_facts(self._managers[Side.PREFILL], send.facts)
        except KvferryError as error:
            self._refused(request_id, "send", str(error))
            return None
        try:
            sender.send(send.kv_indices, send.state_indices)
        except KvferryError as error:
            sender.abort(str(error))
        return sender

    def _open_receiver(self, request_id: str, receive: Receive) -> KVReceiver | None:
        problem = receive.problem
        if receive.facts is not None:
            try:
                return KVReceiver.from_facts(self._managers[Side.DECODE], receive.facts)
            except KvferryError as error:
                problem = str(error)
        self._refused(request_id, "load", problem)
        return None

    def _refused(self, request_id: str, what: str, problem: str) -> None:
        log.warning("%s of request %s failed: %s", what, request_id, problem)
        self.measures.count_failure(what, "input")

    def _end(self, request_id: str, room: Room | None, what: str) -> bool:
        """Give a room back; returns whether it succeeded."""
        if room is None:
            return False
        error, metric = room.failure(), room.get_transfer_metric()
        room.clear()
        if error is not None:
            log.warning("%s of request %s failed: %s", what, request_id, error)
            self.measures.count_failure(what, error.code)
            return False
        self.measures.add(what, metric)
        return True


def _over(rooms: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(request_id, room) for request_id, room in rooms.items() if room is None or _is_over(room)]


def _is_over(room: Room) -> bool:
    return room.poll() in {KVPoll.Success, KVPoll.Failed} and room.is_release_safe()
