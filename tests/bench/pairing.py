"""Compares callables fairly: they alternate in one run, so load and frequency hit all alike.

    for line in pairing.compare({"gloo": f, "libddp": g}, rounds=20, case="25 MiB"):
        pairing.emit(line)

Each round calls every candidate `repeat` times; the order turns by one each round. One JSON line
per candidate: min and median wall seconds per call, min (`cpu_min_s`) and median (`cpu_s`) CPU
seconds per call (all threads of this process; with `over_ranks`, of all ranks), and `ratio_*` and
`cpu_ratio_*` = the first candidate / this one (min and median).
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable

#: Keys of a line that are seconds per call.
TIMES = ("min", "median", "cpu_min_s", "cpu_s")


def measure(function: Callable, repeat: int, cpu_clock: Callable) -> tuple[float, float]:
    """Wall and CPU seconds per call."""
    cpu, wall = cpu_clock(), time.perf_counter()
    for _ in range(repeat):
        function()
    return (time.perf_counter() - wall) / repeat, (cpu_clock() - cpu) / repeat


def sample(
    candidates: dict, rounds: int, repeat: int, warmup: int, cpu_clock: Callable, settle: Callable
):
    """Per candidate the list of (wall, cpu) of each round."""
    names = list(candidates)
    for name in names:
        for _ in range(warmup):
            candidates[name]()
    samples = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            settle()
            samples[name].append(measure(candidates[name], repeat, cpu_clock))
    return samples


def summed(seconds: list[float]) -> list[float]:
    """Over the ranks of libddp's default group; what `over_ranks` takes."""
    import libddp.distributed as ddp_dist
    import torch

    total = torch.tensor(seconds, dtype=torch.float64)
    ddp_dist.all_reduce(total)
    return total.tolist()


def ratio(first: list[float], this: list[float], of: Callable) -> float:
    """Infinite where this one took less than the clock can tell."""
    return of(first) / of(this) if of(this) > 0 else math.inf


def compare(
    candidates: dict[str, Callable],
    *,
    rounds: int = 20,
    repeat: int = 1,
    warmup: int = 2,
    over_ranks: Callable[[list[float]], list[float]] = list,
    cpu_clock: Callable[[], float] = time.process_time,
    settle: Callable[[], object] = lambda: None,
    **case,
) -> list[dict]:
    """One dict per candidate; `case` is copied into each of them.

    cpu_clock: time.thread_time counts the calling thread alone.
    settle: called before each measurement, and not measured: what runs on a device has ended.
    over_ranks: adds a list of CPU seconds up over all ranks, each of which calls `compare`.
    """
    started = time.perf_counter()
    samples = sample(candidates, rounds, repeat, warmup, cpu_clock, settle)
    elapsed = time.perf_counter() - started
    walls = {name: [wall for wall, _ in values] for name, values in samples.items()}
    cpus = {name: over_ranks([cpu for _, cpu in values]) for name, values in samples.items()}
    first, first_cpu = walls[next(iter(walls))], cpus[next(iter(cpus))]
    return [
        {
            **case,
            "candidate": name,
            "min": min(walls[name]),
            "median": statistics.median(walls[name]),
            "cpu_min_s": min(cpus[name]),
            "cpu_s": statistics.median(cpus[name]),
            "ratio_min": ratio(first, walls[name], min),
            "ratio_median": ratio(first, walls[name], statistics.median),
            "cpu_ratio_min": ratio(first_cpu, cpus[name], min),
            "cpu_ratio_median": ratio(first_cpu, cpus[name], statistics.median),
            "rounds": rounds,
            "wall": round(elapsed, 3),
            "load": round(os.getloadavg()[0], 2),
            "cores": os.cpu_count(),
        }
        for name in candidates
    ]


def per(lines: list[dict], count: int) -> list[dict]:
    """The lines with times per step, where each call made `count` steps."""
    for line in lines:
        for key in TIMES:
            line[key] /= count
    return lines


def above_first(lines: list[dict]) -> list[dict]:
    """The lines with `overhead_min_ms` and `overhead_median_ms`: the time above the first one's."""
    for line in lines:
        for key in ("min", "median"):
            line[f"overhead_{key}_ms"] = (line[key] - lines[0][key]) * 1e3
    return lines


def emit(line: dict) -> None:
    """Prints one JSON line; times keep four digits."""
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in line.items()}
    print(json.dumps(rounded), file=sys.stdout, flush=True)
