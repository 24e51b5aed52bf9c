"""What SGLang's KVArgs do not say of a rank: its place in the grid, the model's heads, where the memory is."""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.compat.checkpoint import model_id
from kvferry.ids import Rank


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """One rank.

    Attributes:
        model: name of the model and digest of its weights: both sides must agree (see checkpoint).
        layers: hidden layers of the model; draft layers are numbered from there on.
        first_layer: the first layer of this pipeline stage, where SGLang numbers its regions by position.
        dtype: dtype of the KV cache: SGLang's "auto" says nothing, and two dtypes may have the same size.
        kv_heads: KV heads of the whole model; 0 for MLA.
        swa_kv_heads: KV heads of its sliding-window layers.
        rank: place in the grid.
        sizes: the grid.
        state_tp_rank: the TP rank that recurrent state is laid out over.
        state_tp_size: how many of them there are.
        device: index of the accelerator; -1 for host memory.
    """

    model: str
    layers: int
    dtype: str
    kv_heads: int
    swa_kv_heads: int
    rank: Rank
    sizes: Rank
    first_layer: int = 0
    state_tp_rank: int = 0
    state_tp_size: int = 1
    device: int = -1

    def at_tp(self, tp: int) -> Geometry:
        """The same for another TP rank of the same group."""
        rank = msgspec.structs.replace(self.rank, tp=tp)
        state = tp if self.state_tp_size == self.sizes.tp else self.state_tp_rank
        return msgspec.structs.replace(self, rank=rank, state_tp_rank=state)

    def on_host(self) -> Geometry:
        """The same for a pool in host memory."""
        return msgspec.structs.replace(self, device=-1)


def geometry_of(args: Any, server_args: Any, *, is_mla: bool) -> Geometry:
    """Ask SGLang's runtime context and model configuration, in a scheduler process.

    Args:
        args: SGLang's KVArgs.
        server_args: its ServerArgs.
        is_mla: whether the pool holds latents.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.utils import get_pp_indices
    from sglang.srt.runtime_context import get_parallel, linear_attn_tp_size

    parallel, config = get_parallel(), ModelConfig.from_server_args(server_args)
    dp = parallel.attn_dp_rank if parallel.dp_size == 1 or parallel.attn_dp_size > 1 else args.system_dp_rank or 0
    dp_size = max(parallel.attn_dp_size, parallel.dp_size)
    tp, cp = (parallel.attn_tp_rank, parallel.attn_tp_size), (parallel.attn_cp_rank, parallel.attn_cp_size)
    state_size = linear_attn_tp_size()
    heads = config.get_total_num_kv_heads()
    stage, _ = get_pp_indices(config.num_hidden_layers, args.pp_rank, parallel.pp_size)
    on_host = str(getattr(server_args, "device", "cuda")) == "cpu"
    return Geometry(
        model=model_id(str(server_args.model_path)), layers=config.num_hidden_layers,
        dtype=_dtype(str(args.kv_cache_dtype_str), config.dtype), kv_heads=0 if is_mla else heads,
        swa_kv_heads=config.get_swa_num_kv_heads(tp[1]) * tp[1] if tp[1] <= heads else heads,
        rank=Rank(dp, args.pp_rank, cp[0], tp[0]), sizes=Rank(dp_size, parallel.pp_size, cp[1], tp[1]),
        first_layer=int(getattr(args, "prefill_start_layer", stage)),  # decode's KVArgs do not say it
        state_tp_rank=tp[0] if state_size == tp[1] else cp[0], state_tp_size=state_size,
        device=-1 if on_host else int(args.gpu_id),
    )  # fmt: skip


def _dtype(cache: str, model: Any) -> str:
    return str(model).removeprefix("torch.") if cache == "auto" else cache
