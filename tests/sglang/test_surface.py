"""What SGLang's schedulers call or poke of a backend is there: nothing is found missing in service."""

import inspect
import subprocess
import sys

import pytest

from kvferry.compat.sglang import plugin

pytestmark = [
    pytest.mark.usefixtures("sglang_in_this_process"),
    pytest.mark.filterwarnings("default"),  # other packages' warnings are not ours to fix
]

CHECK_ORDER = """
import os, sys
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
first = sys.argv[1]
def modules():
    import sglang.srt.disaggregation.utils, sglang.srt.disaggregation.prefill
    import sglang.srt.disaggregation.decode, sglang.srt.managers.disagg_service
if first == "modules":
    modules()
from sglang.srt.plugins import load_plugins
load_plugins()
modules()
from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES as choices
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend
import sglang.srt.disaggregation.prefill as P, sglang.srt.disaggregation.decode as D
import sglang.srt.disaggregation.utils as U, sglang.srt.managers.disagg_service as S
for name in ("kvferry", "kvferry_local", "kvferry_nixl", "kvferry_mooncake", "kvferry_mori"):
    assert name in choices, choices
    for module in (P, D, U, S):
        for kind in KVClassType:
            found = module.get_kv_class(TransferBackend(name), kind)
            assert found.__name__.startswith("KV"), (module, kind, found)
            assert found is U.get_kv_class(TransferBackend(name), kind), "the same class everywhere"
managers = {name: P.get_kv_class(TransferBackend(name), KVClassType.MANAGER) for name in ("kvferry", "kvferry_mori")}
engines = {name: manager.engine_name for name, manager in managers.items()}
assert engines == {"kvferry": "local", "kvferry_mori": "mori"}, engines
assert U.get_kv_class(TransferBackend.FAKE, KVClassType.SENDER).__name__ == "FakeKVSender", "others are left alone"
print("fine")
"""


@pytest.mark.parametrize("first", ["plugin", "modules"])
def test_every_module_that_holds_get_kv_class_answers_for_our_names(first, server_environment):
    ended = subprocess.run(
        [sys.executable, "-c", CHECK_ORDER, first], check=False, capture_output=True, text=True, timeout=100,
        env=server_environment,
    )  # fmt: skip
    assert ended.stdout.endswith("fine\n"), ended.stdout + ended.stderr


MANAGER = {
    "kv_args", "request_status", "transfer_infos", "req_to_decode_prefix_len", "prefill_info_table",
    "try_ensure_parallel_info", "submit_prefill_recompute", "_ensure_prefill_recompute_executor", "is_dummy_cp_rank",
    "enable_all_cp_ranks_for_transfer", "is_abort_release_safe", "clear_deferred_abort_state", "register_to_bootstrap",
    "should_verify_kv_checksum", "supports_host_destination", "supports_role_switch", "attn_cp_rank", "attn_cp_size",
    "supports_deferred_decode_kv_release", "enable_deferred_decode_kv_release", "is_mla_backend",
}  # fmt: skip
SENDER = {
    "poll", "poll_pp_consensus", "init", "send", "abort", "clear", "failure_exception", "get_transfer_metric",
    "pop_decode_prefix_len", "get_max_transfer_tokens", "should_send_kv_chunk", "mark_prefill_complete", "kv_mgr",
    "_early_send_wait_event", "supports_host_tensor_indices",
}  # fmt: skip
RECEIVER = {
    "poll", "init", "send_metadata", "abort", "clear", "failure_exception", "ensure_abort_notified", "abort_notified",
    "is_abort_release_safe", "supports_host_destination", "require_staging", "bootstrap_infos", "prefill_info",
    "conclude_state", "chunk_staging_infos", "kv_mgr", "close_all_sockets",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "names"), [("manager", MANAGER), ("sender", SENDER), ("receiver", RECEIVER)])
def test_every_name_that_schedulers_use_is_there(kind, names):
    found = plugin.classes_for("local")[kind]
    said = {name for cls in found.__mro__ for name in vars(cls)}
    assert names - said - _assigned(found) == set()


def _assigned(cls):
    """Names that the methods of a class assign to self, also several in one statement: `self.a, self.b = ...`."""
    written = [base for base in cls.__mro__ if getattr(sys.modules[base.__module__], base.__name__, None) is base]
    return {
        part.strip().removeprefix("self.").split(":")[0]
        for base in written
        if base is not object
        for line in inspect.getsource(base).splitlines()
        for part in line.split("=")[0].split(",")
        if part.strip().startswith("self.")
    }


def test_signatures_take_what_schedulers_pass():
    classes = plugin.classes_for("local")
    sender, receiver = classes["sender"], classes["receiver"]
    inspect.signature(sender.__init__).bind(
        None, mgr=None, bootstrap_addr="", bootstrap_room=1, req_has_disagg_prefill_dp_rank=True
    )
    inspect.signature(sender.send).bind(None, [], None, num_kv_tokens=3, indices_event=None)
    inspect.signature(receiver.__init__).bind(None, mgr=None, bootstrap_addr="", bootstrap_room=1)
    inspect.signature(receiver.send_metadata).bind(
        None, [], 1, None, decode_prefix_len=0, destination=None, device_kv_indices=None
    )
    inspect.signature(receiver.ensure_abort_notified).bind(None, force_arm=True)
    inspect.signature(classes["bootstrap_server"].__init__).bind(None, host="", port=1)
