"""States of processes; a stopped one (SIGSTOP, Ctrl-Z) hears of no signal but SIGKILL."""

from __future__ import annotations

import contextlib
import os
import signal


def is_stopped(pid: int) -> bool:
    """Not where a debugger holds it, nor where there is none of that number."""
    return state_of(pid) == "T"


def state_of(pid: int) -> str:
    """The letter of proc(5): "Z" has ended, and nobody has waited for it; "" there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def let_hear(pid: int) -> None:
    """A stopped process, and its children of that group, go on, with what they were sent first."""
    if is_stopped(pid):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGCONT)
