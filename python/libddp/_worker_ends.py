"""What the launcher knows of its workers' ends beyond torch's list of failures.

torch forgets the error file of a worker that wrote none, counts those that the launcher itself
stopped as failures, and sees nothing of the ranks that a worker started (torch.multiprocessing).
"""

from __future__ import annotations

import copy
import glob
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from libddp import _process_states
from libddp._last_words import MAX_TEXT, LastWords, read
from libddp._program_line import innermost, places_in

_STOPPED = (-signal.SIGTERM, -signal.SIGKILL)
_CHILD = re.compile(r"-- Process (\d+) terminated with the following error:\n")
_CHILD_ERRORS = "torch.multiprocessing.spawn.Process"
_NOTHING_RECORDED = "To enable traceback see"


@dataclass
class Workers:
    """The workers of the last start; an elastic run may start them several times."""

    #: By local rank.
    error_files: dict[int, str] = field(default_factory=dict)
    #: By local rank.
    ranks: dict[int, int] = field(default_factory=dict)
    #: When they were, by the monotonic clock.
    started: float = 0.0
    #: By local rank.
    pids: dict[int, int] = field(default_factory=dict)
    #: torch's failures by local rank.
    told: dict = field(default_factory=dict)
    #: All hosts' number of this start, for TORCHELASTIC_RESTART_COUNT; None: torch's own.
    number: int | None = None
    #: Process ids of those that the launcher ended, because of another.
    stopped: set[int] = field(default_factory=set)

    def begin(self, error_files: dict[int, str], ranks: dict[int, int]) -> None:
        """A new start."""
        self.error_files, self.ranks = error_files, ranks
        self.started = time.monotonic()
        self.told, self.pids = {}, {}
        self.stopped.clear()

    def go_on(self, error_files: dict[int, str], ranks: dict[int, int], started: float) -> None:
        """In another epoch of the same start (--in-place)."""
        self.error_files, self.ranks, self.started = error_files, ranks, started
        self.told = {}

    def tell(self, pids: dict[int, int], failures: dict) -> None:
        """What torch's launcher found, by local rank."""
        self.pids = pids
        if failures:
            self.told = failures

    def running(self, step_in: Callable[[str], int | None]) -> list[tuple[int, int, int | None]]:
        """Rank, process id and step of each worker; for any thread.

        Args:
            step_in: finds the step beside a worker's error file.
        """
        pids, ranks, files = self.pids, self.ranks, self.error_files
        return sorted(
            (ranks[local], pid, step_in(os.path.dirname(files.get(local, ""))))
            for local, pid in pids.items()
            if local in ranks
        )

    def failed(self) -> dict:
        """torch's failures of the last start by rank; none while it runs, or ran well."""
        return {self.ranks[local]: failure for local, failure in self.told.items()}

    def failures(self, failures: dict) -> dict:
        """torch's failures by rank: without the stopped ones, and each with its error file."""
        kept = {}
        for rank, failure in failures.items():
            if failure.exitcode in _STOPPED and failure.pid in self.stopped:
                continue
            kept[rank] = copy.copy(failure)
            kept[rank].error_file = self.error_files.get(failure.local_rank, failure.error_file)
        return kept or failures


@contextmanager
def watched() -> Iterator[Workers]:
    """The workers that are started inside, as torch's launcher starts and stops them."""
    workers = Workers()
    reify, close = DefaultLogsSpecs.reify, SubprocessHandler.close

    def reify_and_note(self, envs, *args, **kwargs):
        for env in envs.values() if workers.number is not None else ():
            env["TORCHELASTIC_RESTART_COUNT"] = str(workers.number)
        destinations = reify(self, envs, *args, **kwargs)
        ranks = {local: int(env.get("RANK", local)) for local, env in envs.items()}
        workers.begin(dict(destinations.error_files), ranks)
        return destinations

    def close_and_note(self, *args, **kwargs):
        workers.stopped.add(self.proc.pid)
        close(self, *args, **kwargs)
        _process_states.let_hear(
            self.proc.pid
        )  # else it is ended when --shutdown-timeout has passed

    DefaultLogsSpecs.reify, SubprocessHandler.close = reify_and_note, close_and_note
    try:
        yield workers
    finally:
        DefaultLogsSpecs.reify, SubprocessHandler.close = reify, close


def complete(ends: list[LastWords], failures: dict) -> list[LastWords]:
    """The ends of the workers, with those of the ranks that they started, each in clear words.

    Args:
        ends: of workers.
        failures: as `Workers.failures` gives them.
    """
    completed = []
    for end in ends:
        failure = failures.get(end.rank)
        file = end.path or (failure.error_file if failure else "")
        names = glob.glob(os.path.join(glob.escape(os.path.dirname(file)), "error.rank*.json"))
        spawned = [found for found in map(read, sorted(names)) if found is not None]
        own = _in_clear_words(end, failure)
        if not _is_told_by(own, end, spawned):
            completed.append(own)
            spawned = [rank for rank in spawned if rank.rank != own.rank]
        completed += spawned
    return completed


def _is_told_by(own, end, spawned: list) -> bool:
    """Whether a worker ended because of the ranks that it started, which say so themselves."""
    if end.text.startswith(_CHILD_ERRORS):
        causes = [rank for rank in spawned if not rank.follows]
        return bool(causes) or (own.follows and bool(spawned))
    return bool(spawned) and end.text.startswith(_NOTHING_RECORDED)


def _in_clear_words(end, failure):
    if end.path is None and failure and end.text.startswith(_NOTHING_RECORDED):
        return replace(end, text=f"exit code {failure.exitcode}; what it said is above")
    if end.path is not None and end.text.startswith(_CHILD_ERRORS):
        return _of_a_child(end)
    return end


def _of_a_child(end):
    """torch hands a child's traceback on as text; its process failed before it was a rank."""
    with open(end.path, encoding="utf-8") as file:
        stack = json.load(file)["message"]["extraInfo"]["py_callstack"]
    processes = list(_CHILD.finditer(stack))
    if not processes:
        return end
    trace = stack[processes[-1].end() :]
    places = places_in(trace)
    text = _last_error(trace)
    return replace(
        end,
        text=f"{text[:MAX_TEXT]} (its process {processes[-1].group(1)})",
        place="{}:{}".format(*innermost(places)) if places else end.place,
        follows=text.partition(":")[0].endswith("PeerError"),
    )


def _last_error(trace: str) -> str:
    """'ValueError: no such token' of a printed traceback: what comes after the last frame."""
    lines = trace.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    start = frames[-1] + 1 if frames else 0
    while start < len(lines) - 1 and lines[start].startswith(" "):
        start += 1
    return "\n".join(lines[start:])
