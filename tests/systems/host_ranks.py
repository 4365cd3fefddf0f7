"""Runs a function of a test file on ranks of several hosts (network.py), as ranks.py on one.

def work():                                   # at the top level of the test file
    init_process_group("gloo")
    ...

with Network(2) as net:
    outcomes = launch(net, [0, 0, 1], work)   # host of each rank
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ranks

#: A namespace has all ports to itself.
PORT = 29500


def launch(net, host_of, function, *args, deadline=150.0, env=None, on_start=None):
    """Outcomes of all ranks. `env(rank)` adds variables; `on_start(folder)` runs beside them."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        call = (inspect.getsourcefile(function), function.__qualname__, args)
        (Path(folder) / "call").write_bytes(pickle.dumps(call))
        with contextlib.ExitStack() as stack:
            children = []
            for rank in range(len(host_of)):
                child = start(net, host_of, rank, folder, env(rank) if env else {})
                stack.callback(ranks.kill_session, child)
                children.append(child)
            if on_start:
                on_start(Path(folder))
            timed_out = ranks.wait_until(children, time.monotonic() + deadline)
        return [ranks.read_outcome(folder, r, c, timed_out) for r, c in enumerate(children)]


def run(net, host_of, function, *args, **options) -> list:
    """As `launch`, but returns the values and raises if a rank failed."""
    outcomes = launch(net, host_of, function, *args, **options)
    if any(outcome.failed for outcome in outcomes):
        raise ranks.RanksError("\n".join(ranks.describe(outcome) for outcome in outcomes))
    return [outcome.value for outcome in outcomes]


def start(net, host_of, rank: int, folder: str, env: dict) -> subprocess.Popen:
    host = host_of[rank]
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(host_of[:rank].count(host)),
        "WORLD_SIZE": str(len(host_of)),
        "LOCAL_WORLD_SIZE": str(host_of.count(host)),
        "MASTER_ADDR": net.addresses[host_of[0]],
        "MASTER_PORT": str(PORT),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "RANKS_FOLDER": folder,
        **env,
    }
    with open(Path(folder) / f"output-{rank}", "wb") as output:
        return subprocess.Popen(
            [*net.inside(host), sys.executable, str(ranks.CHILD), folder],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
