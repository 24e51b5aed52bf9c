"""Descriptor 0, which the library closes by mistake.

Its RDMA backend that waits for events closes its own descriptor twice when it is destroyed, the second time under the
number 0: the standard input, or what this process has as 0 since. So 0 is never free when the library may open
something, and a backend is destroyed by a thread for which closing 0 does nothing: the kernel skips that call, by a
filter that ends with the thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # 32-bit words at fixed offsets, against constants
_NUMBER_AT, _MACHINE_AT, _ARGUMENT_AT = 0, 4, 16  # struct seccomp_data
_ALLOW, _SKIP = 0x7FFF0000, 0x00050000  # skipped, as if it had returned 0
_MACHINES = {"x86_64": (0xC000003E, 3), "aarch64": (0xC00000B7, 57)}
"""The kernel's number of a machine, and of `close` there."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def occupy() -> None:
    """Open something harmless as descriptor 0 where nothing is."""
    with contextlib.suppress(OSError):
        os.fstat(0)
        return
    null = os.open(os.devnull, os.O_RDWR)
    if null:  # somebody was faster
        os.close(null)


def without_closing_it(call: Callable[[], object]) -> bool:
    """Call, on a thread of its own, what may close descriptor 0, and have that do nothing.

    Returns:
        False, and nothing was called, where the kernel knows no such filter.
    """
    with ThreadPoolExecutor(1) as aside:
        return aside.submit(_behind_filter, call).result()


def _behind_filter(call: Callable[[], object]) -> bool:
    if platform.machine() not in _MACHINES or not _set_filter(_steps(*_MACHINES[platform.machine()])):
        return False
    call()
    return True


def _steps(machine: int, close: int) -> bytes:
    """The filter: code, how many steps to skip if so and if not so, and a constant, for each step."""
    return b"".join(
        struct.pack("HBBI", *step)
        for step in (
            (_LOAD, 0, 0, _MACHINE_AT),
            (_JUMP_IF_EQUAL, 0, 4, machine),
            (_LOAD, 0, 0, _NUMBER_AT),
            (_JUMP_IF_EQUAL, 0, 2, close),
            (_LOAD, 0, 0, _ARGUMENT_AT),
            (_JUMP_IF_EQUAL, 1, 0, 0),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _SKIP),
        )
    )


def _set_filter(steps: bytes) -> bool:
    """For the calling thread alone; a process without privileges may only set one if it can gain none any more."""
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(steps) // struct.calcsize("HBBI"), steps)
    unprivileged = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return not unprivileged and not libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
