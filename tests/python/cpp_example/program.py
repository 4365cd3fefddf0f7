"""Builds programs of examples/cpp and runs them, always with a deadline and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import libddp

EXAMPLES = Path(__file__).parents[3] / "examples" / "cpp"
SOURCES = EXAMPLES / "ddp"
BUILD_SECONDS = 900
RUN_SECONDS = 300
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LINE = re.compile(r"^step (\d+) loss (\S+) average (\S+)$", re.M)


def build(folder: Path, sources: Path = SOURCES) -> Path:
    """The program of `sources`, built as a user builds it; skips where libddp is not installed."""
    prefix = Path(libddp.__file__).parent
    if not (prefix / "share/cmake/libddp/libddp-config.cmake").exists():
        pytest.skip(f"{prefix} is no installed libddp (pip install .): it has no CMake package")
    # One translation unit, not optimised: torch's headers are what takes long.
    check(
        ["cmake", "-S", sources, "-B", folder, "-G", "Ninja", "-DCMAKE_UNITY_BUILD=ON"]
        + ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0"]
        + [f"-DCMAKE_PREFIX_PATH={prefix}", f"-DLIBDDP_TORCH_DIR={Path(torch.__file__).parent}"]
    )
    check(["cmake", "--build", folder])
    return folder / "train"


def check(command: list) -> None:
    """Runs one step of the build; its output is the message if it fails."""
    done = run(command, seconds=BUILD_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr


def environment(**place: str) -> dict[str, str]:
    """This process's, with nothing in it of another job's ranks but what `place` says."""
    inherited = {k: v for k, v in os.environ.items() if k not in PLACE and "TORCHELASTIC" not in k}
    return {**inherited, **place}


def start(command: list, **place: str) -> subprocess.Popen:
    """Leads a session of its own, so that `end` can reach whatever it started."""
    return subprocess.Popen(
        list(map(str, command)),
        env=environment(**place),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, seconds: float = RUN_SECONDS) -> subprocess.CompletedProcess:
    """Waits for the end and collects the output; past the deadline it is ended."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        end(process)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def end(process: subprocess.Popen) -> None:
    """Ends a process that still runs: politely first, so that a launcher stops its workers."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def first_line(process: subprocess.Popen, seconds: float = RUN_SECONDS) -> str:
    """The first line that it prints; empty if it ends without one."""
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    assert ready, f"{process.args} printed nothing in {seconds} s"
    return process.stdout.readline()


def run(command: list, seconds: float = RUN_SECONDS, **place: str) -> subprocess.CompletedProcess:
    return finish(start(command, **place), seconds)


@contextlib.contextmanager
def reserved_port():
    """A port that nobody else is given while rank 0 has yet to listen on it.

    Bound, not listening: with SO_REUSEADDR on both sides rank 0 may listen all the same.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield str(holder.getsockname()[1])


@contextlib.contextmanager
def by_hand(command: list):
    """Both ranks, started as a shell would; ended when the block ends."""
    with reserved_port() as port, contextlib.ExitStack() as stack:
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = []
        for rank in "01":
            ranks.append(start(command, RANK=rank, **place))
            stack.callback(end, ranks[-1])
        yield ranks


def launcher(name: str) -> list:
    """The command of torchrun or libddp run, from this interpreter's environment."""
    module = {"torchrun": ["torch.distributed.run", "--standalone"], "libddp": ["libddp", "run"]}
    return [sys.executable, "-m", *module[name], "--no-python", "--nproc-per-node=2"]


def run_by_hand(command: list):
    """Both ranks of a command to their ends, rank 0's first."""
    with by_hand(command) as (first, second):
        return finish(first), finish(second)


def run_killed_once(command: list, folder: Path, num_steps: int) -> str:
    """What rank 0 prints under `libddp run` that starts both ranks again after rank 1's death.

    That comes by SIGKILL when so many steps are printed.
    """
    status, printed = folder / "status.json", folder / "printed.txt"
    flags = [f"--status-json={status}", "--max-restarts=1", "--monitor-interval=0.1"]
    words = ["exec", *launcher("libddp"), *flags, *command]
    process = start(["bash", "-c", shlex.join(map(str, words)) + f" > {shlex.quote(str(printed))}"])
    try:
        limit = time.monotonic() + RUN_SECONDS
        while len(pids := _pids(status)) < 2 or printed.read_text().count("\n") < num_steps:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < limit, f"{pids}, {printed.read_text()}"
            time.sleep(0.02)
        os.kill(pids[1], signal.SIGKILL)
        done = finish(process)
    finally:
        end(process)
    assert done.returncode == 0, done.stderr
    return printed.read_text()


def _pids(status: Path) -> dict[int, int]:
    """Of each rank."""
    if not status.exists():
        return {}
    return {each["rank"]: each["pid"] for each in json.loads(status.read_text())["ranks"]}


def check_restarted(train: Path, folder: Path, *options: str) -> None:
    """A run whose rank 1 is killed has, in repeated steps too, the losses of one where none is."""
    command = [train, f"--data={SOURCES / 'transformer.cpp'}", "--device=cpu", *options]
    command.append("--steps=400")
    first, _ = run_by_hand(command)
    assert first.returncode == 0, first.stderr
    wanted = LINE.findall(first.stdout)
    command += ["--snapshot-every=3", "--snapshot-storage=100"]
    command.append(f"--snapshot-folder={folder / 'snapshots'}")
    printed = run_killed_once(command, folder, num_steps=25)
    (resumed,) = re.findall(r"^resuming at step (\d+)$", printed, re.M)
    assert 20 <= int(resumed) < 400
    before, after = printed.split(f"resuming at step {resumed}\n")
    assert LINE.findall(before) == wanted[: before.count("\n")]
    assert LINE.findall(after) == wanted[int(resumed) :]
    assert before.count("\n") - int(resumed) <= 3
    assert len(list((folder / "snapshots").glob("step-*"))) == 2


def check_goes_on_in_python(command: list, wanted: list, folder: Path, twin) -> None:
    """The first half of a training in C++, the second in Python, and the other way round.

    Args:
        command: of a training without a number of steps.
        wanted: the losses of the whole one.
        twin: (steps, folder) -> losses of the training in Python that goes on from the folder.
    """
    half, steps = len(wanted) // 2, len(wanted)
    from_cpp, from_python = folder / "from_cpp", folder / "from_python"
    for place, until in ((from_cpp, half), (from_python, steps)):
        if place == from_python:
            assert twin(half, str(place)) == wanted[:half]
        first, second = run_by_hand(
            [*command, f"--steps={until}", f"--snapshot-storage={until}"]
            + [f"--snapshot-folder={place}"]
        )
        assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
        if place == from_cpp:
            assert losses(first.stdout) == wanted[:half]
            assert twin(steps, str(place)) == wanted[half:]
        else:
            resumed, printed = first.stdout.split("\n", 1)
            assert resumed == f"resuming at step {half}"
            assert losses(printed, first=half) == wanted[half:]


def losses(output: str, first: int = 0) -> list[tuple[float, float]]:
    """Loss and average of each printed step, in order; %.9g holds a float32 exactly."""
    found = LINE.findall(output)
    assert [int(step) - first for step, _, _ in found] == list(range(len(found))), output
    as_float32 = torch.tensor([[float(own), float(mean)] for _, own, mean in found])
    return [tuple(row) for row in as_float32.tolist()]
