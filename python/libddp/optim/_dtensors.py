"""DTensors among the tensors of an optimizer: what this rank has of each is what it updates."""

from __future__ import annotations

import sys
from typing import Any

import torch


def locals_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The local tensors of DTensors, in the same memory; others as they are."""
    kind = _dtensor()
    if kind is None or not any(isinstance(tensor, kind) for tensor in tensors):
        return tensors
    return [t._local_tensor if isinstance(t, kind) else t for t in tensors]


def like(parameter: torch.Tensor, entries: dict[str, Any]) -> dict[str, Any]:
    """State of the local tensor of `parameter` as DTensors, if that is one; numbers stay."""
    kind = _dtensor()
    if kind is None or not isinstance(parameter, kind):
        return entries
    local, spec = parameter._local_tensor, parameter._spec
    return {
        key: kind(value, spec, requires_grad=False) if value.shape == local.shape else value
        for key, value in entries.items()
    }


def _dtensor() -> type | None:
    """None where nobody has imported it: then there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor
