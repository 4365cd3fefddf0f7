"""One worker of `libddp run --in-place`: its process, its logs, and its line to the launcher.

    worker = Worker.start(local_rank, program, environment, logs)
    worker.pidfd                       # readable when it has ended
    worker.connect(socket)             # it has come to @libddp.elastic.run, or rejoin()
    worker.ask_to_leave("rank 1 has ended")
    worker.go({...})

Thread rule: one thread.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field

from torch.distributed.elastic.multiprocessing import LogsDest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    SubprocessHandler,
    get_subprocess_handler,
)
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.distributed.elastic.utils import macros

_MAX_LINE = 1 << 16


@dataclass(frozen=True)
class Program:
    """What all workers run, as torchrun's flags say it."""

    role: str
    command: str
    arguments: list
    numa_options: object


@dataclass
class Worker:
    """One process, from its start to its end."""

    local_rank: int
    handler: SubprocessHandler
    error_file: str
    pidfd: int
    tails: list[TailLog]
    started: float = field(default_factory=time.monotonic)
    line: socket.socket | None = None
    #: It waits for the next epoch; for what, is `why`.
    is_ready: bool = False
    why: str = ""
    #: It is, or was, in an epoch.
    was_in: bool = False
    is_asked: bool = False
    #: As Popen's; None while it lives.
    status: int | None = None
    _unread: bytes = b""

    @classmethod
    def start(
        cls, local_rank: int, program: Program, environment: dict[str, str], logs: LogsDest,
        prefix: str,
    ) -> Worker:  # fmt: skip
        handler = get_subprocess_handler(
            entrypoint=program.command,
            args=tuple(macros.substitute(program.arguments, str(local_rank))),
            env=environment,
            stdout=logs.stdouts[local_rank],
            stderr=logs.stderrs[local_rank],
            local_rank_id=local_rank,
            numa_options=program.numa_options,
        )
        tails = [
            TailLog(
                program.role, {local_rank: files[local_rank]}, stream, {local_rank: prefix}
            ).start()
            for files, stream in ((logs.tee_stdouts, sys.stdout), (logs.tee_stderrs, sys.stderr))
            if local_rank in files and files[local_rank] != os.devnull
        ]
        error_file = logs.error_files[local_rank]
        return cls(local_rank, handler, error_file, _pidfd(handler.proc.pid), tails)

    @property
    def pid(self) -> int:
        return self.handler.proc.pid

    @property
    def is_alive(self) -> bool:
        return self.status is None

    def failure(self) -> ProcessFailure:
        """REQUIRES: it has ended, and not with 0."""
        failure = ProcessFailure(self.local_rank, self.pid, self.status, self.error_file)
        failure.error_file = self.error_file  # which torch forgets where none was written
        return failure

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it has ended, then with its status noted."""
        if self.is_alive:
            try:
                self.status = self.handler.proc.wait(seconds)
            except subprocess.TimeoutExpired:
                return False
        return True

    def signal(self, number: signal.Signals) -> None:
        if self.is_alive and self.handler.proc.poll() is None:
            self.handler.close(number)

    def close(self) -> None:
        """It has ended: nothing of it stays open but what shows its logs."""
        self.is_ready = False
        self.hang_up()
        for stream in (self.handler._stdout, self.handler._stderr):
            if stream:
                stream.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def end_logs(self) -> None:
        """All that it has printed is shown."""
        for tail in self.tails:
            tail.stop()

    def move_logs(self, folder: str) -> None:
        """In the next epoch it leaves its last words in this folder, beside the newcomers'."""
        own = os.path.join(folder, str(self.local_rank))
        if own == os.path.dirname(self.error_file) or not os.path.isdir(own):
            return
        for name in ("stdout.log", "stderr.log"):
            log = os.path.join(os.path.dirname(self.error_file), name)
            if os.path.exists(log) and not os.path.lexists(os.path.join(own, name)):
                os.symlink(log, os.path.join(own, name))
        self.error_file = os.path.join(own, "error.json")

    # The line.

    def connect(self, line: socket.socket) -> None:
        self.hang_up()
        line.setblocking(False)
        self.line = line
        self._send({"welcome": True})

    def hang_up(self) -> None:
        """There is no next epoch for it."""
        if self.line is not None:
            self.line.close()
            self.line = None

    def ask_to_leave(self, reason: str) -> None:
        if self.was_in and not self.is_ready and not self.is_asked:
            self.is_asked = True
            self._send({"leave": reason})

    def go(self, assignment: dict) -> None:
        """It takes part in the epoch that begins."""
        self._send({"go": assignment | {"is_survivor": self.was_in}})
        self.is_ready, self.is_asked, self.was_in, self.why = False, False, True, ""

    def read(self) -> None:
        """What it has said; a line that it has closed is none."""
        try:
            said = self.line.recv(_MAX_LINE)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        *lines, self._unread = (self._unread + said).split(b"\n")
        if not said or len(self._unread) > _MAX_LINE:
            self.hang_up()
        for line in lines:
            told = json.loads(line)
            if "ready" in told:
                self.is_ready, self.why = True, str(told["ready"])

    def _send(self, message: dict) -> None:
        """A worker that reads nothing has a socket's buffer for it, and ends at the deadline."""
        try:
            if self.line is not None:
                self.line.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.hang_up()


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return os.eventfd(1, os.EFD_CLOEXEC)  # ended already, and waited for by its parent
