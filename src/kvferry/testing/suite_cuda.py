"""Pools on an accelerator, as torch tensors, that the engine suite uses as if they were numpy arrays.

Only here torch is imported, and only when such a pool is asked for.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.errors import EngineUnavailable

Bytes = npt.NDArray[np.uint8]


class DevicePool:
    """A tensor of bytes; reading gives a numpy copy, writing takes numpy arrays or a number.

    Every access waits until the device has ended what it was told before, so that what is read is what is there.

    Attributes:
        nbytes: size in bytes.
        device_index: the device's index; -1 for a tensor in host memory, which only tests make.
    """

    def __init__(self, tensor: Any, synchronize: Any) -> None:
        self._tensor = tensor
        self._synchronize = synchronize
        self.nbytes = int(tensor.numel())
        self.device_index = -1 if tensor.device.type == "cpu" else int(tensor.device.index or 0)
        self.ctypes = SimpleNamespace(data=int(tensor.data_ptr()))

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, where: int | slice) -> Any:
        self._synchronize()
        read = self._tensor[where].cpu().numpy()
        return read.copy() if isinstance(where, slice) else np.uint8(read)

    def __setitem__(self, where: int | slice, value: npt.ArrayLike) -> None:
        torch = importlib.import_module("torch")
        host = torch.from_numpy(np.array(value, np.uint8))
        self._tensor[where] = host.to(self._tensor.device)
        self._synchronize()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        del copy  # it always is one
        whole: Bytes = self[:]
        return whole if dtype is None else whole.astype(dtype)

    def __eq__(self, other: object) -> Any:
        return np.asarray(self) == np.asarray(other)

    def __ne__(self, other: object) -> Any:
        return np.asarray(self) != np.asarray(other)

    __hash__ = None  # type: ignore[assignment]  # as an array's

    def copy(self) -> Bytes:
        """Its bytes at this moment, in host memory."""
        whole: Bytes = self[:]
        return whole


def cuda(nbytes: int) -> DevicePool:
    """A pool on the device that is current for torch.

    Raises:
        EngineUnavailable: torch is not installed, or finds no CUDA device.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise EngineUnavailable(
            f"there is no CUDA memory to test with: torch can't be imported ({error})",
            hint="on a machine with a GPU: pip install torch",
        ) from error
    if not torch.cuda.is_available():
        raise EngineUnavailable(
            f"there is no CUDA memory to test with: torch {torch.__version__} finds no device",
            hint="run it on a machine with a GPU and its driver",
        )
    tensor = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    return DevicePool(tensor, torch.cuda.synchronize)
