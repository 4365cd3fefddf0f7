"""One decision of torch.amp.GradScaler for all ranks, where each has a part of the gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist


def agree(found: dict[torch.device, torch.Tensor], groups: list, device: torch.device) -> None:
    """Infinite on all ranks if on one; `found` is the scaler's own record, of one device."""
    if device not in found:
        found[device] = torch.zeros((), device=device)
    for group in groups:
        group.all_reduce(found[device], op=dist.ReduceOp.MAX)
