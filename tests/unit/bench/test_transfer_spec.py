"""What `kvferry bench transfer` accepts, and the layouts, pages and rows that both sides derive from it."""

import numpy as np
import pytest

from kvferry.bench import transfer_spec
from kvferry.bench.transfer_spec import (
    TransferSpec,
    check,
    layout_of,
    manager_settings,
    rows_of,
    shares,
    source_pages,
    target_pages,
)
from kvferry.engines import find
from kvferry.errors import ConfigError, EngineUnavailable, InputError
from kvferry.free_memory import FreeMemory
from kvferry.node.footprint import footprint

SMALL = {"layers": 3, "pages": 20, "page_bytes": 128}
WRONG = {
    "no layers": ({"layers": 0}, "--layers 0 is below 1"),
    "no pages": ({"pages": 0}, "--pages 0 is below 1"),
    "no bytes": ({"page_bytes": 0}, "--page-bytes 0 is below 1"),
    "nothing in flight": ({"inflight": 0}, "--inflight 0 is below 1"),
    "no rounds": ({"repeats": 0}, "--repeats 0 is below 1"),
    "time backwards": ({"forward_ms": -1}, "--forward-ms -1 is below 0"),
    "a negative seed": ({"seed": -1}, "--seed -1 is below 0"),
    "a page that K and V of 16 tokens do not fill": ({"page_bytes": 100}, "100 is not a multiple of 32"),
    "more requests than pages": ({"pages": 3, "inflight": 4}, r"--inflight 4 is above --pages 3 .each request needs"),
    "an unknown order": ({"order": "random"}, "--order 'random' is not known .one of contig, shuffle, reverse"),
    "an unknown pool": ({"pool": "huge"}, "--pool 'huge' is not known .one of private, memfd"),
    "an unknown layout": ({"layout": "block"}, "--layout 'block' is not known .one of page, layer"),
    "an unknown way to wait": ({"wait": "spin"}, "--wait 'spin' is not known .one of wait, yield, nap, busy"),
    "an unknown digest": ({"digests": ("crc",)}, "--digest 'crc' is not known .one of off, sample, full"),
    "an unknown engine": ({"engine": "locl"}, "no engine is called 'locl' .did you mean 'local'"),
    "no mechanism": ({"mechanism": " "}, "--mechanism ' ' is no word"),
    "a mechanism and more": ({"mechanism": "tcp,x=1"}, "--mechanism 'tcp,x=1' is no word"),
    "more memory than there is": ({"pages": 1 << 40}, "need [0-9]+ bytes; .* has [0-9]+ free.*lower --layers, --pages"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_can_not_be_measured_is_refused_with_the_options_name(name):
    options, words = WRONG[name]
    with pytest.raises(ConfigError, match=words):
        check(TransferSpec(**options))


def test_the_defaults_are_128_mib_and_pass():
    spec = TransferSpec()
    assert (spec.nbytes, spec.layers, spec.page_bytes) == (128 << 20, 1, 65536)
    check(spec)


def test_an_engine_whose_library_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(find, "_registered", {})
    find.register("mine", "no_such_package.engine:Engine", "pip install no-such-package")
    with pytest.raises(EngineUnavailable, match="'no_such_package' is missing"):
        check(TransferSpec(engine="mine"))


def test_a_system_that_does_not_say_what_is_free_is_tried(monkeypatch):
    monkeypatch.setattr(transfer_spec, "free_memory", lambda: None)
    check(TransferSpec(pages=1 << 40))
    monkeypatch.setattr(transfer_spec, "free_memory", lambda: FreeMemory(1000, "cgroup /small"))
    with pytest.raises(InputError, match="cgroup /small has 1000 free"):
        check(TransferSpec())


@pytest.mark.parametrize("layout", ["page", "layer"])
def test_rows_are_the_bytes_that_the_layout_says(layout):
    spec = TransferSpec(**SMALL, layout=layout)
    owner = np.full(spec.pool_bytes, 255, np.uint8)
    for page in range(spec.pool_pages):
        starts, ends = footprint(layout_of(spec), {"kv": np.array([page], np.int32)})
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            owner[start:end] = page
    rows = rows_of(spec, owner).view(np.uint8)
    assert rows.size == spec.pool_bytes
    for page in range(spec.pool_pages):
        assert set(rows[:, page].ravel().tolist()) == {page}


@pytest.mark.parametrize("order", ["contig", "shuffle", "reverse"])
def test_pages_are_named_once_and_leave_guards(order):
    spec = TransferSpec(**SMALL, order=order)
    for pages in (source_pages(spec), target_pages(spec)):
        assert pages.dtype == np.int32
        assert len(set(pages.tolist())) == spec.pages
        assert (pages.min(), pages.max()) >= (0, 0)
        assert pages.max() < spec.pool_pages
    assert spec.pool_pages - spec.pages == spec.guards >= 2


def test_the_orders_are_what_they_are_called():
    source, target = (pages(TransferSpec(**SMALL, order="contig")) for pages in (source_pages, target_pages))
    assert source.tolist() == target.tolist() == list(range(source[0], source[0] + 20))
    assert source[0] > 0  # a page of guard before, and one behind
    assert target_pages(TransferSpec(**SMALL, order="reverse")).tolist() == target.tolist()[::-1]
    mixed = [
        pages(TransferSpec(**SMALL, order="shuffle", seed=seed))
        for seed in (1, 2)
        for pages in (source_pages, target_pages)
    ]
    assert len({tuple(pages) for pages in mixed}) == 4


def test_the_pages_are_dealt_out_to_the_requests_in_flight():
    spec = TransferSpec(**SMALL, inflight=3)
    parts = shares(spec, target_pages(spec))
    assert [len(part) for part in parts] == [7, 7, 6]
    assert np.concatenate(parts).tolist() == target_pages(spec).tolist()


def test_only_what_was_given_becomes_a_setting(monkeypatch):
    monkeypatch.setenv("KVFERRY_ENGINE_OPTIONS", "depth=3,mechanism=cma")
    assert manager_settings(None, "off") == {"digest": "off"}
    assert manager_settings("tcp", "full") == {"engine_options": "depth=3,mechanism=tcp", "digest": "full"}


def test_a_mistyped_variable_is_found_before_anything_is_started(monkeypatch):
    monkeypatch.setenv("KVFERRY_BATCH_BYTE", "1")
    with pytest.raises(ConfigError, match=r"unknown environment variable KVFERRY_BATCH_BYTE .*KVFERRY_BATCH_BYTES"):
        check(TransferSpec())
