"""Tiny models with fixed weights, prompts and the tokens that transformers generates from them.

Run as a program, it writes one model and its references into a folder; the tests import the names alone, so that
neither torch nor transformers is loaded in their process.

The weights are drawn wide, so that each token depends on all that came before it, and prompts are drawn until the
lead of every generated token over the runner-up is above what another order of additions may change.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NEW_TOKENS = 16
PROMPT_LENGTHS = (37, 200, 600)
WINDOW_TOKENS = 64
_VOCABULARY = 1024
_LEAD = {"bfloat16": 0.125, "float32": 1e-3}
"""Least difference of the two largest logits, which are about 10."""
_SHAPE = {
    "vocab_size": _VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None, "tie_word_embeddings": False, "initializer_range": 0.25,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 4, "moe_intermediate_size": 64, "topk_method": "greedy", "moe_layer_freq": 1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 1024,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
_GROUPED = {"num_key_value_heads": 2, "head_dim": 32}


@dataclass(frozen=True)
class TinyModel:
    """A model as transformers makes it.

    Attributes:
        config: name of the configuration's class.
        settings: what it gets besides the shape that all models share.
        rows: (layer, field, head) combinations that hold every token.
        window_rows: those that hold the last WINDOW_TOKENS tokens.
        dtypes: those that there are references for.
    """

    config: str
    settings: dict[str, Any]
    rows: int
    window_rows: int = 0
    dtypes: tuple[str, ...] = ("float32",)


MODELS = {
    "llama": TinyModel("LlamaConfig", _GROUPED, rows=16, dtypes=("bfloat16", "float32")),
    "qwen3": TinyModel("Qwen3Config", _GROUPED, rows=16),
    "deepseek": TinyModel("DeepseekV2Config", {**_LATENT, "initializer_range": 0.2}, rows=4),
    "sliding": TinyModel(
        "MellumConfig",
        {
            **_GROUPED, "initializer_range": 0.2, "sliding_window": WINDOW_TOKENS,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        rows=8, window_rows=8,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Reference:
    """A prompt, and what must be generated from it."""

    prompt: list[int]
    tokens: list[int]


def references(folder: Path, dtype: str) -> list[Reference]:
    """Those of one dtype, in the order of PROMPT_LENGTHS."""
    found = json.loads((folder / f"{dtype}.json").read_text())
    return [Reference(entry["prompt"], entry["tokens"]) for entry in found]


def make_model(name: str, folder: Path) -> None:
    """Write a model in a process of its own."""
    command = [sys.executable, __file__, name, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if ended.returncode:
        raise RuntimeError(f"model {name}: {ended.stderr[-4000:]}")


# -- in that process


def _main(name: str, folder: Path) -> None:
    import torch
    import transformers

    chosen = MODELS[name]
    torch.set_num_threads(1)
    torch.manual_seed(7)
    config = getattr(transformers, chosen.config)(**{**_SHAPE, **chosen.settings})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.to(torch.bfloat16).save_pretrained(folder)
    for dtype in chosen.dtypes:
        drawn = random.Random(1)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        found = [_reference(model, length, _LEAD[dtype], drawn) for length in PROMPT_LENGTHS]
        (folder / f"{dtype}.json").write_text(json.dumps(found))


def _reference(model: Any, length: int, least_lead: float, drawn: random.Random) -> dict[str, list[int]]:
    for _ in range(200):
        prompt = [drawn.randrange(3, _VOCABULARY) for _ in range(length)]
        tokens, lead = _greedy(model, prompt)
        if lead >= least_lead:
            return {"prompt": prompt, "tokens": tokens}
    raise RuntimeError(f"no prompt of {length} tokens whose tokens lead by {least_lead}")


def _greedy(model: Any, prompt: list[int]) -> tuple[list[int], float]:
    """The tokens, and the smallest lead that one of them had."""
    import torch

    tokens: list[int] = []
    lead, past, given = float("inf"), None, prompt
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            out = model(torch.tensor([given]), past_key_values=past, use_cache=True)
            first, second = out.logits[0, -1].float().topk(2).values.tolist()
            lead, past = min(lead, first - second), out.past_key_values
            tokens.append(int(out.logits[0, -1].argmax()))
            given = tokens[-1:]
    return tokens, lead


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
