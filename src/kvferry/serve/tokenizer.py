"""The tokenizer that a GGUF file carries, and its chat format."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.errors import ConfigError
from kvferry.serve.gguf_file import GgufFile, read_gguf

if TYPE_CHECKING:
    import tokenizers
    from tokenizers.pre_tokenizers import PreTokenizer

Message = tuple[str, str]
"""(role, content); roles are "system", "user" and "assistant"."""

_CONTROL = 3
_CHATML = "<|im_start|>"
_DEFAULT_SYSTEM = re.compile(r"<\|im_start\|>system(?:\n|\\n)(.*?)<\|im_end\|>", re.DOTALL)


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, bpe: tokenizers.Tokenizer, bos_ids: list[int], chat_template: str) -> None:
        self._bpe = bpe
        self._bos_ids = bos_ids
        self._is_chatml = _CHATML in chat_template
        default_system = _DEFAULT_SYSTEM.search(chat_template)
        self._default_system = default_system.group(1) if default_system else ""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; control tokens written out in it become the control tokens."""
        ids: list[int] = self._bpe.encode(text).ids
        return self._bos_ids + ids

    def decode(self, ids: Sequence[int], *, with_control_tokens: bool = False) -> str:
        """Text of token ids; bytes that are no whole character yet come out as U+FFFD."""
        return str(self._bpe.decode(list(ids), skip_special_tokens=not with_control_tokens))

    def chat_text(self, messages: Sequence[Message]) -> str:
        """The prompt for the assistant's next turn.

        In ChatML if the file's chat template is of that kind, with the template's own system message unless
        the first message is one; else the contents, one per line.
        """
        if not self._is_chatml:
            return "".join(f"{content}\n" for _, content in messages)
        turns = list(messages)
        if self._default_system and (not turns or turns[0][0] != "system"):
            turns.insert(0, ("system", self._default_system))
        said = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        return f"{said}<|im_start|>assistant\n"

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of `chat_text`."""
        return self.encode(self.chat_text(messages))


def load_tokenizer(path: Path) -> Tokenizer:
    """Build the tokenizer from a GGUF file's metadata.

    Raises:
        ConfigError: the file's tokenizer is of another kind than byte-level BPE or is not complete, or the
            package tokenizers is not installed.
    """
    gguf = read_gguf(path)
    bos_ids = []
    if gguf.value("tokenizer.ggml.add_bos_token", bool, False):
        bos_ids = [gguf.value("tokenizer.ggml.bos_token_id", int)]
    return Tokenizer(_bpe(gguf), bos_ids, gguf.value("tokenizer.chat_template", str, ""))


def _bpe(gguf: GgufFile) -> tokenizers.Tokenizer:
    try:
        from tokenizers import Tokenizer, decoders, models
    except ImportError as error:
        raise ConfigError(
            "the package tokenizers is not installed", hint="pip install 'kvferry[demo]'"
        ) from error
    model = gguf.metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ConfigError(f"{gguf.path}: tokenizer {model!r}; 'gpt2' (byte-level BPE) is supported")
    tokens = [str(token) for token in gguf.value("tokenizer.ggml.tokens", list)]
    kinds = gguf.value("tokenizer.ggml.token_type", list)
    vocab = {token: i for i, token in enumerate(tokens)}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=_merges(gguf, vocab)))
    bpe.pre_tokenizer = _pre_tokenizer(gguf)
    bpe.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
    bpe.add_special_tokens(control)
    return bpe


def _merges(gguf: GgufFile, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    pairs = []
    for merge in gguf.value("tokenizer.ggml.merges", list):
        left, _, right = str(merge).partition(" ")
        if not {left, right, left + right} <= vocab.keys():
            raise ConfigError(
                f"{gguf.path}: the tokenizer merges {merge!r}, which its vocabulary does not have"
            )
        pairs.append((left, right))
    return pairs


def _pre_tokenizer(gguf: GgufFile) -> PreTokenizer:
    from tokenizers import pre_tokenizers

    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rule = gguf.metadata.get("tokenizer.ggml.pre")
    if rule == "gpt-2":
        return words
    if rule == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    raise ConfigError(
        f"{gguf.path}: tokenizer splits text by the rule {rule!r}; 'smollm' and 'gpt-2' are supported"
    )
