"""What a run leaves: results.jsonl, junit.xml, table.md, log.txt; rewritten after every step.

    results = Results(Path("results"))
    results.add({"kind": "bench", "step": "bench-ddp", "candidate": "libddp", "median": 0.1})
    results.finish(60.0)        # prints the table and the skips; the exit status

A line of results.jsonl has a `kind`: machine, step, test, bench. A bench line with `target` says
whether what was measured reached it.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from table import table

#: Characters of a failure that are kept.
MESSAGE = 4000
#: Keys of a bench line that its table leaves out.
HIDDEN = {"kind", "step", "case", "rounds", "wall", "load", "cores", "cpu_min_s", "cpu_s"}
HIDDEN |= {"cpu_ratio_min", "cpu_ratio_median"}
FACTS = ("date", "device", "driver", "cuda", "nccl", "torch", "python", "cores", "commit")


def read_record(path: Path) -> dict[str, dict]:
    """Name of a test -> its result. One that begun and did not end has failed."""
    results: dict[str, dict] = {}
    for line in path.read_text().splitlines():
        one = json.loads(line)
        name = one.pop("test")
        unended = {"outcome": "failed", "seconds": 0.0, "message": "it did not end: see log.txt"}
        results[name] = one if "outcome" in one else results.get(name, unended)
    return results


class Results:
    """Thread rule: any thread."""

    def __init__(self, out: Path):
        self.out, self._lock = out, threading.Lock()
        self.lines: list[dict] = []
        out.mkdir(parents=True, exist_ok=True)
        for name in ("results.jsonl", "log.txt"):
            (out / name).write_text("")

    def add(self, line: dict) -> None:
        with self._lock:
            self.lines.append(line)
            with open(self.out / "results.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")

    def tests(self, step, results: dict[str, dict]) -> None:
        for name, result in results.items():
            self.add({"kind": "test", "step": step.name, "test": name, **result})

    def step(self, step, state: str, seconds: float, why: str) -> None:
        words = f"{step.name}: {state} in {seconds:.0f} s" + (f" ({why})" if why else "")
        print(f"-- {words}", flush=True)
        line = {"kind": "step", "step": step.name, "state": state, "seconds": round(seconds, 1)}
        self.add({**line, "why": why})
        with self._lock:
            replace(self.out / "table.md", markdown(self.lines))
            replace(self.out / "junit.xml", junit(self.lines))

    def log(self, step, command: list[str], status: int | None, text: str) -> None:
        ended = "killed" if status is None else f"exit status {status}"
        with self._lock, open(self.out / "log.txt", "a") as file:
            file.write(f"\n===== {step.name}: {' '.join(command)}\n{text}\n----- {ended}\n")

    def finish(self, seconds: float) -> int:
        """Prints table, failures and skips. 0 if nothing failed and something passed."""
        print("\n" + markdown(self.lines))
        counts = tally(self.lines)
        print(f"{seconds:.0f} s in all; results are in {self.out}")
        print(" ".join(f"{counts[state]} {state}," for state in STATES).rstrip(","))
        return 0 if counts["passed"] and not counts["failed"] else 1


STATES = ("passed", "failed", "skipped")


def replace(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(path)


def of(lines: list[dict], kind: str) -> list[dict]:
    return [line for line in lines if line["kind"] == kind]


def has_tests(lines: list[dict], step: str) -> bool:
    return any(line["step"] == step for line in of(lines, "test"))


def cases(lines: list[dict]) -> list[dict]:
    """Tests, steps that have none (a step that was skipped or killed has one of its own), and
    targets: what a bench did not reach is a failure."""
    found = of(lines, "test")
    for line in of(lines, "step"):
        outcome = {"timed out": "failed"}.get(line["state"], line["state"])
        if not has_tests(lines, line["step"]) or line["why"].startswith(("killed", "exit status")):
            found.append({**line, "test": line["step"], "outcome": outcome, "message": line["why"]})
    for line in targets(lines):
        outcome = "passed" if line["met"] else "failed"
        message = f"{line['value']} instead of {line['limit']}"
        found.append({**line, "test": line["target"], "outcome": outcome, "message": message})
    return found


def targets(lines: list[dict]) -> list[dict]:
    return [line for line in of(lines, "bench") if "target" in line]


def tally(lines: list[dict]) -> Counter:
    return Counter(case["outcome"] for case in cases(lines))


def loud(lines: list[dict]) -> list[str]:
    """A line for everything that did not pass."""
    out = []
    for word, outcome in (("FAILED", "failed"), ("SKIPPED", "skipped")):
        for case in cases(lines):
            if case["outcome"] == outcome:
                said = case.get("message", "").strip().splitlines() or [""]
                out.append(f"{word} {case['step']}: {case['test']}: {said[-1][:200]}")
    return out


def junit(lines: list[dict]) -> str:
    suite = ElementTree.Element("testsuite", name="gpu")
    for case in cases(lines):
        seconds = str(case.get("seconds", 0))
        node = ElementTree.SubElement(
            suite, "testcase", classname=case["step"], name=case["test"], time=seconds
        )
        if case["outcome"] != "passed":
            tag = "skipped" if case["outcome"] == "skipped" else "failure"
            ElementTree.SubElement(node, tag).text = case.get("message", "")
    return ElementTree.tostring(suite, encoding="unicode")


def markdown(lines: list[dict]) -> str:
    """A section for docs/performance.md."""
    facts = next(iter(of(lines, "machine")), {})
    title = f"### On one {facts.get('device', 'unknown device')}, {facts.get('date', '')[:10]}"
    parts = [title, table([{"": name, " ": facts.get(name, "")} for name in FACTS])]
    if targets(lines):
        words = ("target", "limit", "value", "met")
        parts.append(table([{w: said(line[w]) for w in words} for line in targets(lines)]))
    for name in dict.fromkeys(line["step"] for line in of(lines, "bench")):
        parts += [f"#### {name}", *benches(lines, name)]
    parts.append(table([tested(lines, line) for line in of(lines, "step")]))
    parts.append("\n".join(f"- {line}" for line in loud(lines)))
    return "\n\n".join(part for part in parts if part) + "\n"


def said(value) -> str:
    return {True: "yes", False: "NO"}.get(value, str(value)) if isinstance(value, bool) else value


def benches(lines: list[dict], name: str) -> list[str]:
    """A table for each case of a bench, with the columns that its lines have."""
    rows = [line for line in of(lines, "bench") if line["step"] == name and "target" not in line]
    tables = []
    for case in dict.fromkeys(row.get("case", "") for row in rows):
        mine = [row for row in rows if row.get("case", "") == case]
        columns = [key for key in mine[0] if key not in HIDDEN]
        tables += [f"{case}:" if case else "", table(mine, columns)]
    return [text for text in tables if text]


def tested(lines: list[dict], step: dict) -> dict:
    counts = Counter(t["outcome"] for t in of(lines, "test") if t["step"] == step["step"])
    numbers = {state: counts[state] if counts else "" for state in STATES}
    return {"step": step["step"], "state": step["state"], **numbers, "seconds": step["seconds"]}
