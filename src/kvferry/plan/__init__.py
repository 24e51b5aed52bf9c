"""Which bytes go where: two layouts and two page lists become batches of rows. Pure: no I/O, no torch."""

from kvferry.plan.batch import Batch, Limits
from kvferry.plan.batches import batches
from kvferry.plan.elect import Election, Share, elect, fan_in, holding
from kvferry.plan.indices import group_concurrent_contiguous
from kvferry.plan.route import Leg, Pieces, Route, route
from kvferry.plan.runs import PageList, Runs, runs

__all__ = [
    "Batch",
    "Election",
    "Leg",
    "Limits",
    "PageList",
    "Pieces",
    "Route",
    "Runs",
    "Share",
    "batches",
    "elect",
    "fan_in",
    "group_concurrent_contiguous",
    "holding",
    "route",
    "runs",
]
