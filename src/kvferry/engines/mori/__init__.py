"""The MORI engine: batches over MORI-IO, by RDMA or by XGMI."""

from kvferry.engines.mori.engine import MoriEngine

__all__ = ["MoriEngine"]
