"""A worker of `libddp run` ends with its launcher, however that ends.

The launcher keeps the writing end of a pipe, its workers inherit the other (`hold`). A worker that
imports torch or libddp asks the kernel for SIGKILL at its launcher's death (`tie`), and if the pipe
is closed already the launcher died before that. Why SIGKILL: whoever starts the job again must be
able to rely on it that no worker of before writes into the same folders, and a handler of SIGTERM
may take as long as it likes. What a worker has kept (snapshots) is in a process of its own.

Its daemonic children that multiprocessing forks (a DataLoader's) are tied to it in the same way.
Thread rule: the kernel's parent is the thread that forked, so children of other threads than the
first are not tied; such a thread may end before its child should.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading

from libddp._process_states import is_exiting

#: Process id of the `libddp run`, or of its fork server, whose workers inherit it.
LAUNCHER = "LIBDDP_LAUNCHER_PID"
#: "number:inode" of the reading end.
PIPE = "LIBDDP_LAUNCHER_PIPE"
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
#: What the kernel needs at most to take a launcher's memory down, on a loaded machine.
_LONGEST_EXIT_SECONDS = 10


class _Children:
    """Ties the children of this process; multiprocessing calls functions with an object."""

    def __init__(self) -> None:
        self._parent = os.getpid()
        self._by_first_thread = False

    def note_forking_thread(self) -> None:
        self._by_first_thread = threading.get_native_id() == os.getpid()

    def tie_this_one(self) -> None:
        from multiprocessing import current_process

        if self._by_first_thread and current_process().daemon:
            end_with_parent(self._parent)


_children: list[_Children] = []


def hold() -> int:
    """In the launcher: the descriptor that its workers must inherit."""
    reading, writing = os.pipe()
    os.environ[PIPE] = f"{reading}:{os.fstat(reading).st_ino}"
    _held.append(writing)
    return reading


_held: list[int] = []


def tie() -> bool:
    """In any process: whether it is a worker that `libddp run` started itself; ties it then.

    One whose launcher is gone does not come back.
    """
    pipe = _inherited_pipe()
    launcher = os.environ.get(LAUNCHER)
    is_worker = launcher == str(os.getppid())
    if is_worker:
        end_with_parent(int(launcher))
    if pipe is not None:
        # A launcher of several threads has let its children go before its pipe closes: while one of
        # its threads takes its memory down, for instance.
        is_number = launcher is not None and launcher.isdecimal()
        closes_soon = not is_worker and is_number and is_exiting(int(launcher))
        if _is_closed(pipe, _LONGEST_EXIT_SECONDS if closes_soon else 0):
            _end()
        if is_worker:
            os.close(pipe)
    if is_worker and not _children:
        _tie_children()
    return is_worker


def end_with_parent(parent: int) -> None:
    """Asks the kernel for SIGKILL at the parent's death, and ends here if that was before."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0) != 0:
        error = os.strerror(ctypes.get_errno())
        print(f"libddp: pid={os.getpid()} event=not_tied_to_launcher: {error}", file=sys.stderr)
    if os.getppid() != parent:
        _end()


def _tie_children() -> None:
    from multiprocessing.util import register_after_fork

    children = _Children()
    _children.append(children)
    os.register_at_fork(before=children.note_forking_thread)
    register_after_fork(children, _Children.tie_this_one)


def _inherited_pipe() -> int | None:
    """The reading end; None in a process that a worker started, where the number is another's."""
    number, _, inode = os.environ.get(PIPE, "").partition(":")
    try:
        return int(number) if os.fstat(int(number)).st_ino == int(inode) else None
    except (OSError, ValueError):
        return None


def _is_closed(pipe: int, within_seconds: float) -> bool:
    """Whether nobody has the writing end any more."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return any(events & select.POLLHUP for _, events in poll.poll(within_seconds * 1e3))


def _end() -> None:
    print(
        f"libddp: pid={os.getpid()} event=launcher_gone: 'libddp run' has died; its worker ends",
        file=sys.stderr,
        flush=True,
    )
    os.kill(os.getpid(), signal.SIGKILL)
