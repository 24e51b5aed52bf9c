"""Put the engine suite's matrix into docs/engines.md: python tools/engine_matrix.py PAGE.md SAVED [FRESH].

SAVED is a folder of runs, each in a file, which are all put into the page; files in folders of FRESH, if there are any,
are first copied there under the name verbs-NAME.json.
"""

import shutil
import sys
from pathlib import Path

from kvferry.testing.matrix import load, markdown_of

MARK = "<!-- matrix -->\n"


def main(page: str, saved: str, fresh: str = "") -> None:
    for file in sorted(Path(fresh).glob("*/*.json")) if fresh else ():
        shutil.copyfile(file, Path(saved) / f"verbs-{file.name}")
    before, mark, _ = Path(page).read_text().partition(MARK)
    if not mark:
        raise SystemExit(f"{page} has no line {MARK.strip()}")
    runs = [load(file) for file in sorted(Path(saved).glob("*.json"))]
    Path(page).write_text(f"{before}{MARK}\n{markdown_of(runs)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
