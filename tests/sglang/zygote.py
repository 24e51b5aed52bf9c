"""Makes SGLang servers quickly: SGLang is imported once, each line of standard input is a fork.

A line is {"args": [...], "env": {...}, "log": path}; the answer is the server's pid, which is also the number of its
session. When standard input ends, however the tests ended, all sessions are killed.

SGLang has its schedulers started with "spawn", which would import everything again; they are forked here.
"""

import json
import multiprocessing
import os
import signal
import sys
import traceback


def import_sglang():
    """What servers import anyway, so that it is there before they are forked."""
    import gc
    import importlib
    import warnings

    warnings.simplefilter("ignore")
    names = (
        "sglang.launch_server",
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.scheduler",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.layers.attention.torch_native_backend",
        "sglang.srt.models.registry",
        "kvferry",
    )
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def fork_instead_of_spawn():
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None


def serve(request):
    """In the child: become a session of its own and run the server until it ends."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(request["env"])
    sys.argv = ["sglang", *request["args"]]
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(request["args"]))


def kill_session(session):
    """End all processes of a session that this process began."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            if os.getsid(int(entry)) == session:
                os.kill(int(entry), signal.SIGKILL)
        except ProcessLookupError:
            continue


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the imports print is no answer
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    import_sglang()
    fork_instead_of_spawn()
    print("ready", file=answers, flush=True)
    sessions = []
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            try:
                serve(json.loads(line))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        sessions.append(pid)
        print(pid, file=answers, flush=True)
    for session in sessions:
        kill_session(session)


if __name__ == "__main__":
    main()
