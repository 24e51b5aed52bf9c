"""Group `model`: random histories, compared with a numpy model after every call (needs hypothesis)."""

from __future__ import annotations

from typing import ClassVar

import pytest

from kvferry.testing.suite_base import SuiteBase


class Model(SuiteBase):
    """`kvferry.testing.EngineMachine` over this suite's engine."""

    group: ClassVar[str] = "model"

    def test_random_histories_leave_exactly_the_bytes_that_a_model_has(self) -> None:
        """`examples` histories of attaching, writing, polling, detaching, with two targets."""
        pytest.importorskip("hypothesis", reason="the state machine needs hypothesis: pip install hypothesis")
        from kvferry.testing.machine import run_machine

        run_machine(self, self.examples)
