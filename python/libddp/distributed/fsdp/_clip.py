"""Gradient norms over the whole model, also where a script calls torch's clip_grad_norm_.

torch computes the norm of the tensors that it is given; pieces of sharded gradients have only their
part of it. Once something is sharded, the one function of torch that computes norms looks for such
pieces and adds the other ranks' parts; gradients that are not sharded go the old way. The gradients
of a model with a sharded optimizer (ZeRO-1) are whole tensors of which this rank's part counts.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.utils.clip_grad as torchs

from libddp.distributed.fsdp._shards import Shard

_shards: weakref.WeakSet[Shard] = weakref.WeakSet()
#: With `group` and gradient_parts(ids) -> {id of a gradient: what this rank has of it}.
_sources: weakref.WeakSet = weakref.WeakSet()


def watch(shard: Shard) -> None:
    """Norms that include gradients of `shard` are those of the whole model from now on."""
    _shards.add(shard)
    _patch_torch()


def watch_parts(source) -> None:
    """The same for an optimizer whose work is shared."""
    _sources.add(source)
    _patch_torch()


def _patch_torch() -> None:
    if not hasattr(torchs._get_total_norm, "_libddp"):
        torchs._get_total_norm = _over_all_ranks(torchs._get_total_norm)
        torchs.get_total_norm = torchs._get_total_norm
        torch.nn.utils.get_total_norm = torchs._get_total_norm


def _owners() -> dict[int, object]:
    """Address of a block of gradients -> the group that its shards are spread over."""
    return {
        block.untyped_storage().data_ptr(): shard.sharding.shard
        for shard in list(_shards)
        if shard.sharding.shard is not None and shard.sharding.shard.size() > 1
        if shard.made is not None
        for block in shard.made.gradient_blocks()
    }


def _parts(tensors: list[torch.Tensor]) -> dict[int, tuple[object, torch.Tensor]]:
    """id of a gradient -> the group of its ranks, and this rank's part."""
    ids = {id(tensor) for tensor in tensors}
    return {
        key: (source.group, part)
        for source in list(_sources)
        if source.group.size() > 1
        for key, part in source.gradient_parts(ids).items()
    }


def _over_all_ranks(original):
    @functools.wraps(original)
    @torch.no_grad()
    def total_norm(tensors, norm_type=2.0, error_if_nonfinite=False, foreach=None):
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        owners, own_parts = _owners(), _parts(tensors)
        parts: dict[object, list[torch.Tensor]] = {}
        for tensor in tensors:
            group = None
            if id(tensor) in own_parts:
                group, tensor = own_parts[id(tensor)]
            elif tensor.layout == torch.strided and type(tensor) is torch.Tensor:
                group = owners.get(tensor.untyped_storage().data_ptr())
            parts.setdefault(group, []).append(tensor)
        if set(parts) <= {None}:
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        norm_type = float(norm_type)
        norms = [
            _across(original(_filled(part), norm_type, False, foreach), norm_type, group)
            for group, part in parts.items()
        ]
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        if error_if_nonfinite and not math.isfinite(total.item()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients is non-finite, so it cannot "
                "be clipped. To disable this error, set `error_if_nonfinite=False`"
            )
        return total

    total_norm._libddp = True
    return total_norm


def _filled(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Without empty ones, of which there is no largest element."""
    return [tensor for tensor in tensors if tensor.numel() > 0]


def _across(norm: torch.Tensor, norm_type: float, group) -> torch.Tensor:
    """The norm of what all ranks of `group` have together, from each rank's own."""
    if group is None:
        return norm
    if math.isinf(norm_type):
        group.all_reduce(norm, op=dist.ReduceOp.MAX)
        return norm
    power = norm.double().pow(norm_type)
    group.all_reduce(power, op=dist.ReduceOp.SUM)
    return power.pow(1.0 / norm_type).to(norm.dtype)


def clip_grad_norm(
    parameters: Iterable[torch.nn.Parameter], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scales the gradients of a whole model to at most `max_norm`; returns the norm before."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
