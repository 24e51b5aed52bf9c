"""One frame of each kind, empty and filled: what the golden files hold."""

import pytest

from kvferry.errors import Blame, Code, Reason
from kvferry.ids import PeerId, Rank
from kvferry.layout import (
    All,
    Cyclic,
    Device,
    Field,
    Host,
    Layout,
    Ranges,
    Rows,
    Slot,
    Space,
    Strides,
    Tensor,
    Window,
)
from kvferry.wire import (
    Bye,
    Canary,
    Credits,
    Frame,
    Hello,
    InfoPhase,
    KVArgsRegisterInfo,
    Refused,
    StatusPhase,
    Tick,
    TransferInfo,
    TransferStatus,
)

BIG = 2**64 - 1
SOURCE, DESTINATION = PeerId(0x0123456789ABCDEF, 3), PeerId(BIG, 2**32)
REASON = Reason(
    Code.WRITE_FAILED,
    "prefill",
    "dp0 pp1 cp0 tp3",
    "10.0.0.7:8998",
    "transfer",
    "12 bytes, not 16 — cut",
    Blame.ENGINE,
)
EMPTY_LAYOUT = Layout("", "", 0, (), ())
FULL_LAYOUT = Layout(
    model="meta/model@rev", dtype="bfloat16", kv_heads=8,
    tensors=(
        Tensor(
            "kv", (0, 1, 61), ((0, 2), (6, 8)), (Field("k", 256), Field("v", 256)), 0x7F00_0000_0000, 1 << 40,
            Strides(layer=1 << 33, page=1 << 14, token=1 << 10, head=1 << 9), 16384, 1 << 19, Device(7),
        ),
        Tensor(
            "state", (2,), (), (Field("ssm", 4096, "request", False, 1, "f32[64,16]"),), 4096, 65536,
            Strides(page=4096), 4096, 16, Host(),
        ),
    ),
    spaces=(
        Space("kv", 16, Ranges(4, (0, 3), 16), All()),
        Space("swa", 16, Cyclic(16, 2, 1), Window(4096)),
        Space("state", 1, Cyclic(), Slot()),
        Space("rows", 1, Cyclic(), Rows()),
    ),
    rank=Rank(1, 2, 3, 4), head_dim=128,
)  # fmt: skip

MESSAGES = {
    "hello": Hello((1, 0), SOURCE),
    "hello_full": Hello((1, 7), SOURCE, ("credits", "canary")),
    "register": KVArgsRegisterInfo(EMPTY_LAYOUT, {}, "prefill"),
    "register_full": KVArgsRegisterInfo(
        FULL_LAYOUT, {"local": bytes(range(256)), "nixl": b""}, "decode", (4, 64, 1024), "10.0.0.9:30001", "full",
    ),
    "refused": Refused(Reason(Code.INCOMPATIBLE)),
    "refused_full": Refused(REASON),
    "info_open": TransferInfo(0, 1, 1, InfoPhase.OPEN),
    "info_pages": TransferInfo(
        room=BIG, claim=2**40, rev=2, phase=InfoPhase.PAGES, tag=0xFEED_FACE_CAFE_BEEF, ack=1, want_ack=True,
        pages={"kv": b"\x00\x00\x00\x00\xff\xff\xff\x7f", "state": b""}, num_tokens=0, prefix_tokens=16, fan_in=8,
        sends={"kv": ("k",)}, expected_bytes=0, trace="4f2a",
    ),
    "info_success": TransferInfo(7, 1, 3, InfoPhase.CLOSED, success=True),
    "info_failed": TransferInfo(7, 1, 3, InfoPhase.CLOSED, ack=2**33, reason=REASON),
    "status_queued": TransferStatus(7, 1, 1, StatusPhase.QUEUED),
    "status_sending": TransferStatus(
        7, 1, 4, StatusPhase.SENDING, offer=9, ack=2, want_ack=True, chunks_landed=3, chunks_total=5,
        bytes_landed=2**41,
    ),
    "status_delivered": TransferStatus(
        7, 1, 5, StatusPhase.DELIVERED, offer=9, chunks_landed=5, chunks_total=5, bytes_landed=2**41, quiet=True,
        aux=b"\x01\x00\x00\x00token", canary=Canary({"kv": (b"\xaa" * 8, b"\xbb" * 16)}, full=True),
    ),
    "status_failed": TransferStatus(7, 1, 6, StatusPhase.FAILED, quiet=True, reason=REASON),
    "credits": Credits(),
    "tick": Tick(1),
    "tick_full": Tick(BIG, 2**40, 12, 4, want_ack=True),
    "bye": Bye(),
    "bye_full": Bye(REASON),
}  # fmt: skip
FRAMES = {name: Frame(SOURCE, DESTINATION, message) for name, message in MESSAGES.items()}
FRAMES["hello"] = Frame(SOURCE, None, MESSAGES["hello"])


@pytest.fixture
def frames():
    """Name of the golden file -> what it holds."""
    return FRAMES


def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", FRAMES)


@pytest.fixture
def frame(frames, name):
    return frames[name]
