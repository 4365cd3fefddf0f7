"""Workers of `libddp run --preload` that are forked before anybody asks for them.

To fork a process that has imported torch takes 10 to 20 ms, most of it for page tables, and ranks
that train wait for the newcomer meanwhile. So the server (_fork_server.py) forks the next workers
when it has had nothing to do for QUIET_SECONDS. Each waits for its request; it costs page tables,
a few MiB. One that somebody ends is replaced, and all end with the server. Thread rule: one thread.

    spares = SpareWorkers(2, leave=channel.close)
    pidfd, descriptors = spares.add() or (-1, [])   # descriptors: this is the spare, and asked for
    found = spares.take(descriptors)      # pidfd and process id of the one that has begun, or None
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable

from libddp import _lifeline

#: Since the last start, whose workers want the cores for themselves.
QUIET_SECONDS = 1.0
#: Of a request: its memory file, and two streams.
MAX_DESCRIPTORS = 3


class SpareWorkers:
    """Children of this process that wait."""

    def __init__(self, number: int, leave: Callable[[], None]) -> None:
        """
        Args:
            number: so many at most.
            leave: in a child, closes what it has of its parent.
        """
        self._number, self._leave = number, leave
        #: By pidfd: the process id, and what its request goes through.
        self._waiting: dict[int, tuple[int, socket.socket]] = {}

    def is_short(self) -> bool:
        return len(self._waiting) < self._number

    def __contains__(self, pidfd: int) -> bool:
        return pidfd in self._waiting

    def add(self) -> tuple[int, list[int]] | None:
        """Forks one; in it, this returns when its request is here. None: the system refuses."""
        with contextlib.ExitStack() as stack:
            try:
                pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                here, there = map(stack.enter_context, pair)
                pid = fork_leader()
            except OSError:  # a limit on processes or memory: a start that needs one will say it
                self._number = len(self._waiting)
                return None
            if pid == 0:
                here.close()
                self.forget()
                _, descriptors, _, _ = socket.recv_fds(there, 1, MAX_DESCRIPTORS)
                if not descriptors:
                    os._exit(0)  # the server is gone
                return -1, descriptors
            pidfd = os.pidfd_open(pid)
            stack.pop_all()
        there.close()
        self._waiting[pidfd] = pid, here
        return pidfd, []

    def take(self, descriptors: list[int]) -> tuple[int, int] | None:
        """Gives one a request."""
        for pidfd, (pid, line) in self._waiting.items():
            with contextlib.suppress(OSError):  # it has ended, as the server will see
                socket.send_fds(line, [b"r"], descriptors)
                line.close()
                del self._waiting[pidfd]
                return pidfd, pid
        return None

    def drop(self, pidfd: int) -> None:
        """That one has ended."""
        pid, line = self._waiting.pop(pidfd)
        line.close()
        os.close(pidfd)
        os.waitpid(pid, 0)

    def forget(self) -> None:
        """In a child: it has nothing of its parent and siblings."""
        self._leave()
        for pidfd, (_, line) in self._waiting.items():
            os.close(pidfd)
            line.close()
        self._waiting.clear()


def fork_leader() -> int:
    """os.fork(); as this returns the child leads a session, and ends with its parent."""
    parent = os.getpid()
    reading, writing = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(reading)
        os.close(writing)
        raise
    if pid == 0:
        os.setsid()
        _lifeline.end_with_parent(parent)
        os.close(reading)
        os.close(writing)
        return 0
    os.close(writing)
    os.read(reading, 1)  # until it is closed
    os.close(reading)
    return pid
