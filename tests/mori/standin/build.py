"""Build what MORI's wheel is linked to and this machine lacks: `python build.py WHEEL_FOLDER OUT_FOLDER`.

- libamdhip64.so.7: hip_standin.c, and for all else that the wheel wants of HIP a function that returns "not supported";
- librocm_smi64.so.1: rocm_smi_standin.c, which MORI asks where there is an RDMA device;
- libhsa-runtime64.so.1: functions that all fail; nothing of MORI-IO calls them here;
- gRPC and protobuf, which only MORI's key-value store uses: symbols without anything behind them.

The symbols and their versions are read from the wheel. It needs a C compiler, and builds once per wheel and source.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from elf import Library, Wanted

HIP, HSA = "libamdhip64.so.7", "libhsa-runtime64.so.1"
SOURCE, SMI_SOURCE = (Path(__file__).with_name(f"{name}_standin.c") for name in ("hip", "rocm_smi"))

_NOT_SUPPORTED = {HIP: 801, HSA: 0x1000}
_RPC_LIBRARY = re.compile(r"lib(protobuf|grpc|gpr|absl|re2|upb|address_sorting)")
_RPC_SYMBOL = re.compile(r"grpc|gpr_|6google8protobuf")
_RPC_OBJECT = re.compile(r"^_ZT[VIS]|^_ZGV|instance_E|empty_string_E$|fixed_address_empty_stringE$")
_DEFINED = re.compile(r"^(?:[\w ]+\*{0,2} ?)\b(\w+)\(.*\) \{", re.MULTILINE)


def build(wheel: Path, out: Path) -> None:
    """Build all into a folder, unless it holds what comes of this wheel and these sources."""
    files = sorted((wheel / "mori").glob("libmori_*.so"))
    assert files, f"there is no MORI in {wheel}"
    stamp, key = out / "built-from", _key([SOURCE, SMI_SOURCE, Path(__file__), *files])
    if stamp.exists() and stamp.read_text() == key:
        return
    out.mkdir(parents=True, exist_ok=True)
    libraries = [Library(file) for file in files]
    wanted = {symbol.name: symbol for library in libraries for symbol in library.wanted}
    for name, source in ((HIP, SOURCE.read_text()), (HSA, "")):
        _versioned(out, name, source, [symbol for symbol in wanted.values() if symbol.library == name])
    _compile(out, "librocm_smi64.so.1", [str(SMI_SOURCE.resolve())])
    _rpc(out, sorted({name for library in libraries for name in library.needed if _RPC_LIBRARY.match(name)}), wanted)
    stamp.write_text(key)


def _key(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _versioned(out: Path, name: str, source: str, symbols: Sequence[Wanted]) -> None:
    """One library whose symbols have the versions that the wheel wants."""
    defined = set(_DEFINED.findall(source))
    missing = sorted(symbol.name for symbol in symbols if symbol.name not in defined)
    code = source + "".join(f"int {each}(void) {{ return {_NOT_SUPPORTED[name]}; }}\n" for each in missing)
    (out / f"{name}.c").write_text(code)
    (out / f"{name}.map").write_text(_version_script(symbols))
    _compile(out, name, [f"{name}.c", "-pthread", f"-Wl,--version-script={name}.map"])


def _version_script(symbols: Sequence[Wanted]) -> str:
    versions = sorted({each.version for each in symbols}, key=lambda text: [int(n) for n in re.findall(r"\d+", text)])
    lines, before = [], ""
    for version in versions:
        names = sorted(each.name for each in symbols if each.version == version)
        rest = f"}} {before};" if before else "standin_*; local: *; };"
        lines.append(f"{version} {{ global: {'; '.join(names)}; {rest}")
        before = version
    return "\n".join(lines) + "\n"


def _rpc(out: Path, libraries: Sequence[str], wanted: Iterable[str]) -> None:
    """The first library has all symbols, the others none."""
    symbols = sorted(name for name in wanted if _RPC_SYMBOL.search(name))
    text = [
        f".globl {name}\n.type {name},@function\n{name}: xor %eax,%eax\nret" for name in symbols if not _is_data(name)
    ]
    data = [f".balign 16\n.globl {name}\n.type {name},@object\n{name}: .fill 512" for name in symbols if _is_data(name)]
    note = '.section .note.GNU-stack,"",@progbits'
    (out / "rpc.s").write_text("\n".join([".text", *text, ".data", *data, note]) + "\n")
    (out / "nothing.c").write_text("typedef int nothing;\n")
    for number, name in enumerate(libraries):
        _compile(out, name, ["nothing.c" if number else "rpc.s"])


def _is_data(name: str) -> bool:
    return _RPC_OBJECT.search(name) is not None


def _compile(out: Path, name: str, arguments: Sequence[str]) -> None:
    command = ["cc", "-std=gnu11", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", name, f"-Wl,-soname,{name}"]
    subprocess.run([*command, *arguments], cwd=out, check=True)


if __name__ == "__main__":
    build(*map(Path, sys.argv[1:]))
