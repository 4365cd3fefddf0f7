"""What is libddp's own in a forward, for transforms of torch.func and the package spmd_types."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

_NOTHING = nullcontext()
_transform = torch._C._functorch.peek_interpreter_stack


def unchecked() -> AbstractContextManager:
    """What runs inside is neither transformed (weights are constants there) nor checked."""
    if _transform() is not None:
        return torch._C._DisableFuncTorch()
    return _NOTHING if "spmd_types" not in sys.modules else dist._spmd_no_typecheck()
