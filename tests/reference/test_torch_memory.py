"""Torch tensors as registered memory, against the real torch."""

import pytest


@pytest.mark.reference
def test_torch_tensors_carry_pages_and_metadata_rows():
    import torch

    from kvferry import KVArgs, KVManager, KVPoll, KVReceiver, KVSender
    from kvferry.presets import page_major

    layout = page_major("toy", layers=2, kv_heads=2, head_dim=8, dtype="bfloat16", pages=8, page_tokens=16)
    size = max(tensor.address + tensor.nbytes for tensor in layout.tensors)
    source, target = torch.randn(size // 2).to(torch.bfloat16), torch.zeros(size // 2, dtype=torch.bfloat16)
    rows, slots = torch.arange(32).reshape(4, 8), torch.zeros((4, 8), dtype=torch.int64)
    with (
        KVManager(KVArgs(layout, [source], [rows]), "prefill", environ={}) as prefill,
        KVManager(KVArgs(layout, [target], [slots]), "decode", environ={}) as decode,
    ):
        sender = KVSender(prefill, None, 1)
        sender.init(2, 3)
        sender.send(torch.tensor([5, 1]).numpy())
        receiver = KVReceiver(decode, None, 1, peers=[prefill.endpoint])
        receiver.init()
        receiver.send_metadata(torch.tensor([0, 7]).numpy(), 2)
        assert receiver.wait(10) is KVPoll.Success
    assert torch.equal(target.view(8, -1)[[0, 7]], source.view(8, -1)[[5, 1]])
    assert torch.equal(slots[2], rows[3])


@pytest.mark.reference
def test_a_tensor_that_is_not_contiguous_is_refused():
    import torch

    from kvferry.api.memory import block_of
    from kvferry.errors import ConfigError

    with pytest.raises(ConfigError, match="not contiguous"):
        block_of(torch.zeros(8, 8).t(), "buffer 0")


@pytest.mark.reference
def test_the_engine_suites_pools_on_a_device_behave_like_arrays():
    import numpy as np
    import torch

    from kvferry.testing.suite_cuda import DevicePool
    from kvferry.testing.suite_memory import address_of, device_of

    tensor = torch.zeros(100, dtype=torch.uint8)
    pool = DevicePool(tensor, lambda: None)
    pool[:] = 0xEE
    pool[10:13] = np.array([1, 2, 3], np.uint8)
    assert (pool[10], len(pool), device_of(pool)) == (1, 100, -1)
    assert pool[9:14].tolist() == tensor[9:14].tolist() == [0xEE, 1, 2, 3, 0xEE]
    assert address_of(pool) == tensor.data_ptr()
    kept = pool.copy()
    pool[:] = 0
    assert (kept == 0xEE).sum() == 97
    assert (pool == 0).all()
    assert not np.asarray(pool).any()
