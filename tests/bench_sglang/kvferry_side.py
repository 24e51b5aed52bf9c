"""kvferry as a contestant: a manager for each mode, which is a value of the setting `digest`, over the same memory."""

from __future__ import annotations

from side import Decode, Prefill
from work import PAGE_TOKENS

from kvferry.api import KVArgs, KVClassType, KVPoll, KVReceiver, KVSender, get_kv_class
from kvferry.presets import mla

MODES = ("sample", "off")


class Managers:
    """What both sides have."""

    states = KVPoll

    def start(self) -> None:
        work = self.work
        layout = mla(
            "bench", layers=work.layers, latent_dim=work.page_bytes // PAGE_TOKENS, dtype="uint8", pages=work.pages,
            page_tokens=PAGE_TOKENS,
        )  # fmt: skip
        kind = get_kv_class(self.setup.engine, KVClassType.MANAGER)
        args = KVArgs(layout, self.memory.regions, self.memory.aux)
        self.managers = {mode: kind(args, self.side, digest=mode) for mode in MODES}
        self.endpoints = {mode: manager.endpoint for mode, manager in self.managers.items()}

    def close(self) -> None:
        for manager in self.managers.values():
            manager.shutdown()


class KvferryPrefill(Managers, Prefill):
    """A role."""

    def sender(self, room: int, mode: str) -> KVSender:
        sender = KVSender(self.managers[mode], None, room)
        sender.init(self.work.pages, 0)
        return sender

    def begin(self) -> None:
        """Nothing: the room was told its size when it was made."""

    def hand_over(self, pages) -> None:
        self.room.send(pages)


class KvferryDecode(Managers, Decode):
    """A role."""

    def receiver(self, room: int, pages, mode: str, endpoint: str) -> KVReceiver:
        receiver = KVReceiver(self.managers[mode], None, room, peers=[endpoint])
        receiver.init()
        receiver.send_metadata(pages, 0)
        return receiver
