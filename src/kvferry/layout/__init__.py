"""What is held, by whom: declared layouts, their checks. Pure: no I/O, no torch."""

from kvferry.layout.agree import Fit, covers, supports
from kvferry.layout.bind import bind
from kvferry.layout.check import LOWEST_ADDRESS, digest, plain, validate
from kvferry.layout.deal import Segments, extent, first_slot, list_begin, num_pages, segments, slots_below
from kvferry.layout.group import validate_group
from kvferry.layout.space import All, Coverage, Cyclic, Deal, Ranges, Rows, Slot, Space, Window
from kvferry.layout.tensor import Device, Field, Host, Layout, Memory, Strides, Tensor

__all__ = [
    "LOWEST_ADDRESS",
    "All",
    "Coverage",
    "Cyclic",
    "Deal",
    "Device",
    "Field",
    "Fit",
    "Host",
    "Layout",
    "Memory",
    "Ranges",
    "Rows",
    "Segments",
    "Slot",
    "Space",
    "Strides",
    "Tensor",
    "Window",
    "bind",
    "covers",
    "digest",
    "extent",
    "first_slot",
    "list_begin",
    "num_pages",
    "plain",
    "segments",
    "slots_below",
    "supports",
    "validate",
    "validate_group",
]
