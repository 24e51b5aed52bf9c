"""Several ranks put one cache together in a file; what nobody has written is seen."""

import threading

import numpy as np
import pytest

from kvferry.serve.cache_file import CacheFile

SHAPE = (2, 2, 3, 5, 4)


@pytest.fixture
def path(tmp_path):
    CacheFile.create(tmp_path / "prefill.kv", SHAPE)
    return tmp_path / "prefill.kv"


@pytest.fixture
def opened(path):
    files = [CacheFile(path, SHAPE) for _ in range(2)]
    path.unlink()
    yield files
    for file in files:
        file.close()


def test_all_who_opened_it_see_the_same_even_without_its_name(opened):
    one, other = opened
    one.values[1, 0, 2, 3] = 1.5
    assert (other.values[1, 0, 2, 3] == 1.5).all()


def test_what_is_missing_is_named_until_everything_is_there(opened):
    file = opened[0]
    assert file.missing() == "layer 0, head 0, token 0, k and 59 more elements"
    file.values[:] = 0
    assert file.missing() == ""
    file.values[1, 1, 2, 4].view(np.uint16)[3] = 0xFFFF
    assert file.missing() == "layer 1, head 2, token 4, v and 0 more elements"


def test_only_one_at_a_time_holds_the_lock(opened):
    one, other = opened
    taken = threading.Event()

    def wait():
        with other.locked():
            taken.set()

    with one.locked():
        waiter = threading.Thread(target=wait)
        waiter.start()
        assert not taken.wait(0.2)
    assert taken.wait(5)
    waiter.join()


def test_a_file_is_not_made_twice(path):
    with pytest.raises(FileExistsError):
        CacheFile.create(path, SHAPE)
