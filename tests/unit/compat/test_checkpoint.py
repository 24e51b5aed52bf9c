"""Checkpoints are told apart by their files, wherever the folders lie."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.compat.checkpoint import LOOK_BYTES, VARIABLE, digest, model_id, weight_files


@pytest.fixture
def checkpoint(tmp_path):
    def make(where, seed=1, files=2, suffix="safetensors"):
        folder = tmp_path / where / "model"
        folder.mkdir(parents=True)
        random = np.random.default_rng(seed)
        for number in range(files):
            (folder / f"part-{number}.{suffix}").write_bytes(random.bytes(3_000_000))
        (folder / "config.json").write_text("{}")
        return folder

    return make


def test_the_same_weights_elsewhere_are_the_same_and_other_weights_under_the_same_name_are_not(checkpoint):
    one, copy, other = checkpoint("a"), checkpoint("b"), checkpoint("c", seed=2)
    assert model_id(str(one)) == model_id(f"{copy}/")
    assert model_id(str(one)).startswith("model@")
    assert model_id(str(one)) != model_id(str(other))


def test_a_tensor_that_was_changed_is_seen(checkpoint):
    folder = checkpoint("a")
    before = model_id(str(folder))
    path = folder / "part-1.safetensors"
    data = bytearray(path.read_bytes())
    data[1_000_000:1_100_000] = bytes(100_000)
    path.write_bytes(data)
    assert model_id(str(folder)) != before


def test_a_file_that_is_missing_longer_or_renamed_is_seen(checkpoint):
    folder = checkpoint("a")
    seen = {model_id(str(folder))}
    path = folder / "part-1.safetensors"
    path.write_bytes(path.read_bytes() + b"more")
    seen.add(model_id(str(folder)))
    path.rename(folder / "part-2.safetensors")
    seen.add(model_id(str(folder)))
    (folder / "part-2.safetensors").unlink()
    assert len(seen | {model_id(str(folder))}) == 4


def test_a_folder_with_two_formats_is_that_of_the_first(checkpoint):
    folder = checkpoint("a")
    before = model_id(str(folder))
    (folder / "part-0.bin").write_bytes(b"the same weights once more")
    assert model_id(str(folder)) == before
    assert [path.name for path in weight_files(checkpoint("b", suffix="gguf"))] == ["part-0.gguf", "part-1.gguf"]


def test_small_and_empty_files_are_read_whole(tmp_path):
    path = tmp_path / "one.gguf"
    found = set()
    for data in (b"", b"x", bytes(LOOK_BYTES), bytes(LOOK_BYTES - 1) + b"x"):
        path.write_bytes(data)
        found.add(digest([path]))
    assert len(found) == 4
    assert model_id(str(path)) == f"one.gguf@{digest([path])}"


def test_a_name_without_files_stands_for_itself_and_a_variable_for_either(checkpoint, monkeypatch):
    assert model_id("nobody/has-this-model") == "has-this-model"
    monkeypatch.setenv(VARIABLE, "release 7")
    assert model_id("nobody/has-this-model") == model_id(str(checkpoint("a"))) == "release 7"
