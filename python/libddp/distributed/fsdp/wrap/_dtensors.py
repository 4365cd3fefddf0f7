"""DTensors and what this rank has of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from libddp.distributed.fsdp.wrap import _placement


def local_of(tensor: Any) -> Any:
    """What this rank has of a DTensor, in the same memory; others as they are."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_dtensor(tensor: Any) -> bool:
    return isinstance(tensor, DTensor)


def like(parameter: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor of `local`, placed as `parameter` is."""
    spec = _placement.with_dtype(parameter._spec, local.dtype)
    return DTensor(local, spec, requires_grad=False)
