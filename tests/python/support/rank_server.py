"""An interpreter that has imported torch and libddp once, and forks the ranks of ranks.run.

    server = RankServer.get()                          # one for the whole run of pytest
    child = server.start(folder, environment, output)  # as subprocess.Popen(...): pid, wait, poll

Most of the time of a small multi-process test went into importing torch in every rank. A forked
rank starts in milliseconds, leads its own session, has its own environment and output, and ends as
every interpreter does, through atexit. The server has one thread and no group, so that a child has
nothing of it but modules. Its own use: `python rank_server.py`, requests on stdin.

No rank outlives the process that asked for it, whatever ends that one: the server then reads the
end of its requests and ends the ranks' sessions; and without the server, the kernel ends the ranks.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import ranks_child

PR_SET_PDEATHSIG = 1


class ForkedRank:
    """What pytest holds of a rank; the server is its parent and knows its exit status."""

    def __init__(self, server: RankServer, pid: int):
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._end = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """Exit status; negative = the signal that ended it. subprocess.TimeoutExpired in vain."""
        if self.returncode is None:
            milliseconds = None if timeout is None else max(0.0, timeout) * 1000
            poll = select.poll()
            poll.register(self._end, select.POLLIN)
            if not poll.poll(milliseconds):
                raise subprocess.TimeoutExpired("a forked rank", timeout)
            self.returncode = self._server.ask(wait=self.pid)
            os.close(self._end)
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None


class RankServer:
    """The client's side. Thread rule: one thread."""

    _running: RankServer | None = None

    @classmethod
    def get(cls) -> RankServer:
        if cls._running is None:
            cls._running = RankServer()
            atexit.register(cls._running.stop)
        return cls._running

    def __init__(self):
        mine, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdin=its,
                start_new_session=True,  # a Ctrl-C is the client's, which may want exit statuses
            )
        self._requests = mine.makefile("w")
        self._answers = mine.makefile("r")
        mine.close()

    def start(
        self, folder: str, environment: dict[str, str], output: Path, anew: bool = False
    ) -> ForkedRank:
        """Runs ranks_child.py's main(folder) in a new process; `anew`: in a new interpreter."""
        pid = self.ask(folder=str(folder), environment=environment, output=str(output), anew=anew)
        return ForkedRank(self, pid)

    def ask(self, **request) -> int:
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        answer = self._answers.readline()
        if not answer:
            raise RuntimeError(f"the server of ranks has ended: {self._process.wait()}")
        return int(answer)

    def stop(self) -> None:
        self._requests.close()
        self._answers.close()
        self._process.wait()


def serve() -> str | None:
    """Until pytest ends: None. In a forked rank: its folder."""
    living: set[int] = set()
    with os.fdopen(os.dup(0), "r") as requests, os.fdopen(os.dup(0), "w") as answers:
        for line in requests:
            request = json.loads(line)
            if "wait" in request:
                answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
                living.discard(request["wait"])
            else:
                answer = fork_rank(request)
                if answer == 0:
                    return request["folder"]
                living.add(answer)
            try:
                answers.write(f"{answer}\n")
                answers.flush()
            except BrokenPipeError:
                break
        end_sessions(living)
    return None


def end_sessions(leaders: set[int]) -> None:
    """Those of ranks that nobody will wait for."""
    for pid in leaders:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def fork_rank(request: dict) -> int:
    """The child's pid, once it leads its session; 0 in the child."""
    is_ready, ready = os.pipe()
    server = os.getpid()
    pid = os.fork()
    os.close(ready if pid else is_ready)
    if pid == 0:
        end_with(server)
        become_a_rank(request)
        os.close(ready)
        if request["anew"]:
            os.execve(sys.executable, [sys.executable, *sys.argv], os.environ)
        return 0
    os.read(is_ready, 1)
    os.close(is_ready)
    return pid


def end_with(parent: int) -> None:
    """This process is killed when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(2)


def become_a_rank(request: dict) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    for path, flags, descriptors in (
        (os.devnull, os.O_RDONLY, [0]),
        (request["output"], os.O_WRONLY | os.O_CREAT, [1, 2]),
    ):
        opened = os.open(path, flags, 0o600)
        for descriptor in descriptors:
            os.dup2(opened, descriptor)
        os.close(opened)
    sys.argv[:] = [ranks_child.__file__, request["folder"]]


def main() -> None:
    # What nearly every rank needs; nothing of it starts a thread, which a fork would lose.
    import libddp.nn.parallel  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401

    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a server that forks has one thread, not {len(threads)}"
    gc.collect()
    gc.freeze()  # else a rank's last collection would touch, hence copy, every page of the modules
    folder = serve()
    if folder is not None:
        ranks_child.main(Path(folder))


if __name__ == "__main__":
    main()
