"""Bits that are not what they were, and disks that do not take what they are given."""

from __future__ import annotations

import resource
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

from kept_snapshots import flip_bits, flip_byte, load_alone, memories_of
from rows import Skipped, Trial, pause, row

#: Of 40 steps that store each third one: what takes the place of 39 while it waits is stored too.
LAST = (39, 40)
_MODES = ("ddp", "fsdp")
#: In a trial: 1,000 in 50 of them.
FLIPS = 20


@row("20 bit flips in the folder", quick=2)
def flips_in_folder(trial: Trial) -> None:
    """In an index, a header, a chunk, the name of the run; one at a time. What is loaded is the
    newest snapshot, or the older one with a warning that names the damaged one, or nothing with
    a SnapshotError that names it; each byte that is loaded was saved.
    """
    job = trial.job(mode=_MODES[trial.number % 2], steps=4, pause=0.2, store_every=2)
    job.begin(2, wait_at_end=True)
    job.finish()
    assert job.stored_steps() == [2, 4], job.story()
    seed = f"flips {trial.number}"
    results = flip_bits(trial.arena.forks, job.folder, {}, FLIPS, seed)
    wrong = [result for result in results if result["fault"]]
    assert not wrong, wrong[0]
    assert {result["outcome"] for result in results} - {"newest"}, "no flip did anything"
    job.check_nothing_is_left()


@row("a bit flip in the kept memory", quick=1)
def flip_in_memory(trial: Trial) -> float:
    """In the header, the table, the texts or the data of a rank, of those that the keeper holds.
    All ranks resume at one step, the newest or an older one, of which the log then says why; losses
    bitwise those of a run without a fault.
    """
    job = trial.job(mode=_MODES[trial.number % 2], steps=16)
    wanted = trial.reference(job)
    job.begin(2)
    job.await_step(6, "saved")
    job.kill([0, 1])
    job.await_end()
    newest = max(job.newest("saved", rank) for rank in (0, 1))
    (keeper,) = job.keepers()
    offset = flip_byte(trial.random, list(memories_of(keeper).values()))
    job.begin(2)
    job.finish()
    at = {job.newest("resumed", rank, 1) for rank in (0, 1)}
    assert len(at) == 1, job.story()
    is_named = "passed over" in job.output.read_text() or "damaged" in job.output.read_text()
    assert is_named or at.pop() >= newest, f"byte {offset}\n{job.story()}"
    job.check_losses(wanted)
    return job.steps("step", 0, 1)[0].time - job.killed_at


@contextmanager
def _disk(folder: Path, mib: int):
    """One of its own, in memory."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        raise Skipped(mounted.stderr.strip())
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _check_refused(job, reason: str) -> None:
    """The end of a job whose disk has not taken what it was to store."""
    unstored = " ".join(job.steps("unstored", 0)[0].words)
    assert unstored.startswith("SnapshotError"), unstored
    assert reason in unstored, unstored
    assert reason in job.keeper_log.read_text(), job.story()


@row("the disk is full", quick=1)
def full(trial: Trial) -> None:
    """A disk for two snapshots and a half. Training goes on to its end, losses as above; wait()
    raises SnapshotError with the system's reason, the keeper logs it; older snapshots are whole.
    """
    job = trial.job(mode=_MODES[trial.number % 2], steps=24, pause=0.03, block_mib=2, store_every=4)
    wanted = trial.reference(job)
    with _disk(job.folder, 10):
        job.begin(2, wait_at_end=True)
        job.end_well()
        _check_refused(job, "No space left")
        stored = job.stored_steps()
        assert len(stored) == 2, stored
        aside = job.base / "aside"
        shutil.copytree(job.folder, aside, ignore=shutil.ignore_patterns("run", "*.part"))
        job.check_nothing_is_left()
        assert not list(job.folder.glob("*.part/*.safetensors")), "half a file was left"
    found = load_alone(trial.arena.forks, aside, {})
    assert found["step"] == stored[-1], found
    job.check_losses(wanted)


@row("the folder is read-only for a while", quick=1)
def read_only(trial: Trial) -> None:
    """Training goes on, the reason is logged; the first store after it succeeds."""
    job = trial.job(mode=_MODES[trial.number % 2], steps=40, pause=0.03, store_every=3)
    wanted = trial.reference(job)
    with _disk(job.folder, 64):
        job.begin(2, wait_at_end=True)
        job.await_true(lambda: job.snapshots(), "one is stored")
        remount = ["mount", "-o", "remount,ro", str(job.folder)]
        job.await_true(lambda: subprocess.run(remount).returncode == 0, "it is read-only", 10)
        before = job.stored_steps()
        job.await_true(lambda: "Read-only file system" in job.keeper_log.read_text(), "a reason")
        assert job.stored_steps() == before
        subprocess.run(["mount", "-o", "remount,rw", str(job.folder)], check=True)
        job.end_well()
        assert job.stored_steps()[-1] in LAST, job.stored_steps()
        assert not job.steps("unstored", 0), job.story()
        job.check_nothing_is_left()
    job.check_losses(wanted)


@row("the folder is removed", quick=1)
def removed(trial: Trial) -> None:
    """Training goes on; the next stores make it anew; what is in it is whole."""
    job = trial.job(mode=_MODES[trial.number % 2], steps=40, pause=0.02, store_every=3)
    wanted = trial.reference(job)
    job.begin(2, wait_at_end=True)
    job.await_true(lambda: job.snapshots(), "one is stored")
    shutil.rmtree(job.folder, ignore_errors=True)
    job.finish()
    assert not job.steps("unstored", 0), job.story()
    stored = job.stored_steps()[-1]
    assert stored in LAST, job.stored_steps()
    found = load_alone(trial.arena.forks, job.folder, {})
    assert found["step"] == stored, found
    job.check_losses(wanted)


@row("a file takes the place of the folder", quick=1)
def replaced(trial: Trial) -> None:
    """As with a disk that gives errors: training goes on, the reason is named."""
    job = trial.job(mode=_MODES[trial.number % 2], steps=40, pause=0.02, store_every=3)
    wanted = trial.reference(job)
    job.begin(2, wait_at_end=True)
    job.await_true(lambda: job.snapshots(), "one is stored")
    job.folder.rename(job.base / "aside")
    job.folder.write_text("no folder")
    job.end_well()
    unstored = " ".join(job.steps("unstored", 0)[0].words)
    assert unstored.startswith("SnapshotError"), unstored
    assert str(job.folder) in unstored, unstored
    assert "snapshot_not_stored" in job.keeper_log.read_text(), job.story()
    job.check_losses(wanted)
    job.check_nothing_is_left()


@row("a limit of the file size (quota) for the keeper", quick=1)
def limited(trial: Trial) -> None:
    """The keeper lives, training goes on, wait() raises SnapshotError with the reason, the older
    snapshot stays.
    """
    job = trial.job(mode=_MODES[trial.number % 2], steps=24, pause=0.03, block_mib=2, store_every=4)
    wanted = trial.reference(job)
    job.begin(2, wait_at_end=True)
    job.await_true(lambda: job.snapshots(), "one is stored")
    (keeper,) = job.keepers()
    resource.prlimit(keeper, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    before = job.stored_steps()
    pause(0.2)
    assert job.keepers() == [keeper], f"the keeper has died\n{job.story()}"
    job.end_well()
    _check_refused(job, "File too large")
    assert set(before) <= set(job.stored_steps()), job.stored_steps()
    job.check_losses(wanted)
    job.check_nothing_is_left()
