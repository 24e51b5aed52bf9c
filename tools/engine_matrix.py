"""Put the engine suite's matrix into docs/engines.md: python tools/engine_matrix.py MATRIX.json PAGE.md."""

import sys
from pathlib import Path

from kvferry.testing.matrix import load, markdown_of

MARK = "<!-- matrix -->\n"


def main(matrix: str, page: str) -> None:
    before, mark, _ = Path(page).read_text().partition(MARK)
    if not mark:
        raise SystemExit(f"{page} has no line {MARK.strip()}")
    Path(page).write_text(f"{before}{MARK}\n{markdown_of([load(Path(matrix))])}")


if __name__ == "__main__":
    main(*sys.argv[1:])
