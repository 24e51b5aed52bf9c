"""One NIXL agent with one backend, as much of it as the engine uses. All calls are made by one thread at a time."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvferry.engines.nixl.library import Library
from kvferry.engines.nixl.memory import HOST, Rows, host_row
from kvferry.engines.nixl.native import TransferFailed, explain
from kvferry.engines.nixl.transfer import Handle, Here
from kvferry.engines.owner import Owner, keep_in_forks
from kvferry.engines.seam import Region
from kvferry.errors import EngineError, EngineUnavailable

log = logging.getLogger("kvferry.engines")

NONCE_BYTES = 32
SLOTS = 64
"""Peers that can be probed at once."""
ANSWERS = 1024
"""Writers that can be answered at once, unless two are given the same place: then one of them asks again."""


class Agent:
    """A native agent, its registrations and its page.

    The page is registered memory of its own: the nonce, as many bytes for peers to write to, slots that are read
    into from peers, then answers that peers read.

    Attributes:
        name: its name, unique to each start.
        plugins: names of the plug-ins that the library has, which may not all work here.
        has_device_memory: whether the backend moves accelerator memory, and the driver for it is here.
    """

    def __init__(self, library: Library, name: str, backend: str, parameters: dict[str, str], nonce: bytes) -> None:
        """Start an agent.

        Raises:
            EngineUnavailable: the backend can't be had here.
        """
        # a progress thread would take a whole processor for ever; `progress` does its work
        # and calls come from one thread at a time, but not always from the same
        strict = library.api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = library.api.nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=strict)
        self.name = name
        self._owner = Owner("nixl")
        try:
            self._native = library.api.nixl_agent(name, config)
            self.plugins: list[str] = sorted(self._native.get_plugin_list())
            self._native.create_backend(backend, parameters)
        except Exception as error:
            why = explain(error)
            raise EngineUnavailable(
                f"NIXL backend {backend!r} can't be created with {parameters}: {why.cause} [{why.native}]",
                hint=f"the library has plug-ins for {', '.join(getattr(self, 'plugins', [])) or 'nothing'}",
            ) from error
        keep_in_forks(self)
        kinds = self._native.get_backend_mem_types(backend)
        self.has_device_memory = "VRAM_SEG" in kinds and _has_cuda_driver()
        self._page = np.zeros(NONCE_BYTES * (2 + SLOTS + ANSWERS), np.uint8)
        self._page[:NONCE_BYTES] = np.frombuffer(nonce, np.uint8)
        self._free_slots = list(range(2, 2 + SLOTS))
        self._registered: list[Any] = []
        self._page_registration = self._register(Region(self.page, self._page.nbytes))

    # -- memory

    @property
    def page(self) -> int:
        """Address of the nonce; NONCE_BYTES behind it is where peers write."""
        return int(self._page.ctypes.data)

    @property
    def answers(self) -> int:
        """Address of the answers, NONCE_BYTES each."""
        return self.page + (2 + SLOTS) * NONCE_BYTES

    def answer(self, number: int, raw: bytes) -> None:
        """Put an answer where a peer reads it."""
        at = (2 + SLOTS + number) * NONCE_BYTES
        self._page[at : at + NONCE_BYTES] = np.frombuffer(raw, np.uint8)

    def replace_memory(self, regions: Sequence[Region]) -> None:
        """Register these regions, and no others any more.

        Raises:
            EngineError: one, which it names, can't be registered; then none is.
        """
        self._drop_memory()
        for number, region in enumerate(regions):
            try:
                self._registered.append(self._register(region))
            except Exception as error:
                self._drop_memory()
                why = explain(error)
                where = "host memory" if region.device < 0 else f"memory of device {region.device}"
                raise EngineError(
                    f"region {number}, {region.nbytes} bytes of {where} at {region.address:#x}, can't be registered "
                    f"with NIXL: {why.cause} [{why.native}]"
                ) from error

    def metadata(self) -> bytes:
        """What peers load, in the library's own words."""
        raw: bytes = self._native.get_agent_metadata()
        return raw

    # -- peers

    def load(self, metadata: bytes) -> str:
        """Make a peer known; returns its name. Raises what the library raises."""
        name: bytes | str = self._native.add_remote_agent(metadata)
        return name.decode(errors="replace") if isinstance(name, bytes) else name

    def forget(self, name: str) -> None:
        """Disconnect from a peer; no transfer to it may be under way."""
        with contextlib.suppress(Exception):
            self._native.remove_remote_agent(name)

    def progress(self) -> list[bytes]:
        """Serve peers: connections that they make, rows that this process has to take from a socket itself.

        Returns:
            What they have told.
        """
        return [message for messages in self._native.get_new_notifs().values() for message in messages]

    def tell(self, name: str, message: bytes) -> None:
        """Send a peer a message that its `progress` returns; raises what the library raises."""
        self._native.send_notif(name, message)

    # -- transfers

    def write(self, peer: str, here: Rows, there: Rows) -> Here:
        """Make a transfer; raises what the library raises, and then nothing was begun."""
        return self._prepare("WRITE", peer, here, there)

    def read(self, peer: str, there: int, slot: int) -> Here:
        """Make a transfer that reads NONCE_BYTES of a peer into a slot."""
        mine = host_row(self.page + slot * NONCE_BYTES, NONCE_BYTES)
        return self._prepare("READ", peer, mine, host_row(there, NONCE_BYTES))

    def write_page(self, peer: str, page: int) -> Here:
        """Make a transfer that writes to where peers may write to a peer's page."""
        return self.write(peer, host_row(self.page, NONCE_BYTES), host_row(page + NONCE_BYTES, NONCE_BYTES))

    def post(self, handle: Handle) -> bool:
        """Begin; with cross-memory attach the whole copy runs inside. Says whether it is over; raises if it failed."""
        return self._is_done(self._native.transfer(handle))

    def is_done(self, handle: Handle) -> bool:
        """Whether a transfer is over; raises if it failed."""
        return self._is_done(self._native.check_xfer_state(handle))

    def release(self, handle: Handle) -> None:
        """Free a transfer that is over, or whose peer was forgotten: freeing ends none that is under way."""
        try:
            self._native.release_xfer_handle(handle)
        except Exception as error:  # noqa: BLE001 - whatever it raises: it is the library's to keep
            log.debug("NIXL keeps a transfer: %r", error)

    def take_slot(self) -> int | None:
        """Reserve a slot of the page, if one is free."""
        return self._free_slots.pop() if self._free_slots else None

    def free_slot(self, slot: int) -> None:
        """Give a slot back."""
        self._free_slots.append(slot)

    def slot(self, slot: int) -> bytes:
        """What lies in a slot."""
        return self._page[slot * NONCE_BYTES : (slot + 1) * NONCE_BYTES].tobytes()

    def close(self) -> None:
        """End it, all its connections and registrations. Does nothing in a forked child, see `keep_in_forks`."""
        if self._native is None or not self._owner.is_here:
            return
        self._drop_memory()
        self._deregister(self._page_registration)
        self._native = None

    # -- helpers

    def _prepare(self, operation: str, peer: str, here: Rows, there: Rows) -> Here:
        native = self._native
        mine, theirs = native.get_xfer_descs(here.table, here.kind), native.get_xfer_descs(there.table, there.kind)
        return Here(self, native.initialize_xfer(operation, mine, theirs, peer))

    def _register(self, region: Region) -> Any:
        kind, device = (HOST, 0) if region.device < 0 else ("VRAM", region.device)
        return self._native.register_memory([(region.address, region.nbytes, device, "")], kind)

    def _deregister(self, registration: Any) -> None:
        with contextlib.suppress(Exception):
            self._native.deregister_memory(registration)

    def _drop_memory(self) -> None:
        for registration in self._registered:
            self._deregister(registration)
        self._registered.clear()

    @staticmethod
    def _is_done(state: str) -> bool:
        if state not in {"DONE", "PROC"}:
            raise TransferFailed
        return state == "DONE"


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
