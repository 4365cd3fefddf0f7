"""Hosts die, with what their keepers hold. A host is a name here (LIBDDP_HOST_ID), with a keeper of
its own, and has the copies of the host before it.
"""

from __future__ import annotations

import os
import re
import signal
import time

from kept_snapshots import flip_byte, memories_of, rank_of_memory
from rows import Trial, pause, row

HOSTS = ("h0", "h1", "h2")
_MODES = ("ddp", "fsdp")


def _begin(trial: Trial, **config):
    """A job with a rank on each host; and the losses of one without a fault."""
    config = {"steps": 40, "pause": 0.02, "replicas": 1, "linger": 10.0} | config
    job = trial.job(mode=_MODES[trial.number % 2], **config)
    wanted = trial.reference(job, 3, HOSTS)
    job.begin(3, hosts=HOSTS)
    job.await_step(trial.random.randrange(4, 10), "copied")
    pause(trial.random.uniform(0, 0.05))
    return job, wanted


def _lose(job, *hosts: str) -> None:
    """Their keepers and workers at once, as when the power goes; the other workers end by it."""
    gone = [pid for host in hosts for pid in job.keepers(host)]
    assert len(gone) == len(hosts), job.story()
    gone += [job.pids[HOSTS.index(host)] for host in hosts]
    job.killed_at = time.monotonic()
    # Stopped first: no worker may see its keeper's end, and give what it has to a new one.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in gone:
            os.kill(pid, number)
    job.await_end()


def _go_on(job, wanted) -> tuple[int, float]:
    """All hosts start, those that were lost with nothing; where they went on, and how soon."""
    job.begin(3, hosts=HOSTS)
    job.finish()
    at = {job.newest("resumed", rank) for rank in range(3)}
    assert len(at) == 1, f"{at}\n{job.story()}"
    job.check_losses(wanted)
    return at.pop(), job.steps("step", 0, job.start)[0].time - job.killed_at


def _check_newest(job, step: int, copied: int) -> None:
    """What the next host had got by then, or something newer."""
    begun = min(job.newest("saving", rank, 0) for rank in range(3))
    assert copied <= step <= begun, f"resumed at {step}, {copied} was copied\n{job.story()}"


@row("a host of three is gone, with copies", quick=1)
def host_gone(trial: Trial) -> float:
    """Worker and keeper at once, nothing in the folder. All ranks resume in memory, not before the
    newest step that the next host had got; losses bitwise those of a run without a fault.
    """
    job, wanted = _begin(trial)
    lost = trial.random.randrange(3)
    _lose(job, HOSTS[lost])
    copied = job.newest("copied", (lost + 1) % 3, 0)
    step, seconds = _go_on(job, wanted)
    _check_newest(job, step, copied)
    return seconds


@row("two hosts of a ring of three are gone", quick=1)
def two_gone(trial: Trial) -> float:
    """One of them had the copies of the other: the newest of the folder is resumed on all ranks,
    and the log says whose saves are in no memory; losses as above.
    """
    job, wanted = _begin(trial, store_every=2)
    job.await_true(lambda: len(job.snapshots()) >= 2, "two are stored")
    first = trial.random.randrange(3)
    _lose(job, HOSTS[first], HOSTS[(first + 1) % 3])
    stored = job.stored_steps()[-1]
    step, seconds = _go_on(job, wanted)
    assert step == stored, f"resumed at {step}, {stored} was stored\n{job.story()}"
    said = job.output.read_text()
    assert "snapshot_not_whole_in_memory" in said, job.story()
    # The copy of the other one's newest save may not have come either.
    assert re.search(rf"lost_ranks=(\d,)*{first}\b", said), job.story()
    return seconds


@row("a bit flip in the next host's copy", quick=1)
def copy_damaged(trial: Trial) -> float:
    """A host is gone, and one bit of the copies of its rank is another one: in the header, a
    record, a text or the data. All ranks resume at one step. Where that is older than the newest
    copy, the log names the copy, its rank, what is damaged in it, and what is loaded in its place
    (a header that is damaged does not say whose it is); losses as above.
    """
    job, wanted = _begin(trial, store_every=2)
    lost = trial.random.randrange(3)
    _lose(job, HOSTS[lost])
    copied = job.newest("copied", (lost + 1) % 3, 0)
    (keeper,) = job.keepers(HOSTS[(lost + 1) % 3])
    kept = memories_of(keeper).values()
    copies = [path for path in kept if rank_of_memory(path) == lost]
    offset = flip_byte(trial.random, copies)
    step, seconds = _go_on(job, wanted)
    said = job.output.read_text()
    if step < copied:
        named = (
            rf'snapshot_damaged_in_memory whose="the copy of rank {lost} of 3" .*newest_whole=\d+',
            rf"rank {lost} could not be pulled from .*bytes \d+ to \d+ [\s\S]*goes on from",
            r"snapshot_memory_damaged reason=.*this memory holds no snapshot",
        )
        found = [text for text in named if re.search(text, said)]
        assert found, f"byte {offset}: {step} in place of {copied}, unnamed\n{job.story()}"
    return seconds


@row("a host is gone while its save is copied", quick=1)
def in_copying(trial: Trial) -> float:
    """In the sending of a larger state. Half a copy is none: all ranks resume at a step that is
    whole on all of them, with each byte of it; losses as above.
    """
    job, wanted = _begin(trial, block_mib=12, steps=24)
    next_step = job.newest("saved", 0) + 1
    job.await_step(next_step, "saved")
    pause(trial.random.uniform(0, 0.06))
    _lose(job, "h0")
    copied = job.newest("copied", 1, 0)
    step, seconds = _go_on(job, wanted)
    _check_newest(job, step, copied)
    return seconds


@row("kill -9 of the keeper that gets copies", quick=1)
def receiver_killed(trial: Trial) -> float:
    """No worker ends; its successor gets copies anew, and with them the job goes on when the
    other host is gone. The time is that to the next copy.
    """
    job, wanted = _begin(trial, steps=120)
    (keeper,) = job.keepers("h1")
    killed_at = time.monotonic()
    os.kill(keeper, signal.SIGKILL)
    job.await_true(lambda: any(pid != keeper for pid in job.keepers("h1")), "a new keeper", 10)
    begun = job.newest("saving", 0)
    job.await_true(lambda: job.newest("copied", 1) > begun, "a copy of a later save")
    again = next(line.time for line in job.steps("copied", 1) if line.step > begun)
    _lose(job, "h0")
    copied = job.newest("copied", 1, 0)
    step, _ = _go_on(job, wanted)
    _check_newest(job, step, copied)
    return again - killed_at
