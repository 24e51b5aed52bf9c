"""The rows that kvferry's planner makes of a round, worked out before the clock runs: what a bare library is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvferry.bench.geometry import Geometry, Share
from kvferry.layout import Layout, bind, list_begin
from kvferry.plan import Batch, Election, Limits, PageList, Part, Route, batches, route, runs

MAIN = "kv"
Block = tuple[int, int]
"""Address and bytes of a pool."""


def planned(
    geometry: Geometry, prefill: Sequence[Block], decode: Sequence[Block], limits: Limits, first_room: int = 0
) -> list[Batch]:
    """All batches of a round, with the limits that kvferry's have.

    Args:
        geometry: what moves.
        prefill: memory of each prefill rank.
        decode: memory of each decode rank.
        limits: of one batch.
        first_room: number of the first room: which of several replicas sends depends on it.
    """
    sources, targets = _bound(geometry, "prefill", prefill), _bound(geometry, "decode", decode)
    offers = {(share.rank, share.room): share for share in geometry.shares("prefill")}
    elections = [Election(target, sources, targets) for target in targets]
    found: list[Batch] = []
    for claim in geometry.shares("decode"):
        shares = elections[claim.rank].shares(first_room + claim.room)
        for rank, (source, share) in enumerate(zip(sources, shares, strict=True)):
            if share.sends:
                path = route(source, targets[claim.rank]).only(share.sends)
                parts = _parts(path, offers[rank, claim.room], claim, geometry.tokens)
                found += batches(path, [runs(path, part) for part in parts], limits)
    return found


def joined(found: Sequence[Batch]) -> Batch:
    """All rows as one batch."""
    src, dst, nbytes = (np.concatenate([getattr(each, name) for each in found]) for name in ("src", "dst", "nbytes"))
    return Batch(src, dst, nbytes, sum(each.total_bytes for each in found))


def _bound(geometry: Geometry, side: str, pools: Sequence[Block]) -> list[Layout]:
    return [bind(layout, [pool]) for layout, pool in zip(geometry.layouts(side), pools, strict=True)]


def _parts(path: Route, offer: Share, claim: Share, tokens: int | None) -> Iterator[Part]:
    for name, leg in path.legs.items():
        here = offer.pages if name == MAIN else offer.states[name]
        there = claim.pages if name == MAIN else claim.states[name]
        end = len(there) * leg.dst.page_tokens if tokens is None else tokens
        begins = [list_begin(space, 0, end, 0) for space in (leg.src, leg.dst)]
        yield Part(name, 0, end, PageList(here, begins[0]), PageList(there, begins[1]))
