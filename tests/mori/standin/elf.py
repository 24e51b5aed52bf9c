"""What a shared library wants from others, read from its dynamic section; 64-bit little-endian ELF."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

_STRTAB, _DYNAMIC, _DYNSYM, _VERNEED, _VERSYM = 3, 6, 11, 0x6FFFFFFE, 0x6FFFFFFF
_NEEDED = 1


class Wanted(NamedTuple):
    """A symbol that another library has to define.

    Attributes:
        name: of the symbol.
        version: of the symbol, for instance "hip_4.2"; "" if it has none.
        library: that has this version; "" if the symbol has none.
    """

    name: str
    version: str
    library: str


class Library:
    """A shared library on disk.

    Attributes:
        needed: names of the libraries that it is linked to.
        wanted: symbols that it does not define itself.
    """

    def __init__(self, path: Path) -> None:
        self._bytes = path.read_bytes()
        assert self._bytes[:6] == b"\x7fELF\x02\x01", f"{path} is no 64-bit little-endian ELF file"
        (first,) = struct.unpack_from("<Q", self._bytes, 0x28)
        size, count = struct.unpack_from("<HH", self._bytes, 0x3A)
        headers = [struct.unpack_from("<IIQQQQIIQQ", self._bytes, first + number * size) for number in range(count)]
        # by kind: offset and size in the file, and the section of its texts
        self._sections = {header[1]: (header[4], header[5], headers[header[6]][4]) for header in headers}
        self.needed = [self._text(_DYNAMIC, value) for tag, value in self._pairs() if tag == _NEEDED]
        self.wanted = self._undefined(self._versions())

    def _pairs(self) -> list[tuple[int, int]]:
        offset, nbytes, _ = self._sections[_DYNAMIC]
        return [struct.unpack_from("<QQ", self._bytes, at) for at in range(offset, offset + nbytes, 16)]

    def _text(self, kind: int, at: int) -> str:
        start = self._sections[kind][2] + at
        return self._bytes[start : self._bytes.index(b"\0", start)].decode()

    def _versions(self) -> dict[int, tuple[str, str]]:
        """Number -> version and library."""
        found: dict[int, tuple[str, str]] = {}
        at = self._sections[_VERNEED][0]
        while True:
            _, count, library, first, following = struct.unpack_from("<HHIII", self._bytes, at)
            inner = at + first
            for _ in range(count):
                _, _, number, name, step = struct.unpack_from("<IHHII", self._bytes, inner)
                found[number] = self._text(_VERNEED, name), self._text(_VERNEED, library)
                inner += step
            if not following:
                return found
            at += following

    def _undefined(self, versions: dict[int, tuple[str, str]]) -> list[Wanted]:
        offset, nbytes, _ = self._sections[_DYNSYM]
        numbers = self._sections[_VERSYM][0]
        found = []
        for index in range(1, nbytes // 24):
            name, _, _, section = struct.unpack_from("<IBBH", self._bytes, offset + index * 24)
            (number,) = struct.unpack_from("<H", self._bytes, numbers + index * 2)
            if not section:
                found.append(Wanted(self._text(_DYNSYM, name), *versions.get(number, ("", ""))))
        return found
