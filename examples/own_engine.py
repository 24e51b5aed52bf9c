"""An engine of its own: attention and recurrent state, any parallel grid on each side.

python own_engine.py prefill tp=2,cp=2,deal=zigzag    # first; then, in another terminal
python own_engine.py decode tp=4
The ranks of a side are managers of one process here, to be short; an engine has a process for each.
"""

import sys

import numpy as np

from kvferry import KVArgs, KVBootstrapServer, KVClassType, KVPoll, get_kv_class, request_tag
from kvferry.ids import Rank
from kvferry.layout import Slot, num_pages
from kvferry.presets import Block, Item, ModelShape, layouts_of, parse_grid

ROOM, PROMPT, ADDRESS = 7, list(range(45)), "127.0.0.1:8998"
KV = (Item("k", values=64, heads=4), Item("v", values=64, heads=4))  # per token and head, in the cache's dtype
STATE = (Item("conv", values=96, heads=4), Item("ssm", values=128, heads=4, dtype="float32"))  # per request and head
MODEL = ModelShape(
    "my-hybrid", (Block("kv", (0, 2), KV), Block("state", (1, 3), STATE, Slot(), per="request")), dtype="bfloat16"
)

side, words = sys.argv[1:]
grid = parse_grid(words)
layouts = layouts_of(MODEL, grid, pages=64)  # one for each rank, in the order of grid.ranks()
sizes = Rank(grid.dp, grid.pp, grid.cp * grid.dcp, grid.tp)
Manager = get_kv_class("local", KVClassType.MANAGER)
Room = get_kv_class("local", KVClassType.SENDER if side == "prefill" else KVClassType.RECEIVER)
server = KVBootstrapServer(port=8998) if side == "prefill" else None

managers, rooms = [], []
for layout in layouts:
    pool = np.zeros(max(tensor.address + tensor.nbytes for tensor in layout.tensors), np.uint8)
    managers.append(Manager(KVArgs(layout, [pool], group=layouts), side, bootstrap_addr=ADDRESS, sizes=sizes))
    kv = next(space for space in layout.spaces if space.name == "kv")
    pages = np.arange(num_pages(kv, 0, len(PROMPT)))  # of this rank's share: with cp it holds a part of the tokens
    rooms.append(Room(managers[-1], ADDRESS, ROOM))
    if side == "prefill":
        rooms[-1].init(len(pages), num_tokens=len(PROMPT), tag=request_tag(PROMPT))
        rooms[-1].send(pages, {"state": [3]})  # the request's slot in the state pool
    else:
        rooms[-1].init(prefill_dp_rank=0, tag=request_tag(PROMPT))
        rooms[-1].send_metadata(pages, state_indices={"state": [5]}, num_tokens=len(PROMPT))
if side == "prefill":
    print("prefill is ready", flush=True)
for layout, room in zip(layouts, rooms, strict=True):
    if room.wait(60) is KVPoll.Failed:
        room.failure_exception()
    print(side, layout.rank, room.get_transfer_metric().transfer_total_bytes, "bytes")
for manager in managers:
    manager.shutdown()
