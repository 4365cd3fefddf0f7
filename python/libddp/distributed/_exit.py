"""What the other ranks learn of an error here, and when this process ends.

An exception that nobody caught aborts the groups with its text and place, so that the others raise
it at once instead of waiting; also in a child of multiprocessing, which catches it to print it. One
that is on its way while `destroy_process_group()` runs (in a `finally`) is named by those who still
wait. A normal end without `destroy_process_group()` leaves in order.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import time
from functools import cache
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize

import torch.distributed.distributed_c10d as c10d

from libddp import _worker
from libddp._process_states import runs_under
from libddp._program_line import program_line
from libddp.errors import PeerError

_MAX_TEXT = 500
#: How long a child waits for the end of the one that has failed before it.
_SECONDS_TO_END = 2.0
#: This process's rank in its first group, by process: a forked child is another rank.
_ranks: dict[int, int] = {}


def install(rank: int) -> None:
    """Hooks into the end of the process, once.

    Args:
        rank: of this process in the whole job.
    """
    _hook_interpreter()
    if os.getpid() not in _ranks:
        _ranks[os.getpid()] = rank
        _hook_multiprocessing(rank)


@cache
def _hook_interpreter() -> None:
    previous = sys.excepthook

    def abort_and_report(kind, value, trace):
        try:
            _worker.record(value)
            abort(describe(value))
        finally:
            previous(kind, value, trace)

    sys.excepthook = abort_and_report
    atexit.register(leave)


def _hook_multiprocessing(rank: int) -> None:
    """In each child anew: its exceptions never come to sys.excepthook, but its finalizers see them.

    They run in a `finally` around the child's function; since Python 3.13 when it is over.
    """
    if multiprocessing.parent_process() is None:
        return
    _worker.begin_spawned(rank)
    Finalize(None, end_child, exitpriority=100)
    if "_exit_function" not in BaseProcess._bootstrap.__code__.co_names:
        _watch_for_exceptions()


def _watch_for_exceptions() -> None:
    """Ends the child with the exception that leaves what it runs; told of exceptions alone."""
    frame = sys._getframe()
    while frame.f_back and frame.f_back.f_code is not BaseProcess._bootstrap.__code__:
        frame = frame.f_back
    monitoring = sys.monitoring
    # Of the six, those that no kind of tool is meant to have come first.
    free = [tool for tool in (4, 3, 2, 1, 0, 5) if monitoring.get_tool(tool) is None]
    if frame.f_back is None or not free:  # not the child's main thread; tools have taken all
        return
    function = frame.f_code

    def unwind(code, _offset, error):
        if code is function:
            end_child_with(error)

    monitoring.use_tool_id(free[0], "libddp")
    monitoring.register_callback(free[0], monitoring.events.PY_UNWIND, unwind)
    monitoring.set_events(free[0], monitoring.events.PY_UNWIND)


def end_child() -> None:
    """As the end of an interpreter."""
    end_child_with(sys.exc_info()[1])
    leave()


def end_child_with(error: BaseException | None) -> None:
    """Tells the launcher and the other ranks of an exception that ends this child."""
    error = _behind_exit(error)
    if error is not None:
        _worker.record_spawned(error, _ranks[os.getpid()])
        abort(describe(error))
    if isinstance(error, PeerError):
        _end_after(error.peer_pid)


def _end_after(culprit: int) -> None:
    """Waits for its end, for a moment, if it is a child of the same parent: the traceback that a
    parent shows is that of the child that ends first.
    """
    deadline = time.monotonic() + _SECONDS_TO_END
    while culprit != os.getpid() and runs_under(culprit, os.getppid()):
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def _behind_exit(error: BaseException | None) -> BaseException | None:
    """What a sys.exit(1) follows, as torch.multiprocessing.spawn's, or the exception itself."""
    while isinstance(error, SystemExit):
        error = error.__context__ if error.code else None
    return error


def describe(error: BaseException) -> str:
    """'ValueError: no such token (train.py:31)': the place is the innermost line of the program."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")[:_MAX_TEXT]
    place = program_line(error)
    return f"{text} ({os.path.basename(place[0])}:{place[1]})" if place else text


def live_groups() -> list:
    """This process's groups of libddp that are neither destroyed nor failed."""
    from libddp.distributed._groups import find

    if os.getpid() not in _ranks:
        return []  # a forked child has its parent's only, which are nothing of its own
    found = [find(group) for group in list(c10d._world.pg_map)]
    return [group for group in found if group is not None and not group.has_failed()]


def abort(reason: str) -> None:
    """Ends every group here and on its other ranks."""
    for group in live_groups():
        group.abort(reason)


def announce_error_in_flight() -> None:
    """Before leaving: an exception that is being handled is why this rank leaves."""
    error = sys.exc_info()[1]
    if error is None:
        return
    for group in live_groups():
        group.report_error(describe(error))


def leave() -> None:
    """Ends every group in order."""
    for group in live_groups():
        group.shutdown()
