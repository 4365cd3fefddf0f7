"""Processes that have torch and libddp imported already: a trial of a few tenths of a second.

    with Forks() as forks:
        pid = forks.start("train:main", {"mode": "ddp"}, {"RANK": "0"}, "out.txt")
        assert forks.wait(pid, 20) == 0         # negative: the signal that it died of
        forks.others()                          # of what they have started and left behind

The process that forks imports only. What it starts becomes a child of this process (a subreaper),
and so does what those leave behind: nothing that a trial has started can hide.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
_SUBREAPER = 36  # of prctl(2)
_MODULES = ("torch.utils.data", "torch._dynamo", "torch.distributed.launcher.api", "train")


class Forks:
    """The process that forks, and its offspring."""

    def __init__(self) -> None:
        self._was_reaper = _set_subreaper(True)
        self._socket, other = socket.socketpair()
        self._before = set(children_of(os.getpid()))
        self._zygote = subprocess.Popen(
            [sys.executable, str(HERE / "forked.py"), str(other.fileno())],
            pass_fds=[other.fileno()],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path()},
        )
        other.close()
        self._socket.settimeout(120)
        if self._receive() != "ready":
            raise RuntimeError("the process that forks did not start")
        self._status: dict[int, int] = {}

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_) -> None:
        self.kill_all()
        self._socket.close()
        self._zygote.wait(30)
        _set_subreaper(False)

    def start(self, function: str, argument, environment: dict[str, str], output: Path) -> int:
        """ "module:function"(argument) in a process of its own."""
        request = {"function": function, "argument": argument, "output": str(output)}
        self._socket.sendall(json.dumps(request | {"environment": environment}).encode() + b"\n")
        pid = int(self._receive())
        self._status.pop(pid, None)  # of a process of before that had this number
        return pid

    def poll(self, pid: int) -> int | None:
        """How it ended; None: it runs."""
        self._reap()
        return self._status.get(pid)

    def wait(self, pid: int, seconds: float) -> int:
        """Raises TimeoutError."""
        end = time.monotonic() + seconds
        while (status := self.poll(pid)) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"process {pid} still runs after {seconds} s")
            time.sleep(0.002)
        return status

    def others(self) -> list[int]:
        """Living processes that trials have started, keepers too."""
        self._reap()
        return [
            pid
            for pid in children_of(os.getpid())
            if pid != self._zygote.pid and pid not in self._before
        ]

    def kill_all(self) -> None:
        """Whatever is there."""
        end = time.monotonic() + 30
        while (pids := self.others()) and time.monotonic() < end:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)

    def _reap(self) -> None:
        for pid in children_of(os.getpid()):
            if pid == self._zygote.pid or pid in self._before:
                continue
            try:
                ended, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue
            if ended:
                self._status[pid] = os.waitstatus_to_exitcode(status)

    def _receive(self) -> str:
        text = b""
        while not text.endswith(b"\n"):
            part = self._socket.recv(4096)
            if not part:
                raise RuntimeError("the process that forks has died")
            text += part
        return text.decode().strip()


def children_of(parent: int) -> list[int]:
    """Also those that have ended and were not waited for."""
    children = []
    for task in os.listdir(f"/proc/{parent}/task"):
        try:
            text = Path(f"/proc/{parent}/task/{task}/children").read_text()
        except OSError:
            continue
        children += [int(pid) for pid in text.split()]
    return children


def _set_subreaper(is_one: bool) -> None:
    if ctypes.CDLL(None).prctl(_SUBREAPER, int(is_one), 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER)")


def _python_path() -> str:
    return os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])


def _serve(connection: socket.socket) -> None:
    """In the process that forks, until the other end is closed."""
    for name in _MODULES:
        importlib.import_module(name)
    connection.sendall(b"ready\n")
    requests = connection.makefile("rb")
    while line := requests.readline():
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            if (pid := os.fork()) == 0:
                os.close(reader)
                os.close(writer)
                connection.close()
                _run(json.loads(line))
            os.write(writer, str(pid).encode())
            os._exit(0)
        os.close(writer)
        os.waitpid(middle, 0)  # from here on its child is the subreaper's
        connection.sendall(os.read(reader, 32) + b"\n")
        os.close(reader)


def _run(request: dict) -> None:
    status = 1
    try:
        os.setsid()
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for to, descriptor in ((0, nothing), (1, output), (2, output)):
            os.dup2(descriptor, to)
        os.environ.update(request["environment"])
        module, name = request["function"].split(":")
        getattr(importlib.import_module(module), name)(request["argument"])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def wait_readable(descriptor: int, seconds: float) -> bool:
    """A pidfd is, when its process has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(int(seconds * 1000)))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
