"""SGLang's own connectors as contestants, unmodified, on host memory and without a server around them.

A server's configuration needs a model and a device. Here the functions by which the connectors read it are replaced, in
the modules that use them, by ones that answer for a single rank on the CPU.
"""

from __future__ import annotations

import logging
import os
import warnings
from types import SimpleNamespace

warnings.filterwarnings("ignore")
logging.basicConfig(level=logging.ERROR)

from sglang.srt.disaggregation import utils  # noqa: E402
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll  # noqa: E402
from sglang.srt.disaggregation.common import conn as common  # noqa: E402
from side import Decode, Prefill, Setup  # noqa: E402 - SGLang warns while it is imported
from work import PAGE_TOKENS, Memory  # noqa: E402

HOST = "127.0.0.1"
STATE_LISTS = (
    "state_types", "state_data_ptrs", "state_data_lens", "state_item_lens", "state_layer_ids", "state_dim_per_tensor",
    "state_slice_outer_counts", "state_conv_shard_groups", "kv_layer_ids",
)  # fmt: skip


def configuration(port: int) -> dict[str, SimpleNamespace]:
    """What the accessors answer."""
    one = dict.fromkeys(("attn_tp_size", "attn_cp_size", "attn_dcp_size", "attn_dp_size", "dp_size", "num_dp_ranks",
                         "pp_size", "nnodes"), 1)  # fmt: skip
    zero = dict.fromkeys(("attn_tp_rank", "attn_cp_rank", "attn_dcp_rank", "attn_dp_rank"), 0)
    off = dict.fromkeys(
        ("enable_kv_cache_sharding", "enable_dsa_cache_layer_split", "enable_cp_tp_group_sharing"), False
    )  # fmt: skip
    parallel = SimpleNamespace(
        **one, **zero, **off, dist_init_addr=None, world_group=None, pp_group=SimpleNamespace(is_last_rank=True),
        load_balance_method="follow_bootstrap_room",
    )  # fmt: skip
    return {
        "get_parallel": parallel,
        "get_device": SimpleNamespace(device="cpu", gpu_id=0),
        "get_disagg": SimpleNamespace(
            disaggregation_bootstrap_port=port, disaggregation_decode_allocation_policy="early"
        ),
        "get_observability": SimpleNamespace(enable_trace=False),
        "get_schedule": SimpleNamespace(chunked_prefill_size=8192, max_prefill_tokens=16384),
        "get_serving": SimpleNamespace(host=HOST, port=30000),
        "get_memory": SimpleNamespace(enable_unified_memory=False),
        "get_spec": SimpleNamespace(speculative_algorithm=None, speculative_num_draft_tokens=0),
    }


def backend(engine: str, port: int):
    """The connector's manager, sender and receiver."""
    if engine == "nixl":
        from sglang.srt.disaggregation.nixl import conn

        name = "Nixl"
    else:
        from sglang.srt.disaggregation.mooncake import conn

        name = "Mooncake"
    answers = configuration(port)
    for module in (common, utils, conn):
        for accessor, answer in answers.items():
            if hasattr(module, accessor):
                setattr(module, accessor, lambda answer=answer: answer)
    common.linear_attn_tp_size = lambda: 1
    common.max_prefill_buffer_tokens = lambda: 16384
    if engine == "mooncake":
        from sglang.srt.distributed.device_communicators import mooncake_transfer_engine

        mooncake_transfer_engine.init_mooncake_transfer_engine(hostname=HOST, gpu_id=0, ib_device=None)
    return [getattr(conn, f"{name}KV{part}") for part in ("Manager", "Sender", "Receiver")]


def arguments(memory: Memory) -> KVArgs:
    """The same regions that kvferry registers, as a cache without a head axis."""
    args, work = KVArgs(), memory.work
    args.engine_rank = args.gpu_id = args.pp_rank = args.system_dp_rank = args.prefill_start_layer = 0
    args.ib_device = args.kv_layout = args.swa_kv_cache_layout = args.rust_http_port = None
    args.mla_compression_ratios = args.num_draft_entries = None
    args.kv_data_ptrs = [region.address for region in memory.regions]
    args.kv_data_lens = [region.nbytes for region in memory.regions]
    args.kv_item_lens = [work.page_bytes] * work.layers
    args.kv_data_mem_kinds = ["DRAM"] * work.layers
    args.kv_cache_dtype_str = "bfloat16"
    args.aux_data_ptrs = [buffer.ctypes.data for buffer in memory.aux]
    args.aux_data_lens = [buffer.nbytes for buffer in memory.aux]
    args.aux_item_lens = [buffer.shape[1] for buffer in memory.aux]
    for name in STATE_LISTS:
        setattr(args, name, [])
    args.is_hybrid_mla_backend = False
    args.kv_head_num = args.total_kv_head_num = 8
    args.page_size, args.prefill_end_layer = PAGE_TOKENS, work.layers
    return args


class Connector:
    """What both sides have."""

    states = KVPoll
    mode = ""

    def start(self) -> None:
        setup: Setup = self.setup
        os.environ |= {"SGLANG_HOST_IP": HOST, "MOONCAKE_PROTOCOL": "tcp"}
        # a batch of more blocks than this fails on TCP; the default knows no bound
        os.environ.setdefault("SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES", "1024")
        manager, self.make_sender, self.make_receiver = backend(setup.engine, setup.port)
        mode = utils.DisaggregationMode(self.side)
        if self.side == "prefill":
            self.server = common.CommonKVBootstrapServer(HOST, setup.port)
        self.manager = manager(arguments(self.memory), mode, SimpleNamespace(enable_pd_role_switch=False), True)
        self.endpoints = {self.mode: f"{HOST}:{setup.port}"}

    def close(self) -> None:
        os._exit(0)  # its threads have no end


class SglangPrefill(Connector, Prefill):
    """A role."""

    def sender(self, room: int, mode: str):
        return self.make_sender(self.manager, self.endpoints[mode], room)

    def begin(self) -> None:
        """Ready for input: say what comes."""
        assert self.room.pop_decode_prefix_len() == 0
        self.room.init(self.work.pages, 0)

    def hand_over(self, pages) -> None:
        self.room.send(pages, None, num_kv_tokens=len(pages) * PAGE_TOKENS)


class SglangDecode(Connector, Decode):
    """A role."""

    def receiver(self, room: int, pages, mode: str, endpoint: str):
        if not self.manager.try_ensure_parallel_info(endpoint):
            raise RuntimeError(f"the bootstrap server at {endpoint} does not answer")
        receiver = self.make_receiver(self.manager, endpoint, room)
        receiver.init(0)
        receiver.send_metadata(pages, 0, [], decode_prefix_len=0)
        return receiver
