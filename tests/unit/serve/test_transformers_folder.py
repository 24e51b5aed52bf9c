"""What is written is what was read; that transformers understands it is shown by `make reference` and `make vllm`."""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from kvferry.errors import ConfigError
from kvferry.serve.tokenizer import load_tokenizer
from kvferry.serve.transformers_folder import config_dict, state_dict, write_folder
from kvferry.serve.weights import load


def test_a_folder_holds_the_files_values_and_its_tokenizer(tiny_gguf, tmp_path):
    gguf = tiny_gguf({"tokenizer.chat_template": "turns"})
    write_folder(gguf, tmp_path / "new" / "folder")
    folder, weights = tmp_path / "new" / "folder", load(gguf)
    found = load_file(folder / "model.safetensors")
    expected = state_dict(weights)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], values) for name, values in expected.items())
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("abc a").ids == load_tokenizer(gguf).encode(
        "abc a"
    )
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == "turns"
    assert json.loads((folder / "config.json").read_text()) == config_dict(weights.config)


def test_joined_matrices_come_apart(tiny_weights):
    state, config = state_dict(tiny_weights), tiny_weights.config
    layer = tiny_weights.layers[1]
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    assert [len(state[name]) for name in names] == [config.heads * 8, config.kv_heads * 8, config.kv_heads * 8]
    assert np.array_equal(np.concatenate([state[name] for name in names]), layer.qkv)
    assert np.array_equal(state["model.layers.1.mlp.up_proj.weight"], layer.gate_up[config.ffn :])
    assert "lm_head.weight" not in state
    apart = dataclasses.replace(tiny_weights, config=dataclasses.replace(config, tied_embeddings=False))
    assert state_dict(apart)["lm_head.weight"] is tiny_weights.lm_head


def test_what_transformers_has_no_word_for_is_refused(tiny_config):
    with pytest.raises(ConfigError, match="rotary frequencies one by one"):
        config_dict(dataclasses.replace(tiny_config, rope_factors=(1.0, 2.0)))


def test_safetensors_is_asked_for_by_name(tiny_gguf, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ConfigError, match="pip install safetensors"):
        write_folder(tiny_gguf(), tmp_path)
