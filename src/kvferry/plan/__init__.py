"""Which bytes go where: two layouts and two page lists become batches of rows. Pure: no I/O, no torch."""

from kvferry.plan.batch import Batch, Limits
from kvferry.plan.batches import batches
from kvferry.plan.elect import Destinations, Election, Share, elect, fan_in, holdings
from kvferry.plan.pieces import Pieces
from kvferry.plan.route import Leg, Route, route
from kvferry.plan.runs import PageList, Part, Runs, runs
from kvferry.plan.small import SMALL_BYTES, Size, Target, recipe, small_batch, small_target

__all__ = [
    "SMALL_BYTES",
    "Batch",
    "Destinations",
    "Election",
    "Leg",
    "Limits",
    "PageList",
    "Part",
    "Pieces",
    "Route",
    "Runs",
    "Share",
    "Size",
    "Target",
    "batches",
    "elect",
    "fan_in",
    "holdings",
    "recipe",
    "route",
    "runs",
    "small_batch",
    "small_target",
]
