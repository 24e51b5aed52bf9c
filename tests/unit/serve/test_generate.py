from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from kvferry.errors import ConfigError
from kvferry.serve.generate import (
    WORKER_ENV,
    LogitsHash,
    blas_fingerprint,
    greedy,
    prefill,
    require_worker_env,
)


def test_greedy_continues_as_if_the_answer_had_been_part_of_the_prompt(tiny_model, new_cache, tokens):
    cache = new_cache(num_pages=64, dtype="float32")
    pages = cache.allocate(4)
    first, logits = prefill(tiny_model, cache, pages, tokens)
    assert first == logits.argmax()
    answer = [token for token, _ in greedy(tiny_model, cache, pages, first, len(tokens), 10)]
    assert len(answer) == 10
    known = [*tokens, first]
    for token in answer:
        expected, _ = prefill(tiny_model, cache, cache.allocate(4), known)
        assert token == expected
        known.append(token)


def test_greedy_ends_with_the_first_end_token(tiny_model, new_cache, tokens):
    cache = new_cache()
    pages = cache.allocate(4)
    first, _ = prefill(tiny_model, cache, pages, tokens)
    answer = [token for token, _ in greedy(tiny_model, cache, pages, first, len(tokens), 10)]
    eos = next(token for token in answer if token != first)
    assert [t for t, _ in greedy(tiny_model, cache, pages, first, len(tokens), 10, {eos})] == answer[
        : answer.index(eos) + 1
    ]
    assert list(greedy(tiny_model, cache, pages, first, len(tokens), 10, {first})) == []
    assert list(greedy(tiny_model, cache, pages, first, len(tokens), 0)) == []


def test_the_logits_hash_sees_every_bit_and_the_order():
    a, b = np.zeros(4, np.float32), np.ones(4, np.float32)
    c = b.copy()
    c[3] = np.nextafter(c[3], np.float32(2))

    def digest(*steps):
        logits_hash = LogitsHash()
        for step in steps:
            logits_hash.update(step)
        assert logits_hash.steps == len(steps)
        return logits_hash.hexdigest()

    assert digest(a, b) == digest(a.copy(), b.copy())
    assert len({digest(), digest(a), digest(a, b), digest(b, a), digest(a, c)}) == 5


def fingerprint_of_a_worker(**env: str) -> str:
    code = "from kvferry.serve import generate as g; g.require_worker_env(); print(g.blas_fingerprint())"
    worker = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | WORKER_ENV | env,
        capture_output=True,
        text=True,
        check=True,
    )
    return worker.stdout.strip()


def test_two_workers_have_one_fingerprint():
    assert fingerprint_of_a_worker() == fingerprint_of_a_worker()


def test_the_fingerprint_names_the_numpy_version(monkeypatch):
    here = blas_fingerprint()
    assert here == blas_fingerprint()
    monkeypatch.setattr(np, "__version__", "0.0")
    assert blas_fingerprint() != here


def test_a_worker_without_its_environment_is_told_what_to_set(monkeypatch):
    for name, value in WORKER_ENV.items():
        monkeypatch.setenv(name, value)
    require_worker_env()
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    with pytest.raises(ConfigError, match="launch it with OPENBLAS_NUM_THREADS=1"):
        require_worker_env()
