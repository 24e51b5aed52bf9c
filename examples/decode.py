"""A decode worker: receives one request into its own pages and checks what came."""

import numpy as np

from kvferry import KVArgs, KVClassType, KVPoll, get_kv_class, request_tag
from kvferry.presets import page_major

ROOM, PROMPT = 7, list(range(45))

layout = page_major("my-model", layers=4, kv_heads=2, head_dim=64, dtype="bfloat16", pages=64, page_tokens=16)
pool = np.zeros(max(t.address + t.nbytes for t in layout.tensors), np.uint8)
aux = np.zeros((8, 16), np.int64)

Manager = get_kv_class("local", KVClassType.MANAGER)
Receiver = get_kv_class("local", KVClassType.RECEIVER)

with Manager(KVArgs(layout, [pool], [aux]), "decode") as m:
    receiver = Receiver(m, "127.0.0.1:8998", ROOM)
    receiver.init(prefill_dp_rank=0, tag=request_tag(PROMPT))
    receiver.send_metadata(np.array([5, 9, 1], np.int32), aux_index=2, num_tokens=len(PROMPT))
    if receiver.wait(60) is KVPoll.Failed:  # a scheduler polls, or selects on fileno()
        receiver.failure_exception()
    print("received", receiver.get_transfer_metric().transfer_total_bytes, "bytes, first token", aux[2, 1])
    receiver.clear()
