"""What the other ranks learn when one dies, fails, leaves, or calls something else."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import ranks
import torch
from libddp.errors import PeerError, StateError, TimeoutError

from libddp import distributed as ddp_dist

#: Far above what it takes, far below the group's timeout.
SOON = 30.0
TIMEOUT = timedelta(minutes=10)


def start():
    ddp_dist.init_process_group("gloo", timeout=TIMEOUT)
    ddp_dist.all_reduce(torch.ones(1))
    return ddp_dist.get_rank()


def expect_peer_error(call, *words):
    """The error must come soon, name the words, and come again from every later call."""
    began = time.monotonic()
    with pytest.raises(PeerError) as caught:
        call()
    assert time.monotonic() - began < SOON
    for word in words:
        assert str(word) in str(caught.value), str(caught.value)
    with pytest.raises((PeerError, StateError)):
        ddp_dist.all_reduce(torch.ones(1))
    return caught.value


def survive_a_kill():
    rank = start()
    pids = [None] * 3
    ddp_dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    error = expect_peer_error(lambda: ddp_dist.all_reduce(torch.ones(1 << 20)), "rank 1", pids[1])
    assert (error.peer_rank, error.peer_pid) == (1, pids[1])
    assert isinstance(error, torch.distributed.DistBackendError)
    work = "all_reduce" in str(error)
    ddp_dist.destroy_process_group()
    return work


def leftovers(temporary_folder):
    """Named things of ours on the machine."""
    places = (Path("/dev/shm"), temporary_folder)
    return {p for place in places for p in place.iterdir() if "libddp" in p.name}


def test_a_killed_rank_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # nobody else's: other tests may run beside this
    before = leftovers(tmp_path)
    outcomes = ranks.launch(survive_a_kill, 3)
    assert outcomes[1].returncode == -signal.SIGKILL
    for survivor in (outcomes[0], outcomes[2]):
        assert survivor.value is True, ranks.describe(survivor)
    assert leftovers(tmp_path) <= before


UNCAUGHT = """
import time, torch
from libddp import distributed as d
d.init_process_group("gloo")
d.all_reduce(torch.ones(1))
if d.get_rank() == 1:
    raise LookupError("no such token")
try:
    d.all_reduce(torch.ones(1))
except d.DistBackendError as error:
    print("LEARNED", error, flush=True)
"""


def run_scripts(text, world_size, tmp_path, *, wait=90, during=None):
    """Plain scripts as ranks; returns their (exit status, output)."""
    script = tmp_path / "script.py"
    script.write_text(text)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        children = []
        try:
            for rank in range(world_size):
                child = ranks_child(script, rank, world_size, store.port, Path(folder))
                children.append(child)
            if during:
                during(children, Path(folder))
            for child in children:
                child.wait(wait)
        finally:
            for child in children:
                child.kill()
                child.wait()
        return [
            (child.returncode, (Path(folder) / f"out-{rank}").read_text())
            for rank, child in enumerate(children)
        ]


def ranks_child(script, rank, world_size, port, folder):
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    with open(folder / f"out-{rank}", "wb") as output:
        return subprocess.Popen(
            [sys.executable, str(script)], env=environment, stdout=output, stderr=subprocess.STDOUT
        )


def test_an_uncaught_exception_reaches_the_other_ranks(tmp_path):
    (code, output), (other_code, other_output) = run_scripts(UNCAUGHT, 2, tmp_path)
    assert code == 0, output
    assert "LEARNED" in output
    assert "LookupError: no such token" in output
    assert other_code == 1
    assert "LookupError" in other_output


FORGETFUL = """
import torch
from libddp import distributed as d
d.init_process_group("gloo")
t = torch.ones(1)
work = d.all_reduce(t, async_op=True)
work.wait()
print("DONE", t.item())
"""


def test_an_end_without_destroy_is_quiet(tmp_path):
    for code, output in run_scripts(FORGETFUL, 2, tmp_path):
        assert (code, output.split()) == (0, ["DONE", "2.0"]), output


INTERRUPTED = """
import os, pathlib, signal, sys, time, torch
from libddp import distributed as d
# A test run in the background of a shell ignores the signal, and its children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
d.init_process_group("gloo")
d.all_reduce(torch.ones(1))
if d.get_rank() == 1:
    time.sleep(600)
pathlib.Path(os.environ["LIBDDP_TEST_READY"]).touch()
try:
    if len(sys.argv) > 1:
        d.all_reduce(torch.ones(1), async_op=True).wait()
    else:
        d.all_reduce(torch.ones(1))
except KeyboardInterrupt:
    print("INTERRUPTED", flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("form", ["inline", "async"])
def test_ctrl_c_ends_a_wait(tmp_path, monkeypatch, form):
    ready = tmp_path / "ready"
    monkeypatch.setenv("LIBDDP_TEST_READY", str(ready))
    text = INTERRUPTED.replace("len(sys.argv) > 1", str(form == "async"))

    def interrupt(children, _folder):
        end = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.3)
        children[0].send_signal(signal.SIGINT)
        children[0].wait(SOON)
        children[1].kill()

    (code, output), _ = run_scripts(text, 2, tmp_path, during=interrupt)
    assert (code, output.split()[-1:]) == (0, ["INTERRUPTED"]), output


def names_of_both_calls(rank):
    """Each in a group of its own, because a mismatch poisons the group."""
    kinds = {
        "shape": lambda: ddp_dist.all_reduce(torch.ones(3 + rank)),
        "dtype": lambda: ddp_dist.all_reduce(
            torch.ones(4, dtype=torch.int32 if rank else torch.float32)
        ),
        "op": lambda: ddp_dist.all_reduce(
            torch.ones(4), op=ddp_dist.ReduceOp.MAX if rank else ddp_dist.ReduceOp.SUM
        ),
        "root": lambda: ddp_dist.broadcast(torch.ones(4), src=rank),
        "call": lambda: ddp_dist.barrier() if rank else ddp_dist.all_reduce(torch.ones(4)),
        "blocks": lambda: ddp_dist.all_to_all_single(
            torch.empty(16), torch.ones(16), [10, 6], [10, 6]
        ),
        "through torch": lambda: torch.distributed.all_reduce(torch.ones(2 + rank)),
    }
    texts = {}
    for kind, call in kinds.items():
        start()
        began = time.monotonic()
        with pytest.raises(PeerError) as caught:
            call()
        assert time.monotonic() - began < SOON
        texts[kind] = str(caught.value)
        ddp_dist.destroy_process_group()
    return texts


def wait_in_vain(rank):
    """Rank 1 stays away until rank 0 has given up; told through the store, not the group."""
    start()
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 gave up"], timedelta(seconds=120))
        text = None
    else:
        with pytest.raises(TimeoutError, match="rank 1") as caught:
            ddp_dist.native().all_reduce(torch.ones(1), timeout=timedelta(seconds=1))
        text = str(caught.value)
        store.set("rank 0 gave up", "")
    ddp_dist.destroy_process_group()
    return text


def see_the_other_end(rank):
    start()
    if rank == 1:
        os._exit(3)
    work = ddp_dist.all_reduce(torch.ones(100), async_op=True)
    expect_peer_error(work.wait, "rank 1")
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(PeerError):
        work.get_future().wait()
    with pytest.raises(PeerError):
        torch.distributed.all_reduce(torch.ones(1))


def fail_in_every_way():
    rank = int(os.environ["RANK"])
    texts = names_of_both_calls(rank)
    timeout = wait_in_vain(rank)
    start()
    both = [None] * 2
    ddp_dist.all_gather_object(both, texts)
    ddp_dist.destroy_process_group()
    see_the_other_end(rank)
    return both, timeout


@pytest.fixture(scope="module")
def failures():
    """(texts of each rank's mismatches, text of the timeout)."""
    survivor, gone = ranks.launch(fail_in_every_way, 2)
    assert not survivor.failed, ranks.describe(survivor) + ranks.describe(gone)
    assert gone.returncode == 3
    return survivor.value


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", ["[3]", "[4]"]),
        ("dtype", ["float32", "int32"]),
        ("op", ["SUM", "MAX"]),
        ("root", ["broadcast"]),
        ("call", ["barrier", "all_reduce"]),
        ("blocks", ["block sizes differ", "output_splits", " 40 bytes", " 24 bytes"]),
        ("through torch", ["[2]", "[3]"]),
    ],
)
def test_calls_that_differ_are_both_named_on_every_rank(failures, kind, words):
    for texts in failures[0]:
        assert all(word in texts[kind] for word in words), texts[kind]


def test_a_rank_that_does_not_come_is_named_at_the_timeout(failures):
    assert "all_reduce" in failures[1]
    assert "timed out" in failures[1]


def test_async_works_and_torchs_calls_raise_our_error(failures):
    assert failures is not None  # checked on the survivor
