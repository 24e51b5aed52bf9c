"""The Mooncake engine: batches over Mooncake's transfer engine."""

from kvferry.engines.mooncake.engine import MooncakeEngine

__all__ = ["MooncakeEngine"]
