"""Makes worker processes quickly: everything is imported once, each connection to the Unix socket is a fork.

A worker says its pid and endpoint, then does what lines of JSON say, as worker_side.py does.
"""

import json
import os
import signal
import socket
import sys

from worker_side import Worker


def serve(connection):
    stream = connection.makefile("rw")
    mode, engine, settings = json.loads(stream.readline())
    worker = Worker(mode, engine, settings)
    answer = [os.getpid(), worker.side.manager.endpoint]
    while True:
        stream.write(json.dumps(answer) + "\n")
        stream.flush()
        command = json.loads(stream.readline())
        answer = getattr(worker, command.pop("do"))(**command)


def main():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            try:
                serve(connection)
            finally:
                os._exit(1)
        connection.close()


if __name__ == "__main__":
    main()
