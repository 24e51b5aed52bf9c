"""What is free: the least of what the machine and the cgroups have, from files as they are found in the wild."""

import pytest

from kvferry.free_memory import FreeMemory, free_memory

GIB = 1 << 30


@pytest.fixture
def root(tmp_path):
    def make(files):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return make


MEMINFO = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:    {8 << 20} kB\nHugePages_Total: 0\n"}


def test_without_cgroups_it_is_what_the_kernel_calls_available(root):
    assert free_memory(root(MEMINFO)) == FreeMemory(8 * GIB, "this machine")


def test_nothing_known_is_none(tmp_path):
    assert free_memory(tmp_path) is None


def v2(path, limit, used, cached=0):
    place = f"sys/fs/cgroup/{path}".rstrip("/")
    return {
        f"{place}/memory.max": f"{limit}\n",
        f"{place}/memory.current": f"{used}\n",
        f"{place}/memory.stat": f"anon 5\ninactive_file {cached}\n",
    }


def test_a_cgroup_of_version_2_limits_it_and_caches_count_as_free(root):
    files = MEMINFO | {"proc/self/cgroup": "0::/a/b\n"} | v2("a/b", 4 * GIB, 3 * GIB, GIB // 2)
    assert free_memory(root(files)) == FreeMemory(GIB + GIB // 2, "cgroup /a/b")


def test_a_cgroup_further_up_limits_it(root):
    files = MEMINFO | {"proc/self/cgroup": "0::/a/b\n"} | v2("a/b", "max", 3 * GIB) | v2("a", 4 * GIB, 3 * GIB)
    assert free_memory(root(files)) == FreeMemory(GIB, "cgroup /a")


def test_in_a_container_the_root_of_what_is_seen_limits_it(root):
    files = MEMINFO | {"proc/self/cgroup": "0::/\n"} | v2("", GIB, GIB + 5)
    assert free_memory(root(files)) == FreeMemory(0, "cgroup /")


def test_a_cgroup_of_version_1_limits_it(root):
    place = "sys/fs/cgroup/memory/box"
    files = MEMINFO | {
        "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/box\n0::/\n",
        f"{place}/memory.limit_in_bytes": str(2 * GIB),
        f"{place}/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
    }
    assert free_memory(root(files)) == FreeMemory(GIB, "cgroup /box")


def test_here_it_is_a_number():
    found = free_memory()
    assert found is None or 0 <= found.nbytes < 1 << 50
