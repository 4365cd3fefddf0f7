"""torch.distributed.distributed_c10d's names, for scripts that reach into it."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed.distributed_c10d as _torch
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store

from libddp.distributed import *  # noqa: F403
from libddp.distributed._groups import find
from libddp.distributed._init import _checked_timeout

__all__ = ["_get_default_group", "_get_default_store", "_set_pg_timeout"]


def _set_pg_timeout(timeout: timedelta, group=None) -> None:
    """Sets the default deadline of a group's operations."""
    native = find(group)
    if native is None:
        _torch._set_pg_timeout(timeout, group)
    else:
        native.timeout = _checked_timeout(timeout)


def __getattr__(name: str):
    return getattr(_torch, name)
