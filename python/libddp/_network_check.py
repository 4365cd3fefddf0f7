"""One host's part of `libddp run --network-check`: how fast it computes, and its network.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... python -m libddp._network_check      # one process per host

Prints one line of JSON: seconds of a matmul (the slowest device of the host, or its CPU), seconds
of an all-reduce of all hosts, and MB/s with each other host, two at a time, both directions. A host
that is slow by itself is slow with everybody; a whole all-reduce is as slow as its slowest member
and names nobody. _hosts.py starts it and judges.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist

MATMUL_ROWS, MATMUL_ROWS_ON_DEVICE = 1024, 8192
REDUCED_NUMEL = 4 << 20
SENT_NUMEL = 2 << 20
REPEATS = 3


def matmul_seconds() -> float:
    """The best of some, on the slowest device."""
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None or not accelerator.is_available():
        return _matmul_seconds(torch.device("cpu"), MATMUL_ROWS, lambda: None)
    kind = accelerator.current_accelerator().type
    devices = [torch.device(kind, index) for index in range(accelerator.device_count())]
    return max(
        _matmul_seconds(device, MATMUL_ROWS_ON_DEVICE, lambda d=device: accelerator.synchronize(d))
        for device in devices
    )


def _matmul_seconds(device: torch.device, rows: int, synchronize) -> float:
    x = torch.ones(rows, rows, device=device)
    return best(lambda: (x @ x, synchronize()), REPEATS + 2)


def best(function, repeats: int) -> float:
    """Seconds of the fastest call."""
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        found.append(time.perf_counter() - begin)
    return min(found)


def rounds(hosts: int) -> list[list[tuple[int, int]]]:
    """Pairs that can talk at the same time, until each host has met all others."""
    seats = [*range(hosts), *([-1] if hosts % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([tuple(sorted(pair)) for pair in pairs if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def exchange(other: int) -> float:
    """MB/s that go in each direction at the same time."""
    out, into = (torch.zeros(SENT_NUMEL, device="cpu") for _ in range(2))

    def once() -> None:
        for work in (dist.isend(out, other), dist.irecv(into, other)):
            work.wait()

    return out.nbytes / best(once, REPEATS) / 1e6


def measure() -> dict:
    """All of it; every host calls it."""
    rank, hosts = dist.get_rank(), dist.get_world_size()
    facts = {"matmul_s": matmul_seconds(), "all_reduce_s": 0.0, "links_mb_s": {}}
    if hosts == 1:
        return facts
    tensor = torch.ones(REDUCED_NUMEL, device="cpu")
    dist.barrier()
    facts["all_reduce_s"] = best(lambda: dist.all_reduce(tensor), REPEATS)
    for pairs in rounds(hosts):
        dist.barrier()
        for pair in pairs:
            if rank in pair:
                other = pair[1 - pair.index(rank)]
                facts["links_mb_s"][other] = exchange(other)
    dist.barrier()
    return facts


if __name__ == "__main__":
    dist.init_process_group("cpu:libddp")
    _facts = measure()
    dist.destroy_process_group()
    print(json.dumps(_facts), file=sys.stdout, flush=True)
    os._exit(0)  # what a device's library does at the end is not measured
