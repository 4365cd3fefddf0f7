"""What is libddp's own in a forward that the package spmd_types checks."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist

_NOTHING = nullcontext()


def unchecked() -> AbstractContextManager:
    """What runs inside is not checked."""
    return _NOTHING if "spmd_types" not in sys.modules else dist._spmd_no_typecheck()
