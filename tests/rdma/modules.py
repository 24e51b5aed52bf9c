"""Copy the kernel modules that the lab's guest loads, and write their order: python3 modules.py MODULES_FOLDER TO."""

import shutil
import sys
from pathlib import Path

WANTED = (
    "virtio_pci", "virtio_rng", "9pnet_virtio", "9p", "overlay", "dummy", "crc32c_generic", "crc32_generic",
    "ib_core", "ib_uverbs", "rdma_ucm", "rdma_rxe",
)  # fmt: skip
"""What is built into the kernel is not among its modules, and not missed."""


def in_order(needs: dict[str, list[str]]) -> list[str]:
    by_name = {Path(path).stem.replace("-", "_"): path for path in needs}
    ordered: dict[str, None] = {}
    for name in WANTED:
        if name in by_name:
            _add(by_name[name], needs, ordered)
    return list(ordered)


def _add(path: str, needs: dict[str, list[str]], ordered: dict[str, None]) -> None:
    if path not in ordered:
        for other in reversed(needs[path]):
            _add(other, needs, ordered)
        ordered[path] = None


def main(folder: str, to: str) -> None:
    lines = (Path(folder) / "modules.dep").read_text().splitlines()
    needs = {name: others.split() for name, _, others in (line.partition(":") for line in lines)}
    ordered = in_order(needs)
    for path in ordered:
        shutil.copy(Path(folder) / path, to)
    (Path(to) / "order").write_text("".join(f"{Path(path).name}\n" for path in ordered))


if __name__ == "__main__":
    main(*sys.argv[1:])
