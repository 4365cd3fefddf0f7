"""Starts ranks on one or several hosts in milliseconds, and ends whatever is left of them.

with Fleet() as fleet:                                  # Fleet(network): on its hosts
    run = fleet.start("failures.work", "loop", hosts=[0, 0, 0, 0])
    run.wait_for("ready")
    fault = run.signal(2, signal.SIGKILL)               # the time at which it was sent
    for outcome in run.finish(): ...
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rank_server import ForkedRank, RankServer, print_stacks

from failures import leftovers

SYSTEMS = str(Path(__file__).parents[1])


@dataclass
class Outcome:
    rank: int
    pid: int
    #: Exit status; negative = the signal that ended it, None = it was still running.
    status: int | None
    #: When it ended, as time.monotonic().
    ended_at: float
    value: Any
    error: str | None
    output: str
    #: When its exit handlers had run; 0 if they never did.
    left_at: float = 0.0


class Run:
    """The ranks of one trial."""

    def __init__(self, fleet: Fleet, folder: Path):
        self.fleet, self.folder = fleet, folder
        self.ranks: list[ForkedRank] = []

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self.ranks]

    def wait_for(self, mark: str, ranks=None, deadline_s: float = 60.0) -> None:
        """Until these ranks (all) have marked it."""
        end = time.monotonic() + deadline_s
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            while not (self.folder / f"{mark}-{rank}").exists():
                if time.monotonic() > end or self.ranks[rank].has_ended():
                    raise AssertionError(f"rank {rank} is not {mark}: {self._output(rank)}")
                time.sleep(0.001)

    def tell(self, name: str) -> None:
        (self.folder / name).touch()

    def signal(self, rank: int, number: int) -> float:
        now = time.monotonic()
        self.ranks[rank].send_signal(number)
        return now

    def end_of(self, rank: int, deadline_s: float) -> float:
        """Waits for the end of a rank; the time of it."""
        if not self.ranks[rank].has_ended(deadline_s):
            raise AssertionError(f"rank {rank} did not end: {self._output(rank)}")
        return time.monotonic()

    def finish(self, deadline_s: float = 30.0, stragglers=()) -> list[Outcome]:
        """Outcomes of all ranks. Those in `stragglers` are killed once the others have ended."""
        end = time.monotonic() + deadline_s
        waiting = {child: r for r, child in enumerate(self.ranks) if r not in stragglers}
        ended: dict[int, float] = {}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))
            ended.update({waiting.pop(child): time.monotonic() for child in ready})
            if not ready:
                break
        print_stacks(list(waiting))
        hung = set(waiting.values())
        self.kill()
        self.fleet.open_runs.remove(self)
        return [
            self._outcome(rank, ended.get(rank, time.monotonic()), rank in hung)
            for rank in range(len(self.ranks))
        ]

    def kill(self) -> None:
        """Ends every rank and its children, and waits for that."""
        for rank in self.ranks:
            if not rank.has_ended():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
        for rank in self.ranks:
            rank.wait(10)

    def _output(self, rank: int) -> str:
        path = self.folder / f"output-{rank}"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def _outcome(self, rank: int, ended_at: float, is_hung: bool) -> Outcome:
        child = self.ranks[rank]
        result = self.folder / f"result-{rank}"
        found = pickle.loads(result.read_bytes()) if result.exists() else {}
        return Outcome(
            rank,
            child.pid,
            None if is_hung else child.returncode,
            ended_at,
            found.get("value"),
            found.get("error"),
            self._output(rank),
            self._exit_stamp(rank),
        )

    def _exit_stamp(self, rank: int) -> float:
        path = self.folder / f"exit-{rank}"
        return float(path.read_text()) if path.exists() else 0.0


class Fleet:
    """With a server of ranks of its own: what that has for children is this fleet's."""

    def __init__(self, network=None, env: dict | None = None):
        self.network = network
        self.hosts = network.hosts if network else [None]
        self.addresses = network.addresses if network else ["127.0.0.1"]
        self.folder = Path(tempfile.mkdtemp(prefix="failures-"))
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self.num_runs = 0
        self.open_runs: list[Run] = []
        #: Further variables of all ranks.
        self.env = {"TMPDIR": str(self.temporary), **(env or {})}

    def __enter__(self) -> Fleet:
        self.server = RankServer(self.env)
        try:
            self.store = self._open_store()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for run in self.open_runs:  # also those of a case that failed in the midst
            run.kill()
        self.server.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _open_store(self) -> tuple[str, int]:
        """In a process of its own on host 0, as an agent's: no rank is its host."""
        self.store = (self.addresses[0], 0)
        self.store_run = self.start("failures.work", "keep_store", hosts=[0])
        self.store_run.wait_for("open")
        return self.addresses[0], int((self.store_run.folder / "port").read_text())

    def start(
        self, module: str, function: str, *args, hosts: list[int], env=None, quick_exit=True
    ) -> Run:
        """`function(me, *args)` on a rank for each entry of `hosts`; `env(rank)` adds variables."""
        self.num_runs += 1
        folder = self.folder / f"run-{self.num_runs}"
        folder.mkdir()
        run = Run(self, folder)
        self.open_runs.append(run)
        for rank, host in enumerate(hosts):
            work = {
                "module": module,
                "function": function,
                "args": args,
                "rank": rank,
                "world_size": len(hosts),
                "folder": str(folder),
                "store": self.store,
                "prefix": f"run-{self.num_runs}",
                "quick_exit": quick_exit,
            }
            child = self.server.start(
                "failures.rank:main",
                work,
                environment=self._environment(env(rank) if env else {}),
                output=folder / f"output-{rank}",
                namespace=self.hosts[host],
                folders=(SYSTEMS,),
                modules=("failures.rank", module),
                exit_stamp=folder / f"exit-{rank}",
            )
            run.ranks.append(child)
        return run

    def _environment(self, own: dict) -> dict:
        fixed = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        return {**os.environ, **fixed, **self.env, **own}

    def remains(self) -> leftovers.Remains:
        """What there is now of processes, shared memory, sockets and files of the ranks."""
        return leftovers.look(self.server.pid, self.hosts, self.temporary, self.store[1])
