"""What the engine suite showed: engine x group, as JSON, as text, and as a Markdown table.

python -m kvferry.testing.matrix FILE.json [FILE.json ...]     # one Markdown table of all files, for a page of docs
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

OUTCOMES = ("passed", "refused", "skipped", "failed")


class Cell(msgspec.Struct):
    """One group of tests of one engine.

    Attributes:
        passed: tests that showed what they are to show.
        refused: tests that showed that the engine refuses what it has no capability for.
        skipped: tests that had nothing to show, or could not be run here.
        failed: tests that failed, or could not be set up.
        reasons: why, for what was refused or skipped, and the names of tests that failed; each once.
    """

    passed: int = 0
    refused: int = 0
    skipped: int = 0
    failed: int = 0
    reasons: list[str] = []

    @property
    def status(self) -> str:
        """The worst of it in one word: failed, passed, refused or skipped."""
        if self.failed:
            return "failed"
        return next((outcome for outcome in OUTCOMES if getattr(self, outcome)), "skipped")

    def add(self, outcome: str, reasons: Iterable[str] = ()) -> None:
        """Count one test."""
        setattr(self, outcome, getattr(self, outcome) + 1)
        self.reasons += [reason for reason in dict.fromkeys(reasons) if reason not in self.reasons]

    def __str__(self) -> str:
        counts = [f"{getattr(self, outcome)} {outcome}" for outcome in OUTCOMES if getattr(self, outcome)]
        return ", ".join(counts) or "-"


class Matrix(msgspec.Struct):
    """One run, or several put together.

    Attributes:
        versions: what was run, for instance {"kvferry": "0.1.0", "python": "3.11.9"}.
        memory: the kind of pools that the run asked for.
        engines: engine -> group -> what it showed.
    """

    versions: dict[str, str] = {}
    memory: str = "plain"
    engines: dict[str, dict[str, Cell]] = {}

    def cell(self, engine: str, group: str) -> Cell:
        """The cell of a group, new if need be."""
        return self.engines.setdefault(engine, {}).setdefault(group, Cell())

    def groups(self) -> list[str]:
        """All groups, in the order in which they first came."""
        return list(dict.fromkeys(group for row in self.engines.values() for group in row))

    def reasons(self) -> list[tuple[str, str, str]]:
        """Engine, group and reason of all that did not simply pass."""
        return [
            (engine, group, reason)
            for engine, row in self.engines.items()
            for group, cell in row.items()
            for reason in cell.reasons
        ]


def save(matrix: Matrix, path: Path) -> None:
    """Write it as JSON; directories on the way are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(matrix), indent=2) + b"\n")


def load(path: Path) -> Matrix:
    """Read what `save` wrote.

    Raises:
        msgspec.DecodeError, OSError: it is no such file.
    """
    return msgspec.json.decode(path.read_bytes(), type=Matrix)


def text_of(matrix: Matrix) -> list[str]:
    """Lines for a terminal: a row for each group, a column for each engine, then the reasons."""
    head = ["", *matrix.engines]
    rows = [[group, *[_short(row.get(group)) for row in matrix.engines.values()]] for group in matrix.groups()]
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)) for line in (head, *rows)]
    return [line.rstrip() for line in lines] + [" | ".join(reason) for reason in matrix.reasons()]


def markdown_of(matrices: Sequence[Matrix]) -> str:
    """One table with a row for each engine, and a list of the reasons below it."""
    groups = list(dict.fromkeys(group for matrix in matrices for group in matrix.groups()))
    lines = [_row(["engine", "memory", *groups]), _row(["---"] * (len(groups) + 2))]
    for matrix in matrices:
        for engine, row in matrix.engines.items():
            lines.append(_row([f"`{engine}`", matrix.memory, *[str(row.get(group, Cell())) for group in groups]]))
    reasons = [f"- `{engine}`, {group}: {reason}" for matrix in matrices for engine, group, reason in matrix.reasons()]
    versions = [", ".join(f"{name} {version}" for name, version in matrix.versions.items()) for matrix in matrices]
    if reasons:
        lines += ["", *dict.fromkeys(reasons)]
    said = [line for line in dict.fromkeys(versions) if line]
    return "\n".join([*lines, *(["", f"Run with {'; '.join(said)}."] if said else [])]) + "\n"


def _short(cell: Cell | None) -> str:
    return str(cell) if cell is not None else "-"


def _row(words: Iterable[str]) -> str:
    escaped = (word.replace("|", "\\|") for word in words)
    return f"| {' | '.join(escaped)} |"


def main(paths: Sequence[str]) -> int:
    """Print the table of the given files; returns the exit status."""
    if not paths:
        sys.stderr.write("usage: python -m kvferry.testing.matrix FILE.json [FILE.json ...]\n")
        return 2
    try:
        matrices = [load(Path(path)) for path in paths]
    except (msgspec.DecodeError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(markdown_of(matrices))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
