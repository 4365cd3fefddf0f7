"""What the other ranks learn when this process ends.

An exception that nobody caught aborts the groups with its text, so that the others raise it at once
instead of waiting. A normal end without `destroy_process_group()` leaves in order.
"""

from __future__ import annotations

import atexit
import sys
from functools import cache

import torch.distributed.distributed_c10d as c10d


@cache
def install() -> None:
    """Hooks into the end of the process, once."""
    previous = sys.excepthook

    def abort_and_report(kind, value, trace):
        try:
            abort(f"{kind.__name__}: {value}".rstrip(": "))
        finally:
            previous(kind, value, trace)

    sys.excepthook = abort_and_report
    atexit.register(leave)


def live_groups() -> list:
    """libddp's groups that are neither destroyed nor failed."""
    from libddp.distributed._groups import find

    found = [find(group) for group in list(c10d._world.pg_map)]
    return [group for group in found if group is not None and not group.has_failed()]


def abort(reason: str) -> None:
    """Ends every group here and on its other ranks."""
    for group in live_groups():
        group.abort(reason)


def leave() -> None:
    """Ends every group in order."""
    for group in live_groups():
        group.shutdown()
