"""An interpreter that has imported torch and libddp once, and forks the ranks of tests.

    server = RankServer.get()          # one for the whole run of pytest
    rank = server.start("ranks_child:main", folder, environment=environment, output=output)
    rank.wait(60)                      # as subprocess.Popen: pid, wait, poll; a pidfd for select

Most of the time of a small multi-process test went into importing torch in every rank. A forked
rank starts in milliseconds, leads its own session, has its own environment and output, and ends as
every interpreter does: what it raises goes through sys.excepthook, its exit handlers run. SIGUSR1
prints where its threads are. It may live in a network namespace, as a process on another host.
What libraries read from the environment when they are loaded is the server's; a rank that wants
its own starts `anew`, in a fresh interpreter, or belongs to a server with that environment.

The server has one thread and no group, so that a rank has nothing of it but modules. No rank
outlives the process that asked for it, whatever ends that one: the server then reads the end of its
requests and ends the ranks' sessions; and without the server, the kernel ends the ranks.

    python rank_server.py              # the server, requests on stdin
    python rank_server.py REQUEST      # a rank that starts anew
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
#: What most ranks need, so that none spends time on it; nothing of it starts a thread, which a fork
#: would lose. Any optimizer's first step imports torch._dynamo.
MODULES = (
    "libddp.nn.parallel",
    "libddp.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "numpy",
    "pytest",
    "ranks_child",
)


class ForkedRank:
    """What the client holds of a rank; the server is its parent and knows its exit status."""

    def __init__(self, server: RankServer, pid: int):
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._end = os.pidfd_open(pid)

    def fileno(self) -> int:
        """Readable once the rank has ended; until somebody waits for it."""
        return self._end

    def has_ended(self, timeout: float | None = 0.0) -> bool:
        """Whether it has, or does within that time. Its pid is its own until it is waited for."""
        if self.returncode is not None:
            return True
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        return bool(poll.poll(None if timeout is None else max(0.0, timeout) * 1000))

    def wait(self, timeout: float | None = None) -> int:
        """Exit status; negative = the signal that ended it. subprocess.TimeoutExpired in vain."""
        if self.returncode is None:
            if not self.has_ended(timeout):
                raise subprocess.TimeoutExpired("a forked rank", timeout)
            self.returncode = self._server.ask(wait=self.pid)
            os.close(self._end)
        return self.returncode

    def poll(self) -> int | None:
        return self.wait() if self.has_ended() else None

    def send_signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._end, number)


class RankServer:
    """The client's side. Thread rule: one thread."""

    _running: RankServer | None = None

    @classmethod
    def get(cls) -> RankServer:
        if cls._running is None:
            cls._running = RankServer()
            atexit.register(cls._running.stop)
        return cls._running

    def __init__(self, environment: dict[str, str] | None = None):
        """`environment`: further variables, which libraries read when the server loads them."""
        mine, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONUNBUFFERED": "1",
                    **(environment or {}),
                },
                stdin=its,
                start_new_session=True,  # a Ctrl-C is the client's, which may want exit statuses
            )
        self._requests = mine.makefile("w")
        self._answers = mine.makefile("r")
        mine.close()

    @property
    def pid(self) -> int:
        """The parent of all ranks."""
        return self._process.pid

    def start(
        self,
        function: str,
        argument,
        *,
        environment: dict[str, str],
        output: Path,
        namespace: str | None = None,
        anew: bool = False,
        folders: tuple[str, ...] = (),
        modules: tuple[str, ...] = (),
        exit_stamp: Path | None = None,
    ) -> ForkedRank:
        """Calls `function` ("module:name") with an argument, which JSON can hold, in a new process.

        Args:
            environment: of the rank, instead of the server's.
            namespace: the network namespace to live in.
            anew: in a fresh interpreter, so that libraries read this environment.
            folders: where modules are found besides; the server looks there from now on.
            modules: what the server imports before it forks, once for all ranks after this one.
            exit_stamp: file for the time, by time.monotonic(), when its exit handlers had run.
        """
        pid = self.ask(
            function=function,
            argument=argument,
            environment=environment,
            output=str(output),
            namespace=namespace,
            anew=anew,
            folders=folders,
            modules=modules,
            exit_stamp=str(exit_stamp) if exit_stamp else None,
        )
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


def print_stacks(ranks) -> None:
    """Ranks that hang say where, at the end of their outputs."""
    for rank in ranks:
        rank.send_signal(signal.SIGUSR1)
    if ranks:
        time.sleep(0.5)


def serve() -> dict | None:
    """Until the client ends: None. In a forked rank: its request."""
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
                    return request
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
    if not request["anew"]:
        load(request)
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


def load(request: dict) -> None:
    for folder in request["folders"]:
        if folder not in sys.path:
            sys.path.insert(0, folder)
    for module in request["modules"]:
        importlib.import_module(module)


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
        (request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, [1, 2]),
    ):
        opened = os.open(path, flags, 0o600)
        for descriptor in descriptors:
            os.dup2(opened, descriptor)
        os.close(opened)
    if request["namespace"]:
        import namespaces

        namespaces.enter(request["namespace"])
    sys.argv[:] = [__file__, json.dumps(request)]


#: Where this process says that its exit handlers have run.
exit_stamp: str | None = None


def stamp_exit() -> None:
    if exit_stamp:
        Path(exit_stamp).write_text(str(time.monotonic()))


def run(request: dict) -> None:
    """The rank's life, in a process that has become one."""
    global exit_stamp
    exit_stamp = request["exit_stamp"]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # not as the client was started
    faulthandler.enable()  # a library that ends the process says in the midst of what
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    load(request)
    module, _, name = request["function"].partition(":")
    getattr(importlib.import_module(module), name)(request["argument"])


def main() -> None:
    atexit.register(stamp_exit)  # the first one registered runs last
    if sys.argv[1:]:
        return run(json.loads(sys.argv[1]))
    # torch finds no triton here, and remembers that: on CPUs it is of no use, takes a second to
    # load, and prints in every rank that ends what a frozen collector has left of it.
    sys.modules["triton"] = None
    for module in MODULES:
        importlib.import_module(module)
    del sys.modules["triton"]

    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a server that forks has one thread, not {len(threads)}"
    gc.collect()
    gc.freeze()  # else a rank's last collection would touch, hence copy, every page of the modules
    request = serve()
    if request is not None:
        run(request)


if __name__ == "__main__":
    main()
