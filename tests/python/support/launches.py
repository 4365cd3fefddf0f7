"""Scripts as a user starts them, with a deadline and nothing left behind.

(status, output), = finish(launch([*ranks(2), "train.py", "--max_iters=3"], folder))
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping

from forked_program import ForkedProgram, can_fork


def ranks(number: int, module: str = "libddp.run", *, forked: bool = False) -> list[str]:
    """A launcher and its flags; the script comes next.

    Args:
        forked: the workers begin in milliseconds, where the test is not about how they do.
    """
    flags = ["--preload"] if forked else []
    return ["-m", module, "--standalone", f"--nproc-per-node={number}", *flags]


def launch(
    command, folder, *, forks_server: bool = True, **environment
) -> subprocess.Popen | ForkedProgram:
    """A Python program; `forks_server` as ForkedProgram has it."""
    return python(
        command, folder, os.environ | {"OMP_NUM_THREADS": "1"} | environment, forks_server
    )


def python(
    command, folder, environment: Mapping[str, str], forks_server: bool = True
) -> subprocess.Popen | ForkedProgram:
    """With no other variables than these; a launcher need not import torch for it."""
    arguments = list(map(str, command))
    if can_fork(arguments, environment):
        return ForkedProgram(arguments, folder, environment, forks_server=forks_server)
    return _start([sys.executable, *arguments], folder, environment)


def start(command, folder, **environment) -> subprocess.Popen:
    """Any program."""
    return _start(command, folder, os.environ | {"OMP_NUM_THREADS": "1"} | environment)


def _start(command, folder, environment: Mapping[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        list(map(str, command)),
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(*processes, deadline: float = 900) -> list[tuple[int, str]]:
    """Exit status and output of each; whatever they left running is ended."""
    try:
        outputs = [process.communicate(timeout=deadline)[0] for process in processes]
    finally:
        for process in processes:
            stop(process)
    return [(p.returncode, o) for p, o in zip(processes, outputs, strict=True)]


def stop(process: subprocess.Popen | ForkedProgram) -> None:
    """A launcher that may end in peace stops its workers, which lead sessions of their own."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
