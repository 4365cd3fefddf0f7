"""Stopped processes (SIGSTOP, Ctrl-Z): until they go on, they hear of no signal but SIGKILL."""

from __future__ import annotations

import contextlib
import os
import signal


def is_stopped(pid: int) -> bool:
    """Not where a debugger holds it, nor where there is none of that number."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def let_hear(pid: int) -> None:
    """A stopped process, and its children of that group, go on, with what they were sent first."""
    if is_stopped(pid):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGCONT)
