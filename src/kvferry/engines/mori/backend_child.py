"""A process that creates a backend of the library, which may end it: `python -m kvferry.engines.mori.backend_child`.

Its arguments are the backend and the address to listen on; it writes one line of JSON: "why" it can't be created, or
"", and how many "gpus" HIP finds.
"""

from __future__ import annotations

import json
import sys

from kvferry.answers import take_stdio
from kvferry.engines.mori import library
from kvferry.errors import EngineUnavailable


def _main(backend: str, host: str) -> None:
    answers = take_stdio()
    why, gpus = "", 0
    try:
        cpp = library.load()
        gpus = library.gpu_count()
        engine = cpp.IOEngine("kvferry-trial", cpp.IOEngineConfig(host, 0))
        engine.CreateBackend(*library.backend_of(cpp, backend))
    except (EngineUnavailable, RuntimeError) as error:
        why = str(error)
    answers.write(json.dumps({"why": why, "gpus": gpus}).encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
