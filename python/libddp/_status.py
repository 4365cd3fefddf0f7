"""How a job stands, once a second: a file for machines, a line for people.

    with Status(workers, attempts, file="status.json", line=True) as status:
        ...                                  # the launcher runs
        status.failed(first)                 # on the way out: what the last screen names

The file is replaced as a whole, so a reader never sees half of it. The line is for a terminal that
the workers do not print to as well (--redirects=3), unless --status asks for it.
Thread rule: a thread of its own reads what torch's agent's thread writes; both only whole objects.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from libddp import _steps
from libddp._last_words import LastWords
from libddp._process_states import state_of
from libddp._whole_file import write_text

INTERVAL_SECONDS = 1.0


class Status:
    """The state of one launcher."""

    def __init__(self, workers, attempts, file: str | None, line: bool) -> None:
        self._workers, self._attempts = workers, attempts
        self._file, self._line = file, line
        self._begin = time.monotonic()
        self._end = threading.Event()
        self._failure: LastWords | None = None
        self._has_complained = False
        self._thread = threading.Thread(target=self._run, name="libddp-status", daemon=True)

    def __enter__(self) -> Status:
        if self._file or self._line:
            self._thread.start()
        return self

    def __exit__(self, kind, value, trace) -> None:
        self._end.set()
        if not self._thread.is_alive():
            return
        self._thread.join()
        status = 0 if kind is None else value.code if kind is SystemExit else 1
        self._write(self.facts() | {"state": "ended", "exit_status": status or 0})
        if self._line:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def failed(self, first: LastWords) -> None:
        """The run ends because of this rank."""
        self._failure = first

    def facts(self) -> dict:
        """What the file holds."""
        ranks = [
            {"rank": rank, "pid": pid, "alive": is_alive(pid), "step": step}
            for rank, pid, step in self._workers.running(_steps.read)
        ]
        last = self._failure or self._attempts.last_failure
        failure = None
        if last is not None:
            named = {"rank": last.rank, "error": last.text, "place": last.place or None}
            failure = named | {"step": last.step}
        steps = [rank["step"] for rank in ranks if rank["step"] is not None]
        return {
            "state": "running" if any(rank["alive"] for rank in ranks) else "starting",
            "seconds": round(time.monotonic() - self._begin, 1),
            "launcher_pid": os.getpid(),
            "ranks": ranks,
            "step": min(steps) if steps else None,
            "restarts": self._attempts.restarts,
            "max_restarts": self._attempts.max_restarts,
            "last_failure": failure,
            "exit_status": None,
        }

    def _run(self) -> None:
        while True:
            facts = self.facts()
            self._write(facts)
            if self._line:
                print(f"\r\x1b[K{as_line(facts)}", end="", file=sys.stderr, flush=True)
            if self._end.wait(INTERVAL_SECONDS):
                return

    def _write(self, facts: dict) -> None:
        if not self._file:
            return
        try:
            write_text(self._file, json.dumps(facts, indent=1) + "\n")
        except OSError as error:
            if not self._has_complained:
                self._has_complained = True
                text = f"--status-json={self._file}: {error.strerror}; the job goes on without it"
                print(f"libddp run: {text}", file=sys.stderr)


def as_line(facts: dict) -> str:
    """One line, at most about a terminal wide."""
    alive = sum(rank["alive"] for rank in facts["ranks"])
    parts = [f"libddp run: {alive}/{len(facts['ranks'])} ranks alive"]
    if facts["step"] is not None:
        parts.append(f"step {facts['step']}")
    if facts["max_restarts"]:
        parts.append(f"{facts['restarts']}/{facts['max_restarts']} restarts")
    if facts["last_failure"]:
        lines = facts["last_failure"]["error"].splitlines() or ["?"]
        parts.append(f"last failure: rank {facts['last_failure']['rank']}, {lines[0][:60]}")
    return " | ".join(parts)


def is_alive(pid: int) -> bool:
    """Not one that has ended and that nobody has waited for yet."""
    return state_of(pid) not in ("", "Z", "X")
