"""A GGUF model as a folder that transformers, vLLM and SGLang load, so that they serve the weights that we serve.

python -m kvferry.serve.transformers_folder FOLDER [GGUF]: needs the package safetensors, which all of them bring along.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.errors import ConfigError
from kvferry.serve.tokenizer import load_tokenizer
from kvferry.serve.weights import F32, ModelConfig, Weights, find_model, load, tokenizer_metadata


def state_dict(weights: Weights) -> dict[str, F32]:
    """The weights as LlamaForCausalLM of transformers names them: q, k, v, gate and up apart; a tied head is absent."""
    config = weights.config
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    state = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    if not config.tied_embeddings:
        state["lm_head.weight"] = weights.lm_head
    for i, layer in enumerate(weights.layers):
        q, k, v = np.split(layer.qkv, (queries, queries + keys))
        gate, up = np.split(layer.gate_up, 2)
        parts = {
            "input_layernorm": layer.attention_norm,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.attention_out,
            "post_attention_layernorm": layer.mlp_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
        }
        state |= {f"model.layers.{i}.{name}.weight": values for name, values in parts.items()}
    return state


def config_dict(config: ModelConfig) -> dict[str, Any]:
    """What LlamaConfig of transformers takes.

    Raises:
        ConfigError: the file divides rotary frequencies by factors of its own, which LlamaConfig has no word for.
    """
    if config.rope_factors:
        raise ConfigError(f"model {config.name!r} scales its rotary frequencies one by one", hint="use another model")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_eps,
        "max_position_embeddings": config.context_tokens,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": config.tied_embeddings,
        "eos_token_id": list(config.eos_ids),
        "dtype": "float32",
    }


def write_folder(gguf: Path, folder: Path) -> None:
    """Write config.json, model.safetensors (float32), tokenizer.json and tokenizer_config.json.

    Args:
        gguf: the model's file.
        folder: is made if it is not there.

    Raises:
        ConfigError: the file is refused by `load` or `config_dict`, or safetensors is not installed.
    """
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise ConfigError("the package safetensors is not installed", hint="pip install safetensors") from error
    weights = load(gguf)
    config = config_dict(weights.config)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: np.ascontiguousarray(values) for name, values in state_dict(weights).items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    load_tokenizer(gguf).save(folder / "tokenizer.json")
    said = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": tokenizer_metadata(gguf).value("tokenizer.chat_template", str, ""),
        "clean_up_tokenization_spaces": False,
        "model_max_length": weights.config.context_tokens,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(said, indent=1))


if __name__ == "__main__":
    write_folder(find_model(sys.argv[2] if len(sys.argv) > 2 else None), Path(sys.argv[1]))
