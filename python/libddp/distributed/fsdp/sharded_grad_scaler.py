"""torch's ShardedGradScaler, which asks all ranks of a group whether a gradient overflowed."""

from __future__ import annotations

import torch
import torch.distributed.fsdp.sharded_grad_scaler as torchs

import libddp.distributed as dist

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torchs.ShardedGradScaler):
    """For optimizers with fused=True too.

    torch's own (2.11 to 2.15) fails in their step after `unscale_`, where its flag has another
    shape than theirs, or counts ranks where they look for a 1; without `unscale_` it asks nobody,
    so that ranks skip different steps.

    Example:
        >>> from libddp.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
        >>> ShardedGradScaler(enabled=False).is_enabled()
        False
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        if not self._enabled:
            return
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for device, value in found.items():
            found[device] = value.clamp_(max=1).reshape(())

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer):
        """Of an optimizer that unscales by itself."""
        found = super()._check_inf_per_device(optimizer)
        for value in found.values():
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.process_group)
        return found
