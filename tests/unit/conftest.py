"""Hypothesis by itself: how long an example takes says only what else this machine does."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
