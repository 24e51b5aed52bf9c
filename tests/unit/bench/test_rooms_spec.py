"""What `kvferry bench rooms` accepts."""

import resource

import pytest

from kvferry.bench.rooms_spec import RoomsSpec, check, crowd_size
from kvferry.errors import ConfigError

WRONG = {
    "no bytes": ({"request_bytes": 0}, "--request-bytes 0 is below 1"),
    "a page that K and V of 16 tokens do not fill": ({"request_bytes": 33}, "33 is not a multiple of 32"),
    "no samples": ({"samples": 0}, "--samples 0 is below 1"),
    "a negative number of rooms": ({"rooms": -1}, "--rooms -1 is below 0"),
    "no window": ({"window": 0}, "--window 0 is below 1"),
    "an unknown mode": ({"modes": ("wait", "spin")}, "--modes 'spin' is not known .one of wait, nap, yield, busy"),
    "an unknown digest": ({"digest": "crc"}, "--digest 'crc' is not known"),
    "a negative time": ({"idle_s": -1.0}, "--idle-s -1 is not within 0 and 600"),
    "no time": ({"idle_s": float("nan")}, "--idle-s nan is not within 0 and 600"),
    "no peer": ({"peers": (0, 5)}, "--peers 0,5 are not ascending numbers from 1 on"),
    "peers that decrease": ({"peers": (5, 1)}, "--peers 5,1 are not ascending"),
    "the same number of peers twice": ({"peers": (5, 5)}, "--peers 5,5 are not ascending"),
    "more peers than open files": ({"peers": (1, 10**9)}, "--peers 1000000000 need about 8000000200 open files"),
    "more memory than there is": ({"window": 1 << 40}, "lower --window or --request-bytes"),
    "an unknown engine": ({"engine": "locl"}, "no engine is called 'locl'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_can_not_be_measured_is_refused_with_the_options_name(name):
    options, words = WRONG[name]
    with pytest.raises(ConfigError, match=words):
        check(RoomsSpec(**options))


def test_parts_can_be_left_out():
    check(RoomsSpec(modes=(), rooms=0, idle_s=0.0, peers=()))


def test_a_low_limit_of_open_files_says_what_is_possible(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    with pytest.raises(ConfigError, match=r"its limit is 1024 .raise it .ulimit -Hn., or measure at most 103 peers"):
        check(RoomsSpec())
    check(RoomsSpec(peers=(1, 103)))
    assert crowd_size() == 20  # such a process is allowed fewer nodes, too


def test_a_process_never_has_fewer_than_one_node(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    assert crowd_size() == 1
