"""Memory of the HIP stand-in's devices, for suites and clusters: "standin_memory:standin"."""

import ctypes
import itertools
import weakref

import numpy as np

from kvferry.errors import EngineUnavailable

DEVICES = 2

_devices = itertools.cycle(range(DEVICES))


class StandinArray(np.ndarray):
    """A numpy array over memory of the stand-in, which the host can reach; what is cut from it lies there, too."""

    device_index = -1

    def __array_finalize__(self, source):
        self.device_index = getattr(source, "device_index", -1)


def standin(nbytes):
    """Allocate memory, of each device in turn; it is freed with the last array over it."""
    try:
        hip = ctypes.CDLL("libamdhip64.so.7")
    except OSError as error:
        raise EngineUnavailable("the stand-in for HIP is not there", hint="run it by `make mori`") from error
    device, start = next(_devices), ctypes.c_void_p()
    assert hip.hipSetDevice(device) == 0
    assert hip.hipMalloc(ctypes.byref(start), ctypes.c_size_t(nbytes)) == 0
    memory = (ctypes.c_uint8 * nbytes).from_address(start.value)
    # not at exit: the library may still copy then
    weakref.finalize(memory, hip.hipFree, ctypes.c_void_p(start.value)).atexit = False
    array = np.frombuffer(memory, np.uint8).view(StandinArray)
    array.device_index = device
    return array
