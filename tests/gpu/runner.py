"""Runs the steps of tests/gpu/run.sh: each in processes of its own, with a time limit, writing down
what it found at once.

    bash tests/gpu/run.sh --help

The exit status is 0 only if nothing failed and something ran. A step that needs what is not here is
skipped, and said so at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import machine
import report
import steps
from steps import ROOT, Places, Step

#: A test file is started anew so many times behind a test that hung or took CUDA down with it.
RESTARTS = 3


class Run:
    """One run. Thread rule: steps of a stage run in threads; what they find is added one by one."""

    def __init__(self, out: Path, places: Places, seconds: float):
        self.out, self.places = out, places
        self.begin = time.monotonic()
        self.end = self.begin + seconds
        self.results = report.Results(out)
        #: Why the steps to come can't run, or "".
        self.obstacle = ""

    def left(self) -> float:
        return self.end - time.monotonic()

    def stage(self, stage: steps.Stage) -> None:
        with ThreadPoolExecutor(stage.width) as pool:
            list(pool.map(self.step, stage.steps))

    def step(self, step: Step) -> None:
        begin = time.monotonic()
        reason = self.obstacle or step.missing()
        if not reason and self.left() < 5:
            reason = "the time of this run is over"
        if reason:
            self.results.step(step, "skipped", 0.0, reason)
            return
        print(f"== {step.name}: {step.words}", flush=True)
        state, why = self.run_tests(step) if step.kind == "tests" else self.run_once(step)
        self.results.step(step, state, time.monotonic() - begin, why)
        if step.name == "build" and state != "passed":
            self.obstacle = "the build failed"

    def run_once(self, step: Step) -> tuple[str, str]:
        limit = self.limit(step)
        status, text = self.execute(step, limit)
        lines = [line for line in text.splitlines() if line.startswith("{")]
        for line in lines if step.kind == "bench" else []:
            self.results.add({"kind": "bench", "step": step.name, **json.loads(line)})
        if status is None:
            return "timed out", f"killed after {limit:.0f} s"
        if status:
            return "failed", f"exit status {status}"
        if step.kind == "bench" and not lines:
            return "skipped", text.strip().splitlines()[-1] if text.strip() else "no output"
        return "passed", ""

    def run_tests(self, step: Step) -> tuple[str, str]:
        """Until every test of the file has begun once."""
        record = self.places.scratch / f"{step.name}.jsonl"
        record.touch()
        end = time.monotonic() + self.limit(step)
        status: int | None = None
        for _ in range(1 + RESTARTS):
            status, _ = self.execute(step, end - time.monotonic(), LIBDDP_GPU_RECORD=str(record))
            # 0: passed, 1: some failed, 5: none is left. Anything else is an end in mid-word.
            if status in (0, 1, 5) or end - time.monotonic() < 10:
                break
        results = report.read_record(record)
        self.results.tests(step, results)
        failed = [name for name, result in results.items() if result["outcome"] == "failed"]
        if failed:
            return "failed", f"{len(failed)} of {len(results)} tests"
        if status not in (0, 5):
            return "failed", "killed" if status is None else f"exit status {status}"
        if all(result["outcome"] == "skipped" for result in results.values()):
            return "skipped", next((r["message"] for r in results.values()), "it has no tests")
        return "passed", ""

    def limit(self, step: Step) -> float:
        return min(step.limit, max(self.left(), 1.0))

    def execute(self, step: Step, limit: float, **variables: str) -> tuple[int | None, str]:
        """Exit status (None: killed) and output; nothing that it has started outlives it."""
        mark = f"LIBDDP_GPU_STEP={os.getpid()}-{step.name}"
        environment = os.environ | self.environment() | step.environment | variables
        environment |= dict([mark.split("=", 1)])
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                step.command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(max(limit, 1.0))
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end_all(process, mark)
            output.seek(0)
            text = output.read().decode(errors="replace")
        self.results.log(step, step.command, status, text)
        return status, text

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(
            filter(None, [str(self.places.prefix), os.environ.get("PYTHONPATH")])
        )
        return {
            "PYTHONPATH": path,
            "PATH": f"{self.places.prefix}/bin:{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
            "LIBDDP_LOG_LEVEL": os.environ.get("LIBDDP_LOG_LEVEL", "WARN"),
        }


def end_all(process: subprocess.Popen, mark: str) -> None:
    """Ends a step's process group, and what left that group but still has the step's mark."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:  # it has ended, or is another user's
            continue


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="STEP", help="this step; repeatable")
    parser.add_argument("--list", action="store_true", help="print the steps and end")
    parser.add_argument("--budget", type=float, default=470, help="seconds for everything (470)")
    parser.add_argument("--no-build", action="store_true", help="take the libddp that is installed")
    return parser.parse_args()


def chosen(stages: list[steps.Stage], only: list[str] | None, no_build: bool) -> list[steps.Stage]:
    names = [step.name for stage in stages for step in stage.steps]
    unknown = set(only or []) - set(names)
    if unknown:
        sys.exit(f"run.sh: there is no step {', '.join(sorted(unknown))}; --list lists them")
    wanted = set(only or names) - ({"build"} if no_build else set())
    kept = [steps.Stage([s for s in one.steps if s.name in wanted], one.width) for one in stages]
    return [stage for stage in kept if stage.steps]


def main() -> int:
    asked = arguments()
    out = Path(os.environ.get("OUT") or ROOT / "tests/gpu/results").resolve()
    with tempfile.TemporaryDirectory(prefix="libddp-gpu-") as scratch:
        base = ROOT / "build/gpu"
        nccl = os.environ.get("LIBDDP_GPU_NCCL", "")
        places = Places(base / "site", base / "tree", Path(scratch), nccl)
        plan = chosen(steps.stages(places), asked.only, asked.no_build)
        if asked.list:
            for step in (step for stage in plan for step in stage.steps):
                print(f"{step.name:16} {step.limit:4d} s  {step.words}")
            return 0
        run = Run(out, places, asked.budget)
        run.results.add({"kind": "machine", **machine.facts()})
        for stage in plan:
            run.stage(stage)
        return run.results.finish(time.monotonic() - run.begin)


if __name__ == "__main__":
    sys.exit(main())
