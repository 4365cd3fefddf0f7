"""Starts ranks on one or several hosts in milliseconds, and ends whatever is left of them.

with Fleet() as fleet:                                  # Fleet(network): one zygote per host
    run = fleet.start("failures.work", "loop", hosts=[0, 0, 0, 0])
    run.wait_for("ready")
    fault = run.signal(2, signal.SIGKILL)               # the time at which it was sent
    for outcome in run.finish(): ...
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from failures import leftovers

START_S = 120.0


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


class Zygote:
    """One per host; see zygote.py."""

    def __init__(self, prefix: list[str], folder: Path, env: dict):
        self.log = folder / "zygote.log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, str(Path(__file__).with_name("zygote.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env},
            )
        self.pid = self._answer()["pid"]

    def _answer(self) -> dict:
        ready, _, _ = select.select([self.process.stdout], [], [], START_S)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            raise RuntimeError(f"the zygote does not answer: {self.log.read_text()[-2000:]}")
        return json.loads(line)

    def ask(self, command: dict) -> dict:
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Run:
    """The ranks of one trial."""

    def __init__(self, fleet: Fleet, folder: Path, hosts: list[int]):
        self.fleet, self.folder, self.hosts = fleet, folder, hosts
        self.pids: list[int] = []
        self.pidfds: list[int] = []

    def add(self, pid: int) -> None:
        self.pids.append(pid)
        self.pidfds.append(os.pidfd_open(pid))

    def wait_for(self, mark: str, ranks=None, deadline_s: float = 60.0) -> None:
        """Until these ranks (all) have marked it."""
        end = time.monotonic() + deadline_s
        for rank in range(len(self.pids)) if ranks is None else ranks:
            while not (self.folder / f"{mark}-{rank}").exists():
                if time.monotonic() > end or self._is_over(rank):
                    raise AssertionError(f"rank {rank} is not {mark}: {self._output(rank)}")
                time.sleep(0.001)

    def tell(self, name: str) -> None:
        (self.folder / name).touch()

    def signal(self, rank: int, number: int) -> float:
        now = time.monotonic()
        signal.pidfd_send_signal(self.pidfds[rank], number)
        return now

    def end_of(self, rank: int, deadline_s: float) -> float:
        """Waits for the end of a rank; the time of it."""
        if not select.select([self.pidfds[rank]], [], [], max(0.0, deadline_s))[0]:
            raise AssertionError(f"rank {rank} did not end: {self._output(rank)}")
        return time.monotonic()

    def finish(self, deadline_s: float = 30.0, stragglers=()) -> list[Outcome]:
        """Outcomes of all ranks. Those in `stragglers` are killed once the others have ended."""
        end = time.monotonic() + deadline_s
        waiting = {fd: r for r, fd in enumerate(self.pidfds) if r not in stragglers}
        ended: dict[int, float] = {}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))
            ended.update({waiting.pop(fd): time.monotonic() for fd in ready})
            if not ready:
                break
        hung = set(waiting.values())
        for rank in hung:  # its stacks go to its output
            self.signal(rank, signal.SIGUSR1)
        time.sleep(0.5 if hung else 0)
        self.kill()
        self.fleet.open_runs.remove(self)
        return [
            self._outcome(rank, ended.get(rank, time.monotonic()), rank in hung)
            for rank in range(len(self.pids))
        ]

    def kill(self) -> None:
        """Ends every rank and its children, and waits for that."""
        for pid, fd in zip(self.pids, self.pidfds, strict=True):
            if not self._is_ended(fd):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        for fd in self.pidfds:
            select.select([fd], [], [], 10)

    def _is_ended(self, fd: int) -> bool:
        return bool(select.select([fd], [], [], 0)[0])

    def _is_over(self, rank: int) -> bool:
        return self._is_ended(self.pidfds[rank])

    def _output(self, rank: int) -> str:
        path = self.folder / f"output-{rank}"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def _outcome(self, rank: int, ended_at: float, is_hung: bool) -> Outcome:
        pid = self.pids[rank]
        status = self.fleet.zygotes[self.hosts[rank]].ask({"reap": pid})["status"]
        os.close(self.pidfds[rank])
        result = self.folder / f"result-{rank}"
        found = pickle.loads(result.read_bytes()) if result.exists() else {}
        return Outcome(
            rank,
            pid,
            None if is_hung else status,
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
    def __init__(self, network=None, num_hosts: int = 1, env: dict | None = None):
        self.network = network
        self.num_hosts = len(network.hosts) if network else num_hosts
        self.addresses = network.addresses if network else ["127.0.0.1"]
        self.folder = Path(tempfile.mkdtemp(prefix="failures-"))
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self.zygotes: list[Zygote] = []
        self.num_runs = 0
        self.open_runs: list[Run] = []
        #: Further variables of all ranks.
        self.env = {"TMPDIR": str(self.temporary), **(env or {})}

    def __enter__(self) -> Fleet:
        try:
            for host in range(self.num_hosts):
                prefix = self.network.inside(host) if self.network else []
                self.zygotes.append(Zygote(prefix, self.folder, self.env))
            self.store = self._open_store()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for run in self.open_runs:  # also those of a case that failed in the midst
            run.kill()
        for zygote in self.zygotes:
            zygote.close()
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
        run = Run(self, folder, hosts)
        self.open_runs.append(run)
        for rank, host in enumerate(hosts):
            command = {
                "module": module,
                "function": function,
                "args": args,
                "rank": rank,
                "world_size": len(hosts),
                "folder": str(folder),
                "output": str(folder / f"output-{rank}"),
                "store": self.store,
                "prefix": f"run-{self.num_runs}",
                "env": env(rank) if env else {},
                "quick_exit": quick_exit,
            }
            run.add(self.zygotes[host].ask({"run": command})["pid"])
        return run

    def remains(self) -> leftovers.Remains:
        """What there is now of processes, shared memory, sockets and files of the ranks."""
        return leftovers.look([z.pid for z in self.zygotes], self.temporary, self.store[1])
