"""`libddp run --status-json`, --status: how a job stands while it runs, and how it ended."""

import json
import os
import time

import pytest
from launches import launch, ranks, stop

from libddp import _status

#: Fails once, then waits to be told to end.
JOB = """
import os, time
import torch
from libddp._worker import note_step

rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
note_step(7 + rank)
if attempt == "0" and rank == 1:
    raise ValueError("no such token")
while not (attempt == "1" and os.path.exists("go")):
    time.sleep(0.05)
raise SystemExit(4 if rank == 1 else 0)
"""


def until(path, condition, seconds=120):
    end = time.monotonic() + seconds
    while True:
        facts = json.loads(path.read_text()) if path.exists() else {}  # never half of it
        if facts and condition(facts):
            return facts
        assert time.monotonic() < end, facts
        time.sleep(0.05)


@pytest.mark.parametrize("flags", [[], ["--preload"]], ids=["started", "forked"])
def test_the_file_tells_ranks_steps_restarts_and_the_end(tmp_path, flags):
    (tmp_path / "train.py").write_text(JOB)
    file = tmp_path / "status.json"
    flags = [*flags, "--max-restarts=1", "--status-json=status.json", "--status"]
    job = launch([*ranks(2), *flags, "train.py"], tmp_path)
    try:
        # Between two starts it tells of the workers that have ended.
        facts = until(
            file,
            lambda f: f["restarts"] == 1 and f["state"] == "running" and f["step"] is not None,
        )
        facts = until(file, lambda f: [r["step"] for r in f["ranks"]] == [7, 8])
        assert [(r["rank"], r["alive"]) for r in facts["ranks"]] == [(0, True), (1, True)]
        assert facts["launcher_pid"] == job.pid
        failure = facts["last_failure"]
        assert (failure["rank"], failure["error"]) == (1, "ValueError: no such token")
        assert failure["place"].endswith("train.py:9")
        assert failure["step"] == 8
        (tmp_path / "go").touch()
        output = job.communicate(timeout=120)[0]
    finally:
        stop(job)
    assert job.returncode == 4, output
    facts = json.loads(file.read_text())
    assert (facts["state"], facts["exit_status"]) == ("ended", 4)
    assert not any(rank["alive"] for rank in facts["ranks"])
    assert "exit code 4" in facts["last_failure"]["error"]
    assert "2/2 ranks alive | step 7 | 1/1 restarts | last failure: rank 1, ValueError" in output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["go", "status.json", "train.py"]


class Nothing:
    """Workers and attempts before there are any."""

    restarts, max_restarts, last_failure = 0, 0, None

    def running(self, step_in):
        return []


def test_a_file_that_cannot_be_written_is_told_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(_status, "INTERVAL_SECONDS", 0.01)
    with _status.Status(Nothing(), Nothing(), str(tmp_path / "no" / "file"), line=False):
        time.sleep(0.1)
    text = capsys.readouterr().err
    assert text.count("the job goes on without it") == 1
    assert "No such file or directory" in text


def test_nobody_asked():
    with _status.Status(Nothing(), Nothing(), None, line=False) as status:
        assert status.facts()["state"] == "starting"


def test_who_is_alive():
    assert _status.is_alive(os.getpid())
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert not _status.is_alive(pid)  # a zombie
    os.waitpid(pid, 0)
    assert not _status.is_alive(pid)
