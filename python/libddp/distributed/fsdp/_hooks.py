"""Communication hooks of FullyShardedDataParallel: a script's own way of averaging gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from libddp.distributed.fsdp import _shards
from libddp.errors import ArgumentError, StateError


def register(wrapped, state: object, hook: Callable) -> None:
    """Of `wrapped`, the outermost wrapped module, and all wrapped modules under it."""
    if not wrapped.check_is_root():
        raise StateError(
            "libddp fsdp: register_comm_hook can only be called on a root instance; "
            f"{wrapped._shard.name!r} is a part of one. Hint: call it on the outermost module."
        )
    shards = list(_shards.shards_in(wrapped))
    if not callable(hook):
        raise ArgumentError(
            f"libddp fsdp: The communication hook must be callable but got {hook!r}. "
            "Hint: pass a function (state, gradients, average)."
        )
    for shard in shards:
        if shard.hook is not None:
            raise ArgumentError(
                f"libddp fsdp: A communication hook is already registered for {shard.name!r}. "
                "Hint: register one, before training."
            )
        if shard.sharding.shard is not None and shard.sharding.replicate is not None:
            raise ArgumentError(
                "libddp fsdp: Communication hook is currently unsupported for hybrid sharding "
                "strategies, in torch too. Hint: FULL_SHARD, SHARD_GRAD_OP or NO_SHARD."
            )
    for shard in shards:
        shard.hook = partial(hook, state)
        shard.unit.reduce_by(shard.hook)
