from __future__ import annotations

import sys

import pytest

from kvferry.errors import ConfigError
from kvferry.serve.tokenizer import load_tokenizer
from kvferry.serve.weights import load

CHATML = "{{ '<|im_start|>' + message['role'] }}"


def test_a_small_vocabulary_encodes_by_its_merges(tiny_gguf):
    tokenizer = load_tokenizer(tiny_gguf())
    assert tokenizer.encode("abc a") == [12, 14]
    assert tokenizer.decode([12, 14]) == "abc a"


def test_the_files_rule_decides_whether_digits_stay_apart(tiny_gguf):
    assert load_tokenizer(tiny_gguf()).encode("12 a") == [15, 16, 14]
    assert load_tokenizer(tiny_gguf({"tokenizer.ggml.pre": "gpt-2"})).encode("12 a") == [17, 14]


def test_control_tokens_are_one_token_each_and_left_out_of_the_text(tiny_gguf):
    tokenizer = load_tokenizer(tiny_gguf())
    ids = tokenizer.encode("ab<|im_end|>ab")
    assert ids == [11, 2, 11]
    assert tokenizer.decode(ids) == "abab"
    assert tokenizer.decode(ids, with_control_tokens=True) == "ab<|im_end|>ab"


def test_a_beginning_token_is_added_where_the_file_says_so(tiny_gguf):
    keys = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 0}
    assert load_tokenizer(tiny_gguf(keys)).encode("ab") == [0, 11]


def test_a_chatml_template_gives_turns(tiny_gguf):
    tokenizer = load_tokenizer(tiny_gguf({"tokenizer.chat_template": CHATML}))
    text = tokenizer.chat_text([("user", "abc"), ("assistant", "ab")])
    assert text == "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\nab<|im_end|>\n<|im_start|>assistant\n"


LLAMA3 = {
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": ["<bos>", *"abcs1234'", "\u0120", "ab", "abc", "123", "'s", "\u0120a"],
    "tokenizer.ggml.token_type": [3] + [1] * 15,
    "tokenizer.ggml.merges": ["a b", "' s"],
    "tokenizer.ggml.bos_token_id": 0,
}


def test_llama_3_begins_with_a_token_unless_the_file_denies_it(tiny_gguf):
    assert load_tokenizer(tiny_gguf(LLAMA3)).encode("ab") == [0, 11]
    assert load_tokenizer(tiny_gguf({**LLAMA3, "tokenizer.ggml.add_bos_token": False})).encode("ab") == [11]


def test_llama_3_cuts_text_by_its_rule_and_takes_whole_words_without_merges(tiny_gguf):
    tokenizer = load_tokenizer(tiny_gguf(LLAMA3))
    for text, ids in {"1234": [13, 8], "abc's": [12, 14], "abca": [11, 3, 1], "b  a": [2, 10, 15]}.items():
        assert tokenizer.encode(text) == [0, *ids], text
        assert tokenizer.decode([0, *ids]) == text


def test_a_llama_3_template_gives_turns(tiny_gguf):
    tokenizer = load_tokenizer(tiny_gguf({"tokenizer.chat_template": "{{ '<|start_header_id|>' + role }}"}))
    assert tokenizer.chat_text([("system", "ab"), ("user", "abc")]) == (
        "<|start_header_id|>system<|end_header_id|>\n\nab<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nabc<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_a_cached_start_needs_no_gguf_and_gives_the_same_tokenizer(tiny_gguf, only_the_cache):
    path = tiny_gguf({**LLAMA3, "tokenizer.chat_template": CHATML})
    load(path)
    only_the_cache()
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("1234") == [0, 13, 8]
    assert tokenizer.chat_text([]) == "<|im_start|>assistant\n"


def test_a_model_with_a_foreign_tokenizer_still_loads(tiny_gguf):
    path = tiny_gguf({"tokenizer.ggml.model": "llama"})
    assert load(path).config.name == "tiny"
    with pytest.raises(ConfigError, match="tokenizer 'llama'"):
        load_tokenizer(path)


def test_without_a_template_a_chat_is_plain_text(tiny_gguf):
    assert load_tokenizer(tiny_gguf()).chat_text([("user", "abc"), ("user", "a")]) == "abc\na\n"


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer 'llama'"),
        ({"tokenizer.ggml.model": None}, "tokenizer None"),
        ({"tokenizer.ggml.pre": "qwen2"}, "rule 'qwen2'"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.merges": ["a z"]}, "merges do not fit together: .*`z`"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges do not fit together"),
        ({"tokenizer.ggml.merges": [1, 2]}, "merges do not fit together"),
        ({"tokenizer.ggml.add_bos_token": True}, "bos_token_id is missing"),
    ],
)
def test_a_tokenizer_that_can_not_be_built_is_refused_in_one_line(tiny_gguf, metadata, says):
    path = tiny_gguf(metadata)
    with pytest.raises(ConfigError, match=says) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_the_tokenizers_package_the_install_line_is_given(tiny_gguf, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"kvferry\[demo\]"):
        load_tokenizer(tiny_gguf())
