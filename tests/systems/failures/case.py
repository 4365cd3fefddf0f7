"""What a case is: a fault, how often it is tried, and within which time everybody must know.

@case("1", "kill -9 of 1 of 4", bound_s=0.2, short=5, full=100)
def kill_on_one_host(bench, trials):
    for number in bench.each(trials): yield seconds, ...

The function yields one or several times for each trial: from the fault to the moment at which a
survivor had its exception. What must hold besides (texts, nothing left behind) it asserts itself.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

#: A busy machine is slower than the bound says; a test fails only beyond this.
PATIENCE = 10.0
LEAST_PATIENCE_S = 5.0
VARIABLE = "LIBDDP_FAILURE_TRIALS"


@dataclass(frozen=True)
class Case:
    line: str
    name: str
    bound_s: float
    short: int
    full: int
    measure: Callable[..., Iterator[float]]
    num_hosts: int

    def trials(self, wanted: str | None = None) -> int:
        """How often to try: `wanted` or the variable; "full", a number, or nothing (short)."""
        wanted = wanted or os.environ.get(VARIABLE, "short")
        if wanted in ("short", "full"):
            return self.full if wanted == "full" else self.short
        return int(wanted)

    @property
    def patience_s(self) -> float:
        return max(self.bound_s * PATIENCE, LEAST_PATIENCE_S)


CASES: list[Case] = []


def case(line: str, name: str, *, bound_s: float, short: int, full: int, num_hosts: int = 1):
    """Registers a function that measures."""

    def register(measure):
        CASES.append(Case(line, name, bound_s, short, full, measure, num_hosts))
        return measure

    return register


class Bench:
    """What a case works with: the ranks' fleet, a network to break, numbers by chance."""

    def __init__(self, fleet, network, seed: int | None = None):
        self.fleet = fleet
        self.network = network
        seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
        self.seed = seed
        self.random = random.Random(seed)
        self._before = fleet.remains()

    def start(self, function: str, *args, hosts, **options):
        module, _, name = function.rpartition(".")
        return self.fleet.start(f"failures.{module or 'work'}", name, *args, hosts=hosts, **options)

    def finish(self, run, lost=(), **options) -> list:
        """Outcomes of the ranks that must have lived; asserts that nothing else is left."""
        outcomes = run.finish(**options)
        for outcome in outcomes:
            if outcome.rank in lost:
                continue
            assert outcome.status is not None, f"rank {outcome.rank} hangs: {outcome.output}"
            assert outcome.status == 0, describe(outcome)
            assert outcome.error is None, describe(outcome)
        self.require_nothing_left()
        return [outcome for outcome in outcomes if outcome.rank not in lost]

    def require_nothing_left(self, patience_s: float = 2.0) -> None:
        """The kernel may take a moment to take down what a killed process had."""
        end = time.monotonic() + patience_s
        while remains := self.fleet.remains().beyond(self._before):
            assert time.monotonic() < end, f"left behind: {remains}"
            time.sleep(0.01)


def describe(outcome) -> str:
    return f"rank {outcome.rank}: exit status {outcome.status}, {outcome.error}\n{outcome.output}"


def require(text: str, *parts) -> None:
    """The message holds all parts."""
    for part in parts:
        assert str(part) in text, f"no {part!r} in: {text}"
