"""Programs that use a snapshot in a way that cannot work."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from misuse import WANTED
from rows import Skipped, Trial, row


def _misused(trial: Trial, case: str) -> None:
    job = trial.job(linger=1.0, case=case, width=16)
    job.begin(2, function="misuse:main")
    job.await_end(60)
    for rank in (0, 1):
        said = [" ".join(line.words) for line in job.steps("said", rank)]
        wanted = WANTED[case][rank]
        assert len(said) == len(wanted), f"{case}, rank {rank}: {said}\n{job.story()}"
        for text, (kind, part) in zip(said, wanted, strict=True):
            assert text.startswith(kind), f"{case}, rank {rank}: {text}"
            assert part in text, f"{case}, rank {rank}: {text}"
    job.check_nothing_is_left()


def _register(case: str) -> None:
    @row(f"misuse: {case}", quick=1)
    def misused(trial: Trial) -> None:
        """A clear error on every rank that it concerns, in bounded time; earlier saves stay."""
        _misused(trial, case)


for _case in WANTED:
    _register(_case)


_NUMBERS = r"this host's 2 ranks need (\d+) bytes of memory, and the control group / has (\d+) left"


@row("a memory limit of the control group below two copies", quick=1)
def memory_limit(trial: Trial) -> None:
    """The first save is refused on all ranks with a StateError that has both numbers and says whose
    limit it is; no memory was taken for it, and the next start under a wider limit goes on.
    """
    if os.geteuid() != 0 or "0::/\n" not in Path("/proc/self/cgroup").read_text():
        raise Skipped("needs root, and no control group of version 2 of its own")
    job = trial.job(mode="ddp", steps=6, block_mib=4, linger=1.0)
    wanted = trial.reference(job)
    job.begin(2, memory_mib=9 + trial.number % 7)
    assert job.await_end() == [1, 1], job.story()
    for rank in (0, 1):
        failed = " ".join(job.steps("failed", rank)[0].words)
        assert failed.startswith("StateError"), f"{failed}\n{job.story()}"
        numbers = re.search(_NUMBERS, failed)
        assert numbers, failed
        assert int(numbers[1]) > 4 * 4 << 20, failed
        assert int(numbers[2]) == (9 + trial.number % 7) << 20, failed
    job.begin(2, memory_mib=64)
    job.finish()
    assert job.newest("resumed", 0) == 0, job.story()
    job.check_losses(wanted)


@row("two jobs in one folder", quick=0)
def two_jobs(trial: Trial) -> None:
    """The second one is refused with a SnapshotError that names the process that has the rank and
    the run; the first one goes on to its end, losses as above.
    """
    job = trial.job(mode="ddp", steps=1500, pause=0.02)
    second = trial.job(mode="ddp", steps=5)
    second.config["folder"] = str(job.folder)
    wanted = trial.reference(job)
    job.begin(2)
    job.await_step(3, "saved")
    second.begin(2)
    assert second.await_end(60) == [1, 1], second.story()
    assert job.forks.poll(job.pids[0]) is None, job.story()
    for rank in (0, 1):
        failed = " ".join(second.steps("failed", rank)[0].words)
        assert failed.startswith("SnapshotError"), failed
        assert job.run_name() in failed, failed
        assert "is held by process" in failed, failed
        assert any(str(pid) in failed for pid in job.pids), failed
    job.kill([0, 1], signal.SIGKILL)
    job.await_end()
    job.begin(2, steps=job.newest("saved", 0) + 5)
    job.finish()
    job.check_resumed()
    job.check_losses(wanted)
