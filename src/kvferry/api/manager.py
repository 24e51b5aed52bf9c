"""A rank's manager: registered memory, the node that moves it, and the rooms that are in use."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from kvferry import config as settings
from kvferry.api.base import BaseKVManager
from kvferry.api.held import HeldPages
from kvferry.api.indices import PageSpaces
from kvferry.api.memory import KVArgs
from kvferry.api.registrar import Registrar
from kvferry.api.room import Room
from kvferry.bootstrap import BootstrapClient
from kvferry.config import Config
from kvferry.errors import Code, ConfigError, InputError, RoomInUse
from kvferry.ids import KVPoll, Rank, Side
from kvferry.node.node import Node
from kvferry.proto.effects import Kind


class KVManager(BaseKVManager):
    """One rank. `engine_name` is what get_kv_class binds; everything else is the same for every engine.

    Attributes:
        engine_name: the transfer engine.
        side: "prefill" or "decode".
        endpoint: "tcp://host:port" of the control plane, as peers reach it.
    """

    engine_name = "local"

    def __init__(
        self, args: KVArgs, mode: Side | str, config: Config | None = None, *, bootstrap_addr: str | None = None,
        sizes: Rank | None = None, secret: str | None = None, environ: Mapping[str, str] | None = None,
        extra: Mapping[str, str] | None = None, **overrides: Any,
    ) -> None:  # fmt: skip
        """Register memory, start the engine and bind the control plane.

        Args:
            args: layout and memory.
            mode: Side.PREFILL or Side.DECODE, or their values.
            config: settings; None takes defaults, then KVFERRY_* variables, then the overrides.
            bootstrap_addr: prefill side: "host:port" of the bootstrap server to register at.
            sizes: prefill side: the size of the grid on each axis; None = this rank alone.
            secret: bearer token of the bootstrap server; None takes KVFERRY_SECRET.
            environ: environment to read; None is os.environ.
            extra: prefill side: what decode ranks may read of this rank at the bootstrap server.
            overrides: settings by name (see Config).

        Raises:
            ConfigError (LayoutError, UnknownEngine, AddressError, ...): what is wrong and what to do.
            EngineUnavailable: the engine can't be used here.
            BootstrapError: the bootstrap server refuses this rank (one that does not answer is tried again later).
        """
        environ = os.environ if environ is None else environ
        if config is None:
            config = settings.load(environ, **overrides)
        elif not isinstance(config, Config):
            raise ConfigError(f"config is {type(config).__name__}, not Config", hint="see kvferry.config.load")
        elif overrides:
            config = settings.override(config, **overrides)
        self.side = _side(mode).value
        self.secret = secret or environ.get("KVFERRY_SECRET") or None
        self.args = args
        if not isinstance(args, KVArgs):
            raise ConfigError(f"args is {type(args).__name__}, not KVArgs", hint="KVArgs(layout, buffers)")
        layout = args.bound()
        self.spaces = PageSpaces(layout, self.side)
        self.held = HeldPages(self.spaces.pools)
        self._rooms: dict[tuple[Kind, int], Room] = {}
        self._draining = ""
        self._sizes = sizes or Rank(*(index + 1 for index in msgspec.structs.astuple(layout.rank)))
        self.node = Node(
            Side(self.side), layout, self.engine_name, config, group=args.grouped(), aux=args.aux_buffers()
        )
        self.registrar: Registrar | None = None
        if bootstrap_addr is not None and self.side == Side.PREFILL.value:
            self._register(bootstrap_addr, extra)

    @property
    def endpoint(self) -> str:
        """The control plane's address, "tcp://host:port"."""
        return self.node.endpoint

    @property
    def attn_cp_rank(self) -> int:
        """This rank's place on the CP axis."""
        return self.node.layout.rank.cp

    @property
    def attn_cp_size(self) -> int:
        """Ranks on the CP axis, as `sizes` says."""
        return self._sizes.cp

    def update_buffers(self, args: KVArgs) -> None:
        """Replace the registered memory: a new registration epoch.

        Peers shake hands anew before the next room; nothing can be written to the old memory once this returns.

        Raises:
            ConfigError: rooms run, the layout's rank or spaces changed, or the memory does not fit.
        """
        self.node.check_fork()
        if self._rooms:
            raise ConfigError(
                f"{self.side}: update_buffers while {len(self._rooms)} rooms are in use",
                hint="finish and clear() them first",
            )
        layout = args.bound()
        before, self._draining = self._draining, "the manager is replacing its memory"
        try:
            self.node.replace_memory(layout, args.grouped(), args.aux_buffers())
            self.args, self.spaces = args, PageSpaces(layout, self.side)
            self.held = HeldPages(self.spaces.pools)
        finally:
            self._draining = before

    def info(self) -> dict[str, Any]:
        """Engine, addresses, peers, rooms and counts."""
        found = self.node.info()
        found["rooms_in_use"] = len(self._rooms)
        found["bootstrap"] = self.registrar.state if self.registrar else "not registered"
        return found

    def health(self) -> str:
        """Say what is wrong; an empty text while all threads work."""
        self.node.check_fork()
        return self.node.health()

    def release_quarantined(self, room: int) -> None:
        """An operator vouches that nothing can touch the pages of a quarantined room any more."""
        self.node.release_quarantined(room)

    def shutdown(self, drain_s: float = 0.0) -> None:
        """Refuse new rooms, give running ones drain_s, fail the rest, stop all threads. May be called twice."""
        self.node.check_fork()
        self._draining = "the manager is draining"
        deadline = time.monotonic() + drain_s
        while time.monotonic() < deadline and any(_runs(room) for room in list(self._rooms.values())):
            time.sleep(0.01)
        if self.registrar is not None:
            self.registrar.close()
        self.node.close(self.node.where.reason(Code.SHUTDOWN, "the manager was shut down", stage="shutdown"))

    def __enter__(self) -> KVManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # -- for senders and receivers

    def must_be(self, side: Side, what: str) -> None:
        """Refuse a sender at a decode rank and the reverse."""
        if self.side != side.value:
            raise InputError(f"{what} needs a manager of the {side.value} side, this one is of the {self.side} side")

    def take_room(self, kind: Kind, room: Room) -> None:
        """Note a room as in use. Raises RoomInUse or InputError."""
        self.node.check_fork()
        if self._draining:
            raise InputError(f"room {room.bootstrap_room}: {self._draining}", hint="send it to another worker")
        if self._rooms.setdefault((kind, room.bootstrap_room), room) is not room:
            what = "sender" if kind is Kind.OFFER else "receiver"
            raise RoomInUse(
                f"room {room.bootstrap_room} has a {what} on this rank already ({self.side} {self.node.layout.rank})",
                hint=f"clear() the earlier {what} first, or use another room number",
            )

    def drop_room(self, kind: Kind, room: Room) -> None:
        """The room's number may be used again."""
        self._rooms.pop((kind, room.bootstrap_room), None)

    def publish_room(self, bootstrap_addr: str | None, room: int) -> None:
        """Tell the bootstrap server which DP rank serves a room, where there is a choice."""
        if bootstrap_addr is None or self._sizes.dp <= 1:
            return
        client = BootstrapClient(bootstrap_addr, token=self.secret)
        dp = self.node.layout.rank.dp
        self.node.resolver.run(lambda: client.put_rooms({room: dp}), _ignore)

    # -- helpers

    def _register(self, bootstrap_addr: str, extra: Mapping[str, str] | None) -> None:
        try:
            self.registrar = Registrar(bootstrap_addr, self.node, self._sizes, self.secret, extra)
        except BaseException:
            self.node.close()
            raise


def _side(mode: Side | str) -> Side:
    try:
        return Side(mode)
    except ValueError:
        raise ConfigError(f"mode {mode!r} is neither 'prefill' nor 'decode'") from None


def _runs(room: Room) -> bool:
    return room.poll() not in {KVPoll.Success, KVPoll.Failed}


def _ignore(_: object) -> None:
    """A room whose DP rank could not be published fails at the decode side, with the reason from there."""
