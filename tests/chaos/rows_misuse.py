"""Programs that use a snapshot in a way that cannot work."""

from __future__ import annotations

import signal

from misuse import WANTED
from rows import Trial, row


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
