"""A launcher that is killed takes its workers along, and the children of their data loaders."""

import os
import signal
import subprocess
import sys
import time

import pytest

from libddp import _lifeline

#: Ignores what could be ignored; its daemonic child sleeps, and so does a helper that is forgiven.
WORKER = """
import multiprocessing, os, signal, subprocess, sys, time
import libddp.distributed as dist

def child():
    leave(f"child{os.environ['RANK']}", os.getpid())
    time.sleep(600)

def leave(name, value):
    path = os.path.join(sys.argv[1], name)
    open(path + ".new", "w").write(str(value))
    os.rename(path + ".new", path)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("libddp")
    multiprocessing.get_context("fork").Process(target=child, daemon=True).start()
    leave(f"rank{dist.get_rank()}", os.getpid())
    time.sleep(600)
"""

#: Imports libddp when its launcher is dead.
LATE = """
import os, sys, time
folder = sys.argv[1]
open(os.path.join(folder, "new"), "w").write(str(os.getpid()))
os.rename(os.path.join(folder, "new"), os.path.join(folder, "rank0"))
launcher = int(os.environ["LIBDDP_LAUNCHER_PID"])
while os.getppid() == launcher:
    time.sleep(0.02)
import libddp
open(os.path.join(folder, "survived"), "w").close()
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    """Not one that is dead and that nobody has waited for."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, what: str, seconds: float = 90.0) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + seconds, f"waited in vain for {what}"
        time.sleep(0.01)
    return time.monotonic() - start


def kill_launcher(folder, text: str, names: list[str], flags=()) -> float:
    """Seconds from the launcher's SIGKILL until none of the processes that left a pid is alive."""
    script = folder / "train.py"
    script.write_text(text)
    command = [sys.executable, "-m", "libddp.run", "--nproc-per-node=2", *flags]
    if len(names) == 1:
        command[3] = "--nproc-per-node=1"
    launcher = subprocess.Popen([*command, script, folder], stdin=subprocess.DEVNULL)
    pids = []
    try:
        wait_until(lambda: all((folder / name).exists() for name in names), "the workers")
        pids = [int((folder / name).read_text()) for name in names]
        assert all(map(is_alive, pids))
        launcher.send_signal(signal.SIGKILL)
        launcher.wait(30)
        return wait_until(lambda: not any(map(is_alive, pids)), "their end", 30)
    finally:
        launcher.kill()
        launcher.wait()
        for pid in pids:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "flags",
    [[], ["--preload"], ["--preload", "--in-place"]],
    ids=["started", "forked", "in-place"],
)
def test_workers_and_their_daemonic_children_end_with_the_launcher(tmp_path, flags):
    seconds = kill_launcher(tmp_path, WORKER, ["rank0", "rank1", "child0", "child1"], flags)
    print(f"all ended {seconds * 1e3:.0f} ms after the launcher")


def test_a_worker_that_comes_to_libddp_after_its_launcher_died_ends(tmp_path):
    kill_launcher(tmp_path, LATE, ["rank0"])
    assert not (tmp_path / "survived").exists()


def late_worker(launcher: int) -> tuple[subprocess.Popen, int]:
    """Comes to libddp as the child of another one; and what holds the launcher's pipe open."""
    reading, writing = os.pipe()
    pipe = f"{reading}:{os.fstat(reading).st_ino}"
    worker = subprocess.Popen(
        [sys.executable, "-c", "print('here', flush=True); import libddp; print('survived')"],
        env={**os.environ, _lifeline.LAUNCHER: str(launcher), _lifeline.PIPE: pipe},
        pass_fds=[reading],
        stdout=subprocess.PIPE,
    )
    os.close(reading)
    assert worker.stdout.readline() == b"here\n"
    return worker, writing


def test_a_launcher_that_is_still_ending_counts_as_dead():
    """Its children have another parent when its pipe may not have been closed yet."""
    launcher = subprocess.Popen(["true"])
    os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)
    worker, pipe = late_worker(launcher.pid)
    time.sleep(1)  # the worker is past its look at the pipe, mostly
    os.close(pipe)
    assert (worker.communicate(timeout=60)[0], worker.returncode) == (b"", -signal.SIGKILL)
    launcher.wait()


def test_a_late_worker_of_a_launcher_that_lives_goes_on():
    worker, pipe = late_worker(os.getppid())
    assert (worker.communicate(timeout=60)[0], worker.returncode) == (b"survived\n", 0)
    os.close(pipe)


def test_what_no_launcher_started_is_not_tied(monkeypatch):
    monkeypatch.setenv(_lifeline.LAUNCHER, str(os.getpid()))  # not the parent
    monkeypatch.delenv(_lifeline.PIPE, raising=False)
    assert not _lifeline.tie()
    monkeypatch.setenv(_lifeline.PIPE, f"0:{os.fstat(0).st_ino + 1}")  # a number that is another's
    assert not _lifeline.tie()


#: Forks and goes, as a daemon does; a process that is no data loader's child lives on.
HELPER = """
import os, subprocess, sys, time
import torch

helper = subprocess.Popen(
    [sys.executable, "-c", "import torch, time; print('up', flush=True); time.sleep(600)"],
    start_new_session=True, stdout=subprocess.PIPE)
assert helper.stdout.readline() == b"up\\n"
open(os.path.join(sys.argv[1], "helper"), "w").write(str(helper.pid))
"""


@pytest.mark.parametrize("flags", [[], ["--preload"]], ids=["started", "forked"])
def test_a_helper_that_a_worker_leaves_behind_lives_on(tmp_path, flags):
    script = tmp_path / "train.py"
    script.write_text(HELPER)
    command = [sys.executable, "-m", "libddp.run", *flags, script, tmp_path]
    subprocess.run(command, timeout=120, check=True, stdin=subprocess.DEVNULL)
    helper = int((tmp_path / "helper").read_text())
    try:
        time.sleep(0.2)
        assert is_alive(helper)
    finally:
        os.kill(helper, signal.SIGKILL)
