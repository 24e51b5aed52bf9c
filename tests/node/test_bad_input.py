"""A scheduler's mistakes are one clear error, at the call that makes them; everything else goes on."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from kvferry import KVArgs, KVClassType, KVPoll, KVReceiver, KVSender, get_kv_class
from kvferry.config import Config
from kvferry.engines import find
from kvferry.errors import (
    AddressError,
    Code,
    ConfigError,
    EngineUnavailable,
    InputError,
    LayoutError,
    ProtocolError,
    RoomInUse,
    UnknownEngine,
)
from kvferry.presets import page_major

SOURCES = Path(__file__).parents[2] / "src"

BAD_INDICES = {
    "float": (np.array([1.0, 2.0]), "dtype float64 is no integer type"),
    "bool": (np.array([True, False]), "dtype bool is no integer type"),
    "text": (["1", "2"], "no integer type"),
    "two-dimensional": (np.array([[1, 2], [3, 4]]), r"shape \(2, 2\) is not one-dimensional"),
    "a scalar": (7, r"shape \(\) is not one-dimensional"),
    "nothing": (None, "is not one-dimensional"),
    "ragged": ([[1], [2, 3]], "no array of page numbers"),
    "negative": ([1, -1], "page -1 is outside of the pool's 32 pages"),
    "past the end": ([1, 32], "page 32 is outside of the pool's 32 pages"),
    "a token slot": (np.array([2**31], np.int64), "page 2147483648 is outside"),
    "huge": (np.array([2**63], np.uint64), "outside of the pool"),
    "larger than any integer": ([2**70], "no integer type"),
}


@pytest.mark.parametrize("name", BAD_INDICES)
def test_wrong_page_indices_are_refused_at_the_call_on_both_sides(make, kit, name):
    indices, words = BAD_INDICES[name]
    prefill, decode = make("prefill"), make("decode")
    prefill.fill([1, 2], seed=1)
    sender = kit.offer(prefill, 5, [1, 2], send=False)
    with pytest.raises(InputError, match=words):
        sender.send(indices)
    receiver = KVReceiver(decode.manager, None, 5, peers=[prefill.manager.endpoint])
    receiver.init()
    with pytest.raises(InputError, match=words):
        receiver.send_metadata(indices, 0)
    receiver.send_metadata([3, 4], 0)  # neither room has taken harm
    sender.send([1, 2])
    assert receiver.wait(3) is KVPoll.Success
    assert (decode.pages([3, 4]) == prefill.pages([1, 2])).all()


def test_an_engine_that_is_not_known_names_the_nearest_and_the_known_ones():
    with pytest.raises(UnknownEngine, match=r"no engine is called 'locl' \(did you mean 'local'\? known: .*nixl"):
        get_kv_class("locl", KVClassType.MANAGER)


def test_a_class_that_is_none_gets_the_known_ones():
    assert get_kv_class("local", "sender") is KVSender
    with pytest.raises(InputError, match=r"'mgr' is no class type \(one of KVClassType.KVARGS, KVClassType.MANAGER, "):
        get_kv_class("local", "mgr")


def test_an_engine_whose_package_is_missing_names_the_install_line(kit, monkeypatch):
    monkeypatch.setattr(find, "_registered", dict(find._registered))
    find.register("absent", "no_such_package.engine:Engine", "pip install no-such-package")
    manager = get_kv_class("absent", KVClassType.MANAGER)
    layout = page_major("toy", layers=1, kv_heads=1, head_dim=8, dtype="float16", pages=4, page_tokens=16)
    args = KVArgs(layout, [np.zeros(4 * 512, np.uint8)])
    with pytest.raises(EngineUnavailable, match=r"'no_such_package' is missing \(pip install no-such-package\)"):
        manager(args, "decode", environ={}, **kit.FAST)


def test_an_engine_option_that_is_not_known(make):
    with pytest.raises(ConfigError, match="no option 'mechanics'"):
        make("prefill", engine_options="mechanics=tcp")
    with pytest.raises(ConfigError, match="'mechanism' of the local engine is 'udp'"):
        make("prefill", engine_options="mechanism=udp")
    with pytest.raises(ConfigError, match="'mechanism' is not name=value"):
        make("prefill", engine_options="mechanism")


def test_more_pages_than_declared_fail_the_room_on_both_sides(make, kit):
    prefill, decode = make("prefill"), make("decode")
    receiver = kit.claim(decode, prefill, 5, [1, 2])
    sender = kit.offer(prefill, 5, [1, 2], send=False)
    sender.send([1])
    with pytest.raises(InputError, match=r"4 pages were sent, init\(\) declared 2"):
        sender.send([2, 3, 4])
    for room in (receiver, sender):
        assert room.wait(3) is KVPoll.Failed
        assert room.failure().reason.code is Code.PAGE_COUNT
        assert "4 pages were sent" in str(room.failure())


def test_fewer_pages_than_declared_are_told_when_the_sender_gives_up(make, kit):
    prefill, decode = make("prefill"), make("decode")
    receiver = kit.claim(decode, prefill, 5, [1, 2])
    sender = kit.offer(prefill, 5, [1, 2], send=False)
    sender.send([1])
    assert receiver.wait(0.3) is KVPoll.Transferring
    sender.clear()
    assert receiver.wait(3) is KVPoll.Failed
    assert "1 of 2 pages sent" in str(receiver.failure())
    kit.until(receiver.is_release_safe)


@pytest.mark.parametrize("more", [-1, 1])
def test_the_two_sides_differ_in_the_number_of_pages(make, kit, more):
    prefill, decode = make("prefill"), make("decode")
    receiver = kit.claim(decode, prefill, 5, range(4), num_tokens=64)
    pages = list(range(4 + more))
    sender = KVSender(prefill.manager, None, 5)
    sender.init(len(pages), num_tokens=16 * len(pages))
    sender.send(pages)
    assert receiver.wait(3) is KVPoll.Failed
    assert f"expects 64 tokens, prefill holds {64 + 16 * more}" in str(receiver.failure())
    assert (decode.pool == kit.SENTINEL).all()


def test_a_room_number_twice_at_once_is_refused_and_the_first_goes_on(make, kit):
    prefill, decode = make("prefill"), make("decode")
    prefill.fill([1, 2], seed=1)
    receiver, sender = kit.claim(decode, prefill, 5, [3, 4]), kit.offer(prefill, 5, [1, 2], send=False)
    with pytest.raises(RoomInUse, match="room 5 has a sender on this rank already"):
        KVSender(prefill.manager, None, 5)
    with pytest.raises(RoomInUse, match=r"room 5 has a receiver .* \(clear\(\) the earlier receiver first"):
        kit.claim(decode, prefill, 5, [6, 7])
    sender.send([1, 2])
    assert receiver.wait(3) is sender.wait(3) is KVPoll.Success
    assert (decode.pages([3, 4]) == prefill.pages([1, 2])).all()


BAD_NUMBERS = [-1, -(2**40), 2**64, 2**100, 1.5, float("nan"), "7", None, True, [1]]


@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_numbers_that_are_none_are_refused_at_the_call(make, kit, value):
    prefill, decode = make("prefill"), make("decode")
    peers = [prefill.manager.endpoint]
    with pytest.raises(InputError, match="prefill bootstrap_room: "):
        KVSender(prefill.manager, None, value)
    with pytest.raises(InputError, match="decode bootstrap_room: "):
        KVReceiver(decode.manager, None, value, peers=peers)
    sender = KVSender(prefill.manager, None, 5)
    for more in ("first_token", "num_tokens", "tag"):
        if (more, value) != ("num_tokens", None):
            with pytest.raises(InputError, match=f"prefill {more}: "):
                sender.init(2, **{more: value})
    with pytest.raises(InputError, match="prefill num_kv_indices: "):
        sender.init(value)
    if value != -1:
        with pytest.raises(InputError, match="prefill aux"):
            sender.init(2, value)
    receiver = KVReceiver(decode.manager, None, 5, peers=peers)
    with pytest.raises(InputError, match="decode tag: "):
        receiver.init(tag=value)
    if value is not None:
        with pytest.raises(InputError, match="decode prefill_dp_rank: "):
            receiver.init(value)
    receiver.init()
    for more in ("decode_prefix_len", "num_tokens", "tag", "aux_index"):
        if value is not None or more not in {"num_tokens", "aux_index"}:
            with pytest.raises(InputError, match=r"decode (aux|num|tag|decode)"):
                receiver.send_metadata([1, 2], **{more: value})
    sender.init(2)
    sender.send([1, 2])
    receiver.send_metadata([1, 2])
    assert receiver.wait(3) is KVPoll.Success
    assert prefill.manager.health() == decode.manager.health() == ""


@pytest.mark.parametrize("room", [0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_unsigned_64_bit_room_number_works(make, kit, room):
    prefill, decode = make("prefill"), make("decode")
    receiver, sender = kit.claim(decode, prefill, room, [3], tag=room), kit.offer(prefill, room, [1], tag=room)
    assert receiver.wait(3) is sender.wait(3) is KVPoll.Success


def test_numbers_that_are_too_large_for_a_request_cost_the_room_only(make, kit):
    prefill, decode = make("prefill"), make("decode")
    huge = 2**63 - 1
    receiver = KVReceiver(decode.manager, None, 5, peers=[prefill.manager.endpoint])
    receiver.init()
    with pytest.raises(InputError, match="need 576460752303423488 pages"):
        receiver.send_metadata([1, 2], num_tokens=huge)
    with pytest.raises(InputError, match="num_tokens: 5 is below 6"):
        receiver.send_metadata([1, 2], None, None, 6, num_tokens=5)
    receiver.send_metadata([1, 2], None, None, huge)
    assert receiver.wait(3) is KVPoll.Failed
    sender = KVSender(prefill.manager, None, 6)
    with pytest.raises(InputError, match="num_kv_indices counts pages, not tokens"):
        sender.init(2, num_tokens=33)
    sender.init(huge)
    receiver = kit.claim(decode, prefill, 6, [3])
    sender.send([1])
    sender.clear()
    assert receiver.wait(3) is KVPoll.Failed
    assert prefill.manager.health() == decode.manager.health() == ""


def test_aux_slots_that_do_not_exist(make, kit):
    prefill, decode = make("prefill"), make("decode")
    slots = len(prefill.aux)
    with pytest.raises(InputError, match=f"prefill: aux slot {slots} is outside of the {slots} slots"):
        kit.offer(prefill, 5, [1], aux_index=slots)
    with pytest.raises(InputError, match=f"decode: aux slot 99 is outside of the {slots} slots"):
        kit.claim(decode, prefill, 5, [1], aux_index=99)


def test_calls_in_the_wrong_order(make, kit):
    prefill, decode = make("prefill"), make("decode")
    sender = KVSender(prefill.manager, None, 5)
    with pytest.raises(ProtocolError, match=r"send\(\) before init"):
        sender.send([1])
    sender.init(1)
    with pytest.raises(ProtocolError, match=r"init\(\) was called before"):
        sender.init(1)
    sender.send([1])
    with pytest.raises(ProtocolError, match="the last of 1 pages was sent before"):
        sender.send([1])
    with pytest.raises(ProtocolError, match="room 5 has not failed"):
        sender.failure_exception()
    receiver = KVReceiver(decode.manager, None, 5, peers=[prefill.manager.endpoint])
    with pytest.raises(ProtocolError, match=r"send_metadata\(\) before init"):
        receiver.send_metadata([1])
    receiver.init()
    receiver.send_metadata([1])
    with pytest.raises(ProtocolError, match=r"send_metadata\(\) was called before"):
        receiver.send_metadata([1])
    assert receiver.wait(3) is KVPoll.Success


def test_classes_of_the_wrong_side(make):
    prefill, decode = make("prefill"), make("decode")
    with pytest.raises(InputError, match="KVSender needs a manager of the prefill side"):
        KVSender(decode.manager, None, 5)
    with pytest.raises(InputError, match="KVReceiver needs a manager of the decode side"):
        KVReceiver(prefill.manager, None, 5, peers=["127.0.0.1:1"])


@pytest.mark.parametrize("peer", ["", "x", "host", "host:", ":5", "host:0", "host:65536", "host:-1", "[::1]", "h:5x"])
def test_peers_that_are_not_host_and_port(make, peer):
    decode = make("decode")
    with pytest.raises(AddressError, match=r'is not host:port \(e\.g\. "10\.0\.0\.1:5000"'):
        KVReceiver(decode.manager, None, 5, peers=[peer])
    assert decode.manager.info()["rooms_in_use"] == 0


def test_peers_that_are_no_list(make):
    decode = make("decode")
    for peers, addr in (("127.0.0.1:5000", None), (None, None), ([], None), (["127.0.0.1:5000"], "127.0.0.1:8998")):
        with pytest.raises(InputError, match="peers"):
            KVReceiver(decode.manager, addr, 5, peers=peers)
    assert decode.manager.info()["rooms_in_use"] == 0


def test_a_malformed_bootstrap_address_leaves_no_room_behind(make):
    decode = make("decode")
    receiver = KVReceiver(decode.manager, "http://a:b:c:d", 5)
    receiver.init(0)
    assert receiver.wait(3) is KVPoll.Failed
    assert "bootstrap address 'http://a:b:c:d'" in str(receiver.failure())


def test_layouts_and_memory_that_do_not_fit(make, kit):
    layout = page_major("toy", layers=1, kv_heads=1, head_dim=8, dtype="float16", pages=4, page_tokens=16)
    manager = get_kv_class("local", KVClassType.MANAGER)

    def build(*buffers, aux=()):
        manager(KVArgs(layout, list(buffers), list(aux)), "prefill", environ={}, **kit.FAST)

    whole = np.zeros(4 * 512, np.uint8)
    with pytest.raises(LayoutError, match="is not bound to memory"):
        build()
    with pytest.raises(LayoutError, match="its buffer has 100"):
        build(np.zeros(100, np.uint8))
    with pytest.raises(LayoutError, match="3 buffers for 2 tensors"):
        build(whole, whole, whole)
    with pytest.raises(ConfigError, match="list is no memory that kvferry knows"):
        build([1, 2, 3])
    with pytest.raises(ConfigError, match="not C-contiguous"):
        build(np.zeros(8 * 512, np.uint8)[::2])
    with pytest.raises(ConfigError, match="aux buffer 0: it is empty"):
        build(whole, aux=[np.zeros((0, 4))])
    with pytest.raises(ConfigError, match="neither 'prefill' nor 'decode'"):
        manager(KVArgs(layout, [whole]), "both", environ={})


def test_settings_that_are_not_known_or_of_the_wrong_type(make, kit):
    with pytest.raises(ConfigError, match=r"unknown setting stal_s \(did you mean stall_s\?\)"):
        make("prefill", stal_s=3)
    layout = page_major("toy", layers=1, kv_heads=1, head_dim=8, dtype="float16", pages=4, page_tokens=16)
    args = KVArgs(layout, [np.zeros(4 * 512, np.uint8)])
    manager = get_kv_class("local", KVClassType.MANAGER)
    with pytest.raises(ConfigError, match="unknown setting stal_s"):
        manager(args, "prefill", Config(), stal_s=3)
    with pytest.raises(ConfigError, match="stall_s = 'soon' is not of type float"):
        manager(args, "prefill", Config(), stall_s="soon")
    with pytest.raises(ConfigError, match=r"KVFERRY_STALS_S \(did you mean KVFERRY_STALL_S\?\)"):
        manager(args, "prefill", environ={"KVFERRY_STALS_S": "3"})


def test_a_sender_after_shutdown_and_everything_else_after_it(make, kit):
    prefill, decode = make("prefill"), make("decode")
    sender, receiver = kit.offer(prefill, 5, [1], send=False), kit.claim(decode, prefill, 5, [1])
    prefill.manager.shutdown()
    assert receiver.wait(3) is KVPoll.Failed
    assert sender.poll() is KVPoll.Failed
    with pytest.raises(InputError, match="room 6: the manager is draining"):
        KVSender(prefill.manager, None, 6)
    assert prefill.manager.info()["engine"] == "local"
    assert "has ended" in prefill.manager.health()
    sender.abort()
    sender.clear()
    prefill.manager.shutdown()


def test_use_in_a_forked_child_is_refused_by_name():
    code = """
        import os, sys, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        import numpy as np
        from kvferry import KVArgs, KVBootstrapServer, KVManager, KVReceiver, KVSender
        from kvferry.errors import ForkError
        from kvferry.presets import page_major

        layout = page_major("toy", layers=1, kv_heads=1, head_dim=8, dtype="float16", pages=4, page_tokens=16)
        server = KVBootstrapServer(port=0)
        address = f"127.0.0.1:{server.port}"
        args = KVArgs(layout, [np.zeros(4 * 512, np.uint8)])
        prefill = KVManager(args, "prefill", environ={}, bootstrap_addr=address)
        decode = KVManager(KVArgs(layout, [np.zeros(4 * 512, np.uint8)]), "decode", environ={})
        sender, receiver = KVSender(prefill, None, 5), KVReceiver(decode, address, 5)
        uses = {
            "sender": lambda: KVSender(prefill, None, 6), "receiver": lambda: KVReceiver(decode, address, 6),
            "init": lambda: sender.init(1), "begin": lambda: receiver.init(0), "abort": sender.abort,
            "clear": sender.clear, "wait": lambda: sender.wait(1), "fileno": receiver.fileno, "poll": sender.poll,
            "safe": receiver.is_release_safe, "info": prefill.info, "health": decode.health,
            "update": lambda: prefill.update_buffers(args), "release": lambda: decode.release_quarantined(5),
            "shutdown": prefill.shutdown,
        }
        child = os.fork()
        if not child:
            wrong = []
            for name, use in uses.items():
                try:
                    use()
                except ForkError as error:
                    if "used in its fork" not in str(error) or "spawn" not in str(error):
                        wrong.append(f"{name}: {error}")
                except BaseException as error:
                    wrong.append(f"{name}: {error!r}")
                else:
                    wrong.append(f"{name} was not refused")
            print("; ".join(wrong), flush=True)
            os._exit(len(wrong))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sender.init(1)
        receiver.init(0)
        sender.send([1])
        receiver.send_metadata([2])
        print(code, receiver.wait(5).name, sender.wait(5).name, flush=True)
        prefill.shutdown(); decode.shutdown(); server.close()
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(SOURCES)}, check=False,
    )  # fmt: skip
    assert ended.stdout.split("\n")[:2] == ["", "0 Success Success"], ended.stdout + ended.stderr
    assert ended.returncode == 0


@pytest.mark.parametrize("chunks", [[[1, 2, 1]], [[1, 2], [2]], [list(range(100, 180)), [100]]])
def test_a_page_that_is_sent_twice_fails_the_room_on_both_sides(make, kit, chunks):
    layout = page_major("toy", layers=3, kv_heads=2, head_dim=8, dtype="float16", pages=200, page_tokens=16)
    prefill, decode = make("prefill", layout=layout), make("decode", layout=layout)
    sender = KVSender(prefill.manager, None, 5)
    sender.init(sum(len(chunk) for chunk in chunks), 0)
    count = sum(len(chunk) for chunk in chunks)
    receiver = kit.claim(decode, prefill, 5, range(count))
    for chunk in chunks[:-1]:
        sender.send(chunk)
    with pytest.raises(InputError, match="of space 'kv' is sent twice"):
        sender.send(chunks[-1])
    assert receiver.wait(3) is KVPoll.Failed
    assert "sent twice" in str(receiver.failure())
