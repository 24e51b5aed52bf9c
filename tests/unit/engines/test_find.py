"""Engines by name."""

import importlib.metadata
import sys
import types

import pytest

from kvferry.engines import find
from kvferry.engines.local import LocalEngine
from kvferry.errors import ConfigError, EngineUnavailable, UnknownEngine


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    monkeypatch.setattr(find, "_registered", {})


@pytest.fixture
def entry_points(monkeypatch):
    def install(**targets):
        points = [
            importlib.metadata.EntryPoint(name, target, find.ENTRY_POINT_GROUP) for name, target in targets.items()
        ]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)

    return install


def test_local_is_known_and_loads_even_when_no_package_is_installed(entry_points):
    entry_points()
    assert find.known()["local"].target
    assert isinstance(find.load("local"), LocalEngine)


def test_known_imports_nothing(entry_points):
    entry_points(far="no_such_package:Engine")
    assert find.known()["far"].origin == "entry point"
    assert "no_such_package" not in sys.modules


def test_a_misspelt_name_names_the_nearest_and_all():
    with pytest.raises(UnknownEngine, match=r"(?s)'locl'.*did you mean 'local'.*mooncake"):
        find.load("locl")


def test_an_entry_point_makes_an_engine_available(entry_points):
    entry_points(another="kvferry.engines.local:LocalEngine")
    assert isinstance(find.load("another"), LocalEngine)


def test_a_missing_package_is_named_with_the_install_line():
    find.register("mine", "no_such_package.engine:Engine", "pip install no-such-package")
    with pytest.raises(EngineUnavailable, match=r"'no_such_package' is missing \(pip install no-such-package\)"):
        find.load("mine")


def test_a_registered_engine_loads():
    find.register("mine", "kvferry.engines.local:LocalEngine")
    assert isinstance(find.load("mine"), LocalEngine)


@pytest.mark.parametrize("target", ["", "package", "package:", ":Class", "package.1x:Class", "a b:C"])
def test_a_target_of_another_form_is_refused(target):
    with pytest.raises(ConfigError, match="give 'package"):
        find.register("mine", target)


@pytest.mark.parametrize("broken", ["raises", "absent", "not_callable", "cannot_be_made", "half_an_engine"])
def test_a_broken_engine_is_reported_by_name_and_does_not_disturb_another(monkeypatch, broken):
    module = types.ModuleType("broken_engine")

    def getter(name):
        if name == "raises":
            raise RuntimeError("boom")
        raise AttributeError(name)

    module.__getattr__ = getter
    module.not_callable = 5
    module.cannot_be_made = lambda: 1 / 0
    module.half_an_engine = lambda: types.SimpleNamespace(open=print)
    monkeypatch.setitem(sys.modules, "broken_engine", module)
    find.register("bad", f"broken_engine:{broken}")
    with pytest.raises(EngineUnavailable, match="'bad'"):
        find.load("bad")
    assert isinstance(find.load("local"), LocalEngine)
