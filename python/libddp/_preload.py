"""`libddp run --preload`: workers are forked from a process that has imported torch and libddp.

Importing torch is most of the time from a worker's death to its next first line. The server
(_fork_server.py) does it once; torch's launcher stays as it is and gets, in the place of its Popen,
one that asks the server. So logs, exit codes, signals and restarts are the usual ones.

    server = ForkServer(["torch"], num_spares=2)   # starts importing, in the background
    workers_descriptors.start_with(server.start)
    server.end()

Thread rule: one thread, that of torch's agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile

from libddp import _fork_server, _lifeline, _pidfds
from libddp._torch_patches import workers_descriptors
from libddp.errors import ArgumentError, Error, TimeoutError

#: Also what a script imports without naming it: torch's optimizers take torch._dynamo along, which
#: is two thirds as long an import as torch's own.
MODULES = "torch,torch._dynamo,libddp.distributed,libddp.nn.parallel,libddp.snapshot,libddp.elastic"
#: For imports, on a busy machine; a fork takes milliseconds.
START_SECONDS = 600.0


def check(args) -> None:
    """
    Raises:
        ArgumentError: the workers of this command line cannot be forked.
    """
    other = os.environ.get("PYTHON_EXEC", sys.executable)
    script = args.training_script
    problem = (
        "--no-python starts another program"
        if args.no_python
        else "--run-path is torch's own way to run a script in a started interpreter"
        if args.run_path
        else "--numa-binding starts workers through another program"
        if args.numa_binding
        else f"PYTHON_EXEC={other} is not the Python of this command"
        if shutil.which(other) != shutil.which(sys.executable)
        else f"{script} is a folder or an archive, not a file"
        if not args.module and (os.path.isdir(script) or zipfile.is_zipfile(script))
        else ""
    )
    if problem:
        raise ArgumentError(f"libddp run: --preload forks workers, but {problem}. Hint: leave out "
                            "one of the two.")  # fmt: skip
    _pidfds.require("--preload")


class ForkedWorker:
    """What torch's launcher uses of subprocess.Popen, for a child of the server."""

    def __init__(self, server: ForkServer, arguments, pid: int) -> None:
        self.args, self.pid = arguments, pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """
        Raises:
            subprocess.TimeoutExpired: as Popen's.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while self._look(None if end is None else max(0.0, end - time.monotonic())) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _look(self, seconds: float | None) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.status_of(self.pid, seconds)
        return self.returncode


class ForkServer:
    """The process, and how its children ended."""

    def __init__(self, modules: list[str], num_spares: int = 0) -> None:
        """
        Args:
            modules: what it imports.
            num_spares: so many workers are forked ahead (_spare_workers.py).
        """
        self._modules, self._num_spares = modules, num_spares
        self._begin()

    def _begin(self) -> None:
        self._ended: dict[int, int] = {}
        self._is_ready = False
        self._channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        hidden = (_lifeline.LAUNCHER, _lifeline.PIPE)  # of workers; the server is none
        names, spares = ",".join(self._modules), str(self._num_spares)
        arguments = (str(other.fileno()), str(os.getpid()), names, spares)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", _fork_server.__name__, *arguments],
                env={name: value for name, value in os.environ.items() if name not in hidden},
                pass_fds=(other.fileno(), *workers_descriptors.handed_on()),
                start_new_session=True,
            )

    def start(self, args, env, stdout=None, stderr=None, **_) -> ForkedWorker:
        """As subprocess.Popen, for `python -u SCRIPT ...` and `python -u -m MODULE ...`.

        Raises:
            Error: the server has ended, or what it has imported forbids forking.
        """
        if self._process.poll() is not None and self._is_ready:
            self._channel.close()
            self._begin()  # somebody ended it, and its workers with it
        self.wait_until_ready()
        streams = {number: stream for number, stream in ((1, stdout), (2, stderr)) if stream}
        request = {"arguments": args[2:], "environment": env, "streams": list(streams)}
        with open(os.memfd_create("libddp-worker"), "w+b") as file:
            file.write(json.dumps(request).encode())
            file.seek(0)
            descriptors = [file.fileno(), *(stream.fileno() for stream in streams.values())]
            socket.send_fds(self._channel, [b"fork"], descriptors)
        end = time.monotonic() + START_SECONDS
        while (answer := self._receive(end - time.monotonic())) is not None:
            if "pid" in answer:
                return ForkedWorker(self, args, answer["pid"])
        raise self._lost("while it forked a worker")

    def status_of(self, pid: int, seconds: float | None) -> int | None:
        """Popen's returncode of a worker; None if it runs on for so long."""
        while pid not in self._ended:
            if not select.select([self._channel], [], [], seconds)[0]:
                return None
            if self._receive(0) is None:
                return -signal.SIGKILL  # the server is gone, and its workers with it
        return self._ended[pid]

    def end(self) -> None:
        """The launcher's workers have ended, or end now."""
        self._channel.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait_until_ready(self) -> None:
        """It has imported everything.

        Raises:
            ArgumentError: what it has imported forbids forking.
            Error: it has ended.
        """
        if self._is_ready:
            return
        answer = self._receive(START_SECONDS)
        if answer is None:
            raise self._lost(f"as it imported {', '.join(self._modules)}; what it said is above")
        if answer["refused"]:
            raise ArgumentError(f"libddp run: --preload: {answer['refused']}.")
        self._is_ready = True

    def _receive(self, seconds: float) -> dict | None:
        """The next message, noted if it is a worker's end; None from a server that is gone.

        Raises:
            TimeoutError: it lives and says nothing.
        """
        if not select.select([self._channel], [], [], max(0.0, seconds))[0]:
            raise TimeoutError(
                f"libddp run: --preload: the parent of the workers (pid {self._process.pid}) did "
                f"not answer within {START_SECONDS:.0f} s. Hint: see what it does with py-spy, or "
                "leave out --preload."
            )
        try:
            message = self._channel.recv(_fork_server.MAX_MESSAGE)
        except OSError:
            return None
        if not message:
            return None
        found = json.loads(message)
        if "ended" in found:
            self._ended[found["ended"]] = found["code"]
            with contextlib.suppress(OSError):  # it is gone, and so are its children
                self._channel.send(str(found["ended"]).encode())
        return found

    def _lost(self, when: str) -> Error:
        code = self._process.wait()
        return Error(
            f"libddp run: --preload: the parent of the workers ended ({code}) {when}. Hint: try "
            "without --preload."
        )
