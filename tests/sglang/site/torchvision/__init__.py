"""Stands in for torchvision, which SGLang's and transformers' image code import and a text model never uses.

Every submodule exists, and every name in it is a class that does nothing. The one enumeration whose members are read
while modules are imported has them.
"""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

__version__ = "0.28.0"


class InterpolationMode(enum.Enum):
    """The members that transformers maps to those of Pillow."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Nothing(type):
    """A class of nothing: any attribute of it is another one, and it stands in unions of annotations."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __call__(cls, *_: Any, **__: Any) -> Any:
        return cls


class _Submodule(ModuleType):
    """A module whose every name is a class of nothing."""

    InterpolationMode = InterpolationMode

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of this package."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Submodule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


sys.meta_path.append(_Finder())

from torchvision import io, transforms  # noqa: E402, F401  (read as attributes of the package)
