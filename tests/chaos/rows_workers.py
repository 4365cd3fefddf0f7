"""Workers that die or stand still."""

from __future__ import annotations

import os
import signal

from rows import Trial, pause, row

#: A copy with some length to die in: of this state of each rank.
BLOCK_MIB = 12
_MODES = ("ddp", "fsdp")


def _killed(trial: Trial, mode: str, is_all: bool) -> float:
    job = trial.job(mode=mode, steps=24)
    wanted = trial.reference(job)
    job.begin(2)
    job.await_step(trial.random.randrange(1, 14))
    pause(trial.random.uniform(0, 0.02))
    job.kill([0, 1] if is_all else [trial.random.randrange(2)])
    job.await_end()
    job.begin(2)
    job.finish()
    seconds = job.check_resumed()
    job.check_losses(wanted)
    return seconds


def _register_kills(mode: str, is_all: bool) -> None:
    who = "all workers" if is_all else "one worker"

    @row(f"kill -9 of {who}, {mode}", quick=int(is_all == (mode == "fsdp")))
    def killed(trial: Trial) -> float:
        """At a random point of training with a save in each step. All ranks resume at one step,
        the newest that all had saved; the losses of all steps, repeated ones too, are bitwise those
        of a run without a fault; in the end nothing is left.
        """
        return _killed(trial, mode, is_all)


def _in_copy(trial: Trial, mode: str, is_all: bool, *, first: bool) -> float:
    """In the save of step 5, or in the first one with optimizer state, of another layout."""
    step = 1 if first else 5
    ranks = [0, 1] if is_all else [trial.number % 2]
    # Every 64th of it has its turn, however few trials there are.
    part = (trial.number * 64 // max(trial.trials, 1) + trial.random.randrange(2)) % 64
    job = trial.job(mode=mode, steps=8, block_mib=BLOCK_MIB, save_first=first)
    wanted = trial.reference(job)
    job.begin(2, die={"step": step, "part": part, "ranks": ranks})
    job.await_step(step, "saving")
    statuses = job.await_end()
    job.killed_at = max(job.steps("saving", rank)[-1].time for rank in ranks)
    assert all(statuses[rank] == -signal.SIGSEGV for rank in ranks), f"{statuses} {job.story()}"
    job.begin(2)
    job.finish()
    seconds = job.check_resumed()
    assert {job.newest("resumed", rank, 1) for rank in (0, 1)} == {step - 1}, job.story()
    job.check_losses(wanted)
    return seconds


def _register_copies(mode: str, is_all: bool) -> None:
    who = "all" if is_all else "one"

    @row(f"death of {who} in each 1/64 of a copy, {mode}", quick=int(is_all == (mode == "ddp")))
    def in_copy(trial: Trial) -> float:
        """A page of the source that cannot be read ends the process there (SIGSEGV). Every rank
        resumes at the step before, none at a mix; losses as above, each byte of the block too.
        """
        return _in_copy(trial, mode, is_all, first=False)

    @row(f"death of {who} in a layout change, {mode}", quick=int(not is_all))
    def in_layout_change(trial: Trial) -> float:
        """The same in the first save with optimizer state, which makes a new memory: every rank
        resumes at step 0, saved before it.
        """
        return _in_copy(trial, mode, is_all, first=True)


for _mode in _MODES:
    for _is_all in (False, True):
        _register_kills(_mode, _is_all)
        _register_copies(_mode, _is_all)


@row("kill -9 of one worker within save()", quick=1)
def in_save(trial: Trial) -> float:
    """At a random moment of a save (agreeing, copying, state word, telling the keeper): the step
    of that save on all ranks, or the one before on all; losses as above.
    """
    mode = _MODES[trial.number % 2]
    job = trial.job(mode=mode, steps=12, block_mib=BLOCK_MIB)
    wanted = trial.reference(job)
    job.begin(2)
    step = trial.random.randrange(4, 8)
    job.await_step(step, "saving")
    usual = float(job.steps("saved", 0)[2].words[1])
    pause(usual * trial.random.random() * 1.2)
    job.kill([trial.random.randrange(2)])
    job.await_end()
    job.begin(2)
    job.finish()
    seconds = job.check_resumed()
    job.check_losses(wanted)
    return seconds


@row("2 -> 1 -> 3 -> 2 ranks, kills between", quick=1)
def worlds(trial: Trial) -> float:
    """All ranks are killed, another number of them resumes at the newest common step. Losses are
    bitwise those of a job that was ended in order at the same steps and resumed from the folder.
    """
    mode = _MODES[trial.number % 2]
    job = trial.job(mode=mode, steps=400, width=24)
    other = trial.job(mode=mode, width=24, store_every=1, wait_at_end=True)
    numbers = (2, 1, 3, 2)
    seconds = []
    for start, ranks in enumerate(numbers):
        job.begin(ranks)
        job.await_step(0, "resumed")
        at = job.newest("resumed", 0, start)
        job.await_step(at + trial.random.randrange(2, 6), "saved")
        if start > 0:
            seconds.append(job.check_resumed())
        job.kill(range(ranks))
        job.await_end()
        if start > 0:
            _compare_start(job, other, numbers[start - 1], at)
    job.begin(1, steps=1)  # what it resumes is past that
    job.finish()
    _compare_start(job, other, numbers[-1], job.newest("resumed", 0))
    return max(seconds)


def _compare_start(job, other, ranks: int, steps: int) -> None:
    """The other job makes the next start, up to the step that was resumed from it."""
    other.begin(ranks, steps=steps)
    other.end_well()
    for rank in range(ranks):
        mine = {e.step: e.words[1] for e in job.steps("step", rank, other.start)}
        theirs = {e.step: e.words[1] for e in other.steps("step", rank, other.start)}
        assert theirs, f"{ranks} ranks did nothing\n{other.story()}"
        assert theirs.items() <= mine.items(), f"rank {rank} of {ranks}\n{job.story()}"


@row("SIGSTOP of a worker for 3 s", quick=1)
def stopped(trial: Trial) -> None:
    """Nothing happens: the same processes go on to the end, losses as above."""
    job = trial.job(mode=_MODES[trial.number % 2], steps=24, pause=0.01)
    wanted = trial.reference(job)
    job.begin(2)
    job.await_step(4)
    victim = job.pids[trial.random.randrange(2)]
    os.kill(victim, signal.SIGSTOP)
    pause(3)
    os.kill(victim, signal.SIGCONT)
    job.finish()
    assert job.check_losses(wanted) == 0
