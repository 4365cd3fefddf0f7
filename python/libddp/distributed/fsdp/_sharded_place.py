"""What the registry knows of a sharded parameter that is a plain tensor, and of its gradients.

DTensors answer for themselves: torch's norms and scalers know them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from libddp.distributed.fsdp import _registry, _whole_tensor_optimizers
from libddp.distributed.fsdp._shards import Shard


class ShardedPlace:
    """Where a sharded parameter and its gradients lie: the registry's entry."""

    def __init__(self, shard: Shard) -> None:
        # The shard has the parameter, whose entry in the registry this is.
        self._shard = weakref.ref(shard)

    def is_whole(self, shard: Shard) -> bool:
        """Whether the parameter shows the whole tensor now."""
        return shard.made is None or shard.is_running or shard.summoned is not None

    def has_parts_of_values(self) -> bool:
        return self.spread() is not None

    def spread(self) -> Any:
        shard = self._shard()
        if shard is None or self.is_whole(shard):
            return None
        group = shard.sharding.shard
        return group if group is not None and group.size() > 1 else None

    def deciding(self) -> tuple:
        shard = self._shard()
        groups = () if shard is None else shard.groups()
        return tuple(group for group in groups if group is not None and group.size() > 1)

    def own(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def register(shard: Shard) -> None:
    """Makes the parameters of a unit known as sharded."""
    _whole_tensor_optimizers.watch()
    for _, parameter in shard.parameters:
        _registry.register(parameter, ShardedPlace(shard))
