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
from functools import cache
from multiprocessing.util import Finalize

import torch
import torch.distributed.distributed_c10d as c10d

from libddp import _last_words

_LIBRARIES = tuple(
    os.path.join(os.path.dirname(os.path.abspath(path)), "")
    for path in (torch.__file__, os.path.dirname(__file__))
)
#: Python's own, in which an environment's packages may lie.
_STANDARD = os.path.join(os.path.dirname(os.path.abspath(os.__file__)), "")
_PACKAGES = tuple(_STANDARD + name for name in ("site-packages", "dist-packages"))
_MAX_TEXT = 500


def install() -> None:
    """Hooks into the end of the process, once."""
    _hook_interpreter()
    _hook_multiprocessing(os.getpid())


@cache
def _hook_interpreter() -> None:
    previous = sys.excepthook

    def abort_and_report(kind, value, trace):
        try:
            _last_words.record_error(value, program_line(value))
            abort(describe(value))
        finally:
            previous(kind, value, trace)

    sys.excepthook = abort_and_report
    atexit.register(leave)


@cache
def _hook_multiprocessing(_pid: int) -> None:
    """In each child anew: its exceptions never come to sys.excepthook, but its finalizers see them.

    They run in a `finally` around the child's function.
    """
    if multiprocessing.parent_process() is not None:
        Finalize(None, end_child, exitpriority=100)


def end_child() -> None:
    """As the end of an interpreter."""
    error = _behind_exit(sys.exc_info()[1])
    if error is not None:
        abort(describe(error))
    leave()


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


def program_line(error: BaseException) -> tuple[str, int] | None:
    """Path and number of the program's innermost line under an exception."""
    place = None
    trace = error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if place is None or _is_program(path):
            place = (path, trace.tb_lineno)
        trace = trace.tb_next
    return place


def _is_program(path: str) -> bool:
    if path.startswith("<frozen "):
        return False
    path = os.path.abspath(path)
    if path.startswith(_STANDARD) and not path.startswith(_PACKAGES):
        return False
    return not path.startswith(_LIBRARIES)


def live_groups() -> list:
    """libddp's groups that are neither destroyed nor failed."""
    from libddp.distributed._groups import find

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
        group.announce_trouble(describe(error))


def leave() -> None:
    """Ends every group in order."""
    for group in live_groups():
        group.shutdown()
