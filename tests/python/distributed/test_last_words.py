"""How `libddp run` ends when a rank fails: one screen, and the rank that failed first."""

import pytest
from launches import finish, launch, ranks

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


def run(folder, text):
    (folder / "train.py").write_text(text)
    ((status, output),) = finish(launch([*ranks(2), "train.py"], folder), deadline=300)
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
    assert status == 1
    end = last_words(output)
    assert "rank 1 was first: Signal 9 (SIGKILL)" in end
    assert "exit code of rank 1: -9" in end


@pytest.mark.parametrize("number", [1, 2])
def test_a_missing_script_is_one_line(tmp_path, number):
    ((status, output),) = finish(launch([*ranks(number), "trian.py"], tmp_path), deadline=300)
    assert status == 2
    assert output == f"libddp run: trian.py: no such file (from {tmp_path})\n"


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
    status, output = run(tmp_path, DIFFERENT)
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
    status, output = run(tmp_path, text)
    assert status == 1
    assert "has failed" not in output  # no report
    assert "to blame" not in output
    end = last_words(output)
    assert "alike on ranks 0, 1: " in end
    assert told in end
    assert "was first" not in end
