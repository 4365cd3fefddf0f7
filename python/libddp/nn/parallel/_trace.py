"""The passes of all ranks as one file for chrome://tracing and ui.perfetto.dev.

Format: the object form of the Trace Event Format. One process per rank (pid = rank), thread 0 =
forward and backward, thread 1 = communication; complete events ("X") in microseconds since the
first one of all ranks, on rank 0's clock.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict

import torch

from libddp._whole_file import write_text
from libddp.errors import ArgumentError, StateError
from libddp.nn.parallel._clocks import clock_offsets
from libddp.nn.parallel._timings import PassTimes

PRODUCER = "libddp"
COMPUTATION, COMMUNICATION = 0, 1
_ROWS = {COMPUTATION: "forward and backward", COMMUNICATION: "communication"}


def save_trace(path, passes: list[PassTimes], group) -> None:
    """A collective: rank 0 writes the passes of all ranks of the C++ `group` to `path`.

    Raises:
        StateError: no rank has a pass. ArgumentError: rank 0 cannot write. Both on every rank.
    """
    offsets = clock_offsets(group)
    records = _gather(group, _record(passes))
    failure = None
    if group.rank() == 0:
        failure = _try_to_write(path, records, offsets)
    _raise_everywhere(group, failure)


def trace(records: list[dict], offsets: list[int]) -> dict:
    """The whole file, from one record per rank; `offsets`: how much each clock is ahead."""
    events: list[dict] = []
    for rank, (record, offset) in enumerate(zip(records, offsets, strict=True)):
        events += _metadata(rank, record["host"], record["pid"])
        for number in record["passes"]:
            events += _pass_events(rank, number, offset)
    start = min((event["ts"] for event in events if event["ph"] == "X"), default=0)
    for event in events:
        _to_microseconds(event, start)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"producer": PRODUCER, "format": 1, "world_size": len(records)},
    }


def _record(passes: list[PassTimes]) -> dict:
    described = []
    for one in passes:
        spans = one.communication()
        record = asdict(one)
        for bucket, (begin_ns, end_ns) in zip(record["buckets"], spans, strict=True):
            bucket["begin_ns"], bucket["end_ns"] = begin_ns, end_ns
        described.append(record)
    return {"host": platform.node(), "pid": os.getpid(), "passes": described}


def _metadata(rank: int, host: str, pid: int) -> list[dict]:
    def named(kind: str, tid: int, **args) -> dict:
        return {"ph": "M", "name": kind, "pid": rank, "tid": tid, "args": args}

    return [
        named("process_name", 0, name=f"rank {rank} ({host}, pid {pid})"),
        named("process_sort_index", 0, sort_index=rank),
        *(named("thread_name", tid, name=name) for tid, name in _ROWS.items()),
        *(named("thread_sort_index", tid, sort_index=tid) for tid in _ROWS),
    ]


def _pass_events(rank: int, one: dict, offset: int) -> list[dict]:
    """Times still in nanoseconds."""

    def event(name: str, tid: int, begin: int, end: int, **args) -> dict:
        return {
            "ph": "X",
            "name": name,
            "cat": "communication" if tid == COMMUNICATION else "computation",
            "pid": rank,
            "tid": tid,
            "ts": begin - offset,
            "dur": end - begin,
            "args": {"pass": one["number"], **args},
        }

    events = []
    if one["forward_begin_ns"] is not None:
        events.append(event("forward", COMPUTATION, one["forward_begin_ns"], one["forward_end_ns"]))
    backward_end = one["backward_end_ns"]
    events.append(event("backward", COMPUTATION, one["backward_begin_ns"], backward_end))
    events.append(event("wait", COMPUTATION, backward_end, one["pass_end_ns"]))
    for bucket in one["buckets"]:
        known = {} if bucket["done_ns"] is None else {"done": bucket["done_ns"] - offset}
        events.append(
            event(
                f"bucket {bucket['index']}",
                COMMUNICATION,
                bucket["begin_ns"],
                bucket["end_ns"],
                bucket=bucket["index"],
                parameters=list(bucket["parameters"]),
                bytes=bucket["bytes"],
                ready=bucket["ready_ns"] - offset,
                launched=bucket["launched_ns"] - offset,
                **known,
            )
        )
    return events


def _to_microseconds(event: dict, start: int) -> None:
    if event["ph"] != "X":
        return
    event["ts"] = (event["ts"] - start) / 1000
    event["dur"] /= 1000
    for name in ("ready", "launched", "done"):
        if name in event["args"]:
            event["args"][name] = (event["args"][name] - start) / 1000


def _try_to_write(path, records: list[dict], offsets: list[int]) -> Exception | None:
    """What went wrong, as an error for every rank; None where the file is there."""
    if not any(record["passes"] for record in records):
        return StateError(
            "libddp: save_trace: no backward pass has synchronised yet, so there is nothing to "
            "show. Hint: call it after a training step."
        )
    try:
        write_text(path, json.dumps(trace(records, offsets)))
    except (OSError, TypeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return ArgumentError(
            f"libddp: save_trace: rank 0 cannot write {str(path)!r}: {reason}. "
            "Hint: pass a file in a folder that exists and that rank 0 may write to."
        )
    return None


def _gather(group, record: dict) -> list[dict]:
    """One record per rank on rank 0; elsewhere an empty list."""
    own = _as_tensor(bytearray(json.dumps(record).encode()))
    sizes = torch.empty(group.size(), dtype=torch.int64, device="cpu")
    group.all_gather_into(sizes, torch.tensor([own.numel()], device="cpu"))
    parts = [bytearray(size) for size in sizes.tolist()] if group.rank() == 0 else []
    group.gather([_as_tensor(part) for part in parts], own, 0)
    return [json.loads(part) for part in parts]


def _as_tensor(data: bytearray) -> torch.Tensor:
    """The same bytes, without a copy; at least one."""
    return torch.frombuffer(data, dtype=torch.uint8)


def _raise_everywhere(group, failure: Exception | None) -> None:
    """Every rank raises rank 0's error, if there is one."""
    text = bytearray(str(failure or "").encode())
    head = torch.tensor([len(text), int(isinstance(failure, StateError))], device="cpu")
    group.broadcast(head, 0)
    size, is_state = head.tolist()
    if size == 0:
        return
    if group.rank() != 0:
        text = bytearray(size)
    group.broadcast(_as_tensor(text), 0)
    raise StateError(text.decode()) if is_state else ArgumentError(text.decode())
