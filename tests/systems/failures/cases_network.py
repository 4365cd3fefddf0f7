"""Hosts that lose each other: the cable, one direction of it, the whole host."""

from __future__ import annotations

import contextlib
import signal
import time

from failures.case import case, require

HOSTS = [0, 0, 1, 1]
BOUND_S = 6.0


def everybody_learns(bench, run, fault: float):
    """Each rank must name one of the other host's, which is all that it can know."""
    for outcome in bench.finish(run):
        learned = outcome.value
        assert "DistBackendError" in learned["bases"], learned
        others = [r for r, host in enumerate(HOSTS) if host != HOSTS[outcome.rank]]
        named = [f"rank {r} (pid {run.pids[r]} on " for r in range(4)]
        assert any(name in learned["text"] for name in named), (others, learned["text"])
        require(learned["text"], "Hint: ")
        yield learned["at"] - fault


@contextlib.contextmanager
def cable_pulled(bench):
    try:
        yield bench.network.cut(1)
    finally:
        bench.network.mend(1)


@contextlib.contextmanager
def one_way_lost(bench):
    """What host 0 sends to host 1 is lost; the other direction goes on."""
    try:
        yield bench.network.lose(0, 1)
    finally:
        bench.network.find(0, 1)


def lose(bench, trials: int, function: str, fault):
    for _ in range(trials):
        run = bench.start(function, hosts=HOSTS)
        run.wait_for("ready")
        time.sleep(bench.random.uniform(0, 0.05))
        start = time.monotonic()
        with fault(bench):
            for rank in range(len(HOSTS)):
                run.end_of(rank, 60)
        yield from everybody_learns(bench, run, start)


@case("3", "cable pulled while working", bound_s=BOUND_S, short=1, full=10, num_hosts=2)
def cut_while_working(bench, trials):
    yield from lose(bench, trials, "loop", cable_pulled)


@case("3", "cable pulled while nothing is called", bound_s=BOUND_S, short=0, full=10, num_hosts=2)
def cut_while_idle(bench, trials):
    yield from lose(bench, trials, "idle", cable_pulled)


@case("3", "one direction lost while working", bound_s=BOUND_S, short=0, full=10, num_hosts=2)
def one_way_while_working(bench, trials):
    yield from lose(bench, trials, "loop", one_way_lost)


@case(
    "3",
    "one direction lost while nothing is called",
    bound_s=BOUND_S,
    short=1,
    full=10,
    num_hosts=2,
)
def one_way_while_idle(bench, trials):
    yield from lose(bench, trials, "idle", one_way_lost)


@case("4", "an outage of 200 ms is no failure", bound_s=2.0, short=1, full=20, num_hosts=2)
def short_outage(bench, trials):
    """Yields the longest step of any rank."""
    for _ in range(trials):
        run = bench.start("work_until_told", hosts=HOSTS)
        run.wait_for("ready")
        time.sleep(0.2)
        with cable_pulled(bench):
            time.sleep(0.2)
        time.sleep(1.5)
        run.tell("stop")
        yield max(outcome.value["longest_s"] for outcome in bench.finish(run))


@case("1", "all ranks of a host killed at once", bound_s=1.0, short=2, full=50, num_hosts=2)
def kill_a_host(bench, trials):
    for _ in range(trials):
        run = bench.start("loop", hosts=HOSTS)
        run.wait_for("ready")
        time.sleep(bench.random.uniform(0, 0.05))
        fault = run.signal(2, signal.SIGKILL)
        run.signal(3, signal.SIGKILL)
        for outcome in bench.finish(run, lost=[2, 3]):
            require(outcome.value["text"], "(pid ", "Hint: ")
            yield outcome.value["at"] - fault
