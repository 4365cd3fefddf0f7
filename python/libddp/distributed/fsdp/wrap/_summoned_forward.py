"""Forwards inside of summon_full_params: text that a model writes between two steps of training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.utils import _apply_to_tensors

from libddp.errors import StateError


@dataclass
class SummonedForward:
    """Parameters show copies of whole tensors, a script's own for the while."""

    #: On this rank too.
    here: bool

    def run(self, unit: str, forward, args, kwargs):
        """`forward(*args, **kwargs)` with the copies: no collective, in their own precision."""
        if not self.here:
            raise StateError(
                f"libddp fsdp: unit {unit!r}: a forward inside of summon_full_params(rank0_only="
                "True) on another rank, which has pieces only. Hint: call it on rank 0 only, or "
                "leave rank0_only out."
            )

        def refuse(gradient: torch.Tensor) -> None:
            raise StateError(
                f"libddp fsdp: unit {unit!r}: a backward pass through a forward that ran inside of "
                "summon_full_params, whose gradients would not be averaged. Hint: run the forward "
                "of a training step outside; inside under torch.no_grad()."
            )

        def guard(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.grad_fn is not None:
                tensor.register_hook(refuse)
            return tensor

        return _apply_to_tensors(guard, forward(*args, **kwargs))
