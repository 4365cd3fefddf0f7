"""The rows of the failure table: what each one does to a job, and what it asserts.

@row("kill -9 of one worker", quick=2)
def killed(trial):
    \"\"\"What must be true.\"\"\"
    ...
    return seconds_to_the_first_new_step    # or None

run(arena, ROWS["kill -9 of one worker"], number=7)
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forked import Forks
from job import Job


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    function: Callable
    #: Trials in the short mode.
    quick: int

    @property
    def asserts(self) -> str:
        return " ".join(self.function.__doc__.split())


ROWS: dict[str, Row] = {}


class Skipped(Exception):
    """Not to be had on this machine."""


def row(name: str, quick: int = 1):
    """Registers a row."""

    def register(function):
        ROWS[name] = Row(name, function, quick)
        return function

    return register


class Arena:
    """What trials share: the process that forks, and the losses of runs without a fault."""

    def __init__(self) -> None:
        self.forks = Forks()
        self.folder = Path(tempfile.mkdtemp(prefix="libddp-chaos-"))
        self._references: dict[str, dict] = {}
        self._numbers = itertools.count()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_) -> None:
        self.forks.__exit__()
        shutil.rmtree(self.folder, ignore_errors=True)

    def fresh(self, name: str) -> Path:
        """A folder."""
        path = self.folder / f"{name}-{next(self._numbers)}"
        path.mkdir()
        return path

    def reference(self, ranks: int, config: dict, hosts=None) -> dict[tuple[int, int], str]:
        """(rank, step) -> loss of a run without snapshots and without a fault."""
        matters = {k: config[k] for k in ("mode", "steps", "width") if k in config}
        key = json.dumps([ranks, matters, hosts], sort_keys=True)
        if key not in self._references:
            job = Job(self.forks, self.fresh("reference"), matters | {"is_saved": False})
            job.begin(ranks, hosts=hosts)
            job.finish()
            self._references[key] = job.losses(ranks)
        return self._references[key]


@dataclass
class Trial:
    """One of a row."""

    arena: Arena
    number: int
    #: Of the whole row: the parts of a copy are shared out over them.
    trials: int
    random: random.Random

    def job(self, **config) -> Job:
        return Job(self.arena.forks, self.arena.fresh("trial"), config)

    def reference(self, job: Job, ranks: int = 2, hosts=None) -> dict[tuple[int, int], str]:
        return self.arena.reference(ranks, job.config, hosts)


def run(arena: Arena, this: Row, number: int, trials: int) -> float | None:
    """A trial; afterwards nothing of it is left, however it ended."""
    trial = Trial(arena, number, trials, random.Random(f"{this.name} {number}"))
    try:
        return this.function(trial)
    finally:
        arena.forks.kill_all()


def pause(seconds: float) -> None:
    time.sleep(seconds)
