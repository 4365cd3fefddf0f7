"""What fails on one rank fails on all of them, so that none waits for another in vain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from libddp.errors import ArgumentError, SnapshotError

_Result = TypeVar("_Result")
#: Before the text of such an error.
_SNAPSHOT = "\0"


def together(
    groups: Iterable[Any], what: str, function: Callable[[], _Result], of: str = "fsdp"
) -> _Result:
    """Calls `function`, and raises on every rank if it raises on any; a collective.

    Args:
        groups: C++ groups that connect the ranks, one after the other; None is passed over.
        what: "load a state dict": what could not be done.
        of: the part of libddp that says so.

    Raises:
        What `function` raised here. Where only another rank's did: SnapshotError if it was one
        (a file, about which this rank may know nothing), else ArgumentError.
    """
    error = result = None
    try:
        result = function()
    except Exception as caught:
        error = caught
    text = ""
    if error is not None and dist.is_initialized():
        text = f"rank {dist.get_rank()} could not {what}: {_text(error)}"
    if isinstance(error, SnapshotError):
        text = _SNAPSHOT + text
    for group in groups:
        if group is not None and group.size() > 1:
            text = _first_of(group, text)
    if error is not None:
        raise error
    if text.startswith(_SNAPSHOT):
        raise SnapshotError(f"libddp {of}: {text[len(_SNAPSHOT) :]}")
    if text:
        raise ArgumentError(f"libddp {of}: {text} Hint: give every rank the same.")
    return result


def _text(error: Exception) -> str:
    """In one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _first_of(group, text: str) -> str:
    """The text of the first rank that has one, on all ranks."""
    data = text.encode()
    sizes = torch.zeros(group.size(), dtype=torch.int64, device="cpu")
    sizes[group.rank()] = len(data)
    group.all_reduce(sizes, op=dist.ReduceOp.SUM)
    speakers = sizes.nonzero().flatten().tolist()
    if not speakers:
        return ""
    root = speakers[0]
    told = torch.zeros(int(sizes[root]), dtype=torch.uint8, device="cpu")
    if group.rank() == root:
        told.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    group.broadcast(told, root=root)
    return told.numpy().tobytes().decode()
