"""A worker process for the tests of its supervision: it does what it is told, mischief included."""

import os
import subprocess
import sys
import time

import msgspec

from kvferry.bench.child import main, note
from kvferry.bench.failure import BenchError
from kvferry.errors import InputError


class Setup(msgspec.Struct):
    mischief: str = ""


class Toy:
    takes = Setup

    def __init__(self, setup):
        self.mischief = setup.mischief
        if self.mischief == "wrong input":
            raise InputError("5 is wrong", hint="use 6")
        if self.mischief == "leave":
            os._exit(7)

    def hello(self):
        return os.getpid()

    def add(self, a, b):
        return a + b

    def twice(self):
        note("first")
        return "second"

    def fail(self):
        raise BenchError("the bytes are wrong")

    def stumble(self):
        return {}["nothing"]

    def leave(self, code):
        os._exit(code)

    def kill(self):
        os.kill(os.getpid(), 9)

    def hang(self):
        time.sleep(600)

    def close(self):
        if self.mischief == "stay":
            time.sleep(600)


def orphan():
    """Start a worker and die without a word to it."""
    worker = subprocess.Popen(
        [sys.executable, __file__, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    worker.stdin.write(msgspec.json.encode({"role": "toy_role:Toy", "setup": {}}) + b"\n")
    worker.stdout.readline()
    worker.stdin.write(msgspec.json.encode({"do": "hang", "with": {}}) + b"\n")
    print(worker.pid, flush=True)
    os._exit(0)


if __name__ == "__main__":
    orphan() if sys.argv[1:] == ["orphan"] else sys.exit(main(sys.argv[1:]))
