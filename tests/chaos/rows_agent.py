"""The agent that has started the workers dies, or starts them anew."""

from __future__ import annotations

import os
import signal
import time

from rows import Trial, pause, row

_MODES = ("ddp", "fsdp")


def _kill_worker(trial: Trial, job, number: int = signal.SIGKILL) -> int:
    """One of the first start; returns its process id."""
    pid = job.newest("pid", trial.random.randrange(2), 0)
    job.killed_at = time.monotonic()
    os.kill(pid, number)
    return pid


def _await_workers_gone(job) -> None:
    """All but the keeper."""

    def is_gone() -> bool:
        return set(job.forks.others()) <= set(job.keepers())

    job.await_true(is_gone, "the workers end", 10)


def _check_stored(job) -> int:
    """The newest that is whole on all ranks is in the folder."""
    saved = max(job.newest("saved", rank, job.start) for rank in (0, 1))
    begun = min(job.newest("saving", rank, job.start) for rank in (0, 1))
    job.await_true(lambda: job.stored_steps()[-1:] >= [saved], f"{saved} is stored", 10)
    stored = job.stored_steps()[-1]
    assert saved <= stored <= max(saved, begun), f"{stored}\n{job.story()}"
    return stored


@row("kill -9 of a worker, torch's agent", quick=1)
def agent_restarts(trial: Trial) -> float:
    """torch's elastic agent starts all workers anew: from memory, as above."""
    job = trial.job(mode=_MODES[trial.number % 2], steps=24)
    wanted = trial.reference(job)
    job.begin_agent(2)
    job.await_step(trial.random.randrange(2, 10))
    _kill_worker(trial, job)
    job.finish()
    seconds = job.check_resumed(start=1)
    job.check_losses(wanted)
    return seconds


@row("kill -9 of the agent", quick=1)
def agent_dies(trial: Trial) -> float:
    """Its workers end; the newest save is stored in the folder, though none was asked for; a new
    agent with the same folder resumes from memory (the folder is emptied before).
    """
    job = trial.job(mode=_MODES[trial.number % 2], steps=40, pause=0.01)
    wanted = trial.reference(job)
    agent = job.begin_agent(2)
    job.await_step(trial.random.randrange(3, 12), "saved")
    pause(trial.random.uniform(0, 0.02))
    job.killed_at = time.monotonic()
    os.kill(agent, signal.SIGKILL)
    _await_workers_gone(job)
    stored = _check_stored(job)
    for path in job.snapshots():
        path.rename(job.base / path.name)
    job.begin_agent(2)
    job.finish()
    seconds = job.check_resumed()
    # One that all ranks had filled and the keeper was not told of may be in memory and newer.
    assert job.newest("resumed", 0, 1) >= stored, job.story()
    job.check_losses(wanted)
    return seconds


@row("kill -9 of the agent and the keeper", quick=1)
def agent_and_keeper_die(trial: Trial) -> float:
    """Both at once, and the keeper last, so that its successor never sees the agent alive. No
    process and no memory is left; a new agent resumes the newest of the folder.
    """
    job = trial.job(mode=_MODES[trial.number % 2], steps=60, pause=0.02, store_every=2, linger=1.0)
    wanted = trial.reference(job)
    agent = job.begin_agent(2)
    job.await_true(lambda: len(job.snapshots()) >= 2, "two are stored")
    pause(trial.random.uniform(0, 0.05))
    job.killed_at = time.monotonic()
    (keeper,) = job.keepers()
    if trial.number % 2 == 1:
        # So that the agent is gone for good before the workers look for a new keeper.
        os.kill(keeper, signal.SIGSTOP)
    os.kill(agent, signal.SIGKILL)
    if trial.number % 2 == 1:
        job.await_end()
    os.kill(keeper, signal.SIGKILL)
    job.check_nothing_is_left()
    assert max(job.newest("step", rank) for rank in (0, 1)) < 60, job.story()
    stored = job.stored_steps()[-1]
    job.begin_agent(2)
    job.finish()
    assert {job.newest("resumed", rank, 1) for rank in (0, 1)} == {stored}, job.story()
    job.check_losses(wanted)
    return job.steps("step", 0, 1)[0].time - job.killed_at


@row("SIGTERM to the agent, data loaders alive", quick=1)
def terminated(trial: Trial) -> None:
    """The newest save is stored in the folder; worker, data loader, keeper: nothing is left."""
    job = trial.job(
        mode=_MODES[trial.number % 2], steps=400, pause=0.01, data_workers=2, linger=1.0
    )
    agent = job.begin_agent(2)
    job.await_step(trial.random.randrange(3, 8), "saved")
    os.kill(agent, signal.SIGTERM)
    _check_stored_after_end(job)
    job.check_nothing_is_left()


def _check_stored_after_end(job) -> None:
    job.await_end()
    _await_workers_gone(job)
    _check_stored(job)


def _launched(trial: Trial, module: str, *flags: str, number: int = signal.SIGKILL) -> float:
    job = trial.job(mode=_MODES[trial.number % 2], steps=40, pause=0.02)
    wanted = trial.reference(job)
    launcher = job.begin_program(module, *flags, ranks=2)
    try:
        job.await_step(trial.random.randrange(3, 12), "saved")
        victim = _kill_worker(trial, job, number)
        assert launcher.wait(120) == 0, job.story()
    finally:
        launcher.kill()
        launcher.wait()
    job.check_nothing_is_left()
    seconds = job.check_resumed(start=1)
    job.check_losses(wanted)
    pids = [[int(line.words[0]) for line in job.steps("pid", rank)] for rank in (0, 1)]
    stay = [rank for rank in (0, 1) if len(set(pids[rank])) == 1]
    assert len(stay) == ("--in-place" in flags), f"{pids}\n{job.story()}"
    assert not any(victim in pids[rank] for rank in stay), job.story()
    return seconds


@row("kill -9 of a worker, libddp run --max-restarts", quick=0)
def libddp_run(trial: Trial) -> float:
    """The program as a user starts it; nothing is imported before: as above."""
    return _launched(trial, "libddp.run")


@row("kill -9 of a worker, torchrun --max-restarts", quick=0)
def torchrun(trial: Trial) -> float:
    """The same under torchrun."""
    return _launched(trial, "torch.distributed.run")


@row("kill -9 of a worker, libddp run --preload --max-restarts", quick=0)
def preloaded(trial: Trial) -> float:
    """The same with workers that are forked from a process that has imported torch and libddp."""
    return _launched(trial, "libddp.run", "--preload")


@row("kill -9 of a worker, libddp run --preload --in-place", quick=0)
def in_place(trial: Trial) -> float:
    """The same; the other worker's process goes on."""
    return _launched(trial, "libddp.run", "--preload", "--in-place")


@row("SIGSTOP of a worker for good, libddp run --preload --max-restarts", quick=0)
def stopped(trial: Trial) -> float:
    """It is missed by its heartbeats, and replaced as one that is killed."""
    return _launched(trial, "libddp.run", "--preload", number=signal.SIGSTOP)


@row("SIGSTOP of a worker for good, libddp run --preload --in-place", quick=0)
def stopped_in_place(trial: Trial) -> float:
    """The same; the other worker's process goes on."""
    return _launched(trial, "libddp.run", "--preload", "--in-place", number=signal.SIGSTOP)
