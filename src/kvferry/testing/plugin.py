"""The pytest plug-in of the engine suite: what must be there, which memory, and the matrix of what was shown.

pytest --kvferry-require=local --kvferry-memory=memfd --kvferry-matrix=matrix.json

pytest imports this module in every run where kvferry is installed, so it imports nothing but pytest, and does nothing
to tests that are not of the engine suite.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvferry.testing.matrix import Matrix

_MEMORY = ("plain", "private", "memfd", "cuda")
_ENGINE, _GROUP, _REFUSED = "kvferry_engine", "kvferry_group", "kvferry_refused"

pytest.register_assert_rewrite("kvferry.testing.groups", "kvferry.testing.suite_base", "kvferry.testing.suite_pair")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("kvferry", "kvferry's engine suite")
    group.addoption(
        "--kvferry-require",
        action="append",
        default=[],
        metavar="NAME",
        help="an engine that must be there: where it is not, its tests fail instead of being skipped; repeatable",
    )
    group.addoption(
        "--kvferry-memory",
        choices=_MEMORY,
        default=None,
        help="where pools lie in suites that don't name a memory of their own (cuda: torch tensors on a GPU)",
    )
    group.addoption(
        "--kvferry-matrix",
        metavar="FILE.json",
        default=None,
        help="print what each engine showed, group by group, and write it to a file",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hand the choices to the suite, and collect results if a matrix was asked for."""
    required, memory = config.getoption("kvferry_require"), config.getoption("kvferry_memory")
    if required or memory:
        _choose(required, memory)
    if config.getoption("kvferry_matrix") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Collector(config, memory or "plain"), "kvferry-matrix")


def _choose(required: list[str], memory: str | None) -> None:
    from kvferry.testing import settings
    from kvferry.testing.suite_memory import KINDS, refusal_of

    refusal = refusal_of(KINDS[memory]) if memory else ""
    if refusal:
        raise pytest.UsageError(f"--kvferry-memory {memory}: {refusal}")
    settings.current = settings.Settings(frozenset(map(str.casefold, required)), KINDS[memory] if memory else "")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Forget the choices: a run inside another one must not leave them behind."""
    if config.getoption("kvferry_require") or config.getoption("kvferry_memory"):
        from kvferry.testing import settings

        settings.current = settings.Settings()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let -k choose tests of the suite by the name of their group."""
    for item in items:
        if hasattr(getattr(item, "cls", None), "name_in_matrix"):
            item.extra_keyword_matches.add(_group_of(item))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note which engine and group a test of the suite belongs to."""
    name = getattr(getattr(item, "cls", None), "name_in_matrix", None)
    if name is not None:
        item.user_properties += [(_ENGINE, name()), (_GROUP, _group_of(item))]


@pytest.hookimpl(hookwrapper=True)  # the form that older versions of pytest know, too
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note what the engine refused for want of a capability."""
    yield
    for refusal in getattr(getattr(item, "instance", None), "refusals", ()):
        item.user_properties.append((_REFUSED, refusal))


def _group_of(item: Any) -> str:
    """The group of the class that defines the test; "own" for tests that an engine's own class adds."""
    name = item.originalname or item.name
    owners = (owner for owner in item.cls.__mro__ if name in vars(owner) and vars(owner).get("group"))
    return next((str(vars(owner)["group"]) for owner in owners), "own")


class _Collector:
    """Fills the matrix; with pytest-xdist in the controlling process only."""

    def __init__(self, config: pytest.Config, memory: str) -> None:
        from kvferry.testing.matrix import Matrix

        self._path = Path(config.getoption("kvferry_matrix"))
        self._config = config
        self.matrix: Matrix = Matrix(_versions(), memory)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: by its call, or by a setup or teardown that went wrong."""
        facts = dict(report.user_properties)
        if _ENGINE not in facts or (report.when != "call" and report.passed):
            return
        cell = self.matrix.cell(str(facts[_ENGINE]), str(facts[_GROUP]))
        if report.failed:
            cell.add("failed", [report.nodeid.rpartition("::")[2]])
        elif report.skipped:
            cell.add("skipped", [_reason(report)])
        else:
            refusals = [str(value) for name, value in report.user_properties if name == _REFUSED]
            cell.add("refused" if refusals else "passed", refusals)

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        from kvferry.testing import matrix

        matrix.save(self._in_order(), self._path)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table."""
        from kvferry.testing import matrix

        terminalreporter.section("kvferry: engines and what they showed")
        for line in matrix.text_of(self._in_order()):
            terminalreporter.line(line)
        terminalreporter.line(f"written to {self._path}")

    def _in_order(self) -> Matrix:
        if self.matrix.engines:
            from kvferry.testing.suite import GROUPS

            for engine, row in self.matrix.engines.items():
                order = [*[group for group in GROUPS if group in row], *[group for group in row if group not in GROUPS]]
                self.matrix.engines[engine] = {group: row[group] for group in order}
        return self.matrix


def _reason(report: pytest.TestReport) -> str:
    where = report.longrepr
    text = str(where[2]) if isinstance(where, tuple) else str(where)
    return text.removeprefix("Skipped: ")


def _versions() -> dict[str, str]:
    import platform

    import kvferry

    return {"kvferry": kvferry.__version__, "python": platform.python_version(), "kernel": platform.release()}
