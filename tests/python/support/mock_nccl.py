"""The NCCL that is none of tests/fakegpu: what tests want of it, and ask it afterwards.

    import mock_nccl

    mock_nccl.install()                        # libddp reduces the fake device's tensors by it
    mock_nccl.fail("all_reduce", nth_call=3, result=mock_nccl.SYSTEM_ERROR)
    ...
    assert mock_nccl.live().communicators == 0

tests/fakegpu/mock_nccl.h describes the functions, which have these names there.
"""

from __future__ import annotations

from typing import NamedTuple

import fakegpu

UNHANDLED_CUDA_ERROR = 1
SYSTEM_ERROR = 2
INTERNAL_ERROR = 3
INVALID_ARGUMENT = 4
INVALID_USAGE = 5
REMOTE_ERROR = 6


class Issued(NamedTuple):
    """One call of an operation."""

    function: str
    rank: int
    communicator: int
    operation: int
    stream: int
    count: int
    peer: int


class Live(NamedTuple):
    """What has not been given back in this process."""

    communicators: int
    memory: int
    registrations: int
    reductions: int


def install() -> None:
    """libddp uses it from now on."""
    fakegpu.load().mock_nccl_install()


def reset() -> None:
    """Forgets what was asked for, counts and the list of operations."""
    fakegpu.load().mock_nccl_reset()


def fail(function: str, nth_call: int, result: int, rank: int = -1) -> None:
    """The nth call of a function gives `result`."""
    fakegpu.load().mock_nccl_fail(function.encode(), nth_call, result, rank)


def hang(nth_operation: int, rank: int = -1) -> None:
    """The nth operation never ends by itself."""
    fakegpu.load().mock_nccl_hang(nth_operation, rank)


def hang_init(rank: int = -1) -> None:
    """Making a communicator does not come back."""
    fakegpu.load().mock_nccl_hang_init(rank)


def fail_async(nth_operation: int, result: int, rank: int = -1) -> None:
    """The communicator's asynchronous error from the nth operation on."""
    fakegpu.load().mock_nccl_fail_async(nth_operation, result, rank)


def delay(milliseconds: int) -> None:
    """Each operation takes that much longer."""
    fakegpu.load().mock_nccl_delay(milliseconds)


def set_version(version: int) -> None:
    """From the next install on."""
    fakegpu.load().mock_nccl_set_version(version)


def calls(function: str, rank: int = -1) -> int:
    """Calls of a function since the reset."""
    return fakegpu.load().mock_nccl_calls(function.encode(), rank)


def issued() -> list[Issued]:
    """All calls of operations since the reset, in their order."""
    lines = fakegpu.load().mock_nccl_issued().decode().splitlines()
    return [Issued(name, *map(int, numbers)) for name, *numbers in map(str.split, lines)]


def live() -> Live:
    """What has not been given back."""
    return Live(*map(int, fakegpu.load().mock_nccl_live().split()))
