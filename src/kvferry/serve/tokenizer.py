"""The tokenizer that a GGUF file carries, and its chat format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.errors import ConfigError
from kvferry.serve.gguf_file import Metadata
from kvferry.serve.weights import tokenizer_metadata

if TYPE_CHECKING:
    import tokenizers
    from tokenizers.pre_tokenizers import PreTokenizer

Message = tuple[str, str]
"""(role, content); roles are "system", "user" and "assistant"."""

_CONTROL = 3
# ChatML, Llama 3: what stands before a turn's role, between role and content, and after the content
_TURNS = (
    ("<|im_start|>", "\n", "<|im_end|>\n"),
    ("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"),
)
_LLAMA3 = "llama-bpe"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT_SYSTEM = re.compile(r"<\|im_start\|>system(?:\n|\\n)(.*?)<\|im_end\|>", re.DOTALL)


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, bpe: tokenizers.Tokenizer, bos_ids: list[int], chat_template: str) -> None:
        self._bpe = bpe
        self._bos_ids = bos_ids
        self._turn = next((turn for turn in _TURNS if turn[0] in chat_template), None)
        default_system = _DEFAULT_SYSTEM.search(chat_template)
        self._default_system = default_system.group(1) if default_system else ""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; control tokens written out in it become the control tokens."""
        ids: list[int] = self._bpe.encode(text).ids
        return self._bos_ids + ids

    def decode(self, ids: Sequence[int], *, with_control_tokens: bool = False) -> str:
        """Text of token ids; bytes that are no whole character yet come out as U+FFFD."""
        return str(self._bpe.decode(list(ids), skip_special_tokens=not with_control_tokens))

    def save(self, path: Path) -> None:
        """Write it as a tokenizer.json."""
        self._bpe.save(str(path))

    def chat_text(self, messages: Sequence[Message]) -> str:
        """The prompt for the assistant's next turn.

        In turns if the file's chat template is of the kind of ChatML or of Llama 3, with a ChatML template's own
        system message unless the first message is one; else the contents, one per line.
        """
        if self._turn is None:
            return "".join(f"{content}\n" for _, content in messages)
        turns = list(messages)
        if self._default_system and (not turns or turns[0][0] != "system"):
            turns.insert(0, ("system", self._default_system))
        before, between, after = self._turn
        said = "".join(f"{before}{role}{between}{content}{after}" for role, content in turns)
        return f"{said}{before}assistant{between}"

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of `chat_text`."""
        return self.encode(self.chat_text(messages))


def load_tokenizer(path: Path) -> Tokenizer:
    """Build the tokenizer from a GGUF file's metadata, through the same cache as the weights.

    Raises:
        ConfigError: the file's tokenizer is of another kind than byte-level BPE or is not complete, the
            package tokenizers is not installed, or the model is refused by `weights.load`.
    """
    keys = tokenizer_metadata(path)
    bpe = _bpe(keys)
    bos_ids = []
    # Llama 3's files mostly don't say it
    if keys.value("tokenizer.ggml.add_bos_token", bool, keys.entries["tokenizer.ggml.pre"] == _LLAMA3):
        bos_ids = [keys.value("tokenizer.ggml.bos_token_id", int)]
    return Tokenizer(bpe, bos_ids, keys.value("tokenizer.chat_template", str, ""))


def _bpe(keys: Metadata) -> tokenizers.Tokenizer:
    try:
        from tokenizers import Tokenizer, decoders, models
    except ImportError as error:
        raise ConfigError("the package tokenizers is not installed", hint="pip install 'kvferry[demo]'") from error
    model, rule = keys.entries.get("tokenizer.ggml.model"), keys.entries.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise ConfigError(f"{keys.path}: tokenizer {model!r}; 'gpt2' (byte-level BPE) is supported")
    tokens, kinds = keys.value("tokenizer.ggml.tokens", list), keys.value("tokenizer.ggml.token_type", list)
    merges = keys.value("tokenizer.ggml.merges", list)
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        pairs = [tuple(merge.split(" ", 1)) for merge in merges]
        bpe = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=rule == _LLAMA3))
    except Exception as error:  # tokenizers has no class of its own for a merge that is not in the vocabulary
        raise ConfigError(f"{keys.path}: vocabulary and merges do not fit together: {str(error)[:100]!r}") from error
    bpe.pre_tokenizer = _pre_tokenizer(keys.path, rule)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL])
    return bpe


def _pre_tokenizer(path: Path, rule: object) -> PreTokenizer:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    words = ByteLevel(add_prefix_space=False)
    if rule == "gpt-2":
        return words
    if rule == "smollm":
        return Sequence([Digits(individual_digits=True), words])
    if rule == _LLAMA3:
        return Sequence([Split(Regex(_LLAMA3_WORDS), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])
    raise ConfigError(
        f"{path}: tokenizer splits text by the rule {rule!r}; 'smollm', 'gpt-2' and 'llama-bpe' are supported"
    )
