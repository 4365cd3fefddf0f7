"""`libddp run --max-restarts`: what is started again, what is not, and how long stopping takes."""

import time

import pytest
from launches import finish, launch, ranks

from libddp import _attempts, _last_words, _steps, _worker

COUNTED = """
import os, signal, sys, time
import torch
import libddp
from libddp._worker import note_step

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if rank == 0:
    with open("attempts", "a") as file:
        print(attempt, file=file)
"""
ALIKE = f"{COUNTED}\nraise ValueError(f'no token {{id(object()):#x}} of pid {{os.getpid()}}')\n"
ONE_RANK = f"{COUNTED}\nif rank == 1:\n    raise ValueError('no token')\ntime.sleep(300)\n"
PROGRESS = f"{COUNTED}\nnote_step(10 + attempt)\nraise ValueError('no such token')\n"
NO_PROGRESS = f"{COUNTED}\nnote_step(10)\nraise ValueError('no such token')\n"
ELSEWHERE = f"""{COUNTED}
if attempt == 0:
    raise ValueError('no such token')
elif attempt == 1:
    raise ValueError('no such token')
elif attempt == 2:
    sys.exit(4)
"""
KILLED = f"{COUNTED}\nos.kill(os.getpid(), signal.SIGKILL)\n"


def run(folder, text, *flags, number=1, forked=True):
    (folder / "train.py").write_text(text)
    job = launch([*ranks(number, forked=forked), *flags, "train.py"], folder)
    ((status, output),) = finish(job, deadline=300)
    return status, output, (folder / "attempts").read_text().split()


@pytest.mark.parametrize(
    ("text", "number", "forked", "told"),
    [
        (ALIKE, 2, False, "the same error twice, so it would come again"),
        (ONE_RANK, 2, True, "the same error twice, so it would come again"),
        (NO_PROGRESS, 1, True, "the same error twice at step 10, so it would come again"),
    ],
)
def test_the_same_error_at_the_same_place_ends_the_run(tmp_path, text, number, forked, told):
    flags = ["--max-restarts=4"]
    status, output, attempts = run(tmp_path, text, *flags, number=number, forked=forked)
    assert status == 1
    assert attempts == ["0", "1"]
    assert told in output
    assert "in spite of --max-restarts=4" in output
    assert "ValueError: no" in output[output.index("libddp run: failed") :]
    assert "ChildFailedError" not in output


@pytest.mark.parametrize(
    ("text", "flags", "status"),
    [
        (PROGRESS, ["--max-restarts=2"], 1),
        (NO_PROGRESS, ["--max-restarts=2", "--retry-same-error"], 1),
        (ELSEWHERE, ["--max-restarts=2"], 4),
        (KILLED, ["--max-restarts=2"], 137),
    ],
)
def test_what_may_go_well_is_started_again(tmp_path, text, flags, status):
    found, output, attempts = run(tmp_path, text, *flags)
    assert found == status, output
    assert attempts == ["0", "1", "2"]
    assert "the same error" not in output
    for number in (1, 2):
        assert f"libddp run: restart {number} of 2; rank 0 was first: " in output
    assert "libddp run: restart 3" not in output


IGNORES = f"""{COUNTED}
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"ready{{rank}}", "w").close()
while not all(os.path.exists(f"ready{{r}}") for r in (0, 1)):
    time.sleep(0.05)
if rank == 1:
    sys.exit(5)
time.sleep(600)
"""


def test_a_worker_that_does_not_end_is_ended(tmp_path):
    start = time.monotonic()
    flags = ["--shutdown-timeout=1"]
    status, output, _ = run(tmp_path, IGNORES, *flags, number=2, forked=False)
    assert status == 5
    assert "rank 1 was first: exit code 5" in output
    assert time.monotonic() - start < 28  # torchrun: 30 s, whatever the flag says


GLOO = f"""{COUNTED}
torch.distributed.init_process_group("gloo")
total = torch.ones(1)
torch.distributed.all_reduce(total)
if attempt < 2 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_torchs_gloo_comes_back(tmp_path):
    """torch's launcher hands each start the store of the first: gloo finds dead ranks there."""
    status, output, attempts = run(tmp_path, GLOO, "--max-restarts=2", number=2)
    assert status == 0, output
    assert attempts == ["0", "1", "2"]


STOPPED = f"""{COUNTED}
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
while rank == 0:
    state = open(f"/proc/{{os.getppid()}}/task/{{os.getppid()}}/children").read().split()
    if any(") T " in open(f"/proc/{{pid}}/stat").read() for pid in state):
        sys.exit(5)
    time.sleep(0.05)
"""


def test_a_stopped_worker_is_not_waited_for(tmp_path):
    status, output, _ = run(tmp_path, STOPPED, "--shutdown-timeout=3000", number=2)
    assert status == 5
    assert "rank 0 was first: exit code 5" in output


def attempt(text="ValueError: no", place="train.py:3", seconds=10.0, step=None, **other):
    words = {"when": 1.0, "follows": False, "path": "error.json"} | other
    return _attempts.Attempt(
        _last_words.LastWords(0, text, place, step=step, **words), seconds=seconds
    )


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ({}, {}, True),
        ({"text": "E: at 0x7f0a of pid 17"}, {"text": "E: at 0x81 of pid 4242"}, True),
        ({"text": "E: /tmp/tmpabcd1234"}, {"text": "E: /tmp/tmpx_9y8z7w"}, True),
        ({"text": "E: [group 0, rank 0/2] x"}, {"text": "E: [group 0, rank 1/2] x"}, True),
        ({}, {"text": "KeyError: no"}, False),
        ({}, {"place": "train.py:4"}, False),
        ({}, {"seconds": 60.0}, False),
        ({}, {"seconds": 3.0}, True),
        ({"step": 4}, {"step": 4, "seconds": 60.0}, True),
        ({"step": 4}, {"step": 5, "seconds": 1.0}, False),
        ({"step": 4}, {"step": 3, "seconds": 1.0}, False),
        ({}, {"step": 0, "seconds": 1.0}, False),
        ({"step": 4}, {"seconds": 1.0}, True),
        ({"path": None}, {"path": None}, False),
        ({"place": ""}, {"place": ""}, False),
        ({"follows": True}, {"follows": True}, False),
        ({"follows": True, "is_nobodys": True}, {"follows": True, "is_nobodys": True}, True),
    ],
)
def test_what_counts_as_the_same_error(old, new, same):
    assert _attempts.is_same(attempt(**old), attempt(**new)) is same


def test_a_step_is_seen_while_the_worker_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(_steps, "_page", None)
    monkeypatch.setattr(_steps, "_step", None)
    assert _steps.read(str(tmp_path)) is None
    _steps.open_page(str(tmp_path / "error.json"))
    assert _steps.read(str(tmp_path)) is None
    _worker.note_step(7)
    assert (_steps.noted(), _steps.read(str(tmp_path))) == (7, 7)
    (tmp_path / "step").write_bytes(b"123")
    assert _steps.read(str(tmp_path)) is None
