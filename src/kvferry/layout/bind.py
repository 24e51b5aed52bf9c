"""From a declared layout to memory: put addresses into its tensors."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvferry.errors import LayoutError
from kvferry.layout.tensor import Layout


def bind(layout: Layout, buffers: Sequence[tuple[int, int]]) -> Layout:
    """Place an unbound layout's tensors into buffers.

    One buffer holds all tensors, each at the offset that its `address` states; otherwise there is one buffer
    per tensor, in order, and each tensor starts at the start of its own.

    Args:
        layout: an unbound layout (presets make such); `address` of a tensor is its offset in the one buffer.
        buffers: (address, nbytes) pairs.

    Raises:
        LayoutError: the number of buffers fits neither way, or a tensor does not fit into its buffer.
    """
    count = len(layout.tensors)
    if len(buffers) == 1:
        places = [(*buffers[0], tensor.address) for tensor in layout.tensors]
    elif len(buffers) == count:
        places = [(address, nbytes, 0) for address, nbytes in buffers]
    else:
        hint = "pass one buffer for all tensors, or one for each"
        raise LayoutError(f"bind: {len(buffers)} buffers for {count} tensors", hint=hint)
    tensors = []
    for number, (tensor, (address, nbytes, offset)) in enumerate(zip(layout.tensors, places, strict=True)):
        if offset + tensor.nbytes > nbytes:
            what = f"bind: tensor {number} needs {offset} + {tensor.nbytes} bytes, its buffer has {nbytes}"
            raise LayoutError(what, hint="make the buffer larger, or bind the layout before it has addresses")
        tensors.append(msgspec.structs.replace(tensor, address=address + offset))
    return msgspec.structs.replace(layout, tensors=tuple(tensors))
