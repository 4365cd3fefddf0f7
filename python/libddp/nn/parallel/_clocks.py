"""How far the monotonic clocks of the ranks are apart.

Processes of one machine share the clock; between machines the difference is measured by messages to
and fro, as in NTP: the answer of the fastest exchange is off by half its way at most.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

_NUM_EXCHANGES = 8
_NAME_BYTES = 128


def clock_name() -> str:
    """Equal for processes that share the monotonic clock: machine (since its boot), namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    try:
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return boot  # a kernel without time namespaces has one clock


def now_ns() -> int:
    """The clock of the timings."""
    return time.monotonic_ns()


def clock_offsets(group) -> list[int]:
    """A collective. On rank 0: per rank, by how much its clock is ahead, in ns; else all 0.

    Args:
        group: the C++ group.
    """
    names = _all_clock_names(group)
    return [
        0 if rank == 0 or (name and name == names[0]) else _measure(group, rank)
        for rank, name in enumerate(names)
    ]


def _all_clock_names(group) -> list[bytes]:
    own = clock_name().encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    names = torch.empty(group.size() * _NAME_BYTES, dtype=torch.uint8, device="cpu")
    group.all_gather_into(names, torch.frombuffer(bytearray(own), dtype=torch.uint8))
    parts = names.view(group.size(), _NAME_BYTES)
    return [bytes(part.tolist()).rstrip(b"\0") for part in parts]


def _measure(group, rank: int) -> int:
    """Rank 0 asks `rank` for its time; the others have no part in it."""
    message = torch.zeros(1, dtype=torch.int64, device="cpu")
    if group.rank() == rank:
        for _ in range(_NUM_EXCHANGES):
            group.recv(message, 0)
            message.fill_(now_ns())
            group.send(message, 0)
    if group.rank() != 0:
        return 0
    return min(_exchange(group, rank, message) for _ in range(_NUM_EXCHANGES))[1]


def _exchange(group, rank: int, message: torch.Tensor) -> tuple[int, int]:
    """Nanoseconds to and fro, and the difference of the clocks."""
    sent_ns = now_ns()
    group.send(message, rank)
    group.recv(message, rank)
    back_ns = now_ns()
    return back_ns - sent_ns, int(message.item()) - (sent_ns + back_ns) // 2
