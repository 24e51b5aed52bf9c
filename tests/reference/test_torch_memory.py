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
