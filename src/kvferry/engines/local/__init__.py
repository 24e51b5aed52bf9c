"""The embedded engine: no library needed, cross-memory attach on one host and TCP elsewhere."""

from kvferry.engines.local.engine import LocalEngine

__all__ = ["LocalEngine"]
