"""The canary: where both sides of a transfer look, and what they see. Pure: the shell reads the memory."""

from kvferry.canary.places import EVERY_BYTES, WINDOW_BYTES, Look, Windows, look, small_look
from kvferry.canary.sums import Sums, add, cells, difference, no_sums, weigh

__all__ = [
    "EVERY_BYTES",
    "WINDOW_BYTES",
    "Look",
    "Sums",
    "Windows",
    "add",
    "cells",
    "difference",
    "look",
    "no_sums",
    "small_look",
    "weigh",
]
