"""A GGUF file, read by the package gguf, with everything that can be wrong with it as one kind of error.

Reading takes seconds (every word of the vocabulary becomes objects), so a file is read once and what a start
needs of it is cached; gguf is imported only then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_T = TypeVar("_T")

_MOST_VALUES = 1 << 20
# what gguf raises for files that are foreign, cut off or damaged; it promises no exceptions of its own
_BROKEN = (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class Metadata:
    """The keys of a GGUF file, or some of them.

    Attributes:
        path: the file.
        entries: key to value; strings are str, arrays are lists.
    """

    path: Path
    entries: Mapping[str, Any]

    def value(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        """A value of one kind: int, float, bool, str or list.

        Raises:
            ConfigError: it is of another kind, or is missing and has no default.
        """
        value = self.entries.get(key, default)
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        found = "is missing" if value is None else f"is {str(value)[:80]!r}"
        raise ConfigError(f"{self.path}: the metadata key {key} {found}; its kind must be {kind.__name__}")


@dataclass(frozen=True)
class GgufFile(Metadata):
    """A whole GGUF file.

    Attributes:
        tensors: name to directory entry and mapped data.
    """

    tensors: Mapping[str, ReaderTensor]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor, rows first as numpy has it; None if there is no such tensor."""
        tensor = self.tensors.get(name)
        return tuple(reversed(tensor.shape.tolist())) if tensor else None

    def dequantized(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor as float32, in its numpy shape.

        Raises:
            ConfigError: its storage type can't be read.
        """
        from gguf import dequantize

        tensor = self.tensors[name]
        try:
            return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        except NotImplementedError as error:
            raise ConfigError(
                f"{self.path}: tensor {name}, storage type {tensor.tensor_type.name}, can't be read: {error}",
                hint="convert the file to F32, F16, Q8_0 or Q4_1",
            ) from error


def read_gguf(path: Path) -> GgufFile:
    """Read a GGUF file's metadata and map its tensors.

    Raises:
        ConfigError: it can't be read, is not a GGUF file, is cut off or damaged, or gguf is not installed.
    """
    try:
        with np.errstate(over="raise"):
            reader = _bounded_reader(path)
        entries = {key: field.contents() for key, field in reader.fields.items()}
        return GgufFile(path, entries, {tensor.name: tensor for tensor in reader.tensors})
    except ImportError as error:
        raise ConfigError("the package gguf is not installed", hint="pip install 'kvferry[demo]'") from error
    except _BROKEN as error:
        raise ConfigError(
            f"{path}: can't be read as a GGUF file: {type(error).__name__} {str(error)[:100]!r}",
            hint="give the path of a GGUF file; one that is cut off or damaged must be downloaded again",
        ) from error


def _bounded_reader(path: Path) -> GGUFReader:
    from gguf import GGUFReader, GGUFValueType

    class BoundedReader(GGUFReader):
        """Believes no array length beyond that of any vocabulary: a damaged one would fill the memory."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            is_array = int(raw_type) == int(GGUFValueType.ARRAY)  # as numpy's number it takes seconds to compare
            if is_array and (length := self._get(orig_offs + 4, np.uint64)[0]) > _MOST_VALUES:
                raise ValueError(f"an array of {length} values")
            return super()._get_field_parts(orig_offs, raw_type)

    reader = BoundedReader(path)
    if reader.byte_order == "S":
        raise ValueError("the byte order is that of another kind of machine")
    return reader
