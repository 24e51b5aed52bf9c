"""Writes down what each rank's pools hold of a request, for the test to compare. Runs in SGLang's schedulers.

Only what SGLang itself hands over is used: the page lists of its calls, as they were passed, and the decode prefix. The
elements are read one by one through the rank's layout, by the planner's oracle. A record is written when a sender or a
receiver is seen to have succeeded, before its scheduler goes on.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orders
import xxhash

from kvferry import KVPoll
from kvferry.layout import Layout
from kvferry.plan.runs import PageList
from kvferry.testing.oracle import cells

MAIN = "kv"


class Notes:
    """What SGLang has said of one room.

    Attributes:
        prefix_tokens: tokens that decode has already.
        pool: which of the rank's pools they are in, "device" or "host".
        pages: page lists by number: 0 is the KV cache, 1 and so on the kinds of state.
        is_written: whether the record was written.
    """

    def __init__(self) -> None:
        self.prefix_tokens = 0
        self.pool = "device"
        self.pages: dict[int, list[int]] = {0: []}
        self.is_written = False

    def add(self, kv_indices: Any, state_indices: Any) -> None:
        """Note the lists of one call."""
        self.pages[0] += np.asarray(kv_indices).ravel().tolist()
        for number, indices in enumerate(state_indices or ()):
            if indices is not None:
                self.pages[number + 1] = np.asarray(indices).ravel().tolist()


def register() -> None:
    """Wrap the adapter's sender and receiver."""
    from kvferry.compat.sglang import receiver, sender

    _wrap(sender.KVFerrySender, "prefill", {"pop_decode_prefix_len": _note_prefix, "send": _note_send})
    _wrap(receiver.KVFerryReceiver, "decode", {"send_metadata": _note_metadata})


def _wrap(cls: type, side: str, notes: dict[str, Callable[..., None]]) -> None:
    for name, note in notes.items():
        setattr(cls, name, _noting(getattr(cls, name), note))
    for name in ("poll", "poll_pp_consensus"):
        if hasattr(cls, name):
            setattr(cls, name, _recording_result(getattr(cls, name), side))
    cls.clear = _recording_first(cls.clear, side)  # type: ignore[attr-defined]


def _noting(method: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noting(room: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(room, *args, **kwargs)
        note(_notes(room), result, *args, **kwargs)
        return result

    return noting


def _recording_result(method: Callable[[Any], Any], side: str) -> Callable[[Any], Any]:
    @functools.wraps(method)
    def polling(room: Any) -> Any:
        state = method(room)
        if state == KVPoll.Success:
            _write(room, side)
        return state

    return polling


def _recording_first(method: Callable[[Any], Any], side: str) -> Callable[[Any], Any]:
    """A rank that another one polls for learns of the end by being cleared."""

    @functools.wraps(method)
    def clearing(room: Any) -> Any:
        if room.poll() == KVPoll.Success:
            _write(room, side)
        return method(room)

    return clearing


def _notes(room: Any) -> Notes:
    if not hasattr(room, "recorded_notes"):
        room.recorded_notes = Notes()
    found: Notes = room.recorded_notes
    return found


def _note_prefix(notes: Notes, result: int) -> None:
    notes.prefix_tokens = int(result or 0)


def _note_send(notes: Notes, _: Any, kv_indices: Any, state_indices: Any = None, *__: Any, **___: Any) -> None:
    notes.add(kv_indices, state_indices)


def _note_metadata(
    notes: Notes, _: Any, kv_indices: Any, aux_index: Any = None, state_indices: Any = None,
    decode_prefix_len: int | None = None, destination: Any = None, *__: Any, **___: Any,
) -> None:  # fmt: skip
    notes.prefix_tokens = int(decode_prefix_len or 0)
    notes.pool = "device" if destination is None else destination.value
    notes.add(kv_indices, state_indices)


def _write(room: Any, side: str) -> None:
    notes = _notes(room)
    if notes.is_written:
        return
    notes.is_written = True
    layout = _layout(room)
    if orders.given("swap_pages") and side == "decode":
        _swap_pages(layout, notes.pages[0])
    found = []
    for number, space in enumerate(layout.spaces):
        found += _elements(layout, space.name, notes, number)
    rank = msgspec.to_builtins(layout.rank)
    record = {
        "side": side, "rank": rank, "pool": notes.pool, "prefix_tokens": notes.prefix_tokens, "elements": found,
    }  # fmt: skip
    name = f"{room.bootstrap_room}.{side}.{'-'.join(map(str, rank.values()))}"
    folder = Path(os.environ["FERRY_TEST_RECORDS"])
    (folder / f"{name}.part").write_bytes(msgspec.msgpack.encode(record))
    (folder / f"{name}.part").rename(folder / f"{name}.record")


def _layout(room: Any) -> Layout:
    layout: Layout = room.kv_mgr.pool_at(_notes(room).pool).node.layout
    return layout


def _elements(layout: Layout, name: str, notes: Notes, number: int) -> list[list[Any]]:
    """[space, layer, field, head, position, digest] of all elements of one space."""
    space = next(space for space in layout.spaces if space.name == name)
    tensors = tuple(tensor for tensor in layout.tensors if tensor.space == name)
    one = msgspec.structs.replace(layout, spaces=(space,), tensors=tensors)
    pages = notes.pages.get(number, [])
    prefix = notes.prefix_tokens if name == MAIN else 0
    first = prefix - prefix % space.page_tokens
    listed = {name: PageList(np.array(pages, np.int64), first)}
    where = cells(one, listed, prefix, first + len(pages) * space.page_tokens, len(pages))
    return [
        [*key, xxhash.xxh3_64_intdigest(ctypes.string_at(address, nbytes))]
        for key, (address, nbytes) in where.items()
    ]  # fmt: skip


def _swap_pages(layout: Layout, pages: list[int]) -> None:
    """A planted mistake: exchange what the first two pages hold in one layer."""
    tensor = next(tensor for tensor in layout.tensors if tensor.space == MAIN)
    first, second = (tensor.address + page * tensor.strides_bytes.page for page in pages[:2])
    kept = ctypes.string_at(first, tensor.item_bytes)
    ctypes.memmove(first, second, tensor.item_bytes)
    ctypes.memmove(second, kept, tensor.item_bytes)
