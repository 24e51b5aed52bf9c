"""A paged KV cache in host memory, which the model computes in, and its page allocator.

The block is page-major, [page][layer][k|v][KV head][token][dim]: a page is one run of bytes, and so are the
keys of one head of one layer on it. Layers and heads are named by their number in the whole model, so that a
rank that holds a slice of the model is read and compared like one that holds all of it.
"""

from __future__ import annotations

import mmap
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError

F32 = npt.NDArray[np.float32]
Pages = npt.NDArray[np.int32]
Memory = bytearray | memoryview | mmap.mmap | npt.NDArray[Any]


class PagedCache:
    """Keys and values of many requests, in pages of `page_tokens` tokens. Not thread-safe.

    Attributes:
        block: the memory, dtype[num_pages, layers, 2, KV heads, page_tokens, head_dim]; the 2 are k and v.
        layers: the model's layers that are held here.
        heads: the model's KV heads that are held here.
        page_tokens: tokens per page.
        num_pages: pages in the block.
    """

    def __init__(
        self,
        layers: range,
        heads: range,
        head_dim: int,
        num_pages: int,
        *,
        page_tokens: int = 16,
        dtype: Literal["float16", "float32"] = "float16",
        memory: Memory | None = None,
        seed: int = 0,
    ) -> None:
        """Lay the block over `memory`, or over new memory, which is taken as it is used.

        Args:
            layers: consecutive layer numbers.
            heads: consecutive KV head numbers.
            head_dim: values per head and token.
            num_pages: pages to hold.
            page_tokens: tokens per page.
            dtype: how values are stored; the model computes in float32.
            memory: a writable buffer of at least the block's size; its content is kept.
            seed: decides the order in which pages are handed out.

        Raises:
            InputError: a size is not positive, a range has gaps, or the memory is read-only or too small.
        """
        shape = (num_pages, len(layers), 2, len(heads), page_tokens, head_dim)
        if min(shape) < 1 or layers.step != 1 or heads.step != 1:
            raise InputError(
                f"KV cache of {num_pages} pages of {page_tokens} tokens, layers {layers}, KV heads {heads}, "
                f"head_dim {head_dim}: every size must be positive, layers and heads consecutive"
            )
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = np.zeros(nbytes, np.uint8) if memory is None else _given_memory(memory, nbytes)
        self.block: npt.NDArray[Any] = raw.view(dtype).reshape(shape)
        self.layers, self.heads = layers, heads
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self._is_free = np.ones(num_pages, bool)
        # real pools are fragmented after minutes; a fresh one in order would hide what scattered pages show
        self._free = list(np.random.default_rng(seed).permutation(num_pages).astype(np.int32))

    @property
    def num_free_pages(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free)

    def allocate(self, count: int) -> Pages:
        """Take `count` pages, in no particular order.

        Returns:
            int32[count] page numbers; what the pages hold is unspecified.

        Raises:
            InputError: fewer pages are free; none is taken then.
        """
        if not 0 <= count <= len(self._free):
            raise InputError(
                f"{count} KV pages wanted, {len(self._free)} of {self.num_pages} are free",
                hint="free finished requests, or make the cache larger",
            )
        taken = np.array([self._free.pop() for _ in range(count)], np.int32)
        self._is_free[taken] = False
        return taken

    def free(self, pages: Pages) -> None:
        """Give pages back.

        Raises:
            InputError: a page is free already, is named twice or does not exist; none is given back then.
        """
        self._check_exist(pages)
        numbers, counts = np.unique(pages, return_counts=True)
        wrong = numbers[self._is_free[numbers] | (counts > 1)]
        if len(wrong):
            raise InputError(
                f"double free of KV pages {wrong.tolist()}",
                hint="each allocated page is given back exactly once",
            )
        self._is_free[pages] = True
        self._free.extend(pages)

    def write(self, layer: int, pages: Pages, start_token: int, k: npt.NDArray[Any], v: npt.NDArray[Any]) -> None:
        """Store the keys and values of consecutive tokens of one request, rounded to the cache's dtype.

        Args:
            layer: number of the layer in the model.
            pages: int[P], the request's pages in logical order.
            start_token: position in the request of the first token.
            k: [KV heads, tokens, head_dim], float32 or the cache's dtype.
            v: the same.

        Raises:
            InputError: the layer is not held here, a page does not exist, or the pages end before the tokens.
        """
        tokens = np.arange(start_token, start_token + k.shape[1])
        self._check(layer, pages, start_token + k.shape[1])
        page, row = pages[tokens // self.page_tokens], tokens % self.page_tokens
        for which, values in enumerate((k, v)):
            self.block[page, layer - self.layers.start, which, :, row] = values.swapaxes(0, 1)

    def gather(self, layer: int, pages: Pages, num_tokens: int) -> tuple[F32, F32]:
        """Read the keys and values of a request's first tokens.

        Returns:
            (k, v), each float32[KV heads, num_tokens, head_dim]: the same bytes give the same arrays, with
            the same strides, whatever pages they lie on.

        Raises:
            InputError: as for `write`.
        """
        by_page = np.ascontiguousarray(self._stored(layer, pages, num_tokens), np.float32)
        k, v = self._in_order(by_page, num_tokens)
        return k, v

    def read(self, pages: Pages, num_tokens: int) -> npt.NDArray[Any]:
        """Copy what is stored of a request's first tokens, as it is stored.

        Returns:
            dtype[layers, 2, KV heads, num_tokens, head_dim], whatever pages it lies on.

        Raises:
            InputError: a page does not exist, or the pages end before the tokens.
        """
        return np.stack([self._in_order(self._stored(layer, pages, num_tokens), num_tokens) for layer in self.layers])

    def fill(self, pages: Pages, values: npt.NDArray[Any]) -> None:
        """Store a request's first tokens, from what `read` of another cache gave.

        Args:
            pages: int[P], the request's pages in logical order.
            values: dtype[layers, 2, KV heads, tokens, head_dim], of this cache's dtype, layers and heads.

        Raises:
            InputError: as for `write`.
        """
        for layer, (k, v) in zip(self.layers, values, strict=True):
            self.write(layer, pages, 0, k, v)

    def _stored(self, layer: int, pages: Pages, num_tokens: int) -> npt.NDArray[Any]:
        """dtype[2, KV heads, P, page_tokens, head_dim], the pages that hold the first tokens, copied."""
        self._check(layer, pages, num_tokens)
        needed = pages[: -(-num_tokens // self.page_tokens)]
        copied: npt.NDArray[Any] = self.block[needed, layer - self.layers.start].transpose(1, 2, 0, 3, 4)
        return copied

    @staticmethod
    def _in_order(by_page: npt.NDArray[Any], num_tokens: int) -> npt.NDArray[Any]:
        """dtype[2, KV heads, num_tokens, head_dim] of what `_stored` returns."""
        which, heads, _, _, head_dim = by_page.shape
        return by_page.reshape(which, heads, -1, head_dim)[:, :, :num_tokens]

    def _check(self, layer: int, pages: Pages, num_tokens: int) -> None:
        if layer not in self.layers:
            raise InputError(f"layer {layer} is not in this cache, which holds {self.layers}")
        self._check_exist(pages)
        if num_tokens > len(pages) * self.page_tokens:
            raise InputError(
                f"{num_tokens} tokens do not fit in {len(pages)} pages of {self.page_tokens} tokens",
                hint="allocate pages for the prompt and for every token to come",
            )

    def _check_exist(self, pages: Pages) -> None:
        if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < self.num_pages:
            raise InputError(
                f"KV pages {int(pages.min())} to {int(pages.max())} named, this cache has {self.num_pages}"
            )


def _given_memory(memory: Memory, nbytes: int) -> npt.NDArray[np.uint8]:
    raw = np.frombuffer(memory, np.uint8)
    if len(raw) < nbytes or not raw.flags.writeable:
        raise InputError(
            f"KV cache needs {nbytes} writable bytes; the memory given has {len(raw)}, "
            f"{'writable' if raw.flags.writeable else 'read-only'}"
        )
    return raw[:nbytes]
