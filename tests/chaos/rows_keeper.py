"""The keeper dies."""

from __future__ import annotations

import os
import shutil
import signal
import time

from kept_snapshots import load_alone
from rows import Trial, pause, row

_MODES = ("ddp", "fsdp")


def kill_keeper(job) -> int:
    """There is one."""
    (keeper,) = job.keepers()
    os.kill(keeper, signal.SIGKILL)
    return keeper


@row("kill -9 of the keeper in training", quick=1)
def in_training(trial: Trial) -> float:
    """No worker ends; each rank logs it once; a new keeper has the memory: when all workers are
    killed later, they resume at their newest save. The time is that to the next whole save.
    """
    job = trial.job(mode=_MODES[trial.number % 2], steps=60, pause=0.005)
    wanted = trial.reference(job)
    job.begin(2)
    job.await_step(trial.random.randrange(3, 12), "saved")
    pause(trial.random.uniform(0, 0.02))
    old, killed_at = kill_keeper(job), time.monotonic()
    job.await_true(lambda: any(pid != old for pid in job.keepers()), "a new keeper", 10)
    next_step = max(job.newest("saved", rank) for rank in (0, 1)) + 2
    job.await_step(next_step, "saved")
    seconds = min(e.time for e in job.steps("saved", 0) if e.time > killed_at) - killed_at
    job.kill([0, 1])
    job.await_end()
    assert job.output.read_text().count("keeper_lost") == 2, job.story()
    job.begin(2)
    job.finish()
    job.check_resumed()
    job.check_losses(wanted)
    return seconds


@row("kill -9 of the keeper while it stores", quick=1)
def while_storing(trial: Trial) -> None:
    """What has its name in the folder at that moment is whole, for a process that loads it;
    training goes on, and its new keeper stores the newest.
    """
    mode = _MODES[trial.number % 2]
    job = trial.job(mode=mode, steps=24, pause=0.03, block_mib=16, store_every=4, wait_at_end=True)
    wanted = trial.reference(job)
    job.begin(2)
    job.await_true(lambda: job.snapshots(), "the first is stored")
    job.await_true(lambda: list(job.folder.glob("*.part")), "the next one is being stored")
    pause(trial.random.uniform(0, 0.05))
    kill_keeper(job)
    aside = job.base / "aside"
    _copy(job, aside)
    job.end_well()
    found = load_alone(trial.arena.forks, aside, {})
    assert found["step"] >= 4, found
    assert not found["warnings"], found
    assert not job.steps("unstored", 0), job.story()
    assert job.stored_steps()[-1] == 24, job.stored_steps()
    job.check_nothing_is_left()
    job.check_losses(wanted)


@row("kill -9 of all workers and the keeper", quick=1)
def all_of_it(trial: Trial) -> float:
    """The memory is gone with them; the newest snapshot of the folder is resumed, losses bitwise
    those of a run without a fault.
    """
    job = trial.job(mode=_MODES[trial.number % 2], steps=30, pause=0.01, store_every=2)
    wanted = trial.reference(job)
    job.begin(2)
    job.await_true(lambda: len(job.snapshots()) >= 2, "two are stored")
    pause(trial.random.uniform(0, 0.05))
    kill_keeper(job)
    job.kill([0, 1])
    job.await_end()
    job.check_nothing_is_left()
    # A rank may have started a keeper anew before it died; it had nothing to store then.
    stored = job.stored_steps()[-1]
    job.begin(2)
    job.finish()
    assert {job.newest("resumed", rank, 1) for rank in (0, 1)} == {stored}, job.story()
    job.check_losses(wanted)
    return job.steps("step", 0, 1)[0].time - job.killed_at


def _copy(job, to) -> None:
    """Its snapshots, but not its name, by which a copy would find the job's memory."""
    to.mkdir()
    for path in job.snapshots():
        try:
            shutil.copytree(path, to / path.name)
        except (FileNotFoundError, shutil.Error):  # an older one that was just taken away
            if path.exists():
                raise
            shutil.rmtree(to / path.name, ignore_errors=True)
