"""The source tree: what must not stand in it anywhere."""

import ast
import pathlib
import subprocess
import sys

import pytest

import kvferry

ROOT = pathlib.Path(kvferry.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def unsafe(tree):
    """What in a module can turn bytes of a peer into code."""
    found = [f"import {name}" for name in imports(tree) if name in UNSAFE_MODULES]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
            found.append(f"{node.func.id}() in line {node.lineno}")
        if any(keyword.arg == "allow_pickle" for keyword in node.keywords):
            found.append(f"allow_pickle in line {node.lineno}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_turns_bytes_into_code(path):
    assert unsafe(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import dill.source",
        "eval('1')",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_the_search_for_such_modules_finds_them(text):
    assert len(unsafe(ast.parse(text))) == 1


def test_the_whole_package_is_searched():
    assert {"proto", "wire", "node", "engines", "api", "bootstrap"} <= {path.parent.name for path in FILES}


def test_a_worker_imports_neither_a_web_server_nor_torch_nor_the_model():
    heavy = ("uvicorn", "starlette", "torch", "gguf", "rich")
    code = f"import sys, kvferry; print(*[name for name in {heavy} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ended.stdout.strip() == ""


def test_no_class_outside_of_the_engines_is_named_after_one():
    names = ("local", "nixl", "mooncake", "mori")
    for path in FILES:
        if "engines" not in path.parts:
            found = [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
            assert not [name for name in found if any(engine in name.lower() for engine in names)], path
