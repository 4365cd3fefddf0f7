"""torch.amp.GradScaler where each rank has a part of the gradients: one decision for all ranks.

The scaler skips a step, and lowers its scale, where a gradient has overflowed. Which ranks it asks
follows from the optimizer's parameters, so a rank that has no gradients takes part too.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from libddp.distributed.fsdp import _registry


def watch() -> None:
    """Scalers respect sharded parameters from now on."""
    scaler = torch.amp.GradScaler
    if not hasattr(scaler._unscale_grads_, "_libddp"):
        scaler._unscale_grads_ = _on_all_ranks(scaler._unscale_grads_)


def _on_all_ranks(original):
    @functools.wraps(original)
    def unscale(self, optimizer, *args, **kwargs):
        found = original(self, optimizer, *args, **kwargs)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        groups = _registry.deciding(parameters)
        if groups:
            _agree(found, groups)
        return found

    unscale._libddp = True
    return unscale


def _agree(found: dict[torch.device, torch.Tensor], groups: list) -> None:
    """Infinite on all ranks if on one; `found` is the scaler's own record."""
    device = torch.device("cpu")
    if device not in found:
        found[device] = torch.zeros((), device="cpu")
    for group in groups:
        group.all_reduce(found[device], op=dist.ReduceOp.MAX)
