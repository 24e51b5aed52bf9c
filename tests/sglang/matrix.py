"""The setups in which two servers are run, by name."""

from __future__ import annotations

from servers import ENGINE, Setup

TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
"""SGLang binds each rank to cores of its own."""
SECRET = {"KVFERRY_SECRET": "only-these-two-servers-know-it"}
SEQUENTIAL = ("--disable-overlap-schedule",)

TCP = {"local": "mechanism=tcp", "nixl": "param.engine_config=TLS=tcp"}
"""Options of engines that would take another way on one host."""

TO_HOST = ("--disaggregation-decode-retraction-backup", "host_pool", "--disaggregation-decode-host-receive-threshold")
"""Decode receives into host memory once so much of the device's is taken: a number from 0 to 1 follows."""
ALWAYS_TO_HOST = (*TO_HOST, "0")

SETUPS = {
    "base": Setup(),
    "no-overlap": Setup(args=SEQUENTIAL),
    "chunked-prefill": Setup(prefill_args=("--chunked-prefill-size", "64")),
    "chunked-no-overlap": Setup(prefill_args=("--chunked-prefill-size", "64", *SEQUENTIAL)),
    "page-1": Setup(page_tokens=1),
    "page-64": Setup(page_tokens=64),
    "page-16-to-64": Setup(decode_args=("--page-size", "64")),
    "page-64-to-16": Setup(prefill_args=("--page-size", "64")),
    "page-64-to-16-prefix": Setup(
        prefill_args=("--page-size", "64"), decode_args=("--disaggregation-decode-enable-radix-cache",)
    ),
    "page-16-to-64-prefix": Setup(decode_args=("--page-size", "64", "--disaggregation-decode-enable-radix-cache")),
    "float32": Setup(dtype="float32"),
    "no-prefix-cache": Setup(args=("--disable-radix-cache",)),
    "decode-prefix-cache": Setup(decode_args=("--disaggregation-decode-enable-radix-cache",)),
    "optimistic-prefill": Setup(prefill_args=("--optimistic-prefill-attempts", "2")),
    "tcp": Setup(env={"KVFERRY_ENGINE_OPTIONS": TCP.get(ENGINE, "")}),
    "full-digest": Setup(env={"KVFERRY_DIGEST": "full"}),
    "by-engine-name": Setup(backend=f"kvferry_{ENGINE}"),
    "secret": Setup(env=SECRET),
    "all-interfaces": Setup(args=("--host", "0.0.0.0"), env=SECRET),
    "qwen3": Setup("qwen3", "float32"),
    "latent": Setup("deepseek", "float32", page_tokens=1),
    "window": Setup("sliding", "float32"),
    "window-page-1": Setup("sliding", "float32", page_tokens=1),
    "window-tp-2-to-1": Setup("sliding", "float32", prefill_args=("--tp-size", "2"), prefill_env=TWO_RANKS),
    "latent-tp-2-to-1": Setup(
        "deepseek", "float32", page_tokens=1, prefill_args=("--tp-size", "2"), prefill_env=TWO_RANKS
    ),
    "tp-2-to-1": Setup(dtype="float32", prefill_args=("--tp-size", "2"), prefill_env=TWO_RANKS),
    "tp-1-to-2": Setup(dtype="float32", decode_args=("--tp-size", "2"), decode_env=TWO_RANKS),
    "tp-2-to-2": Setup(dtype="float32", args=("--tp-size", "2"), env=TWO_RANKS),
    "pp-2-to-2": Setup(dtype="float32", args=("--pp-size", "2", *SEQUENTIAL), env=TWO_RANKS),
    "dp-2-to-1": Setup(prefill_args=("--dp-size", "2"), prefill_env=TWO_RANKS),
    "secret-dp-2-to-1": Setup(prefill_args=("--dp-size", "2"), prefill_env=TWO_RANKS, env=SECRET),
    "dp-1-to-2": Setup(decode_args=("--dp-size", "2"), decode_env=TWO_RANKS),
    "pp-2-to-1": Setup(dtype="float32", prefill_args=("--pp-size", "2", *SEQUENTIAL), prefill_env=TWO_RANKS),
}
SLOW = {name for name in SETUPS if name.endswith(("2-to-1", "1-to-2", "2-to-2"))}
"""Their ranks agree on each step, on two cores: one request of each length, and two at once."""
