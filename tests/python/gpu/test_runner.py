"""tests/gpu/run.sh: limits, what is written down, what goes on behind a test that hangs."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

GPU = Path(__file__).parents[2] / "gpu"


@pytest.fixture
def rooms(monkeypatch):
    """The modules of tests/gpu, under their plain names for the time of a test."""
    names = ("machine", "report", "runner", "steps", "table")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    monkeypatch.setattr(sys, "path", [str(GPU), *sys.path])
    import report
    import runner
    import steps

    yield runner, steps, report
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.fixture
def run(rooms, tmp_path):
    runner, steps, _ = rooms
    (tmp_path / "scratch").mkdir()
    places = steps.Places(tmp_path / "site", tmp_path / "tree", tmp_path / "scratch", "")
    return runner.Run(tmp_path / "out", places, 60)


def step(rooms, program, kind="program", limit=30, **options):
    command = [sys.executable, "-c", program]
    return rooms[1].Step("one", "words", command, limit, kind, **options)


def lines(run) -> list[dict]:
    return [json.loads(line) for line in (run.out / "results.jsonl").read_text().splitlines()]


def test_a_bench_and_its_target(rooms, run):
    program = """
print('noise')
print('{"case": "c", "candidate": "libddp", "median": 0.25}')
print('{"target": "faster", "limit": "<= 1", "value": 2.0, "met": false}')
"""
    run.step(step(rooms, program, "bench"))
    bench, target, ended = lines(run)
    assert (bench["candidate"], target["target"], ended["state"]) == ("libddp", "faster", "passed")
    text = (run.out / "table.md").read_text()
    assert "| libddp | 0.25 |" in text
    assert "| faster | <= 1 | 2 | NO |" in text
    assert run.results.finish(1.0) == 1
    [bad] = ElementTree.parse(run.out / "junit.xml").getroot().iter("failure")
    assert bad.text == "2.0 instead of <= 1"
    assert "noise" in (run.out / "log.txt").read_text()


def test_a_bench_without_a_gpu_is_skipped(rooms, run, capsys):
    run.step(step(rooms, "print('SKIPPED gpu_x.py: needs a GPU')", "bench"))
    run.step(step(rooms, "", missing=lambda: "no such tool"))
    assert [line["state"] for line in lines(run)] == ["skipped", "skipped"]
    assert run.results.finish(1.0) == 1  # nothing has passed
    printed = capsys.readouterr().out
    assert "SKIPPED one: one: SKIPPED gpu_x.py: needs a GPU" in printed
    assert "SKIPPED one: one: no such tool" in printed


def test_nothing_is_tried_behind_a_build_that_failed(rooms, run):
    run.step(rooms[1].Step("build", "words", [sys.executable, "-c", "raise SystemExit(3)"], 30))
    run.step(step(rooms, "print(1)"))
    build, one = lines(run)
    assert (build["state"], one["state"], one["why"]) == ("failed", "skipped", "the build failed")
    assert run.results.finish(1.0) == 1


def is_running(stat: Path) -> bool:
    try:
        return stat.read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_step_that_hangs_and_what_it_has_started(rooms, run, tmp_path):
    """Also what has left its process group."""
    program = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
print("hangs", flush=True)
time.sleep(600)
"""
    begin = time.monotonic()
    run.step(step(rooms, program, limit=5))
    assert time.monotonic() - begin < 20
    assert lines(run)[0]["state"] == "timed out"
    assert "hangs" in (run.out / "log.txt").read_text()
    child = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    end = time.monotonic() + 20
    while is_running(child) and time.monotonic() < end:  # a killed process takes its time
        time.sleep(0.05)
    assert not is_running(child)


def test_steps_behind_the_end_of_the_time_are_skipped(rooms, run):
    run.end = time.monotonic()
    run.step(step(rooms, "print(1)"))
    assert lines(run)[0]["why"] == "the time of this run is over"


TESTS = """
import os, time, pytest
pytestmark = pytest.mark.launches

def test_first():
    pass

@pytest.mark.limit(1)
def test_hangs():
    time.sleep(600)

def test_between():
    assert os.environ["LIBDDP_GPU_TEST_DEVICE"] == "cpu"

def test_dies():
    os.abort()

@pytest.mark.cuda
def test_elsewhere():
    pass

def test_fails():
    assert 1 == 2

def test_last():
    pass
"""


def test_tests_behind_one_that_hangs_or_dies_still_run(rooms, run, tmp_path):
    for name in ("conftest.py", "subject.py"):
        shutil.copy(GPU / name, tmp_path / name)
    (tmp_path / "test_some.py").write_text(TESTS)
    command = rooms[1].pytest(str(tmp_path))
    environment = {"LIBDDP_GPU_TEST_DEVICE": "cpu"}
    run.step(rooms[1].Step("some", "", command, 120, "tests", environment))
    *tests, ended = lines(run)
    found = {line["test"].split("::")[1]: line["outcome"] for line in tests}
    assert found == {
        "test_first": "passed",
        "test_hangs": "failed",
        "test_between": "passed",
        "test_dies": "failed",
        "test_elsewhere": "skipped",
        "test_fails": "failed",
        "test_last": "passed",
    }
    assert ended["state"] == "failed"
    log = (run.out / "log.txt").read_text()
    assert "in test_hangs" in log  # the stack of the test that hung
    assert "Fatal Python error: Aborted" in log
    assert "| some | failed | 3 | 3 | 1 |" in (run.out / "table.md").read_text()


def collected(selections: list[list[str]]) -> list[list[str]]:
    """The tests that pytest finds for each of the arguments, all asked in one process."""
    program = """
import json, sys, pytest

class Found:
    def pytest_collection_finish(self, session):
        self.tests = [item.nodeid for item in session.items]

for arguments in json.loads(sys.argv[1]):
    found = Found()
    assert pytest.main(["--collect-only", "-p", "no:cacheprovider", *arguments], [found]) == 0
    print(json.dumps(found.tests))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(selections)],
        cwd=GPU.parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def test_each_test_has_its_step(rooms, tmp_path):
    """No file is left out, and no test of a file that several steps share."""
    _, steps, _ = rooms
    places = steps.Places(tmp_path, tmp_path, tmp_path, "")
    commands = [step.command for stage in steps.stages(places) for step in stage.steps]
    for path in GPU.glob("test_*.py"):
        asked = f"tests/gpu/{path.name}"
        parts = [command[command.index(asked) :] for command in commands if asked in command]
        assert parts, path.name
        if [asked] in parts:
            continue
        every, *shares = collected([[asked], *parts])
        assert every
        assert sorted(test for share in shares for test in share) == sorted(every)


def test_the_command_line(tmp_path):
    def called(*arguments):
        return subprocess.run(
            ["bash", str(GPU / "run.sh"), *arguments],
            env={"LIBDDP_PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "OUT": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    listed = called("--list")
    assert listed.returncode == 0, listed.stderr
    names = [line.split()[0] for line in listed.stdout.splitlines()]
    assert names[0] == "build"
    for path in (GPU.parent / "bench").glob("gpu_*.py"):
        name = path.stem.removeprefix("gpu_").replace("_", "-")
        assert f"bench-{name}" in names
    refused = called("--only", "nonsense")
    assert refused.returncode == 1
    assert "there is no step nonsense" in refused.stderr
