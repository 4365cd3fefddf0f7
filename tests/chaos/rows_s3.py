"""Jobs that store at an address: a server of S3's that fails, refuses and is slow."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from job import Job
from rows import Skipped, Trial, pause, row

sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "support"))
_MODES = ("ddp", "fsdp")
_URL = "s3://bucket/run"


class _Stored:
    """What a job has at its address, and the faults of it."""

    def __init__(self, server, job: Job) -> None:
        self.server, self.job = server, job
        job.environment |= server.environment

    def names(self) -> list[str]:
        return self.server.objects("bucket", "run/")

    def steps(self) -> list[int]:
        """Of snapshots that are whole, the oldest first."""
        pause(0.1)  # the server has the threads of this process
        whole = [name.split("/")[0] for name in self.names() if name.endswith("/index.json")]
        pairs = [map(int, name.removeprefix("step-").split(".")) for name in whole]
        return [step for _, step in sorted((save, step) for step, save in pairs)]

    def refuse(self, status: int | None) -> None:
        """All that is written from now on; None: nothing."""
        is_written = ("PUT", "POST")
        self.server.answer = lambda method, path: status if method in is_written else None

    def check_loads(self, step: int) -> None:
        """A start without memory resumes there."""
        self.job.begin(2, wait_at_end=True)
        self.job.finish()
        found = {self.job.newest("resumed", rank, self.job.start) for rank in (0, 1)}
        assert found == {step}, f"{found}, not {step}\n{self.job.story()}"


@contextmanager
def _stored(trial: Trial, **config) -> Iterator[_Stored]:
    try:
        import s3fs  # noqa: F401
        from faulty_s3 import FaultyS3
        from moto import server
    except ImportError as error:
        raise Skipped(str(error)) from error
    job = trial.job(mode=_MODES[trial.number % 2], folder=_URL, **config)
    with FaultyS3() as server:
        server.make_bucket("bucket")
        yield _Stored(server, job)


@row("S3: credentials are refused for a while", quick=0)
def refused(trial: Trial) -> None:
    """Training goes on, the reason is logged once per save, what is there stays; what is stored
    afterwards is.
    """
    with _stored(trial, steps=200, pause=0.08, store_every=5) as stored:
        job, wanted = stored.job, trial.reference(stored.job)
        job.begin(2, wait_at_end=True)
        job.await_true(lambda: stored.steps(), "one is stored")
        stored.refuse(403)
        before = stored.steps()
        job.await_true(lambda: "AccessDenied" in job.keeper_log.read_text(), "a reason")
        assert set(before) & set(stored.steps()), stored.names()
        stored.refuse(None)
        job.finish()
        assert not job.steps("unstored", 0), job.story()
        assert stored.steps()[-1] == 200, stored.names()
        job.check_losses(wanted)


@row("S3: the bucket is gone", quick=0)
def gone(trial: Trial) -> None:
    """Training goes on to its end; wait() raises SnapshotError with the service's word; the
    snapshot that was there is loaded by the next start.
    """
    with _stored(trial, steps=150, pause=0.08, store_every=5) as stored:
        job, wanted = stored.job, trial.reference(stored.job)
        job.begin(2, wait_at_end=True)
        job.await_true(lambda: stored.steps(), "one is stored")
        stored.refuse(404)
        job.finish()
        unstored = " ".join(job.steps("unstored", 0)[0].words)
        assert unstored.startswith("SnapshotError"), unstored
        assert "NoSuchBucket" in unstored, unstored
        assert "NoSuchBucket" in job.keeper_log.read_text(), job.story()
        assert job.newest("step", 0) == 150, job.story()
        job.check_losses(wanted)
        stored.refuse(None)
        stored.check_loads(stored.steps()[-1])


@row("S3: kill -9 of all workers while it is slow", quick=1)
def killed(trial: Trial) -> None:
    """What is on its way arrives, from the keeper's memory; the next start resumes at the newest
    save of the memory, losses bitwise.
    """
    # The memory is there still when what is on its way has arrived.
    with _stored(trial, steps=150, pause=0.08, store_every=10, linger=60.0) as stored:
        job, wanted = stored.job, trial.reference(stored.job)
        stored.server.delay = lambda method, path: 0.7 if "/step-" in path else 0.0
        job.begin(2)
        job.await_true(
            lambda: any("/step-" in path for _, path in stored.server.requests), "it begins"
        )
        job.kill([0, 1])
        job.await_end()
        assert not stored.steps(), "it was too fast"
        job.await_true(lambda: len(stored.steps()) == 1, "it arrives")
        stored.server.delay = lambda method, path: 0.0
        job.begin(2, wait_at_end=True)
        job.finish()
        job.check_resumed()
        job.check_losses(wanted)
        assert stored.steps()[-1] == 150, stored.names()
