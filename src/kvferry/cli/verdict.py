"""The demo's verdict: what the events of all workers say together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.obs import Event

Events = Mapping[str, Event]
"""The last event of each kind of one worker."""


@dataclass
class Outcome:
    """What the demo found; the fields of `--json`, and the differences in words."""

    engine: str
    tokens_equal: bool
    logits_equal: bool
    kv_bytes_equal: bool
    kv_bytes: int
    transfer_s: float
    gb_per_s: float
    memcpy_ratio: float
    ttft_s: float
    text: str
    prefill: str
    decode: str
    ranks: tuple[int, int]
    differences: list[str] = field(default_factory=list, metadata={"in_json": False})

    @property
    def all_equal(self) -> bool:
        """The decode side held the same bytes and computed the same bits."""
        return self.tokens_equal and self.logits_equal and self.kv_bytes_equal


def judge(
    engine: str, grids: tuple[str, str], prefill: Sequence[Events], decode: Sequence[Events], begun_s: float
) -> Outcome:
    """Judge a run that has come to its end.

    Args:
        engine: the transfer engine's name.
        grids: of both sides, as they were given.
        prefill: the events of the prefill ranks, in the order of the ranks; the first one generated.
        decode: the same of the decode side.
        begun_s: when the request was made.
    """
    transfer_s = max(1e-9, last_received_s(decode) - min(float(each["handed over"].data["sent_s"]) for each in prefill))
    kv_bytes = sum(int(each["received"].data["kv_bytes"]) for each in decode)
    memcpy = prefill[0]["memcpy"].data
    memcpy_s = memcpy["seconds"] * kv_bytes / memcpy["nbytes"]
    differences = [*_differences(prefill), *_differences(decode)]
    reference, generated = prefill[0]["generated"].data, decode[0]["generated"].data
    firsts = [each["computed"].data["first_token"] for each in prefill]
    firsts += [each["received"].data["first_token"] for each in decode]
    return Outcome(
        engine=engine, tokens_equal=reference["tokens"] == generated["tokens"] and len(set(firsts)) == 1,
        logits_equal=reference["logits"] == generated["logits"], kv_bytes_equal=not differences,
        kv_bytes=kv_bytes, transfer_s=transfer_s, gb_per_s=kv_bytes / transfer_s / 1e9,
        memcpy_ratio=memcpy_s / transfer_s, ttft_s=last_received_s(decode) - begun_s, text="", prefill=grids[0],
        decode=grids[1], ranks=(len(prefill), len(decode)), differences=differences,
    )  # fmt: skip


def last_received_s(decode: Sequence[Events]) -> float:
    """When the last decode rank had its share."""
    return max(each["received"].at_s for each in decode)


def _differences(ranks: Sequence[Events]) -> Iterator[str]:
    """What is wrong with the bytes, in words, with the rank's name."""
    for rank in ranks:
        for kind in ("stored", "compared"):
            event = rank.get(kind)
            if event is not None and event.data["difference"]:
                yield f"{event.source}: {event.data['difference']}"
        if "compared" in rank:
            compared, received = rank["compared"].data["nbytes"], rank["received"].data["kv_bytes"]
            if compared != received:
                yield f"{rank['compared'].source}: {received} bytes were received, {compared} compared"
