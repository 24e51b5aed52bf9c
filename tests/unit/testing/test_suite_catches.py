"""The suite finds each of these defects, and what an engine honestly can't do is refused and noted."""

import runpy
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # planted_engines is a module of its own

import planted_engines as planted

from kvferry.engines.seam import Caps
from kvferry.testing import EngineSuite

EXAMPLES = Path(__file__).parents[3] / "examples"
EXACT = "test_landed_means_that_every_row_is_in_place_and_nothing_else_changed"
FOUND = (AssertionError, TimeoutError, pytest.fail.Exception)


def run(engine, test, mechanism="", **attributes):
    """One test of the suite, on an engine of this class; returns the suite."""

    class Suite(EngineSuite):
        options = {"mechanism": mechanism} if mechanism else {}

        def make_engine(self):
            return engine()

    suite = Suite()
    vars(suite).update(attributes)
    suite.setup_method()
    try:
        getattr(suite, test)()
    finally:
        suite.teardown_method()
    return suite


DEFECTS = [
    (planted.TooEarly, EXACT, "cma"),
    (planted.OneByteTooMany, EXACT, "cma"),
    (planted.OneByteTooMany, "test_a_row_of_any_size_lands_between_its_guard_bytes", "tcp"),
    (planted.NoLimits, "test_a_batch_over_the_limits_or_with_a_wrong_total_is_refused", "cma"),
    (planted.NoLimits, "test_a_batch_of_too_many_bytes_is_refused", "cma"),
    (planted.AnyRegion, "test_a_device_region_is_refused_by_number_without_the_capability", "cma"),
    (planted.AnyOption, "test_an_option_that_is_unknown_is_named_and_the_engine_can_still_be_opened", "cma"),
    (planted.AnyGrant, "test_a_target_row_outside_the_grant_is_refused_before_a_byte_is_written", "tcp"),
    (planted.AnyGrant, "test_what_a_writer_held_back_does_not_land_after_the_grant_was_dropped", "tcp"),
    (planted.AnyGrant, "test_a_fence_of_one_claim_stops_that_one_only", "tcp"),
    (planted.Speechless, "test_every_kind_of_failure_has_a_cause_and_a_native_code", "cma"),
    (planted.SaysItTwice, EXACT, "cma"),
    (planted.ProvesWithoutFence, "test_without_the_capability_a_fence_ends_at_once_and_proves_nothing", "cma"),
    (planted.ProvesTooMuch, "test_a_stopped_writer_proves_nothing_unless_the_target_itself_can_stop_the_rows", "cma"),
    (planted.ProvesTooMuch, "test_a_stopped_writer_proves_nothing_unless_the_target_itself_can_stop_the_rows", "tcp"),
    (planted.ProvesTooMuch, "test_a_fence_on_a_peer_that_never_attached_ends_at_once_and_keeps_it_out", "cma"),
    (planted.ProvesTooMuch, "test_what_a_writer_held_back_does_not_land_after_the_target_cut_it_off", "tcp"),
    (planted.UsedInForks, "test_what_a_parent_has_under_way_lands_while_a_child_closes", "cma"),
    (planted.ForgetsTheOldBlob, "test_a_target_that_was_restarted_under_the_same_name_is_attached_anew", "cma"),
]


@pytest.mark.parametrize(("engine", "test", "mechanism"), DEFECTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_defect_is_found(engine, test, mechanism):
    with pytest.raises(FOUND):
        run(engine, test, mechanism)


@pytest.mark.parametrize("engine", [planted.LeaksDescriptors, planted.LeaksThreads, planted.LeaksMemory])
def test_a_leak_is_found(engine, monkeypatch):
    monkeypatch.setattr("kvferry.testing.groups.leaks.SETTLE_S", 0.5)
    name = "test_attaching_and_detaching_leaves_no_descriptor_no_thread_and_no_memory"
    with pytest.raises(FOUND):
        run(engine, name, "cma", cycles=40)
    planted.LeaksMemory.kept.clear()


def test_a_target_that_has_to_poll_and_does_not_say_so_is_found(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    toy = runpy.run_path(str(EXAMPLES / "toy_engine.py"), run_name="toy_engine")
    toy["ToyEngine"]._give_up_waiting.__globals__["OPENING_S"] = 0.2
    name = "test_a_target_that_does_not_poll_is_written_to_unless_the_engine_says_that_it_must"
    with pytest.raises(pytest.skip.Exception, match="NEEDS_TARGET_POLL"):
        run(toy["ToyEngine"], name)
    silent = type("Silent", (toy["ToyEngine"],), {"caps": Caps.GRANTS | Caps.FENCE})
    with pytest.raises(FOUND):
        run(silent, name)


@pytest.mark.parametrize(
    ("test", "capability"),
    [
        ("test_without_the_capability_a_fence_ends_at_once_and_proves_nothing", "FENCE"),
        ("test_a_stopped_writer_proves_nothing_unless_the_target_itself_can_stop_the_rows", "FENCE"),
        ("test_a_device_region_is_refused_by_number_without_the_capability", "DEVICE_MEMORY"),
    ],
)
def test_what_an_engine_can_not_do_is_refused_and_noted(test, capability):
    assert run(planted.NoFence, test, "cma").refusals == [f"no {capability}"]


def test_what_needs_a_fence_is_skipped_without_one():
    with pytest.raises(pytest.skip.Exception, match="no FENCE"):
        run(planted.NoFence, "test_a_writer_that_detached_is_quiet", "cma")
