"""The flight log from Python, and what a timeout tells of the rank that did not come."""

import ctypes
import json
import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import ranks
import torch
from libddp.errors import ArgumentError, PeerError, TimeoutError

from libddp import _C
from libddp import distributed as ddp_dist


def log_everything(folder):
    ddp_dist.init_process_group("gloo")
    part = ddp_dist.new_group([0, 1])
    ddp_dist.all_reduce(torch.ones(3, 2))
    ddp_dist.barrier(group=part)
    path = Path(folder) / f"{ddp_dist.get_rank()}.json"
    log = ddp_dist.flight_log(path)
    assert json.loads(path.read_text()) == log
    assert len(ddp_dist.flight_log(group=part)["groups"]) == 1
    ddp_dist.destroy_process_group()
    return log


def test_the_flight_log_holds_the_operations_of_all_groups(tmp_path):
    for rank, log in enumerate(ranks.run(log_everything, 2, str(tmp_path))):
        world, part = log["groups"]
        assert (world["rank"], world["world_size"], world["failure"]) == (rank, 2, None)
        sums = [entry for entry in world["operations"] if entry["kind"] == "all_reduce"]
        assert sums[-1]["dtype"] == "float32"
        assert sums[-1]["shape"] == [3, 2]
        assert sums[-1]["reduce_op"] == "SUM"
        assert sums[-1]["state"] == "done"
        assert sums[-1]["called_ns"] <= sums[-1]["started_ns"] <= sums[-1]["finished_ns"]
        assert abs(world["wall_time_ns"] - time.time_ns()) < 300e9
        assert part["operations"][-1]["kind"] == "barrier"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "1.json"]


def test_a_log_that_cannot_be_written(tmp_path):
    ddp_dist.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        with pytest.raises(OSError, match="no folder"):
            ddp_dist.flight_log(tmp_path / "no folder" / "log.json")
        with pytest.raises(ArgumentError):
            ddp_dist.flight_log(group="world")
    finally:
        ddp_dist.destroy_process_group()


def pretend_to_work(folder):
    while not (Path(folder) / "stop").exists():
        time.sleep(0.01)


WAITS = {
    "all_reduce": lambda: ddp_dist.native().all_reduce(torch.ones(1), timeout=timedelta(seconds=1)),
    "recv": lambda: ddp_dist.native().recv(torch.ones(1), 1, timeout=timedelta(seconds=1)),
    "send": lambda: ddp_dist.native().send(torch.ones(1 << 20), 1, timeout=timedelta(seconds=1)),
    "recv from any": lambda: ddp_dist.native().recv(torch.ones(1), timeout=timedelta(seconds=1)),
}


def wait_for_a_busy_rank(folder, call):
    ddp_dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    ddp_dist.barrier()
    if ddp_dist.get_rank() == 1:
        pretend_to_work(folder)
        with pytest.raises(PeerError) as caught:
            ddp_dist.barrier()
    else:
        with pytest.raises(TimeoutError) as caught:
            WAITS[call]()
        (Path(folder) / "stop").touch()
    return str(caught.value)


@pytest.mark.parametrize("call", WAITS)
def test_a_timeout_tells_where_the_missing_rank_is(tmp_path, call):
    outcomes = ranks.launch(
        wait_for_a_busy_rank, 2, str(tmp_path), call, env={"LIBDDP_FLIGHT_LOG_DIR": str(tmp_path)}
    )
    for outcome in outcomes:
        assert not outcome.failed, ranks.describe(outcome)
        assert "timed out after" in outcome.value
        where = outcome.value.split("rank 1 is in ")[1]
        assert "pretend_to_work (test_flight_log.py:" in where, outcome.value
    report = outcomes[0].output
    for part in (
        f"has failed: {call.split()[0]}",
        "rank 1 (pid ",
        "last call barrier #",
        "threads of",
    ):
        assert part in report, report
    assert "in pretend_to_work" in report
    assert "has failed" not in outcomes[1].output
    for rank in (0, 1):
        log = json.loads((tmp_path / f"flight-world-rank{rank}.json").read_text())
        assert "timed out after" in log["failure"]
        assert log["pid"] != os.getpid()


def abort_after_a_peer():
    ddp_dist.init_process_group("gloo")
    ddp_dist.barrier()
    if ddp_dist.get_rank() == 1:
        while not ddp_dist.native().has_failed():
            time.sleep(0.01)
    ddp_dist.native().abort("what all ranks meet")


def test_a_rank_that_aborts_after_a_peer_has_nothing_to_report():
    for outcome in ranks.launch(abort_after_a_peer, 2):
        assert not outcome.failed, ranks.describe(outcome)
        assert "has failed" not in outcome.output


def hold_the_interpreter_lock(folder):
    ddp_dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    ddp_dist.barrier()
    if ddp_dist.get_rank() == 1:
        ctypes.PyDLL(None).usleep(2_500_000)
        return ""
    with pytest.raises(TimeoutError) as caught:
        WAITS["all_reduce"]()
    return str(caught.value)


@pytest.mark.skipif(
    not hasattr(ctypes.pythonapi, "_Py_DumpTracebackThreads"),
    reason="this Python does not export what reads stacks without the lock",
)
def test_a_timeout_tells_where_the_lock_of_the_missing_ranks_interpreter_is_held(tmp_path):
    text, _ = ranks.run(hold_the_interpreter_lock, 2, str(tmp_path))
    assert "rank 1 is in hold_the_interpreter_lock (test_flight_log.py:" in text, text


def test_stacks_are_whole_while_the_threads_run(tmp_path):
    outermost = _C.dump_stacks().splitlines()[-1]
    dumps = []
    reader = threading.Thread(target=lambda: dumps.extend(_C.dump_stacks() for _ in range(300)))
    reader.start()
    while reader.is_alive():
        (tmp_path / "a" / "b").exists()
    assert len(dumps) == 300
    for dump in dumps:
        main = dump.split("Thread 0x")[-1]
        assert f" in {test_stacks_are_whole_while_the_threads_run.__name__}\n" in main, dump
        assert main.splitlines()[-1] == outermost, dump


def call_groups_in_opposite_order():
    ddp_dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    world = ddp_dist.native()
    other = ddp_dist.native(ddp_dist.new_group([0, 1]))
    for group in (world, other):
        group.barrier()
    if ddp_dist.get_rank() == 1:
        with pytest.raises(PeerError):
            other.all_reduce(torch.ones(1))
        return other.name()
    with pytest.raises(TimeoutError) as caught:
        world.all_reduce(torch.ones(1), timeout=timedelta(seconds=1))
    ddp_dist.destroy_process_group()
    return str(caught.value)


def test_a_timeout_names_the_call_of_another_group_that_the_missing_rank_waits_in():
    text, name = ranks.run(call_groups_in_opposite_order, 2)
    assert "; rank 1 is in call_groups_in_opposite_order (test_flight_log.py:" in text, text
    assert f" of group {name}, which waits for this rank" in text, text
    assert "all_reduce #" in text.split("rank 1 is in")[1], text
