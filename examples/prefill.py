"""A prefill worker: registers its pool, hands over one request, waits until it is through. Start it first."""

import numpy as np

from kvferry import KVArgs, KVBootstrapServer, KVClassType, KVPoll, get_kv_class, request_tag
from kvferry.presets import page_major

ROOM, PROMPT = 7, list(range(45))  # the router gives both sides the room; both schedulers know the tokens

layout = page_major("my-model", layers=4, kv_heads=2, head_dim=64, dtype="bfloat16", pages=64, page_tokens=16)
pool = np.random.default_rng(0).integers(0, 255, max(t.address + t.nbytes for t in layout.tensors), np.uint8)
aux = np.zeros((8, 16), np.int64)  # one metadata row per request: first token and what else travels with it

Manager = get_kv_class("local", KVClassType.MANAGER)
Sender = get_kv_class("local", KVClassType.SENDER)

args = KVArgs(layout, [pool], [aux])
with KVBootstrapServer(port=8998), Manager(args, "prefill", bootstrap_addr="127.0.0.1:8998") as m:
    print("prefill is ready", flush=True)
    pages = np.array([7, 3, 20], np.int32)  # where the request's KV cache lies in the pool, in token order
    aux[0, :2] = (ROOM, 1234)
    sender = Sender(m, "127.0.0.1:8998", ROOM)
    sender.init(num_kv_indices=len(pages), aux_index=0, num_tokens=len(PROMPT), tag=request_tag(PROMPT))
    sender.send(pages[:2])  # once per chunk; the one that completes num_kv_indices is the last
    sender.send(pages[2:])
    if sender.wait(60) is KVPoll.Failed:
        sender.failure_exception()
    print("handed over", sender.get_transfer_metric().transfer_total_bytes, "bytes")
    sender.clear()  # the pages are free: sender.is_release_safe()
