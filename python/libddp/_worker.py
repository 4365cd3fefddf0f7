"""In a process that `libddp run` started: what it dies of is left for the launcher's last screen.

It also ends with its launcher (_lifeline.py). `watch` is called as torch or libddp is imported, so
that an exception before init_process_group is known too. Ranks that a worker starts by
multiprocessing write a file of their own beside its file; the launcher puts them together
(_worker_ends.py).
"""

from __future__ import annotations

import atexit
import os
import sys

from libddp import _steps
from libddp._lifeline import tie

_FILE = "TORCHELASTIC_ERROR_FILE"
_RANK = "RANK"

_recorded: list[BaseException] = []


def watch() -> None:
    """Records how this process ends, if it is a worker itself and not a process that one started.

    A helper may fail and be forgiven, so its end says nothing about the rank.
    """
    if not tie():
        return
    _steps.open_page(os.environ.get(_FILE))
    previous, pid = sys.excepthook, os.getpid()

    def record_and_report(kind, value, trace):
        try:
            if os.getpid() == pid:
                record(value)
        finally:
            previous(kind, value, trace)

    def record_behind_a_hook():
        """Where the program has put a hook of its own that does not call the one before it."""
        error = getattr(sys, "last_value", None)
        if error is not None and os.getpid() == pid:
            record(error)

    sys.excepthook = record_and_report
    atexit.register(record_behind_a_hook)


def note_step(step: int) -> None:
    """This rank has stored this step: a start that fails after it again has made progress."""
    _steps.note(step)


def record(error: BaseException) -> None:
    """Records an exception that ends this process, once."""
    from libddp._last_words import record_error
    from libddp._program_line import program_line

    if not any(error is other for other in _recorded):
        _recorded.append(error)
        record_error(error, program_line(error))


def begin_spawned(rank: int) -> None:
    """In a child of a worker that is a rank: a file that an earlier child has left is not its own.

    A program may catch the failure of its children and start them again.
    """
    path = _spawned_file(rank)
    if path:
        try:
            os.remove(path)
        except OSError:
            pass  # there was none


def record_spawned(error: BaseException, rank: int) -> None:
    """The same for such a child: its worker's file stays as it is."""
    path = _spawned_file(rank)
    if path:
        os.environ.update({_FILE: path, _RANK: str(rank)})
        record(error)


def _spawned_file(rank: int) -> str | None:
    path = os.environ.get(_FILE)
    if not path or path == os.devnull:
        return None
    return os.path.join(os.path.dirname(path), f"error.rank{rank}.json")
