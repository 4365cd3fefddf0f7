"""Prints the table of failures: python tests/systems/failures --help"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / "systems"), str(TESTS / "python" / "support")]

from failures.bench import open_bench  # noqa: E402
from failures.cases import CASES  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures what libddp does when something fails.")
    parser.add_argument("--trials", default="short", help='"short", "full" or a number')
    parser.add_argument("--only", default="", help="cases whose line or name has this")
    parser.add_argument("--seed", type=int, help="repeats the random points of a run")
    return parser.parse_args()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def row(case, trials: int, seconds: list[float]) -> tuple[str, bool]:
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    is_met = high <= case.bound_s
    cells = [
        case.line,
        case.name,
        str(trials),
        f"{case.bound_s:g}",
        f"{low:.3f}",
        f"{middle:.3f}",
        f"{high:.3f}",
        "met" if is_met else "missed",
    ]
    return f"| {' | '.join(cells)} |", is_met


def main() -> int:
    options = arguments()
    print("| line | fault | trials | bound (s) | min (s) | median (s) | max (s) | |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    num_bad = 0
    with contextlib.ExitStack() as stack:
        benches = {}
        for case in CASES:
            trials = case.trials(options.trials)
            if options.only not in f"{case.line} {case.name}" or trials == 0:
                continue
            if case.num_hosts not in benches:
                benches[case.num_hosts] = open_bench(stack, case.num_hosts, options.seed)
            bench = benches[case.num_hosts]
            start = time.monotonic()
            try:
                text, is_met = row(case, trials, list(case.measure(bench, trials)))
            except Exception as error:
                text, is_met = f"| {case.line} | {case.name} | {trials} | failed | | | | |", False
                say(f"{case.name} (seed {bench.seed}): {type(error).__name__}: {error}")
            print(text, flush=True)
            say(f"{time.monotonic() - start:.1f} s for {case.name}")
            num_bad += not is_met
    say(f"{num_bad} not met")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
