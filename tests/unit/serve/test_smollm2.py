"""The packaged SmolLM2-135M-Instruct, from its GGUF file to an answer."""

from __future__ import annotations

import pytest

from kvferry.serve.cache import PagedCache
from kvferry.serve.generate import LogitsHash, greedy, prefill
from kvferry.serve.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    return load_tokenizer(smollm2_path)


def test_the_configuration_is_smollm2s(smollm2):
    c = smollm2.config
    assert (c.layers, c.heads, c.kv_heads, c.head_dim) == (30, 9, 3, 64)
    assert (c.hidden, c.ffn, c.vocab, c.context_tokens) == (576, 1536, 49152, 8192)
    assert (c.rope_theta, c.tied_embeddings, c.eos_ids) == (100000.0, True, (2,))
    assert c.rms_eps == pytest.approx(1e-5)


@pytest.mark.parametrize(
    "text", ["Hello, world!", "  two spaces\n\n 1234", "naïve café — 你好 🙂", "def f(x):\n\treturn x**2", ""]
)
def test_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_and_the_space_before_them_are_single_tokens(tokenizer):
    assert [tokenizer.decode([i]) for i in tokenizer.encode("in 1234")] == ["in", " ", "1", "2", "3", "4"]


def test_the_chat_template_brings_its_own_system_message(tokenizer):
    text = tokenizer.chat_text([("user", "Hi")])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "SmolLM" not in tokenizer.chat_text([("system", "Be brief."), ("user", "Hi")])
    assert tokenizer.encode_chat([("user", "Hi")])[:3] == [1, 9690, 198]


def test_it_answers_a_question_and_the_same_bits_from_moved_pages(smollm2, tokenizer):
    c = smollm2.config
    prompt = tokenizer.encode_chat([("user", "What is the capital of France?")])
    runs = []
    caches = [PagedCache(range(c.layers), range(c.kv_heads), c.head_dim, 8, seed=seed) for seed in (1, 2)]
    pages = [cache.allocate(3) for cache in caches]
    first, _ = prefill(smollm2, caches[0], pages[0], prompt)
    caches[1].fill(pages[1], caches[0].read(pages[0], len(prompt)))
    for cache, own_pages in zip(caches, pages, strict=True):
        logits_hash, answer = LogitsHash(), [first]
        for token, logits in greedy(smollm2, cache, own_pages, first, len(prompt), 8, c.eos_ids):
            logits_hash.update(logits)
            answer.append(token)
        runs.append((answer, logits_hash.hexdigest()))
    assert runs[0] == runs[1]
    assert tokenizer.decode(runs[0][0]) == "The capital of France is Paris."
