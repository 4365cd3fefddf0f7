"""A job of a trial: its ranks, what they have written, and what must be true of that.

job = Job(forks, folder, {"mode": "ddp", "steps": 20})
job.begin(ranks=2)
job.await_step(7)
job.kill([0])
job.await_end()
job.begin(ranks=2)
assert job.await_end() == [0, 0]
job.check_resumed()                     # at a step that all ranks have, not an older one
job.check_losses(reference)             # each step that was done, also the repeated ones
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from forked import HERE, Forks

sys.path.append(str(HERE.parent / "python" / "support"))

import run_keys

DEADLINE = 60.0
_PAUSE = 0.002


@dataclass(frozen=True)
class Line:
    """Of a rank's log."""

    start: int
    time: float
    what: str
    words: tuple[str, ...]

    @property
    def step(self) -> int:
        return int(self.words[0])


class Job:
    """Of one folder; it may begin many times."""

    def __init__(self, forks: Forks, folder: Path, config: dict) -> None:
        self.forks, self.base = forks, folder
        self.folder = folder / "snapshots"
        self.log = folder / "log"
        self.log.mkdir(parents=True, exist_ok=True)
        self.output = folder / "output.txt"
        self.keeper_log = folder / "keeper.txt"
        self.config = {"folder": str(self.folder), "log": str(self.log), "linger": 5.0} | config
        self.start, self.ranks, self.pids = -1, 0, []
        self.killed_at = 0.0
        self.environment: dict[str, str] = {}

    def begin(self, ranks: int, function: str = "train:main", hosts=None, **config) -> None:
        """Its ranks start; each on the host of that name, if they have names."""
        self.start, self.ranks = self.start + 1, ranks
        settings = self.config | config | {"start": self.start}
        if settings.get("mode") != "plain":
            settings["init"] = f"file://{self.base}/store-{self.start}"
        self.pids = [
            self.forks.start(
                function,
                settings,
                {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LIBDDP_KEEPER_LOG": str(self.keeper_log),
                    **self.environment,
                    **(self._host(hosts[rank]) if hosts else {}),
                },
                self.output,
            )
            for rank in range(ranks)
        ]

    def _host(self, name: str) -> dict[str, str]:
        """What makes a process one of another host."""
        return {"LIBDDP_HOST_ID": name, "LIBDDP_RUN_KEY_FILE": self.key_file()}

    def key_file(self) -> str:
        """By which hosts know each other."""
        return run_keys.key_file(self.base)

    def begin_agent(self, ranks: int, restarts: int = 3, **config) -> int:
        """torch's agent starts them; returns its process id."""
        self.start, self.ranks = self.start + 1, ranks
        settings = self.config | config | {"start": self.start}
        argument = {"ranks": ranks, "restarts": restarts, "training": settings}
        environment = {"LIBDDP_KEEPER_LOG": str(self.keeper_log), **self.environment}
        agent = self.forks.start("agent:main", argument, environment, self.output)
        self.pids = [agent]
        return agent

    def begin_program(self, module: str, *more: str, ranks: int) -> subprocess.Popen:
        """A launcher, as on the command line."""
        self.start, self.ranks = self.start + 1, ranks
        flags = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=3", *more]
        settings = json.dumps(self.config | {"start": self.start})
        with open(self.output, "a") as output:
            return subprocess.Popen(
                [sys.executable, "-m", module, *flags, str(HERE / "train.py"), settings],
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "LIBDDP_KEEPER_LOG": str(self.keeper_log)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def lines(self, rank: int) -> list[Line]:
        try:
            text = (self.log / f"rank-{rank}.txt").read_text()
        except FileNotFoundError:
            return []
        split = (line.split(" ") for line in text.splitlines())
        return [Line(int(w[0]), float(w[1]), w[2], tuple(filter(None, w[3:]))) for w in split]

    def steps(self, what: str, rank: int, start: int | None = None) -> list[Line]:
        """Lines of one kind; of one start if it is named."""
        return [
            line for line in self.lines(rank) if line.what == what and start in (None, line.start)
        ]

    def newest(self, what: str, rank: int, start: int | None = None) -> int:
        return max((line.step for line in self.steps(what, rank, start)), default=-1)

    def await_true(self, condition, what: str, seconds: float = DEADLINE) -> None:
        """Raises AssertionError with all that is known."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what}: not after {seconds} s\n{self.story()}"
            time.sleep(_PAUSE)

    def await_step(self, step: int, what: str = "step", start: int | None = None) -> None:
        """All ranks have written that line in this start, or died."""
        start = self.start if start is None else start

        def is_there() -> bool:
            return all(self.newest(what, rank, start) >= step for rank in range(self.ranks))

        self.await_true(is_there, f"{what} {step}")

    def kill(self, ranks, number: int = signal.SIGKILL) -> None:
        self.killed_at = time.monotonic()
        for rank in ranks:
            os.kill(self.pids[rank], number)

    def await_end(self, seconds: float = DEADLINE) -> list[int]:
        """Exit statuses; negative ones are signals."""
        self.await_true(
            lambda: all(self.forks.poll(pid) is not None for pid in self.pids), "end", seconds
        )
        return [self.forks.poll(pid) for pid in self.pids]

    def end_well(self, seconds: float = DEADLINE) -> None:
        """Its processes end with 0."""
        statuses = self.await_end(seconds)
        assert statuses == [0] * len(statuses), f"{statuses}\n{self.story()}"

    def finish(self, seconds: float = DEADLINE) -> None:
        """To its end, and all of it is gone."""
        self.end_well(seconds)
        self.check_nothing_is_left()

    def check_nothing_is_left(self, seconds: float = 8.0) -> None:
        """No process: not a worker, not a data loader's, not a keeper with its memory."""
        self.await_true(lambda: not self.forks.others(), "nothing is left", seconds)

    def run_name(self) -> str:
        return (self.folder / "run").read_text().strip()

    def keepers(self, host: str | None = None) -> list[int]:
        """Of this job, on all hosts or on that one."""
        name = self.run_name()
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                given = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if host is not None and f"LIBDDP_HOST_ID={host}".encode() not in given:
                continue
            if words[0].endswith(b"libddp-keeper") and words[1:2] == [name.encode()]:
                found.append(int(pid))
        return found

    def snapshots(self) -> list[Path]:
        """That have their name in the folder, the oldest first."""
        named = [p for p in self.folder.glob("step-*") if not p.name.endswith(".part")]
        return sorted(named, key=lambda p: int(p.name.split(".")[1]))

    def stored_steps(self) -> list[int]:
        return [int(p.name.split(".")[0].removeprefix("step-")) for p in self.snapshots()]

    def check_resumed(self, start: int | None = None) -> float:
        """All ranks went on at one step: the newest that all had. Seconds from the kill to the
        first new step.
        """
        start = self.start if start is None else start
        at = {self.newest("resumed", rank, start) for rank in range(self.ranks)}
        assert len(at) == 1, f"ranks resumed at {at}\n{self.story()}"
        (step,) = at
        were = [rank for rank in range(8) if self.newest("pid", rank, start - 1) > 0]
        before = [self._before(rank, start) for rank in were]
        saved = max(b["saved"] for b in before)
        begun = min(b["saving"] for b in before)
        assert saved <= step <= max(begun, saved), (
            f"resumed at {step}; step {saved} was saved, {begun} begun\n{self.story()}"
        )
        return self.steps("step", 0, start)[0].time - self.killed_at

    def _before(self, rank: int, start: int) -> dict[str, int]:
        """The newest save of the start before, or what that one had resumed."""
        found = {}
        for what in ("saved", "saving"):
            kinds = (what, "resumed")
            lines = [e for e in self.lines(rank) if e.start == start - 1 and e.what in kinds]
            found[what] = max((line.step for line in lines), default=0)
        return found

    def check_losses(self, reference: dict[tuple[int, int], str], ranks=None) -> int:
        """Bit for bit; returns how many steps were repeated."""
        repeated = 0
        for rank in range(ranks or self.ranks):
            seen = set()
            for line in self.lines(rank):
                assert line.what not in ("wrong",), f"{line}\n{self.story()}"
                if line.what != "step":
                    continue
                wanted = reference[rank, line.step]
                assert line.words[1] == wanted, (
                    f"rank {rank}, step {line.step}, start {line.start}: {line.words[1]}, "
                    f"not {wanted}\n{self.story()}"
                )
                repeated += line.step in seen
                seen.add(line.step)
        return repeated

    def losses(self, ranks: int) -> dict[tuple[int, int], str]:
        return {
            (rank, line.step): line.words[1]
            for rank in range(ranks)
            for line in self.steps("step", rank)
        }

    def story(self) -> str:
        """For a message."""
        parts = [f"config {json.dumps(self.config)}"]
        for path in [*sorted(self.log.glob("rank-*.txt")), self.output, self.keeper_log]:
            if path.exists():
                parts.append(f"-- {path.name}\n{path.read_text()[-2500:]}")
        return "\n".join(parts)
