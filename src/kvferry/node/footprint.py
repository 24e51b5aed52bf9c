"""Where a room's pages lie in memory: what a grant allows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvferry.layout.tensor import Layout, Tensor
from kvferry.plan.batch import U64


def footprint(layout: Layout, pages: Mapping[str, npt.NDArray[np.integer]]) -> tuple[U64, U64]:
    """The memory of some pages of a rank, without the padding between them.

    Args:
        layout: bound to memory.
        pages: page numbers per space; a space that is not named has no pages.

    Returns:
        uint64[N] first addresses and uint64[N] addresses past the end, not merged.
    """
    sizes = {space.name: space.page_tokens for space in layout.spaces}
    starts, ends = [], []
    for tensor in layout.tensors:
        numbers = np.asarray(pages.get(tensor.space, ()), np.int64)
        offsets, nbytes = _item(tensor, sizes[tensor.space])
        layers = np.arange(len(tensor.layers), dtype=np.int64) * tensor.strides_bytes.layer
        places = (numbers * tensor.strides_bytes.page)[:, None, None] + layers[None, :, None] + offsets
        first = (places.reshape(-1) + tensor.address).astype(np.uint64)
        starts.append(first)
        ends.append(first + np.uint64(nbytes))
    nothing = np.zeros(0, np.uint64)
    return np.concatenate([nothing, *starts]), np.concatenate([nothing, *ends])


def _item(tensor: Tensor, page_tokens: int) -> tuple[npt.NDArray[np.int64], int]:
    """Offsets and length of the contiguous parts of one (layer, page) item."""
    granules = {_granule(field.per, field.granule_tokens, page_tokens) for field in tensor.fields}
    nbytes = tensor.cell_bytes
    heads = sum(high - low for low, high in tensor.heads) or 1
    axes = [(tensor.strides_bytes.head, heads), (tensor.strides_bytes.token, page_tokens // min(granules))]
    offsets = np.zeros(1, np.int64)
    for stride, count in sorted(axis for axis in axes if axis[1] > 1):
        if stride == nbytes and len(offsets) == 1:
            nbytes *= count
        else:
            offsets = (offsets[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
    return offsets, nbytes


def _granule(per: str, granule_tokens: int, page_tokens: int) -> int:
    return granule_tokens if per == "token" else page_tokens
