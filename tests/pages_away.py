"""Pages of this process that nobody can read or write for a while."""

import contextlib
import ctypes
import mmap


@contextlib.contextmanager
def out_of_reach(address):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert libc.mprotect(address, mmap.PAGESIZE, 0) == 0
    yield
    assert libc.mprotect(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE) == 0
