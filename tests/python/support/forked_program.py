"""A launcher that is forked from an interpreter with torch (rank_server.py), as a program.

    program = ForkedProgram(["-m", "libddp.run", "train.py"], folder, environment)
    output, _ = program.communicate(timeout=60)      # and the rest of subprocess.Popen

To import torch takes a launcher seconds, in which a test waits for nothing else. What it starts are
programs of their own: the workers import torch as they do for a user. With --preload and
`forks_server` the parent that forks them is forked, too (forked_server.py).
"""

from __future__ import annotations

import contextlib
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rank_server import RankServer

#: Programs that hand everything that a test is about on to what they start.
LAUNCHERS = ("libddp", "libddp.run", "torch.distributed.run")
MODULES = ("forked_program", "torch.distributed.run")
#: What such a server would import (libddp/_preload.py), beside what the interpreter has.
SERVER_MODULES = ("forked_server", "libddp.snapshot", "libddp.elastic")
#: Beginnings of variables that the interpreter or a library reads when it is loaded.
READ_EARLY = ("PYTHON", "LD_", "LIBDDP_DROP_IN", "TORCH_DEVICE_BACKEND", "MALLOC_", "TRITON")


class ForkedProgram:
    """Its output, errors included, is in a pipe or in a file. Leads a session of its own."""

    def __init__(
        self,
        arguments: list[str],
        folder: Path,
        environment: Mapping[str, str],
        output: Path | None = None,
        namespace: str | None = None,
        forks_server: bool = False,
    ):
        """
        Args:
            arguments: what follows `python`.
            folder: where it runs.
            environment: all of its variables.
            output: the file that what it prints is added to; None: a pipe, for communicate().
            namespace: the network namespace to live in.
            forks_server: with --preload, the parent of the workers is forked, not started.
        """
        forks_server = forks_server and "--preload" in arguments
        self.args = arguments
        self._output = b""
        with contextlib.ExitStack() as stack:
            if output is None:
                reader, writer = os.pipe()
                stack.callback(os.close, writer)
                output = Path(f"/proc/{os.getpid()}/fd/{writer}")
                self.stdout = os.fdopen(reader, errors="replace")
            self._process = RankServer.get().start(
                "forked_program:run",
                {"arguments": arguments, "folder": str(folder), "forks_server": forks_server},
                environment=dict(environment),
                output=output,
                namespace=namespace,
                modules=MODULES + (SERVER_MODULES if forks_server else ()),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self._process.wait(timeout)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """All that it has printed, once nobody can print more; may be tried again."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self.stdout.closed:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self.stdout], [], [], left)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            part = os.read(self.stdout.fileno(), 1 << 16)
            self._output += part
            if not part:
                self.stdout.close()
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        return self._output.decode(errors="replace"), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            self._process.send_signal(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def can_fork(arguments: list[str], environment: Mapping[str, str]) -> bool:
    """Whether it is a launcher, and nothing that is read early differs from this process."""
    if arguments[:1] != ["-m"] or arguments[1:2] not in ([name] for name in LAUNCHERS):
        return False
    names = {name for name in (*environment, *os.environ) if name.startswith(READ_EARLY)}
    return all((environment.get(name) or "") == os.environ.get(name, "") for name in names)


def run(request: dict) -> None:
    """In the forked process: as `python -m NAME ...`."""
    os.chdir(request["folder"])
    _, name, *rest = request["arguments"]
    here = str(Path(__file__).parent)
    sys.path[:] = [request["folder"], *(folder for folder in sys.path if folder != here)]
    sys.argv[:] = [name, *rest]
    if request["forks_server"]:
        from forked_server import ServerTemplate

        template = ServerTemplate()
        if template.is_server:
            return template.serve()
        template.offer()
    runpy.run_module(name, run_name="__main__", alter_sys=True)
