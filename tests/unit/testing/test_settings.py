"""What tests are told by the environment."""

import os
import subprocess
import sys

import pytest

from kvferry.errors import ConfigError
from kvferry.testing.settings import patience_of


def test_tests_are_as_patient_as_the_environment_says():
    assert patience_of({}) == 1.0
    assert patience_of({"KVFERRY_TEST_PATIENCE": "2.5"}) == 2.5


@pytest.mark.parametrize("text", ["", "much", "0.5", "nan", "1001"])
def test_what_is_no_factor_is_refused_by_name(text):
    with pytest.raises(ConfigError, match="KVFERRY_TEST_PATIENCE"):
        patience_of({"KVFERRY_TEST_PATIENCE": text})


def test_the_limits_of_what_has_to_come_grow_with_it():
    names = "suite_pair.SETTLE_S, suite_process._ANSWER_S, cluster.WAIT_S, cluster.CLEAR_S"
    modules = "cluster, suite_pair, suite_process"
    command = [sys.executable, "-c", f"from kvferry.testing import {modules}; print({names})"]
    said = [
        subprocess.run(command, env={**os.environ, "KVFERRY_TEST_PATIENCE": factor}, check=True, capture_output=True)
        for factor in ("1", "4")
    ]
    once, more = ([float(word) for word in ended.stdout.split()] for ended in said)
    assert more == [4 * seconds for seconds in once]
