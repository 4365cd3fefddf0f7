"""Groups of other libraries that a model is given; its wrapper runs over them."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch.distributed as dist

from libddp._load import load
from libddp.distributed._from_c10d import from_c10d
from libddp.distributed._groups import find

_C = load()


def take_over(process_group: Any, user: str) -> _C.ProcessGroup:
    """The C++ group of whatever group it is; says so once where it is another library's.

    Args:
        process_group: of torch.distributed, a C++ group, or None for the default group.
        user: what is to run over it, for the warning.

    Raises:
        ArgumentError: this is no group, or one that this rank is not in.
        StateError: there is no default group.
    """
    found = find(process_group)
    if found is not None:
        return found
    group = from_c10d(process_group)
    given = dist.group.WORLD if process_group is None else process_group
    # A class of its own is there for its own sake.
    if type(given) is dist.ProcessGroup and group.rank() == 0:
        warnings.warn(
            f"libddp: {user} communicates over the backend {given.name()!r} of the process group. "
            "Hint: libddp.distributed.init_process_group() makes groups that share memory between "
            "the ranks of a host.",
            stacklevel=_level_of_caller(),
        )
    return group


def _level_of_caller() -> int:
    """A stacklevel for whoever calls this: the first frame that is not libddp's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("libddp."):
        level, frame = level + 1, frame.f_back
    return level
