"""Which weights a model folder holds: two checkpoints under one name must not feed each other's caches.

A name says too little: training writes every step into a folder called `model`, and a cache of other weights gives
fluent wrong text. What is read of the files is little: their sizes, and some bytes spread over them.
"""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""Files with weights; the first pattern that has some counts, as folders often hold one model in two formats."""

LOOKS, LEAST_LOOKS, LOOK_BYTES = 256, 8, 4096
"""Places that are read in all, in one file at the least, and how much of each: 1 MiB, or 32 KiB of each file."""

VARIABLE = "KVFERRY_MODEL"
"""An environment variable that says which weights are served, instead of their files: the same text on both sides."""


def model_id(model: str) -> str:
    """What both sides have to share of a model: "NAME" or "NAME@DIGEST", or what KVFERRY_MODEL says.

    Args:
        model: a folder, a file, or a name on a hub whose files are in the local cache.
    """
    if said := os.environ.get(VARIABLE):
        return said
    files = weight_files(_local(model))
    name = Path(model).name
    return f"{name}@{digest(files)}" if files else name


def weight_files(path: Path) -> list[Path]:
    """The files with weights in a folder, by name; or the file itself; none if there is nothing."""
    if path.is_file():
        return [path]
    for pattern in PATTERNS:
        if found := sorted(path.glob(pattern)):
            return found
    return []


def digest(files: list[Path]) -> str:
    """16 hexadecimal digits of the files' names, sizes, and bytes at places spread over each."""
    looks = max(LEAST_LOOKS, LOOKS // max(len(files), 1))
    found = xxhash.xxh3_64()
    for path in files:
        with path.open("rb") as file:
            nbytes = file.seek(0, os.SEEK_END)
            found.update(f"{path.name}:{nbytes};".encode())
            for look in range(looks):
                file.seek(max(0, nbytes - LOOK_BYTES) * look // (looks - 1))
                found.update(file.read(LOOK_BYTES))
    return found.hexdigest()


def _local(model: str) -> Path:
    """Where the files are; a path to nothing if they are not on this host."""
    if Path(model).exists():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, local_files_only=True))
    except Exception:  # noqa: BLE001 - whatever is missing, or refused: the name alone is known
        return Path(model)
