"""Network devices: as people give them to an engine (one name, several, or a JSON object by GPU), and what is here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvferry.errors import ConfigError

OPTIONS = ("devices", "gpu")

RDMA = (Path("/sys/class/infiniband"), Path("/sys/class/infiniband_verbs"))
"""Where the kernel lists RDMA devices, and what programs open of them."""


def rdma_devices() -> list[str]:
    """Names of the RDMA devices of this system; [] if it has none."""
    found = (sorted(each.name for each in folder.iterdir() if each.is_dir()) for folder in RDMA if folder.is_dir())
    return next(filter(None, found), [])


def devices_of(options: Mapping[str, str], engine: str) -> list[str]:
    """The names that options `devices` and `gpu` say; none where nothing is said.

    Args:
        options: an engine's options: `devices` is "mlx5_0", "mlx5_0,mlx5_1", or '{"0": "mlx5_0", "1": "mlx5_1"}', of
            which `gpu` ("0") says the entry that counts.
        engine: its name, for errors.

    Raises:
        ConfigError: it looks like JSON and is none of names, or has no entry for the GPU.
    """
    text, gpu = options.get("devices", "").strip(), options.get("gpu", "0").strip()
    if text.startswith("{"):
        text = _entry(text, gpu, engine)
    return [name.strip() for name in text.split(",") if name.strip()]


def _entry(text: str, gpu: str, engine: str) -> str:
    try:
        by_gpu = msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"option 'devices' of the {engine} engine is {text!r}",
            hint=f"names, or a JSON object with names for each GPU: {error}",
        ) from None
    if gpu not in by_gpu:
        raise ConfigError(
            f"option 'gpu' of the {engine} engine is {gpu!r}",
            hint=f"option 'devices' has an entry for GPU {', '.join(sorted(by_gpu)) or 'none'}",
        )
    return by_gpu[gpu]
