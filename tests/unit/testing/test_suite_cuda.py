"""Pools on a device, on a stand-in for torch; `make reference` runs the same on torch's own tensors in host memory."""

import types

import numpy as np
import pytest

from kvferry.engines.seam import Caps
from kvferry.errors import EngineUnavailable
from kvferry.testing import EngineSuite, suite_cuda
from kvferry.testing.suite_cuda import DevicePool, cuda
from kvferry.testing.suite_memory import address_of, device_of, region_of
from kvferry.testing.suite_pair import HostMemoryOnly


class Tensor:
    """As much of a tensor as a pool needs; it lies in host memory and says that it is on device 3."""

    device = types.SimpleNamespace(type="cuda", index=3)

    def __init__(self, array):
        self.array = array

    def numel(self):
        return self.array.size

    def data_ptr(self):
        return self.array.ctypes.data

    def __getitem__(self, where):
        return Tensor(self.array[where])

    def __setitem__(self, where, value):
        self.array[where] = value.array

    def cpu(self):
        return self

    def to(self, device):
        assert device is self.device
        return self

    def numpy(self):
        return self.array


class FakeTorch(types.ModuleType):
    uint8, __version__ = np.uint8, "0"

    def __init__(self, has_device=True):
        super().__init__("torch")
        self.waited = 0
        self.cuda = types.SimpleNamespace(is_available=lambda: has_device, synchronize=self.wait)

    def wait(self):
        self.waited += 1

    def zeros(self, nbytes, dtype, device):
        assert (dtype, device) == (np.uint8, "cuda")
        return Tensor(np.zeros(nbytes, dtype))

    def from_numpy(self, array):
        return Tensor(array)


@pytest.fixture
def torch(monkeypatch):
    made = FakeTorch()
    monkeypatch.setitem(__import__("sys").modules, "torch", made)
    return made


def test_a_device_pool_is_used_like_an_array(torch):
    pool = cuda(100)
    pool[:] = 0xEE
    pool[10:13] = np.array([1, 2, 3], np.uint8)
    assert pool[10] == 1
    assert pool[9:14].tolist() == [0xEE, 1, 2, 3, 0xEE]
    assert (len(pool), pool.nbytes) == (100, 100)
    assert np.array_equal(pool, pool.copy())
    assert (pool != 0xEE).sum() == 3
    assert np.flatnonzero(np.asarray(pool) != pool.copy()).tolist() == []
    kept = pool.copy()
    pool[:] = 0
    assert kept[10] == 1
    assert (pool == 0).all()
    assert torch.waited > 5


def test_it_says_where_it_lies(torch):
    pool = cuda(64)
    assert (device_of(pool), address_of(pool)) == (3, pool._tensor.data_ptr())
    assert (region_of(pool).device, region_of(pool).nbytes) == (3, 64)


def test_an_engine_of_host_memory_is_not_given_device_memory(torch):
    class Suite(EngineSuite):
        memory = "kvferry.testing.suite_cuda:cuda"

    suite = Suite()
    with pytest.raises(pytest.skip.Exception, match="'local' has no DEVICE_MEMORY: cuda memory is not for it"):
        suite.setup_method()
    suite.teardown_method()
    with pytest.raises(HostMemoryOnly):
        suite.make_pair()
    assert Caps.DEVICE_MEMORY not in suite.make_engine().caps


@pytest.mark.parametrize(
    ("module", "reason"), [(None, "torch can't be imported"), (FakeTorch(has_device=False), "torch 0 finds no device")]
)
def test_where_there_is_no_device_it_says_so(monkeypatch, module, reason):
    monkeypatch.setitem(__import__("sys").modules, "torch", module)
    with pytest.raises(EngineUnavailable, match=reason):
        cuda(10)


def test_torch_is_imported_by_nothing_but_a_request_for_such_memory():
    assert not hasattr(suite_cuda, "torch")
    assert DevicePool.__module__ == "kvferry.testing.suite_cuda"
