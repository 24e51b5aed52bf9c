"""Hypothesis profiles: HYPOTHESIS_PROFILE=nightly draws many more examples."""

import os

from hypothesis import HealthCheck, settings

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("plan", max_examples=300, deadline=None, suppress_health_check=_QUIET)
settings.register_profile("nightly", max_examples=10_000, deadline=None, suppress_health_check=_QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "plan"))
