"""What is public, and that it costs nothing before it is used."""

import subprocess
import sys

import pytest

import kvferry
from kvferry import testing

WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(["pytest", "hypothesis", "torch"]))  # as if they were not installed
import kvferry.testing.matrix, kvferry.testing.simulate, kvferry.testing.suite_pair, kvferry.testing.suite_process
from kvferry.testing import Faulty
try:
    from kvferry.testing import EngineSuite
except ImportError as error:
    print(error.name)
"""


def run(text):
    command = [sys.executable, "-c", text]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_neither_pytest_nor_hypothesis_is_needed_but_by_the_suite():
    assert run(WITHOUT) == "pytest\n"


def test_importing_the_packages_imports_nothing_else():
    loaded = "import sys, kvferry, kvferry.testing; print(sorted(name for name in sys.modules if 'kvferry.' in name))"
    assert run(loaded) == "['kvferry.testing']\n"


@pytest.mark.parametrize("package", [kvferry, testing])
def test_every_public_name_is_there_and_no_other(package):
    for name in package.__all__:
        assert getattr(package, name) is not None
        assert name in dir(package)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        package.no_such_name  # noqa: B018
