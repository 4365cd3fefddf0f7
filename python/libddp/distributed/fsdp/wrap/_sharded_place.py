"""What the registry knows of a sharded parameter that is a plain tensor, and of its gradients.

DTensors answer for themselves: torch's norms and scalers know them.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from libddp.distributed.fsdp import _registry, _whole_tensor_optimizers

if TYPE_CHECKING:
    from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule


class ShardedPlace:
    """Where a sharded parameter and its gradients lie: the registry's entry."""

    def __init__(self, wrapped: WrappedModule) -> None:
        # It has the parameter, whose entry in the registry this is.
        self._wrapped = weakref.ref(wrapped)

    def is_whole(self, wrapped: WrappedModule) -> bool:
        """Whether the parameter shows the whole tensor now."""
        return wrapped.made is None or wrapped.is_running or wrapped.summoned is not None

    def has_parts_of_values(self) -> bool:
        return self.spread() is not None

    def spread(self) -> Any:
        wrapped = self._wrapped()
        if wrapped is None or self.is_whole(wrapped):
            return None
        group = wrapped.sharding.shard
        return group if group is not None and group.size() > 1 else None

    def norm_group(self) -> Any:
        wrapped = self._wrapped()
        if wrapped is None or wrapped.root is None or self.is_whole(wrapped):
            return self.spread()
        own, outermost = wrapped.sharding, wrapped.root.sharding
        around = outermost.shard or outermost.replicate
        if own.shard is None or own.replicate is not None or around is None:
            return self.spread()
        return around if own.shard.size() < around.size() else self.spread()

    def deciding(self) -> tuple:
        wrapped = self._wrapped()
        groups = () if wrapped is None else wrapped.groups()
        return tuple(group for group in groups if group is not None and group.size() > 1)

    def own(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def register(wrapped: WrappedModule) -> None:
    """Makes the parameters of a unit known as sharded."""
    _whole_tensor_optimizers.watch()
    for _, parameter in wrapped.parameters:
        _registry.register(parameter, ShardedPlace(wrapped))
