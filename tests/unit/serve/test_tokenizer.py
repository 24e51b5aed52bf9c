from __future__ import annotations

import sys

import pytest

from kvferry.errors import ConfigError
from kvferry.serve.tokenizer import load_tokenizer

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
    assert (
        text
        == "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\nab<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_a_template_a_chat_is_plain_text(tiny_gguf):
    assert load_tokenizer(tiny_gguf()).chat_text([("user", "abc"), ("user", "a")]) == "abc\na\n"


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer 'llama'"),
        ({"tokenizer.ggml.model": None}, "tokenizer None"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "rule 'llama-bpe'"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.merges": ["a z"]}, "'a z'"),
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
