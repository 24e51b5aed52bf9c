"""Index lists of SGLang's kinds of state, as page lists of spaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.compat.sglang.layouts import STATES, Lists
from kvferry.errors import InputError


class States:
    """The kinds of state of one rank, in SGLang's order."""

    def __init__(self, state_types: Any, page_tokens: int) -> None:
        self._kinds = [STATES[str(getattr(state, "value", state))] for state in state_types]
        self._page_tokens = page_tokens

    def named(self, indices: Any, prefix_tokens: int) -> dict[str, npt.NDArray[np.int32]]:
        """Space -> int32 numbers.

        Args:
            indices: one list (array, or None) per kind of state.
            prefix_tokens: tokens that decode has already; of lists that name all pages the first ones are left out.

        Raises:
            InputError: another number of lists.
        """
        if len(indices) != len(self._kinds):
            raise InputError(f"SGLang gave {len(indices)} state lists for {len(self._kinds)} kinds of state")
        found = {}
        for kind, given in zip(self._kinds, indices, strict=True):
            numbers = np.asarray([] if given is None else given, np.int32).reshape(-1)
            if kind.lists is Lists.ALL:
                numbers = numbers[prefix_tokens // self._page_tokens :]
            found[kind.space] = numbers
        return found
