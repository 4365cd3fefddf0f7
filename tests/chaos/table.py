"""The failure table over libddp.Snapshot, measured:

python tests/chaos/table.py --trials 50                # all rows
python tests/chaos/table.py --trials 5 --only keeper   # those with that in their names
python tests/chaos/table.py --list                     # what each one asserts
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
import traceback

import rows_agent  # noqa: F401
import rows_hosts  # noqa: F401
import rows_keeper  # noqa: F401
import rows_misuse  # noqa: F401
import rows_network  # noqa: F401
import rows_s3  # noqa: F401
import rows_storage  # noqa: F401
import rows_workers  # noqa: F401
from rows import ROWS, Arena, Row, Skipped, run


def measure(arena: Arena, row: Row, trials: int) -> bool:
    """Prints its line; True: all passed."""
    passed, seconds, began = 0, [], time.monotonic()
    for number in range(trials):
        try:
            taken = run(arena, row, number, trials)
        except Skipped as reason:
            print(f"| {row.name} | skipped: {reason} | | |", flush=True)
            return True
        except Exception:
            print(f"-- {row.name}, trial {number}:", file=sys.stderr)
            traceback.print_exc()
            continue
        passed += 1
        if taken is not None:
            seconds.append(taken)
    shown = "-"
    if seconds:
        shown = f"{min(seconds):.2f} / {statistics.median(seconds):.2f} / {max(seconds):.2f}"
    took = time.monotonic() - began
    print(f"| {row.name} | {trials} | {passed} | {shown} |", flush=True)
    print(f"   {took:.0f} s", file=sys.stderr, flush=True)
    return passed == trials


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--only", default="", help="rows whose names this regular expression finds")
    parser.add_argument("--list", action="store_true", help="what the rows assert")
    args = parser.parse_args()
    rows = [row for row in ROWS.values() if re.search(args.only, row.name)]
    if args.list:
        for row in rows:
            print(f"{row.name}: {row.asserts}")
        return 0
    print("| fault | trials | passed | s to the first new step: min / median / max |")
    print("|---|---|---|---|", flush=True)
    with Arena() as arena:
        results = [measure(arena, row, args.trials) for row in rows]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
