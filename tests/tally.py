"""Adds up the JUnit files of all test programs: the last line is 'N passed, N failed, N skipped'.

    python tests/tally.py RESULTS_FOLDER [NAME_OF_A_FAILED_STEP ...]

A step that failed without a failed test in any file (a crash, a build error) counts as one failure.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path


def tally(results: Path) -> tuple[Counter, list[str]]:
    """Counts of passed, failed and skipped cases, and a line for each case that did not pass."""
    counts: Counter = Counter()
    lines = []
    for file in sorted(results.rglob("*.xml")):
        for case in ElementTree.parse(file).iter("testcase"):
            name = f"{file.stem}: {case.get('classname', '')} {case.get('name', '')}"
            broken = next(
                (case.find(t) for t in ("failure", "error") if case.find(t) is not None), None
            )
            if broken is not None or case.get("status") == "fail":
                counts["failed"] += 1
                text = "" if broken is None else broken.text or broken.get("message") or ""
                lines.append(f"FAILED {name}\n    " + "\n    ".join(text.strip().splitlines()[:30]))
            elif case.find("skipped") is not None:
                counts["skipped"] += 1
                lines.append(f"SKIPPED {name}")
            else:
                counts["passed"] += 1
    return counts, lines


def main(arguments: list[str]) -> int:
    """Prints the tally; the exit status is 0 only if nothing failed and something passed."""
    results, failed_steps = Path(arguments[0]), arguments[1:]
    try:
        counts, lines = tally(results)
    except ElementTree.ParseError as error:
        counts, lines = Counter(failed=1), [f"FAILED a result file is damaged: {error}"]
    if failed_steps and not counts["failed"]:
        counts["failed"] += len(failed_steps)
    print()
    print("\n".join(lines + [f"FAILED step: {name}" for name in failed_steps]))
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 0 if counts["passed"] and not counts["failed"] and not failed_steps else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
