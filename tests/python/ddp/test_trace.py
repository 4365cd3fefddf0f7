"""save_trace(): one file over all ranks, and errors that all of them raise."""

import json
import os
import time
from pathlib import Path

import ddp_models as models
import pytest
import ranks
import torch

STEPS = 4
#: Doubles that hold microseconds.
TOLERANCE_US = 0.01
RANK = int(os.environ.get("RANK", 0))


def work(folder):
    from libddp.distributed import destroy_process_group, init_process_group

    init_process_group("gloo")
    model = models.libddp_ddp()(models.Mlp(), bucket_cap_mb=0.001)
    errors = [error_of(model, f"{folder}/early.json")]
    for _ in range(STEPS):
        model(torch.ones(2, 16)).sum().backward()
    Path(folder, f"file-{RANK}").touch()
    errors += [
        error_of(model, f"{folder}/missing/trace.json"),
        error_of(model, folder),
        error_of(model, f"{folder}/file-0/trace.json"),
        error_of(model, None),
    ]
    model.save_trace(f"{folder}/trace.json")
    model.save_trace(f"{folder}/again.json")
    model.save_trace(f"{folder}/again.json")
    explained = model.explain()
    destroy_process_group()
    return errors, [(list(b.parameters), b.total_bytes) for b in explained.buckets]


def error_of(model, path):
    try:
        model.save_trace(path)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.fixture(scope="module", params=[2, 3])
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    return request.param, folder, ranks.run(work, request.param, str(folder))


def read(folder, name="trace.json"):
    return json.loads((folder / name).read_text())


def events(folder, rank, category):
    found = read(folder)["traceEvents"]
    return [e for e in found if e["ph"] == "X" and e["pid"] == rank and e["cat"] == category]


def test_the_file_names_its_maker_and_every_row(saved):
    world_size, folder, _ = saved
    whole = read(folder)
    assert whole["otherData"] == {"producer": "libddp", "format": 1, "world_size": world_size}
    names = [e for e in whole["traceEvents"] if e["ph"] == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in names if e["name"] == "process_name"}
    assert sorted(processes) == list(range(world_size))
    assert all(processes[rank].startswith(f"rank {rank} (") for rank in processes)
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in names if e["name"] == "thread_name"}
    assert len(rows) == 2 * world_size
    used = {(e["pid"], e["tid"]) for e in whole["traceEvents"] if e["ph"] == "X"}
    assert used == set(rows)


def test_every_rank_has_every_pass_and_bucket(saved):
    world_size, folder, results = saved
    for rank in range(world_size):
        buckets = results[rank][1]
        computation = events(folder, rank, "computation")
        for name in ("forward", "backward", "wait"):
            assert [e["args"]["pass"] for e in computation if e["name"] == name] == [1, 2, 3, 4]
        last = [
            e["args"] for e in events(folder, rank, "communication") if e["args"]["pass"] == STEPS
        ]
        assert [(args["parameters"], args["bytes"]) for args in last] == buckets
        assert [args["bucket"] for args in last] == list(range(len(buckets)))
        assert len(buckets) > 2


def test_times_are_microseconds_in_order(saved):
    world_size, folder, _ = saved
    everything = [e for e in read(folder)["traceEvents"] if e["ph"] == "X"]
    assert min(e["ts"] for e in everything) == 0
    assert all(e["dur"] >= 0 for e in everything)
    for rank in range(world_size):
        for event in events(folder, rank, "communication"):
            args = event["args"]
            assert args["ready"] <= args["launched"] <= event["ts"] + TOLERANCE_US
            assert event["ts"] + event["dur"] == pytest.approx(args["done"], abs=TOLERANCE_US)


def test_ranks_are_aligned(saved):
    """A bucket is done on one rank only after it was launched on each of them."""
    world_size, folder, _ = saved
    places = {}
    for rank in range(world_size):
        for event in events(folder, rank, "communication"):
            args = event["args"]
            places.setdefault((args["pass"], args["bucket"]), []).append(args)
    assert all(len(parts) == world_size for parts in places.values())
    for parts in places.values():
        assert max(p["launched"] for p in parts) <= min(p["done"] for p in parts) + TOLERANCE_US


def test_errors_are_raised_on_every_rank_and_leave_nothing(saved):
    world_size, folder, results = saved
    for errors, _ in results:
        early, missing, is_folder, in_file, no_path = errors
        assert early[0] == "StateError"
        assert "no backward pass" in early[1]
        assert "Hint" in early[1]
        for error in (missing, is_folder, in_file, no_path):
            assert error[0] == "ArgumentError"
            assert "rank 0 cannot write" in error[1]
            assert "Hint" in error[1]
        assert "missing/trace.json" in missing[1]
    assert all(errors == results[0][0] for errors, _ in results)
    wanted = {"trace.json", "again.json", *(f"file-{rank}" for rank in range(world_size))}
    assert {path.name for path in folder.iterdir()} == wanted


def test_a_trace_is_overwritten_as_a_whole(saved):
    _, folder, _ = saved
    assert read(folder, "again.json") == read(folder)


AHEAD_S = 10_000


def measure():
    from libddp.distributed import destroy_process_group, init_process_group, native
    from libddp.nn.parallel import _clocks

    init_process_group("gloo")
    same = _clocks.clock_offsets(native())
    if RANK > 0:
        _clocks.clock_name = lambda: f"machine {RANK}"
        _clocks.now_ns = lambda: time.monotonic_ns() + RANK * AHEAD_S * 10**9
    other = _clocks.clock_offsets(native())
    destroy_process_group()
    return same, other


def test_clocks_of_other_machines_are_measured():
    measured = ranks.run(measure, 3)
    assert all(same == [0, 0, 0] for same, _ in measured)
    zero, one, two = measured[0][1]
    assert zero == 0
    # An exchange is far shorter than the difference of the clocks.
    assert one == pytest.approx(AHEAD_S * 1e9, rel=0.01)
    assert two == pytest.approx(2 * AHEAD_S * 1e9, rel=0.01)


def test_offsets_move_events_onto_rank_0s_clock():
    from libddp.nn.parallel._timings import BucketTimes, PassTimes
    from libddp.nn.parallel._trace import _record, trace

    def one_pass(ahead):
        bucket = BucketTimes(0, ("weight",), 68, *(ahead + t for t in (4000, 5000, 9000)))
        times = [ahead + t for t in (1000, 2000, 3000, 8000, 10_000)]
        return PassTimes(1, *times, (bucket,))

    records = [_record([one_pass(0)]), _record([one_pass(10**12)])]
    drawn = [e for e in trace(records, [0, 10**12])["traceEvents"] if e["ph"] == "X"]
    first, second = ([e for e in drawn if e["pid"] == rank] for rank in (0, 1))
    assert [{**e, "pid": 1} for e in first] == second
    bucket = first[-1]
    assert (bucket["ts"], bucket["dur"]) == (4.0, 4.0)
    assert bucket["args"] == {
        "pass": 1,
        "bucket": 0,
        "parameters": ["weight"],
        "bytes": 68,
        "ready": 3.0,
        "launched": 4.0,
        "done": 8.0,
    }
