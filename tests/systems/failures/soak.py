"""A long life: many mixed collectives, groups that come and go; nothing may grow.

    python tests/systems/failures/soak.py                        # 100,000 collectives, 100 lives
    python tests/systems/failures/soak.py --collectives 5000 --lives 20 --hosts 2

Prints one JSON object: time, and of each rank what it had after the first part and at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / "systems"), str(TESTS / "python" / "support")]

#: Of memory per 1,000 collectives or groups.
MAX_KIB_PER_1000 = 1.0
NUM_SAMPLES = 10
#: What the allocator needs more or less from one moment to the next.
NOISE_KIB = 512
#: A short run still meets buffers and threads (of a group's messages) that come when first needed.
LONG_RUN = 50_000
WARM_UP_KIB = 16 << 10
WARM_UP_THREADS = 4
#: One heap for all threads: several ones drift for long after they are made.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}


def growth_kib(samples: list[dict]) -> int:
    """Of the least memory in the second half over that in the first; the first sample warms up."""
    least = [sample["anonymous_kib"] for sample in samples[1:]]
    middle = len(least) // 2
    return min(least[middle:]) - min(least[:middle])


def check(samples: list[dict], unit: str) -> list[str]:
    """What has grown."""
    first, last = samples[1], samples[-1]
    is_short = unit == "collectives" and last[unit] < LONG_RUN
    slack = {"descriptors": 0, "threads": WARM_UP_THREADS if is_short else 0}
    grown = [
        f"{name}: {first[name]} -> {last[name]}"
        for name, more in slack.items()
        if last[name] > first[name] + more
    ]
    memory = growth_kib(samples)
    noise = WARM_UP_KIB if is_short else NOISE_KIB
    if memory > noise + MAX_KIB_PER_1000 * last[unit] / 1000:
        grown.append(f"memory: {memory} KiB in half of {last[unit]} {unit}")
    return grown


def collectives(fleet, hosts: list[int], count: int, seed: int = 1) -> list[list[dict]]:
    run = fleet.start("failures.work_soak", "soak", count, NUM_SAMPLES, seed, hosts=hosts)
    return [value_of(outcome) for outcome in run.finish(deadline_s=60 + count / 100)]


def lives(fleet, hosts: list[int], count: int) -> list[list[dict]]:
    run = fleet.start("failures.work_soak", "come_and_go", count, NUM_SAMPLES, hosts=hosts)
    return [value_of(outcome) for outcome in run.finish(deadline_s=60 + count)]


def value_of(outcome):
    assert outcome.status == 0, f"{outcome.status} {outcome.error} {outcome.output}"
    assert outcome.error is None, f"{outcome.error} {outcome.output}"
    return outcome.value


def report(ranks: list[list[dict]], unit: str, seconds: float) -> dict:
    return {
        "seconds": round(seconds, 1),
        unit: ranks[0][-1][unit],
        "begin": ranks[0][1],
        "end": ranks[0][-1],
        "growth_kib": [growth_kib(r) for r in ranks],
        "grown": [grown for r in ranks for grown in check(r, unit)],
    }


def main() -> int:
    from failures.bench import open_bench

    parser = argparse.ArgumentParser(description="Many collectives; nothing may grow.")
    parser.add_argument("--collectives", type=int, default=100_000)
    parser.add_argument("--lives", type=int, default=100)
    parser.add_argument("--hosts", type=int, default=1)
    options = parser.parse_args()
    hosts = sorted(rank % options.hosts for rank in range(4))
    with contextlib.ExitStack() as stack:
        bench = open_bench(stack, options.hosts, env=ENVIRONMENT)
        start = time.monotonic()
        samples = collectives(bench.fleet, hosts, options.collectives)
        mixed = report(samples, "collectives", time.monotonic() - start)
        start = time.monotonic()
        samples = lives(bench.fleet, hosts, options.lives)
        short = report(samples, "lives", time.monotonic() - start)
        bench.require_nothing_left()
    print(json.dumps({"mixed": mixed, "lives": short}))
    return 1 if mixed["grown"] or short["grown"] else 0


if __name__ == "__main__":
    sys.exit(main())
