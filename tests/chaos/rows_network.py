"""Hosts are network namespaces, each with a launcher (`libddp run`): cables are pulled, hosts come
and go. Needs root.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from forked import HERE
from rows import Skipped, Trial, pause, row

sys.path.insert(0, str(HERE.parent / "systems"))

import network

#: Rendezvous, imports and the last call for hosts, on a busy machine.
_START = 150.0


class Hosts:
    """The launchers of a job."""

    def __init__(self, job, net: network.Network, *flags: str) -> None:
        self.job, self.net, self.flags = job, net, flags
        self.launchers: dict[int, subprocess.Popen] = {}

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_) -> None:
        for host in list(self.launchers):
            self.lose(host)

    def start(self, host: int, store: int = 0) -> None:
        """A launcher there; the store is on the other host."""
        run = [
            "--rdzv-backend=c10d",
            "--rdzv-id=chaos",
            f"--rdzv-conf=is_host={int(host == store)}",
        ]
        run += [f"--rdzv-endpoint={self.net.addresses[store]}:29400", "--nproc-per-node=1"]
        run += [f"--local-addr={self.net.addresses[host]}", "--preload", *self.flags]
        environment = {"OMP_NUM_THREADS": "1", "LIBDDP_HEARTBEAT_TIMEOUT": "3"}
        environment["LIBDDP_RUN_KEY_FILE"] = self.job.key_file()
        environment["LIBDDP_KEEPER_LOG"] = str(self.job.keeper_log)
        command = [*run, str(HERE / "train.py"), json.dumps(self.job.config)]
        with open(self.said_file(host), "ab") as output:
            self.launchers[host] = subprocess.Popen(
                [*self.net.inside(host), sys.executable, "-m", "libddp", "run", *command],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def said_file(self, host: int) -> Path:
        return self.job.base / f"launcher-{host}.txt"

    def said(self, host: int) -> str:
        return self.said_file(host).read_text(errors="replace")

    def pids(self, host: int) -> list[int]:
        command = ["ip", "netns", "pids", self.net.hosts[host]]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [int(pid) for pid in listed.split()]

    def workers(self, host: int) -> list[int]:
        """Of the start that is the newest on some rank."""
        known = {line.step for rank in range(3) for line in self.job.steps("pid", rank)}
        return [pid for pid in self.pids(host) if pid in known]

    def lose(self, host: int) -> None:
        """All of its processes."""
        for pid in self.pids(host):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.launchers.pop(host).wait(30)

    def await_true(self, condition, what: str, seconds: float = _START) -> None:
        told = "".join(f"-- launcher {h}\n{self.said(h)[-2000:]}" for h in self.launchers)
        self.job.await_true(condition, f"{what}\n{told}", seconds)

    def await_ranks(self, ranks: int, beyond: int, start: int) -> int:
        """Until that many of that start or a later one have gone on; at which step they began."""
        found = -1

        def have_gone_on() -> bool:
            nonlocal found
            for number in range(start, self.newest_start() + 1):
                resumed = [self.job.newest("resumed", rank, number) for rank in range(4)]
                copied = [self.job.newest("saved", rank, number) for rank in range(4)]
                is_whole = [at >= 0 for at in resumed] == [rank < ranks for rank in range(4)]
                if is_whole and all(at > resumed[0] + beyond for at in copied[:ranks]):
                    found = resumed[0]
                    return True
            return False

        self.await_true(have_gone_on, f"{ranks} ranks go on")
        return found

    def await_together(self, ranks: int, since: float) -> list:
        """Until that many have begun after that moment, and gone on; how they have begun."""

        def begun() -> list:
            lines = [self.job.steps("resumed", rank)[-1:] for rank in range(ranks)]
            return [line for (line,) in filter(None, lines) if line.time > since]

        def have_gone_on() -> bool:
            resumed = begun()
            return len(resumed) == ranks and all(
                any(
                    saved.time > line.time and saved.step > line.step + 3
                    for saved in self.job.steps("saved", rank)
                )
                for rank, line in enumerate(resumed)
            )

        self.await_true(have_gone_on, f"{ranks} ranks go on together")
        return begun()

    def newest_start(self) -> int:
        return max((line.start for rank in range(3) for line in self.job.lines(rank)), default=0)


def _network(hosts: int) -> network.Network:
    if reason := network.why_not():
        raise Skipped(f"no network namespaces: {reason}")
    return network.Network(hosts)


def _job(trial: Trial, **config):
    base = {"mode": "ddp", "steps": 100000, "pause": 0.05, "store_every": 10, "replicas": 1}
    return trial.job(**base | {"linger": 3.0} | config)


def _ranks_of(snapshot: Path) -> int:
    """That have stored it."""
    (name,) = {path.stem.split("-")[-1] for path in snapshot.glob("rank-0-of-*.safetensors")}
    return int(name)


@row("one of three hosts is split off", quick=0)
def split_off(trial: Trial) -> None:
    """Its cable is pulled. The side of the store goes on with two ranks, not before the newest step
    that was copied; the other side's worker ends, and it stores nothing any more: whatever is
    newer in the folder is of two ranks.
    """
    with _network(3) as net:
        job = _job(trial)
        with Hosts(job, net, "--nnodes=1:3", "--max-restarts=3") as hosts:
            for host in range(3):
                hosts.start(host)
            hosts.await_ranks(3, 4 + trial.number % 8, 0)
            lost = 1 + trial.number % 2
            copied = min(job.newest("copied", rank) for rank in range(3))
            net.cut(lost)
            hosts.await_true(lambda: not hosts.workers(lost), "the worker that is alone ends", 60)
            at = hosts.await_ranks(2, 25, 1)
            assert at >= copied, f"went on at {at}, {copied} was copied\n{job.story()}"
            stored = [path for path in job.snapshots() if path.exists()]
            assert stored, job.story()
            assert {_ranks_of(path) for path in stored} == {2}, stored
            assert not hosts.workers(lost), job.story()


@row("the host of the store is gone", quick=0)
def store_gone(trial: Trial) -> float:
    """With all of its processes, every second time with `--in-place`. The two others meet at a
    store of one of them and go on, not before the newest step that was copied. Losses are bitwise
    those of a job that was ended in order there, and resumed by two ranks from the folder.
    """
    with _network(3) as net:
        job = _job(trial, linger=120.0)
        flags = ["--nnodes=1:3", "--max-restarts=3", *["--in-place"] * (trial.number % 2)]
        with Hosts(job, net, *flags) as hosts:
            for host in range(3):
                hosts.start(host)
            hosts.await_ranks(3, 4 + trial.number % 8, 0)
            copied = min(job.newest("copied", rank) for rank in range(3))
            net.cut(0)
            hosts.lose(0)
            lost = time.monotonic()
            at = hosts.await_ranks(2, 12, 1)
            assert at >= copied, f"went on at {at}, {copied} was copied\n{job.story()}"
            for host in (1, 2):
                assert hosts.said(host).count("the run goes on with the store at") == 1
        other = trial.job(mode="ddp", store_every=1, wait_at_end=True)
        _check_losses(job, 0, other, 3, at)
        start = hosts.newest_start()
        _check_losses(job, start, other, 2, at + 12)
        return job.steps("step", 0, start)[0].time - lost


def _check_losses(job, start: int, other, ranks: int, steps: int) -> None:
    """Of a start of the job, up to that step, which the other job makes next."""
    other.begin(ranks, steps=steps)
    other.end_well()
    for rank in range(ranks):
        mine = {e.step: e.words[1] for e in job.steps("step", rank, start)}
        theirs = {e.step: e.words[1] for e in other.steps("step", rank, other.start)}
        assert theirs, f"{ranks} ranks did nothing\n{other.story()}"
        assert theirs.items() <= mine.items(), f"rank {rank} of {ranks}\n{job.story()}"


@row("20 joins and leaves in a minute", quick=0)
def joins_and_leaves(trial: Trial) -> float:
    """Two of three hosts come and go (SIGTERM to their launchers, some while they are still on
    their way in). The rendezvous stays open and the first host's launcher stays: at last all three
    go on together, not before the newest step that was stored. A leave is counted as a failure
    (--max-restarts), a join is not. The time is from the last join to the common start.
    """
    with _network(3) as net:
        job = _job(trial)
        with Hosts(job, net, "--nnodes=1:3", "--max-restarts=100") as hosts:
            for host in range(3):
                hosts.start(host)
            hosts.await_ranks(3, 4, 0)
            for number in range(20):
                host = 1 + number % 2
                if host in hosts.launchers:
                    hosts.launchers[host].terminate()
                    hosts.launchers.pop(host).wait(60)
                else:
                    hosts.start(host)
                    joined = time.monotonic()
                pause(3)
            stored = job.stored_steps()[-1]
            resumed = hosts.await_together(3, joined)
            steps = {line.step for line in resumed}
            assert len(steps) == 1, f"{steps}\n{job.story()}"
            assert steps.pop() >= stored, f"{resumed}, {stored} was stored\n{job.story()}"
            assert "RendezvousClosedError" not in "".join(map(hosts.said, range(3)))
            return max(line.time for line in resumed) - joined
