"""The parent of `libddp run --preload`, forked as its launcher is (forked_program.py).

    template = ServerTemplate()        # in a launcher that has not begun yet
    if template.is_server:             # the process that it has forked
        template.serve()
    else:
        template.offer()               # the launcher's first _preload.ForkServer will be that one

A server imports torch and torch._dynamo, which takes longer than most of these tests. What is
forked has them from the start; all else of it is as it is started: arguments, environment,
descriptors, a session of its own, a fresh `__main__`. tests/python/distributed/test_preload.py has
started ones.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import types

from rank_server import end_with

from libddp import _fork_server, _preload

#: Descriptors of a server are below that.
HIGH = 400
MAX_DESCRIPTORS = 8


class ServerTemplate:
    """Thread rule: one thread."""

    def __init__(self) -> None:
        launcher = os.getpid()
        self._channel, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid: int | None = os.fork()
        self.is_server = self._pid == 0
        if self.is_server:
            end_with(launcher)
            self._channel, its = its, self._channel
        its.close()

    def offer(self) -> None:
        names = vars(subprocess) | {"Popen": self._start}
        _preload.subprocess = types.SimpleNamespace(**names)

    def _start(self, arguments, *, env, pass_fds, start_new_session):
        """As subprocess.Popen, of which ForkServer uses this much."""
        if self._pid is None:  # a second one
            return subprocess.Popen(
                arguments, env=env, pass_fds=pass_fds, start_new_session=start_new_session
            )
        with open(os.memfd_create("server"), "w+b") as file:
            request = {"arguments": arguments, "environment": env, "descriptors": pass_fds}
            file.write(json.dumps(request).encode())
            file.seek(0)
            socket.send_fds(self._channel, [b"server"], [file.fileno(), *pass_fds])
        self._channel.close()
        pid, self._pid = self._pid, None
        return _Forked(arguments, pid)

    def serve(self) -> None:
        """Until there is nothing to do for it; in a worker, the worker's program."""
        message, received, _, _ = socket.recv_fds(self._channel, 16, MAX_DESCRIPTORS)
        self._channel.close()
        if not message:
            os._exit(0)
        with open(received[0]) as file:
            request = json.load(file)
        _place(received[1:], request["descriptors"])
        os.setsid()
        faulthandler.disable()
        faulthandler.unregister(signal.SIGUSR1)
        os.environ.clear()
        os.environ.update(request["environment"])
        # What follows `python -u`.
        main, code = _fork_server.program(request["arguments"][2:])
        # As in a program that was started: it is __main__ and nothing else.
        del sys.modules[_fork_server.__name__]
        exec(code, main.__dict__)


class _Forked(subprocess.Popen):
    """A child of this process that runs already."""

    def __init__(self, arguments, pid: int) -> None:
        self._forked = pid
        super().__init__(arguments)

    def _execute_child(self, *_, **__) -> None:
        self.pid, self._child_created = self._forked, True


def _place(received: list[int], wanted: list[int]) -> None:
    """Gives descriptors the numbers that the arguments have them by."""
    aside = [fcntl.fcntl(number, fcntl.F_DUPFD, HIGH) for number in received]
    for number in received:
        os.close(number)
    for high, number in zip(aside, wanted, strict=True):
        os.dup2(high, number)
        os.close(high)
