"""torch's own tests of a c10d backend, over libddp's backend and over Gloo, side by side.

torch ships them in torch/testing/_internal/distributed/distributed_test.py. Many ask for the name
"gloo", so libddp stands behind that name here, as after libddp.install(), with torch's DDP left in
place. Gloo itself cannot be created then, except as torch's helper of
TORCH_DISTRIBUTED_DEBUG=DETAIL, so what passes has passed on libddp.

    python tests/systems/torch_suite.py                      # every test over both; minutes
    python tests/systems/torch_suite.py --backend libddp --tests test_barrier test_gather

Ranks are forks of one process that has imported torch, which saves every rank's import.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from pathlib import Path

BACKENDS = ("libddp", "gloo")
WORLD_SIZE = 4
#: Tests that torch skips with fewer ranks run with this many.
LARGE_WORLD_SIZE = 8
SMALL_WORLD = "Skipped due to small world size."
#: What torch runs on MPI alone, and what needs no more than CPU tensors.
OPENED = ("Only MPI supports CPU all_to_all_single", "Only MPI supports all_to_all")
#: Seconds for one test, start of its ranks included.
TEST_SECONDS = 120
REASON_CHARACTERS = 2000
MISSING = {"outcome": "missing"}


def run(backend: str, tests: list[str], world_size: int = WORLD_SIZE, deadline: float = 3600.0):
    """Tests of the suite in a process of its own; no names = all.

    Returns {test: {"outcome": "passed" | "failed" | "skipped", "reason", "seconds"}}, without those
    that the deadline cut off, and everything that was printed.
    """
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder:
        results, output = Path(folder) / "results", Path(folder) / "output"
        environment = os.environ | {
            "BACKEND": "gloo",
            "WORLD_SIZE": str(world_size),
            "INIT_METHOD": f"file://{folder}/meeting",
            "TEMP_DIR": folder,
            "TMPDIR": folder,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, "--inside", str(results), "--backend", backend]
        with output.open("wb") as log:
            child = subprocess.Popen(
                [*command, "--tests", *tests], env=environment, stdout=log, stderr=log
            )
            try:
                child.wait(deadline)
            except subprocess.TimeoutExpired:
                child.terminate()
                child.wait()
        lines = results.read_text().splitlines() if results.exists() else []
        return {line.pop("test"): line for line in map(json.loads, lines)}, output.read_text(
            errors="replace"
        )


def run_at_both_sizes(backend: str, tests: list[str], deadline: float = 3600.0):
    """As `run`; what torch skips because of few ranks is run again with more."""
    found, output = run(backend, tests, deadline=deadline)
    small = [name for name, result in found.items() if result["reason"] == SMALL_WORLD]
    if small:
        again, more = run(backend, small, LARGE_WORLD_SIZE, deadline)
        found, output = found | again, output + more
    return found, output


def inside(backend: str, results: Path, tests: list[str]) -> None:
    """Runs the tests, one after the other, and writes a line for each."""
    case = suite_over(backend)
    tests = tests or [name for name in dir(case) if name.startswith("test_")]
    with results.open("w") as file:
        for name in tests:
            print(f"\n== {name}", flush=True)
            begin = time.monotonic()
            found = unittest.TestResult()
            case(name).run(found)
            end_children()
            line = {"test": name, **verdict(found), "seconds": round(time.monotonic() - begin, 2)}
            print(line, flush=True)
            file.write(json.dumps(line) + "\n")
            file.flush()


def suite_over(backend: str):
    """torch's test class with forked ranks on `backend`."""
    import torch.distributed as dist
    import torch.multiprocessing
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    common_distributed.get_timeout = lambda test: TEST_SECONDS
    open_tests(distributed_test.DistributedTest._DistTestBase)
    if backend == "libddp":
        put_libddp_in_gloos_place()
        call_events_gloos(distributed_test)

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def run_test(self, *args):
            used = dist.group.WORLD._get_backend(torch.device("cpu")).name()
            assert used == backend, f"the ranks run on {used}"
            super().run_test(*args)

    return Suite


def open_tests(base) -> None:
    for test in vars(base).values():
        if getattr(test, "__unittest_skip_why__", None) in OPENED:
            test.__unittest_skip__ = False


def put_libddp_in_gloos_place() -> None:
    """The names of libddp.install() without its DDP, and no Gloo but the debug wrapper's helper."""
    from libddp._torch_patches import process_group
    from libddp._torch_patches.replacing import DROP_IN
    from torch.distributed import distributed_c10d as c10d

    process_group.put(DROP_IN)
    gloo, wrap = c10d.ProcessGroupGloo, c10d._create_process_group_wrapper

    class NoGloo(gloo):
        def __init__(self, *args, **kwargs):
            raise AssertionError("a test of libddp's backend created Gloo's")

    def wrap_with_gloo(*args, **kwargs):
        c10d.ProcessGroupGloo = gloo
        try:
            return wrap(*args, **kwargs)
        finally:
            c10d.ProcessGroupGloo = NoGloo

    c10d.ProcessGroupGloo = NoGloo
    c10d._create_process_group_wrapper = wrap_with_gloo


def call_events_gloos(module) -> None:
    """Profiler events are found by the backend's name: "libddp:send" counts as "gloo:send"."""
    find = module.get_profiling_event

    def find_and_rename(name, *args, **kwargs):
        found = find(name.replace("gloo:", "libddp:"), *args, **kwargs)
        for event in found:
            event.name = event.name.replace("libddp:", "gloo:")
        return found

    module.get_profiling_event = find_and_rename


def end_children() -> None:
    import multiprocessing

    for child in multiprocessing.active_children():
        child.kill()
        child.join()


def verdict(found: unittest.TestResult) -> dict:
    wrong = found.errors + found.failures
    if wrong:
        return {"outcome": "failed", "reason": wrong[0][1][-REASON_CHARACTERS:]}
    if found.skipped:
        return {"outcome": "skipped", "reason": found.skipped[0][1]}
    return {"outcome": "passed", "reason": ""}


def table(results: dict[str, dict]) -> str:
    """Markdown: the counts of each backend, the tests that differ or failed, why some skipped."""
    lines = ["| backend | passed | failed | skipped |", "|---|---|---|---|"]
    for backend, found in results.items():
        counts = Counter(result["outcome"] for result in found.values())
        numbers = [str(counts[outcome]) for outcome in ("passed", "failed", "skipped")]
        lines.append(f"| {' | '.join([backend, *numbers])} |")
    names = sorted(set().union(*results.values()))
    for name in names:
        outcomes = {b: found.get(name, MISSING)["outcome"] for b, found in results.items()}
        if len(set(outcomes.values())) > 1 or "failed" in outcomes.values():
            lines.append(f"- {name}: {outcomes}")
    skips = [found[name]["reason"] for found in results.values() for name in names if name in found]
    reasons = Counter(reason for reason in skips if reason and "\n" not in reason)
    lines += [f"- {count} skipped: {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=BACKENDS, help="one of them; default: both")
    parser.add_argument("--tests", nargs="*", default=[], help="names; default: all")
    parser.add_argument("--log", type=Path, help="folder for the results and what was printed")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return inside(arguments.backend, arguments.inside, arguments.tests)
    results = {}
    for backend in [arguments.backend] if arguments.backend else BACKENDS:
        results[backend], output = run_at_both_sizes(backend, arguments.tests)
        if arguments.log:
            (arguments.log / f"{backend}.txt").write_text(output)
            (arguments.log / f"{backend}.json").write_text(json.dumps(results[backend], indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
