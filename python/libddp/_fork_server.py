"""The parent of `libddp run --preload`: has imported torch and libddp, and forks the workers.

    python -u -m libddp._fork_server SOCKET LAUNCHER torch,libddp.distributed SPARES

Over the socket (a pair of the launcher's, _preload.py) come requests: the command line and the
environment of a worker as a memory file, then descriptors for its output. Back go the process id,
and later its exit code, which the launcher answers with the id: until it knows the end it may
signal the worker, whose id must then still be its own. A forked worker gets the environment, a
session of its own and a fresh `__main__`, and leaves this module by its end, so that the
interpreter ends it as it ends any other program: excepthook, atexit, exit codes. After an error it
leaves behind atexit, see end().

The server ends with the launcher, a worker with the server (_lifeline.py). Thread rule: one thread;
a library that starts threads as it is imported must survive a fork, as torch does.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib
import importlib.util
import io
import json
import os
import select
import socket
import sys
from types import ModuleType

from libddp import _lifeline
from libddp._spare_workers import MAX_DESCRIPTORS, QUIET_SECONDS, SpareWorkers, fork_leader

#: Bytes of a message; requests themselves are memory files.
MAX_MESSAGE = 1 << 16


def serve(channel: socket.socket, num_spares: int) -> dict | None:
    """Forks workers until the launcher is gone (None); in a worker, its request.

    Raises:
        ConnectionError: it is gone, with something unread or unsent.
    """
    workers: dict[int, int] = {}  # pidfd -> pid

    def leave() -> None:
        channel.close()
        for pidfd in workers:
            os.close(pidfd)

    spares = SpareWorkers(num_spares, leave)
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        events = poll.poll(1e3 * QUIET_SECONDS if spares.is_short() else None)
        if not events and (added := spares.add()) is not None:
            pidfd, descriptors = added
            if descriptors:
                return _read(descriptors)
            poll.register(pidfd, select.POLLIN)
        for number, _ in events:
            if number in workers:
                poll.unregister(number)
                os.close(number)
                pid = workers.pop(number)
                _send(channel, {"ended": pid, "code": _exit_code(pid)})
                continue
            if number in spares:
                poll.unregister(number)
                spares.drop(number)
                continue
            message, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE, MAX_DESCRIPTORS)
            if not message:
                return None
            if not descriptors:
                os.waitpid(int(message), 0)
                continue
            found = spares.take(descriptors)
            if found is None:
                pid = fork_leader()
                if pid == 0:
                    spares.forget()
                    return _read(descriptors)
                found = os.pidfd_open(pid), pid
                poll.register(found[0], select.POLLIN)
            for descriptor in descriptors:
                os.close(descriptor)
            workers[found[0]] = found[1]
            _send(channel, {"pid": found[1]})


def _exit_code(pid: int) -> int:
    """Popen's returncode of a child that has ended, whose id stays its own."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _send(channel: socket.socket, message: dict) -> None:
    channel.send(json.dumps(message).encode())


def _read(descriptors: list[int]) -> dict:
    """In a worker: its request; its output goes where that says."""
    with open(descriptors[0], encoding="utf-8") as file:
        request = json.load(file)
    for number, descriptor in zip(request["streams"], descriptors[1:], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    return request


def become(request: dict) -> None:
    """In a worker: what a program of its own would have had from its start."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ[_lifeline.LAUNCHER] = str(os.getppid())
    os.environ.pop(_lifeline.PIPE, None)
    atexit.register(end)  # ahead of the program's own functions, so after them
    _seed()
    from libddp._worker import watch

    watch()


#: Of a program that an exception has ended.
_failed: list[BaseException] = []


def end() -> None:
    """The last that runs in Python as a worker ends.

    After an error all others wait for the next start, and to take apart every object of what has
    been imported takes a second of a core, more than a start does. Files are written out.
    """
    if _failed:
        for each in gc.get_objects():
            if isinstance(each, (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
                with contextlib.suppress(OSError, ValueError):  # closed, or its reader is gone
                    each.flush()
        os._exit(1)
    # What is frozen is not collected at the end either, and libraries that count what they have
    # given out (nanobind, in triton) would then report leaks.
    gc.unfreeze()


def _seed() -> None:
    """Fresh seeds, as after an import; all workers, and the next ones, would draw the same numbers.

    Python's own generator sees to it itself.
    """
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def program(arguments: list[str]) -> tuple[ModuleType, object]:
    """A fresh `__main__` and its code, for what follows `python -u`; sets sys.argv and sys.path."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if arguments[0] == "-m":
        name, sys.argv = arguments[1], arguments[1:]
        spec = _spec_of(name)
        main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
        main.__file__ = sys.argv[0] = spec.origin
        code = spec.loader.get_code(spec.name)
    else:
        sys.argv = arguments
        main.__file__ = os.path.abspath(arguments[0])
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
        if not getattr(sys.flags, "safe_path", False):  # Python 3.11
            sys.path[0] = os.path.dirname(os.path.realpath(arguments[0]))
        with io.open_code(main.__file__) as file:
            code = compile(file.read(), main.__file__, "exec", dont_inherit=True)
    # This module's functions still run.
    sys.modules["libddp._fork_server"] = sys.modules["__main__"]
    sys.modules["__main__"] = main
    return main, code


def _spec_of(name: str):
    """As `python -m` finds it."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        sys.exit(f"{sys.executable}: Error while finding module {name!r}: {error}")
    if spec is None or spec.loader is None:
        sys.exit(f"{sys.executable}: No module named {name}")
    return spec


def tell_error(error: BaseException) -> None:
    """As the interpreter tells an exception that nobody caught, without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.excepthook(type(error), error, trace)


def preload(names: list[str]) -> str:
    """Imports them; "", or why workers cannot be forked now."""
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the workers' collector leaves these pages shared
    return _cuda_in_use()


def _cuda_in_use() -> str:
    """Whether a child could not use CUDA any more, which only a child can tell."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    bad = getattr(torch.cuda, "_is_in_bad_fork", None)
    pid = os.fork()
    if pid == 0:
        os._exit(1 if bad is not None and bad() else 0)
    if os.waitpid(pid, 0)[1] == 0 and not torch.cuda.is_initialized():
        return ""
    return (
        "a module that is preloaded has initialised CUDA, which forked workers could not use. Hint:"
        " leave it out of --preload-modules"
    )


if __name__ == "__main__":
    _lifeline.end_with_parent(int(sys.argv[2]))
    _channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(_channel.fileno(), False)
    _send(_channel, {"refused": preload(sys.argv[3].split(","))})
    _request = None
    with contextlib.suppress(ConnectionError):
        _request = serve(_channel, int(sys.argv[4]))
    if _request is None:
        os._exit(0)  # of what it has imported nothing has to be ended, see become()
    become(_request)
    try:
        _main, _code = program(_request["arguments"])
        exec(_code, _main.__dict__)
    except Exception as _error:
        tell_error(_error)
        _failed.append(_error)
        sys.exit(1)
