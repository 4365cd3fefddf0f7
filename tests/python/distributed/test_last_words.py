"""How `libddp run` ends when a rank fails: one screen, and the rank that failed first."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from launches import finish, launch, ranks
from libddp.errors import PeerError

from libddp import _failure_report, _worker

RAISES = """
import os, time
import torch
import libddp.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
if rank == 1:
    raise ValueError("no such token")
dist.all_reduce(torch.ones(1))
time.sleep(60)
"""

KILLED = RAISES.replace('raise ValueError("no such token")', "os.kill(os.getpid(), 9)")


def last_words(output: str) -> str:
    return output[output.index("libddp run: failed") :]


def run(folder, text, number=2, forked=False):
    (folder / "train.py").write_text(text)
    job = launch([*ranks(number, forked=forked), "train.py"], folder)
    ((status, output),) = finish(job, deadline=300)
    return status, output


def test_the_rank_that_raised_is_named_with_its_line(tmp_path):
    status, output = run(tmp_path, RAISES)
    assert status == 1
    assert "ChildFailedError" not in output
    end = last_words(output)
    line = RAISES.splitlines().index('    raise ValueError("no such token")') + 1
    assert "rank 1 was first: ValueError: no such token\n" in end
    assert f"train.py:{line}\n" in end
    assert "exit code of rank 1: 1" in end
    assert len(end.splitlines()) <= 6


def test_the_rank_that_was_killed_is_named(tmp_path):
    status, output = run(tmp_path, KILLED)
    assert status == 128 + 9
    end = last_words(output)
    assert "rank 1 was first: Signal 9 (SIGKILL)" in end
    assert "exit code of rank 1: -9; of libddp run: 137" in end


@pytest.mark.parametrize("number", [1, 2])
def test_a_missing_script_is_one_line(tmp_path, number):
    ((status, output),) = finish(launch([*ranks(number), "trian.py"], tmp_path), deadline=300)
    assert status == 2
    assert output == f"libddp run: trian.py: no such file (from {tmp_path})\n"


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("./nothing", "no such program"),
        ("nothing-of-the-kind", "no such program in PATH"),
        ("train.py", "not in PATH. Hint: ./train.py"),
        ("./train.py", "not executable. Hint: chmod +x, or leave out --no-python"),
    ],
)
def test_a_program_that_cannot_be_started_is_one_line(tmp_path, program, problem):
    (tmp_path / "train.py").write_text("")
    command = [*ranks(1), "--no-python", program]
    ((status, output),) = finish(launch(command, tmp_path), deadline=300)
    assert status == 2
    assert output.startswith(f"libddp run: {program}: {problem}")
    assert output.count("\n") == 1


BEGIN = """
import torch
import libddp.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
"""
DIFFERENT = f"""{BEGIN}
if rank == 0:
    dist.all_reduce(torch.ones(3))
else:
    dist.broadcast(torch.ones(3), 0)
"""
ALIKE = f"{BEGIN}\nraise ValueError('the same everywhere')\n"
MODELS = f"""{BEGIN}
from libddp.nn.parallel import DistributedDataParallel
DistributedDataParallel(torch.nn.Linear(3, 3 + rank))
"""


def test_a_mismatch_is_nobodys(tmp_path):
    status, output = run(tmp_path, DIFFERENT, forked=True)
    assert status == 1
    assert "to blame" not in output
    assert output.count("has failed: the ranks called different collectives") == 1  # one report
    end = last_words(output)
    told = "between ranks: the ranks called different collectives: rank 0 called all_reduce #2"
    assert told in end
    assert "was first" not in output
    assert "train.py:10 (rank 0)\n" in end
    assert "train.py:12 (rank 1)\n" in end
    assert "exitcode" not in output


@pytest.mark.parametrize(
    ("text", "told"),
    [(ALIKE, "ValueError: the same everywhere"), (MODELS, "the ranks wrap different models")],
)
def test_what_all_ranks_meet_is_pinned_on_none(tmp_path, text, told):
    status, output = run(tmp_path, text, forked=True)
    assert status == 1
    assert "has failed" not in output  # no report
    assert "to blame" not in output
    end = last_words(output)
    assert "alike on ranks 0, 1: " in end
    assert told in end
    assert "was first" not in end


#: Names only torch, as a script for the drop-in does.
EARLY = """
import json, os, time
import torch

rank = int(os.environ["RANK"])
if rank == 0:
    time.sleep(600)
config = json.loads("no json")
"""


def test_an_exception_before_the_group_is_named_with_the_programs_line(tmp_path):
    status, output = run(tmp_path, EARLY, forked=True)
    assert status == 1
    end = last_words(output)
    line = EARLY.splitlines().index('config = json.loads("no json")') + 1
    assert "rank 1 was first: json.decoder.JSONDecodeError: Expecting value" in end
    assert f"  at:   {tmp_path}/train.py:{line}\n" in end


REPLACED_HOOK = """
import sys
import torch

sys.excepthook = lambda kind, value, trace: print("Oh dear:", value)
raise ValueError("no such token")
"""


def test_an_exception_that_the_programs_own_hook_prints_is_named(tmp_path):
    status, output = run(tmp_path, REPLACED_HOOK, number=1)
    assert status == 1
    assert "Oh dear: no such token" in output
    assert "rank 0 was first: ValueError: no such token\n" in last_words(output)
    assert "train.py:6\n" in last_words(output)


FORGIVEN = """
import os, subprocess, sys, time
import torch

if "HELPER" in os.environ:
    raise ValueError("no cache yet")
if os.environ["RANK"] == "0":
    subprocess.run([sys.executable, __file__], env=os.environ | {"HELPER": "1"})
    open("tried", "w").close()
    time.sleep(600)
while not os.path.exists("tried"):
    time.sleep(0.1)
sys.exit(3)
"""


def test_a_helper_that_fails_and_is_forgiven_is_not_named(tmp_path):
    status, output = run(tmp_path, FORGIVEN)
    assert status == 3
    assert "ValueError: no cache yet" in output
    end = last_words(output)
    assert "rank 1 was first: exit code 3" in end
    assert "no cache yet" not in end


SPAWNS = """
import os
import torch
import torch.multiprocessing as mp
import libddp.distributed as dist

def train(rank):
    if BEFORE and rank == 1:
        raise ValueError("no such token")
    meet = "file://" + os.path.abspath("meet")
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        raise ValueError("no such token")
    dist.all_reduce(torch.ones(1))

if __name__ == "__main__":
    mp.spawn(train, nprocs=2)
"""


@pytest.mark.parametrize("before", [False, True])
def test_a_spawned_rank_is_named_with_its_line(tmp_path, before):
    text = SPAWNS.replace("BEFORE", str(before))
    status, output = run(tmp_path, text, number=1)
    assert status == 1
    end = last_words(output)
    raising = [n for n, line in enumerate(text.splitlines(), 1) if "raise" in line]
    if before:  # which rank it was going to be, nobody knows yet
        assert "rank 0 was first: ValueError: no such token (its process 1)\n" in end
    else:
        assert "rank 1 was first: ValueError: no such token\n" in end
    assert f"  at:   {tmp_path}/train.py:{raising[not before]}\n" in end
    assert len(end.splitlines()) <= 6


def test_a_spawned_rank_that_was_killed_is_not_taken_for_another(tmp_path):
    text = SPAWNS.replace("BEFORE", "False").replace(
        'raise ValueError("no such token")', "os.kill(os.getpid(), 9)"
    )
    status, output = run(tmp_path, text, number=1)
    assert status == 1
    end = last_words(output)
    assert "process 1 terminated with signal SIGKILL" in end.splitlines()[0]


def workers_end(folder, exitcode, records):
    """The screen's first line for worker 0 that started ranks 0 and 1, which left `records`."""
    file = folder / "0" / "error.json"
    file.parent.mkdir()
    message = "Signal 9" if exitcode < 0 else "To enable traceback see: ..."
    failure = SimpleNamespace(exitcode=exitcode, message=message, error_file=str(file))
    with patch.dict(os.environ, TORCHELASTIC_ERROR_FILE=str(file)):
        for rank, error in records:
            _worker.begin_spawned(rank)
            with patch.dict(os.environ):
                _worker.record_spawned(error, rank)
    return _failure_report.report({0: failure})


def lost() -> PeerError:
    """A new one each time: an error is recorded once."""
    return PeerError("libddp: rank 0 died")


@pytest.mark.parametrize(
    ("exitcode", "records", "rank", "text"),
    [
        (1, [(1, ValueError("no such token")), (0, lost())], 1, "ValueError: no such token"),
        (1, [(1, ValueError("first try")), (1, lost()), (0, KeyError("second"))], 0, "KeyError:"),
        (-9, [(0, lost()), (1, lost())], 0, "Signal 9"),
        (3, [], 0, "exit code 3"),
    ],
)
def test_spawned_ranks_speak_for_their_worker(tmp_path, capsys, exitcode, records, rank, text):
    first, status = workers_end(tmp_path, exitcode, records)
    screen = capsys.readouterr().err
    assert first.rank == rank
    assert f"rank {rank} was first: {text}" in screen
    assert status == (exitcode if exitcode > 0 else 128 - exitcode)
    assert len(screen.splitlines()) <= 6


def test_a_worker_that_is_killed_while_it_writes_leaves_no_half_file(tmp_path):
    """torch's agent reads the file before we do, and ends itself over half a file."""
    path = tmp_path / "error.json"
    program = (
        "import os, pathlib, signal\n"
        "from libddp import _last_words\n"
        "def replace(beside, path):\n"
        "    assert 'broken' in beside.read_text()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "pathlib.Path.replace = replace\n"
        "_last_words.record_error(RuntimeError('broken'), None)\n"
    )
    environment = os.environ | {"TORCHELASTIC_ERROR_FILE": str(path), "RANK": "0"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, timeout=120)
    assert ended.returncode == -signal.SIGKILL
    assert not path.exists()
