"""Adds up the JUnit files of all test programs: the last line is 'N passed, N failed, N skipped'.

    python tests/tally.py RESULTS_FOLDER [NAME_OF_A_FAILED_STEP ...]

A step that failed without a failed test in any file (a crash, a build error) is one failure. What
failed is told twice, at length and in a line each near the end: long output is read from there.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

#: Of the text of a failure.
MOST_LINES = 30
MOST_LETTERS = 400


@dataclass
class Tally:
    #: Of passed, failed and skipped cases.
    counts: Counter = field(default_factory=Counter)
    #: What failed, with the beginning of its text.
    details: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    #: What failed, in a line each.
    failed: list[str] = field(default_factory=list)

    def fail(self, name: str, text: str = "") -> None:
        lines = text.strip().splitlines()
        self.counts["failed"] += 1
        self.details.append(f"FAILED {name}\n    " + "\n    ".join(lines[:MOST_LINES]))
        self.failed.append(f"FAILED {name}: {_gist(lines)[:MOST_LETTERS]}".rstrip(": "))


def _gist(lines: list[str]) -> str:
    """What pytest marks as the error; of Catch2's text, all."""
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    return marked[0] if marked else " ".join(" ".join(lines).split())


def tally(results: Path) -> Tally:
    found = Tally()
    for file in sorted(results.rglob("*.xml")):
        for case in ElementTree.parse(file).iter("testcase"):
            name = f"{file.stem}: {case.get('classname', '')} {case.get('name', '')}"
            broken = next(
                (case.find(t) for t in ("failure", "error") if case.find(t) is not None), None
            )
            if broken is not None or case.get("status") == "fail":
                text = "" if broken is None else broken.text or broken.get("message") or ""
                found.fail(name, text)
            elif case.find("skipped") is not None:
                found.counts["skipped"] += 1
                found.skipped.append(f"SKIPPED {name}")
            else:
                found.counts["passed"] += 1
    return found


def main(arguments: list[str]) -> int:
    """Prints the tally; the exit status is 0 only if nothing failed and something passed."""
    results, failed_steps = Path(arguments[0]), arguments[1:]
    try:
        found = tally(results)
    except ElementTree.ParseError as error:
        found = Tally()
        found.fail(f"a result file is damaged: {error}")
    counts = found.counts
    if failed_steps and not counts["failed"]:
        counts["failed"] += len(failed_steps)
    steps = [f"FAILED step: {name}" for name in failed_steps]
    print()
    print("\n".join(found.details + found.skipped + found.failed + steps))
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 0 if counts["passed"] and not counts["failed"] and not failed_steps else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
