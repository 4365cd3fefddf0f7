"""States of processes; a stopped one (SIGSTOP, Ctrl-Z) hears of no signal but SIGKILL."""

from __future__ import annotations

import contextlib
import os
import signal

_EXITING = 4  # PF_EXITING, in the flags of proc(5)


def is_stopped(pid: int) -> bool:
    """Not where a debugger holds it, nor where there is none of that number."""
    return state_of(pid) == "T"


def state_of(pid: int) -> str:
    """The letter of proc(5): "Z" has ended, and nobody has waited for it; "" there is none."""
    return _fields_of(pid)[0]


def runs_under(pid: int, parent: int) -> bool:
    """Whether it is a child of `parent` that has not ended."""
    state, of = _fields_of(pid)[:2]
    return state not in ("", "Z", "X") and int(of) == parent


def is_exiting(pid: int) -> bool:
    """Whether its first thread is ending or has ended; False where there is none of that number."""
    fields = _fields_of(pid)
    return fields[0] in ("Z", "X") or int(fields[6]) & _EXITING != 0


def let_hear(pid: int) -> None:
    """A stopped process, and its children of that group, go on, with what they were sent first."""
    if is_stopped(pid):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGCONT)


def _fields_of(pid: int) -> list[str]:
    """Of /proc/PID/stat, from the state on; of a process that is gone, one without flags."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split() or _GONE
    except OSError:
        return _GONE


_GONE = ["", "0", "0", "0", "0", "0", "0"]
