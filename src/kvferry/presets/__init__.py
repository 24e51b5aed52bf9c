"""Well-known caches as data: arrangements of engines, models, parallel grids. Pure: no I/O, no torch."""

from kvferry.presets.arrange import DTYPE_BYTES, Order, Piece, arranged, dtype_bytes
from kvferry.presets.caches import layer_major, mla, page_major, stacked
from kvferry.presets.engine_caches import ENGINE_CACHES, EngineCache
from kvferry.presets.grid import Grid, layout_of, layouts_of, parse_grid
from kvferry.presets.model import Block, Item, ModelShape, attention
from kvferry.presets.models import MODELS, find_model

__all__ = [
    "DTYPE_BYTES",
    "ENGINE_CACHES",
    "MODELS",
    "Block",
    "EngineCache",
    "Grid",
    "Item",
    "ModelShape",
    "Order",
    "Piece",
    "arranged",
    "attention",
    "dtype_bytes",
    "find_model",
    "layer_major",
    "layout_of",
    "layouts_of",
    "mla",
    "page_major",
    "parse_grid",
    "stacked",
]
