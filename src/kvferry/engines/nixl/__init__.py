"""The NIXL engine: https://github.com/ai-dynamo/nixl, by default over UCX."""

from kvferry.engines.nixl.engine import NixlEngine

__all__ = ["NixlEngine"]
