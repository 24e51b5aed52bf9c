"""Fail where a file or function is larger than the house rule: 600 lines a file, 60 a function; no catch-all names."""

import ast
import pathlib
import sys

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
EMPTY_NAMES = {"utils", "common", "helpers", "misc"}


def complaints(path: pathlib.Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    found = []
    lines = len(text.splitlines())
    if lines > MAX_FILE_LINES:
        found.append(f"{path}: {lines} lines, at most {MAX_FILE_LINES}")
    if path.stem in EMPTY_NAMES:
        found.append(f"{path}: a module name that says nothing")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{path}:{node.lineno} {node.name}: {length} lines, at most {MAX_FUNCTION_LINES}")
    return found


def main(roots: list[str]) -> int:
    found = [text for root in roots for path in sorted(pathlib.Path(root).rglob("*.py")) for text in complaints(path)]
    print("\n".join(found) if found else "sizes: fine")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
