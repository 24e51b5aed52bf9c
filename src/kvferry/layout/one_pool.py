"""Spaces whose pages are those of one pool: their tensors lie on the same bytes, and a page belongs to one of them.

Engines with several kinds of layers overlay the caches of the kinds, and give each page number to one kind at a time.
"""

from __future__ import annotations

import itertools

from kvferry.layout.tensor import Layout, Tensor


def pool_names(layout: Layout) -> dict[str, str]:
    """The pool of each space that has tensors; spaces that share one have the same, by the names of all of them."""
    members = {tensor.space: {tensor.space} for tensor in layout.tensors}
    placed = sorted(layout.tensors, key=lambda tensor: tensor.address)
    for _, alike in itertools.groupby(placed, key=lambda tensor: tensor.address):
        together = set().union(*(members[tensor.space] for tensor in alike))
        members.update(dict.fromkeys(together, together))
    return {space: "+".join(sorted(together)) for space, together in members.items()}


def may_overlay(a: Tensor, b: Tensor) -> bool:
    """Whether page p of one is page p of the other, in two spaces: then both may name the same bytes."""
    steps = (a.strides_bytes.page, a.pages) == (b.strides_bytes.page, b.pages)
    return a.space != b.space and a.address == b.address and steps
