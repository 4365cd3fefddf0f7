"""Makes torch.amp.GradScaler decide for all ranks where each has a part of the gradients.

Replaces `_unscale_grads_`, in which the scaler looks for gradients that have overflowed: it skips
a step, and lowers its scale, for one. A rank that did so alone would have other weights from then
on, and the scaler has no hook there. Which ranks it asks follows from the optimizer's parameters,
so a rank that has no gradients takes part too. Where gradients are in the host's memory and the
loss on a device (CPU offload), torch copies the scale to the host without waiting for the copy and
reads it at once; here it waits. The first model that is sharded into plain tensors asks for it, or
the first optimizer with shard_gradients; it stays for good.
"""

from __future__ import annotations

import functools

import torch

from libddp._torch_patches.replacing import SHARDING


@functools.cache
def put() -> None:
    """Once."""
    scaler = torch.amp.GradScaler
    SHARDING.put(scaler, "_unscale_grads_", _on_all_ranks(scaler._unscale_grads_))


def _on_all_ranks(original):
    from libddp.distributed.fsdp import _registry, _scaler

    @functools.wraps(original)
    def unscale(self, optimizer, inv_scale, found_inf, *args, **kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p.is_cpu for p in parameters):
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        found = original(self, optimizer, inv_scale, found_inf, *args, **kwargs)
        groups = _registry.deciding(parameters)
        if groups:
            _scaler.agree(found, groups, parameters[0].device)
        return found

    return unscale
