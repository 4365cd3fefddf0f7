"""The failure table over libddp.Snapshot, measured:

python tests/chaos/table.py --trials 50                # all rows
python tests/chaos/table.py --trials 5 --only keeper   # those with that in their names
python tests/chaos/table.py --results trials.jsonl     # goes on where it was ended
python tests/chaos/table.py --list                     # what each one asserts
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import sys
import time
import traceback
from pathlib import Path

import rows_agent  # noqa: F401
import rows_hosts  # noqa: F401
import rows_keeper  # noqa: F401
import rows_misuse  # noqa: F401
import rows_network  # noqa: F401
import rows_s3  # noqa: F401
import rows_storage  # noqa: F401
import rows_workers  # noqa: F401
from rows import ROWS, Arena, Row, Skipped, run


class Results:
    """A file with a JSON line for each trial, so that a run that was ended is gone on with."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.trials: dict[tuple[str, int], dict] = {}
        if path and path.exists():
            for line in path.read_text().splitlines():
                self._take(json.loads(line))

    def _take(self, trial: dict) -> None:
        self.trials[trial["row"], trial["trial"]] = trial

    def of(self, row: Row) -> list[dict]:
        return [trial for (name, _), trial in self.trials.items() if name == row.name]

    def add(self, row: Row, number: int, has_passed: bool, seconds: float | None) -> None:
        trial = {"row": row.name, "trial": number, "passed": has_passed, "seconds": seconds}
        self._take(trial)
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps(trial) + "\n")


def measure(arena: Arena, row: Row, trials: int, results: Results) -> bool:
    """Prints its line, whatever ends it; True: all passed."""
    began = time.monotonic()
    skipped = ""
    try:
        for number in range(trials):
            if (row.name, number) not in results.trials:
                measure_one(arena, row, number, trials, results)
    except Skipped as reason:
        skipped = f"| {row.name} | skipped: {reason} | | |"
    finally:
        print(skipped or line_of(row, results), flush=True)
        print(f"   {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return all(trial["passed"] for trial in results.of(row))


def measure_one(arena: Arena, row: Row, number: int, trials: int, results: Results) -> None:
    try:
        seconds = run(arena, row, number, trials)
    except Skipped:
        raise
    except Exception:
        print(f"-- {row.name}, trial {number}:", file=sys.stderr)
        traceback.print_exc()
        results.add(row, number, False, None)
    else:
        results.add(row, number, True, seconds)


def line_of(row: Row, results: Results) -> str:
    done = results.of(row)
    passed = sum(trial["passed"] for trial in done)
    seconds = [trial["seconds"] for trial in done if trial["seconds"] is not None]
    shown = "-"
    if seconds:
        shown = f"{min(seconds):.2f} / {statistics.median(seconds):.2f} / {max(seconds):.2f}"
    return f"| {row.name} | {len(done)} | {passed} | {shown} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--only", default="", help="rows whose names this regular expression finds")
    parser.add_argument("--list", action="store_true", help="what the rows assert")
    parser.add_argument(
        "--results", type=Path, help="a file of trials: those in it are not made again"
    )
    args = parser.parse_args()
    rows = [row for row in ROWS.values() if re.search(args.only, row.name)]
    if args.list:
        for row in rows:
            print(f"{row.name}: {row.asserts}")
        return 0
    results = Results(args.results)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print("| fault | trials | passed | s to the first new step: min / median / max |")
    print("|---|---|---|---|", flush=True)
    with Arena() as arena:
        passed = [measure(arena, row, args.trials, results) for row in rows]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
