"""A vLLM engine in a process of its own, stepped there, and driven over a pipe: requests in, tokens out."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from multiprocessing import get_context
from typing import Any

ENGINE = os.environ.get("FERRY_TEST_ENGINE", "local")
"""The transfer engine of all tests; `make vllm` runs all of them with each."""
ANSWER_LIMIT_S = 90.0
START_LIMIT_S = 300.0
"""Several start at once, and the first time Python compiles all of vLLM."""
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclasses.dataclass
class Output:
    """A finished request."""

    tokens: list[int]
    finish_reason: str
    params: dict[str, Any] | None
    cached_tokens: int | None


class Engine:
    """The parent's end. `options` are those of vLLM's EngineArgs; `role` None is vLLM alone."""

    def __init__(self, model: str, role: str | None = None, *, policy: str = "fail",
                 settings: dict[str, Any] | None = None, **options: Any) -> None:  # fmt: skip
        transfer = None
        if role:
            transfer = {
                "kv_connector": "KVFerryConnector", "kv_connector_module_path": "kvferry.compat.vllm", "kv_role": role,
                "kv_load_failure_policy": policy, "kv_connector_extra_config": {"engine": ENGINE, **(settings or {})},
            }  # fmt: skip
        spawn = get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_main, args=(theirs, model, transfer, options))
        self.process.start()
        theirs.close()
        self._number = 0
        self.is_ready = False
        self.model = model

    def wait_ready(self) -> Engine:
        if not self.is_ready:
            assert self._answer(START_LIMIT_S) == "ready"
            self.is_ready = True
        return self

    def add(self, prompt: list[int], max_tokens: int, params: dict[str, Any] | None = None) -> str:
        self._number += 1
        req_id = f"r{self._number}"
        self.call("add", req_id, prompt, max_tokens, params)
        return req_id

    def finish(self, req_id: str, limit_s: float = 60.0) -> Output:
        deadline = time.monotonic() + limit_s
        while (output := self.call("output", req_id)) is None:
            assert time.monotonic() < deadline, f"{req_id} did not finish within {limit_s} s"
            time.sleep(0.01)
        return output

    def generate(self, prompt: list[int], max_tokens: int, params: dict[str, Any] | None = None) -> Output:
        return self.finish(self.add(prompt, max_tokens, params))

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """The parameters for the decode side."""
        params = self.generate(prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False}).params
        assert params is not None
        return params

    def until(self, name: str, expected: Any, limit_s: float = 30.0) -> None:
        deadline = time.monotonic() + limit_s
        while (found := self.call(name)) != expected:
            assert time.monotonic() < deadline, f"{name} is {found}, not {expected}"
            time.sleep(0.02)

    def call(self, name: str, *args: Any) -> Any:
        self.wait_ready()
        self._pipe.send((name, args))
        return self._answer()

    def forget(self) -> None:
        """What was loaded and logged so far."""
        if self.is_ready and self.process.is_alive():
            self.call("loads")
            self.call("warnings")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        """Ends it, once; a test may do so before its session does."""
        if self.process.is_alive():
            self.call("close")
            self.process.join(20)

    def _answer(self, limit_s: float = ANSWER_LIMIT_S) -> Any:
        assert self._pipe.poll(limit_s), f"no answer within {limit_s} s"
        found = self._pipe.recv()
        if isinstance(found, Exception):
            raise found
        return found


class _Child:
    """The engine's process."""

    def __init__(self, model: str, transfer: dict[str, Any] | None, options: dict[str, Any]) -> None:
        import torch
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        # vLLM 0.32 computes bfloat16 attention with AMX wherever the processor has it, and asks the system for nothing:
        # unless oneDNN has, the process ends by SIGILL; without AMX this does nothing, and workers are forks
        torch.cpu._init_amx()
        # in bfloat16 two TP sizes, or two sizes of chunks, round differently, and a near tie gives another token
        defaults = {
            "dtype": "float32",
            "block_size": 32,
            "max_model_len": 512,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 8,
        }
        config = KVTransferConfig(**transfer) if transfer else None
        arguments = EngineArgs(
            model=model, skip_tokenizer_init=True, enforce_eager=True, kv_transfer_config=config, seed=0,
            num_gpu_blocks_override=options.pop("blocks", 64), **{**defaults, **options},
        )  # fmt: skip
        self.engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
        self.core = self.engine.engine_core.engine_core
        self.outputs: dict[str, Output] = {}
        self.held_back = False
        self.closed = False
        self.warnings_seen = _Warnings()
        self.loads_seen: list[int] = []
        self._watch_loads()

    def step(self) -> None:
        if not self.held_back and self.core.scheduler.has_requests():
            self.step_once()
            time.sleep(0.001)

    def step_once(self) -> None:
        for found in self.engine.step():
            if found.finished:
                done = found.outputs[0]
                self.outputs[found.request_id] = Output(
                    list(done.token_ids), str(done.finish_reason), found.kv_transfer_params, found.num_cached_tokens
                )

    def add(self, req_id: str, prompt: list[int], max_tokens: int, params: dict[str, Any] | None) -> None:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra
        )
        self.engine.add_request(req_id, {"prompt_token_ids": prompt}, sampling)

    def output(self, req_id: str) -> Output | None:
        return self.outputs.get(req_id)

    def abort(self, req_id: str) -> None:
        self.engine.abort_request([req_id])

    def hold_back(self, held_back: bool) -> None:
        """Whether the engine makes no step for now."""
        self.held_back = held_back

    def requests(self) -> int:
        """Requests that vLLM holds blocks for, finished ones included."""
        return len(self.core.scheduler.requests)

    def free_blocks(self) -> int:
        return self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def cached_blocks(self) -> int:
        """Blocks in the prefix cache."""
        return sum(block.block_hash is not None for block in self.core.scheduler.kv_cache_manager.block_pool.blocks)

    def kv_cache(self) -> list[list[float]]:
        """By layer, all values in the blocks of the prefix cache, in the order of their numbers."""
        blocks = self.core.scheduler.kv_cache_manager.block_pool.blocks
        numbers = [number for number, block in enumerate(blocks) if block.block_hash is not None]
        runner = self.core.model_executor.driver_worker.worker.model_runner
        return [cache[numbers].float().flatten().tolist() for cache in runner.kv_caches]

    def warnings(self) -> list[str]:
        """What the connector has logged since the last call."""
        found, self.warnings_seen.texts = self.warnings_seen.texts, []
        return found

    def loads(self) -> list[int]:
        """Bytes of each load that succeeded in this process since the last call."""
        found, self.loads_seen = self.loads_seen, []
        return found

    def swap(self, swapped: bool) -> None:
        """Exchange the first and the last block of each load from now on: the test of the tests.

        Two full blocks would change nothing: keys carry their positions, and attention adds over a set.
        """
        from kvferry.compat.vllm.scheduler import SchedulerHalf

        right = SchedulerHalf._pages if swapped else SchedulerHalf._right_pages
        SchedulerHalf._right_pages = right

        def wrong(half: Any, block_ids: Any, begin: int, end: int) -> Any:
            lists = right(half, block_ids, begin, end)
            return {name: [blocks[-1], *blocks[1:-1], blocks[0]] for name, blocks in lists.items()}

        SchedulerHalf._pages = wrong if swapped else right

    def _watch_loads(self) -> None:
        from kvferry.compat.vllm.measures import Measures

        right = Measures.add

        def add(measures: Any, what: str, metric: Any) -> None:
            if what == "load":
                self.loads_seen.append(metric.transfer_total_bytes)
            right(measures, what, metric)

        Measures.add = add

    def close(self) -> None:
        self.engine.engine_core.shutdown()
        self.closed = True


class _Warnings(logging.Handler):
    """What the connector logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("kvferry.vllm").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _main(pipe: Any, model: str, transfer: Any, options: dict[str, Any]) -> None:
    os.environ.update(ENVIRONMENT)
    try:
        child = _Child(model, transfer, options)
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
        raise
    pipe.send("ready")
    while not child.closed:
        if pipe.poll(0 if child.core.scheduler.has_requests() and not child.held_back else 0.02):
            name, args = pipe.recv()
            try:
                pipe.send(getattr(child, name)(*args))
            except Exception as error:
                pipe.send(RuntimeError(f"{name}: {type(error).__name__}: {error}"))
        if not child.closed:
            child.step()
