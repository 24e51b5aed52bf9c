"""What vLLM asks of a connector is there, and what can't be carried is refused by name: in a process with vLLM."""

import os
import subprocess
import sys

import pytest
from engine_process import ENVIRONMENT

SURFACE = """
import inspect
from types import SimpleNamespace
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma
named = {"kv_connector": "KVFerryConnector", "kv_connector_module_path": "kvferry.compat.vllm"}
config = KVTransferConfig(**named, kv_role="kv_both")
made = KVConnectorFactory.get_connector_class(config)
assert issubclass(made, KVConnectorBase_V1) and not inspect.isabstract(made)
assert supports_hma(made) and KVConnectorFactory.supports_hma_config(config)
for name, ours in vars(made).items():
    theirs = getattr(KVConnectorBase_V1, name, None)
    if inspect.isfunction(ours) and inspect.isfunction(theirs) and name != "__init__":
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name
"""
REFUSED = """
from types import SimpleNamespace
from vllm.v1.kv_cache_interface import MambaSpec
import torch
from kvferry.compat.vllm.geometry import groups_of
from kvferry.errors import ConfigError
def refusal(kind, **sizes):
    group = SimpleNamespace(kv_cache_spec=kind, layer_names=["layers.0"], host_resident=False)
    try:
        groups_of(SimpleNamespace(parallel_config=SimpleNamespace(**sizes)), SimpleNamespace(transfer_groups=[group]))
    except ConfigError as error:
        return str(error)
mamba = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,))
assert "layers.0 is a MambaSpec, supported are FullAttentionSpec, SlidingWindowSpec" in refusal(mamba), refusal(mamba)
assert "pipeline_parallel_size is 2, supported is 1" in refusal(mamba, pipeline_parallel_size=2)
"""
VERSION = """
import logging, vllm
import kvferry.compat.vllm.connector as connector
said = []
connector.log.warning = lambda text, *values: said.append(text % values)
connector._warn_of_other_versions()
assert said == [], said
vllm.__version__ = "0.33.1"
connector._warn_of_other_versions()
assert said == ["kvferry was tested with vLLM 0.32.0, this is 0.33.1; it goes on"], said
"""
LAZY = """
import sys, kvferry.compat.vllm, kvferry.compat.vllm.scheduler, kvferry.compat.vllm.worker, kvferry.compat.vllm.layouts
assert "vllm" not in sys.modules and "torch" not in sys.modules
try:
    kvferry.compat.vllm.Connector
except AttributeError as error:
    assert "no attribute 'Connector'" in str(error)
else:
    raise SystemExit("no error")
"""


@pytest.mark.parametrize("code", [SURFACE, REFUSED, VERSION, LAZY])
def test_in_a_process_of_its_own(code):
    ended = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | ENVIRONMENT, check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
