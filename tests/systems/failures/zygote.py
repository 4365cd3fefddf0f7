"""A process that has torch and libddp loaded and forks ranks from itself.

An interpreter with torch takes seconds to start, a fork milliseconds: so a hundred kills are a
minute. Commands come on standard input and answers go to standard output, one JSON object a line:

    {"run": {"module": ..., "function": ..., "args": [...], "rank": 0, ...}}   -> {"pid": 4711}
    {"reap": 4711}                                    -> {"status": -9}, null while it is alive

Each rank leads a session of its own. Its end is that of a normal interpreter: what it raises goes
through sys.excepthook, its exit handlers run.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path


def reply(answer: dict) -> None:
    print(json.dumps(answer), flush=True)


def reap(pid: int) -> int | None:
    """Exit status of a child, negative for a signal; None while it is alive."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


#: Where this process writes when its exit handlers have run; ranks have it.
exit_stamp: Path | None = None


def stamp_exit() -> None:
    if exit_stamp:
        exit_stamp.write_text(str(time.monotonic()))


def reap_all() -> None:
    """The driver has killed whoever was left."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass


def become_rank(run: dict) -> None:
    """In the child: its own output, session and signals."""
    os.setsid()
    output = os.open(run["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where it hangs
    os.environ.update(run["env"])
    global exit_stamp
    exit_stamp = Path(run["folder"]) / f"exit-{run['rank']}"


def serve() -> dict | None:
    """Runs commands; returns in the parent at the end of input (None), in a child with its run."""
    for line in iter(sys.stdin.readline, ""):
        command = json.loads(line)
        if "reap" in command:
            reply({"status": reap(command["reap"])})
            continue
        run = command["run"]
        importlib.import_module(run["module"])
        pid = os.fork()
        if pid == 0:
            return run
        reply({"pid": pid})
    return None


def main() -> None:
    sys.path[:0] = [str(Path(__file__).parents[1])]
    atexit.register(stamp_exit)  # the first one registered runs last
    import libddp.distributed
    import libddp.nn.parallel  # noqa: F401

    from failures import rank

    reply({"pid": os.getpid()})
    run = serve()
    if run is not None:
        become_rank(run)
        rank.main(run)
    else:
        reap_all()


if __name__ == "__main__":
    main()
