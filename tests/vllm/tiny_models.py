"""Writes random models of 1.6 MiB whose greedy tokens depend on the prompt; vLLM's dummy weights give a loop of two."""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "initializer_range": 0.25,
}  # fmt: skip
WINDOW = 64
"""Tokens that half of the layers of tiny-windows attend to."""


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and words for the rest of the vocabulary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"w{number}" for number in range(len(letters), SIZES["vocab_size"]))]
    made = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def write(folder: str) -> None:
    for name, seed in (("tiny-llama", 7), ("tiny-other", 8), ("again/tiny-llama", 10)):
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16).save_pretrained(f"{folder}/{name}")
        tokenizer().save_pretrained(f"{folder}/{name}")
    kinds = ["sliding_attention", "full_attention"] * 2
    torch.manual_seed(9)
    windows = Gemma3TextConfig(**SIZES, sliding_window=WINDOW, layer_types=kinds, query_pre_attn_scalar=32)
    Gemma3ForCausalLM(windows).to(torch.bfloat16).save_pretrained(f"{folder}/tiny-windows")


if __name__ == "__main__":
    write(sys.argv[1])
