"""Runs a function of a test file in N Python processes, with a deadline.

    def work(step):                       # at the top level of the test file
        init_process_group("gloo")        # RANK, WORLD_SIZE, MASTER_* are set
        return get_rank() + step

    assert ranks.run(work, 2, 10) == [10, 11]

The caller hosts the store on a port that the kernel chose, so runs cannot collide. Whatever is
still alive at the deadline is killed, children of the children included. Ranks are forked from one
interpreter with torch (rank_server.py): starting one anew takes seconds.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rank_server import ForkedRank, RankServer, print_stacks

TAIL_CHARACTERS = 6000
#: Variables that are read when a group is made or used, and not when a library is loaded.
READ_LATE = {
    "GLOO_SOCKET_IFNAME",
    "LIBDDP_FLIGHT_LOG_DIR",
    "LIBDDP_HOST_ID",
    "LIBDDP_LOG_LEVEL",
    "LIBDDP_NAN_CHECK",
    "LIBDDP_REQUIRE_KEY",
    "LIBDDP_RUN_KEY_FILE",
    "LIBDDP_SOCKETS_PER_LINK",
    "LIBDDP_SOCKET_IFNAME",
    "LIBDDP_WIRE_DTYPE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "NCCL_SOCKET_IFNAME",
}


@dataclass
class Outcome:
    """How one rank ended: with `value`, or with `error` (a class name) and `message`."""

    rank: int
    value: Any = None
    error: str | None = None
    message: str = ""
    #: Names of the exception's class and of its base classes.
    bases: tuple[str, ...] = ()
    #: Exit status; negative = the signal that ended it.
    returncode: int = 0
    #: Killed by us because the deadline had passed.
    timed_out: bool = False
    #: End of what it printed, stderr included.
    output: str = ""

    @property
    def failed(self) -> bool:
        return self.error is not None or self.returncode != 0 or self.timed_out


class RanksError(AssertionError):
    """At least one rank failed; the text holds every rank's error and last output."""


def run(function, world_size: int = 2, *args, deadline: float = 120.0, env=None) -> list:
    """`function(*args)` on every rank; returns the ranks' values, raises RanksError on failure."""
    return values(launch(function, world_size, *args, deadline=deadline, env=env))


def values(outcomes: list[Outcome]) -> list:
    if any(outcome.failed for outcome in outcomes):
        raise RanksError("\n".join(describe(outcome) for outcome in outcomes))
    return [outcome.value for outcome in outcomes]


def launch(function, world_size: int = 2, *args, deadline: float = 120.0, env=None):
    """As `run`, but hands back an Outcome for each rank, whatever happened to it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(folder: str, rank: int) -> ForkedRank:
        return start_child(folder, rank, world_size, store.port, env or {})

    return supervise(start, world_size, function, args, deadline)


def supervise(start, world_size: int, function, args, deadline: float, on_start=None):
    """Outcomes of ranks that `start(folder, rank)` starts; `on_start(folder)` runs beside them."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        call = (inspect.getsourcefile(function), function.__qualname__, args)
        (Path(folder) / "call").write_bytes(pickle.dumps(call))
        children = []
        with contextlib.ExitStack() as stack:
            for rank in range(world_size):
                children.append(start(folder, rank))
                stack.callback(kill_session, children[-1])
            if on_start:
                on_start(Path(folder))
            timed_out = wait_until(children, time.monotonic() + deadline)
            print_stacks([child for child in children if child.pid in timed_out])
        return [read_outcome(folder, r, c, timed_out) for r, c in enumerate(children)]


def live_apart() -> None:
    """On a rank, before it makes its group: it is alone on a host of its own."""
    os.environ["LIBDDP_HOST_ID"] = f"host-{os.environ['RANK']}"


def start_child(folder: str, rank: int, world_size: int, port: int, env: dict) -> ForkedRank:
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return fork(folder, place, env)


def fork(
    folder: str, place: dict, env: dict, *, namespace: str | None = None, anew: bool = False
) -> ForkedRank:
    """Forked from an interpreter that has imported torch; a fresh one, which takes seconds to
    start, where libraries may read something of `env` when they are loaded."""
    environment = {
        **os.environ,
        **place,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "RANKS_FOLDER": folder,
        **env,
    }
    return RankServer.get().start(
        "ranks_child:main",
        folder,
        environment={name: value for name, value in environment.items() if value is not None},
        output=Path(folder) / f"output-{place['RANK']}",
        namespace=namespace,
        anew=anew or not READ_LATE.issuperset(env),
    )


def wait_until(children, end: float) -> set[int]:
    """Waits for all children until `end`; returns the pids of those that were still running."""
    for child in children:
        try:
            child.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            break
    return {child.pid for child in children if child.poll() is None}


def kill_session(child) -> None:
    """Ends the child and everything that it started: it leads a session of its own."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def read_outcome(folder: str, rank: int, child, timed_out: set[int]) -> Outcome:
    output = (Path(folder) / f"output-{rank}").read_text(errors="replace")[-TAIL_CHARACTERS:]
    outcome = Outcome(rank, returncode=child.returncode, output=output)
    outcome.timed_out = child.pid in timed_out
    result = Path(folder) / f"result-{rank}"
    if result.exists():
        for name, value in pickle.loads(result.read_bytes()).items():
            setattr(outcome, name, value)
    elif outcome.returncode == 0:
        outcome.error, outcome.message = "SystemExit", "the rank ended without a result"
    return outcome


def describe(outcome: Outcome) -> str:
    how = "timed out" if outcome.timed_out else f"exit status {outcome.returncode}"
    what = f"{outcome.error}: {outcome.message}" if outcome.error else "no error"
    return f"--- rank {outcome.rank}: {how}, {what}\n{outcome.output}"
