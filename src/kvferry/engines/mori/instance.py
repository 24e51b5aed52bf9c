"""One engine of the library, with its registrations; used by one thread at a time."""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import threading
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvferry.engines.mori import library, precautions, zero
from kvferry.engines.mori.blob import NONCE_BYTES, Blob, Described
from kvferry.engines.mori.flight import Flight
from kvferry.engines.mori.memory import Held, Memory, parts_of
from kvferry.engines.mori.spinner import Spinner, started_by
from kvferry.engines.owner import keep_in_forks
from kvferry.engines.seam import Outcome, Region
from kvferry.errors import EngineError
from kvferry.plan.batch import Batch

_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_undying: list[Any] = []
"""Engines that could not be destroyed."""

_starting = threading.Lock()
"""One at a time, so that two don't find the same port free; the library ends the process over one that is taken."""

_HOST = 3
"""Where the address stands in the library's packed descriptor of an engine."""


class Place(NamedTuple):
    """How instances are made.

    Attributes:
        cpp: the library.
        backend: "rdma" or "xgmi".
        bind_host: address that the library listens on, by RDMA.
        host: address that peers use.
        ports: (first, last) port to listen on; (0, 0): any.
    """

    cpp: Any
    backend: str
    bind_host: str
    host: str
    ports: tuple[int, int]


def _door_of(place: Place) -> tuple[str, int]:
    """Host and port to listen on: by RDMA; a port that is free at this moment."""
    if place.backend != "rdma":
        return "", 0
    return place.bind_host, precautions.bindable(place.bind_host, place.ports)


class Instance:
    """An engine of the library with its backend.

    Its key is never used again: the library keeps queue pairs by it, and a later process of the same key would be
    written to by those of the dead one.

    Attributes:
        memory: what is registered.
        described: the same, as peers are told.
        nonce: registered host memory that holds random bytes, as peers are told; None by XGMI.
        nonce_digest: SHA-256 of these bytes.
        reading: the last read of a peer's nonce.
    """

    def __init__(self, place: Place, *, is_written_to: bool = False) -> None:
        """Start it; one that is written to by peers writes nothing itself.

        Raises:
            EngineError: the library can't start it.
        """
        self._place = place
        self._cpp = place.cpp
        is_rdma = place.backend == "rdma"
        with _starting:
            self._engine, self._spinner = self._started(*_door_of(place))
        if is_written_to:
            self._spinner.park()
        self._is_resting = False
        self.reading = Flight([])
        self.memory = Memory.of(())
        self.described: list[Described] = []
        self._regions: tuple[Region, ...] = ()
        self._page = np.frombuffer(bytearray(os.urandom(NONCE_BYTES)), np.uint8)
        self._page_descriptor = self._register(Region(int(self._page.ctypes.data), NONCE_BYTES)) if is_rdma else None
        self.nonce = self._described(self._page_region, self._page_descriptor) if is_rdma else None
        self.nonce_digest = hashlib.sha256(self._page.tobytes()).digest() if is_rdma else b""
        keep_in_forks(self)

    def _started(self, host: str, port: int) -> tuple[Any, Spinner]:
        key = f"kvferry-{os.getpid()}-{secrets.token_hex(8)}"
        engine = self._cpp.IOEngine(key, self._cpp.IOEngineConfig(host, port))
        backend, config = library.backend_of(self._cpp, self._place.backend)
        spinner_of = started_by if self._place.backend == "rdma" else Spinner.none
        try:
            # before memory is registered and before the descriptor is read: it holds the port only afterwards
            zero.occupy()
            spinner = spinner_of(lambda: engine.CreateBackend(backend, config))
        except RuntimeError as error:
            raise EngineError(f"MORI can't create the backend {self._place.backend}: {error}") from error
        return engine, spinner

    @property
    def descriptor(self) -> bytes:
        """The library's descriptor of it, with the address that peers use."""
        fields = msgspec.msgpack.decode(self._engine.GetEngineDesc().pack())
        fields[_HOST] = self._place.host
        return msgspec.msgpack.encode(fields)

    def register(self, regions: tuple[Region, ...]) -> None:
        """Replace the registered regions; does nothing if they are the same.

        Raises:
            EngineError: a region, which it names, can't be registered; then none is.
        """
        if regions == self._regions:
            return
        for descriptor in self.memory.descriptors:
            self._engine.DeregisterMemory(descriptor)
        self.memory, self.described, self._regions = Memory.of(()), [], ()
        held = [Held(region.address, region.nbytes, self._register(region)) for region in regions]
        for number, (region, one) in enumerate(zip(regions, held, strict=True)):
            if region.device >= 0 and not any(bytes(one.descriptor.ipc_handle)) and self._place.backend == "xgmi":
                for each in held:
                    self._engine.DeregisterMemory(each.descriptor)
                raise EngineError(
                    f"MORI can't share region {number}, {region.nbytes} bytes at {region.address:#x} on device "
                    f"{region.device}: HIP gives no handle for it",
                    hint="memory for XGMI has to come from hipMalloc, in one allocation",
                )
        self.memory = Memory.of(held)
        self.described = [
            self._described(*pair) for pair in zip(regions, (one.descriptor for one in held), strict=True)
        ]
        self._regions = regions

    def introduce(self, blob: Blob) -> Memory:
        """Make a peer's engine known; gives its memory. Raises RuntimeError where a descriptor is none."""
        self._engine.RegisterRemoteEngine(self._cpp.EngineDesc.unpack(blob.engine))
        return Memory.of(
            Held(one.address, one.nbytes, self._cpp.MemoryDesc.unpack(one.descriptor)) for one in blob.memory
        )

    def why_unreachable(self, blob: Blob, there: Memory, until: float) -> str:
        """Why a peer's memory can't be written to, or "".

        By RDMA the peer's nonce is read into the own page, which may take until then on the monotonic clock.
        """
        if blob.nonce is not None and self._page_descriptor is not None:
            return self._why_not_its_nonce(blob, blob.nonce, until)
        if not self.memory.descriptors or not there.descriptors:
            return ""
        if self._engine.CreateSession(self.memory.descriptors[0], there.descriptors[0]) is None:
            return "the peer's memory can't be opened: another GPU, not linked to this one, or its owner has ended"
        return ""

    def write(self, batch: Batch, there: Memory) -> Flight:
        """Begin to write rows that lie in this memory to a peer's.

        The library's own sessions are used, which it makes inside of this call: its call for making one holds Python's
        lock while a stopped peer is asked.
        """
        if self._is_resting:
            self._is_resting = False
            self._spinner.wake()
        parts = list(parts_of(batch, self.memory, there))
        statuses = [self._cpp.TransferStatus() for _ in parts]
        here, far, src, dst, nbytes = (list(column) for column in zip(*parts, strict=True))
        uids = [self._engine.AllocateTransferUniqueId() for _ in parts]
        try:
            self._engine.BatchWrite(here, src, far, dst, nbytes, statuses, uids)
        except Exception as error:  # noqa: BLE001 - whatever it raises: what was begun before goes on
            return Flight(statuses, error)
        return Flight(statuses)

    def rest(self) -> None:
        """Let others have the processor that it keeps busy, until the next write."""
        if not self._is_resting:
            self._is_resting = True
            self._spinner.rest()

    def hear(self) -> list[str]:
        """What the library has to say of lost peers and ports since it was last asked, in words."""
        found = []
        while (event := self._engine.PopPeerFailure()) is not None:
            where = f" ({event.device_name} port {event.port_num})" if event.device_name else ""
            found.append(f"{event.reason.name}{where}: {event.detail}")
        return found

    def close(self) -> bool:
        """Destroy it: when this returns true nothing is read or written for it, and what arrives finds nothing.

        Returns:
            False if the kernel can't keep the library from closing what is not its own: then it stays for good.
        """
        engine, self._engine = self._engine, None
        if engine is None:
            return True
        self._spinner.wake()  # it is waited for
        kind = library.backend_of(self._cpp, self._place.backend)[0]
        is_destroyed = zero.without_closing_it(lambda: engine.RemoveBackend(kind))
        if not is_destroyed:
            _undying.append(engine)
        return is_destroyed

    @property
    def _page_region(self) -> Region:
        return Region(int(self._page.ctypes.data), NONCE_BYTES)

    def _register(self, region: Region) -> Any:
        kind = self._cpp.MemoryLocationType.GPU if region.device >= 0 else self._cpp.MemoryLocationType.CPU
        return self._engine.RegisterMemory(_capsule(region.address, None, None), region.nbytes, region.device, kind)

    @staticmethod
    def _described(region: Region, descriptor: Any) -> Described:
        return Described(region.address, region.nbytes, region.device, descriptor.pack())

    def _why_not_its_nonce(self, blob: Blob, nonce: Described, until: float) -> str:
        status = self._cpp.TransferStatus()
        there = self._cpp.MemoryDesc.unpack(nonce.descriptor)
        uid = self._engine.AllocateTransferUniqueId()
        self._engine.Read(self._page_descriptor, 0, there, 0, NONCE_BYTES, status, uid)
        self.reading = Flight([status])
        if not self.reading.wait(until):
            return "it did not answer in time"
        outcome, cause, _ = self.reading.verdict()
        if outcome is not Outcome.LANDED:
            return f"its nonce can't be read: {cause}"
        return "" if blob.is_nonce(self._page.tobytes()) else "what answers there is another process than the peer"
