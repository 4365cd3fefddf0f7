"""Communication hooks of FullyShardedDataParallel: a script's own way of averaging gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from libddp.distributed.fsdp.wrap._lookup import wrapped_modules_in
from libddp.errors import ArgumentError, StateError
from libddp.nn.parallel._comm_hooks import state_after


def register(model, state: object, hook: Callable) -> None:
    """Of `model`, the outermost wrapped module, and all wrapped modules under it."""
    if not model.check_is_root():
        raise StateError(
            "libddp fsdp: register_comm_hook can only be called on a root instance; "
            f"{model._wrapped.name!r} is a part of one. Hint: call it on the outermost module."
        )
    wrapped_modules = list(wrapped_modules_in(model))
    if not callable(hook):
        raise ArgumentError(
            f"libddp fsdp: The communication hook must be callable but got {hook!r}. "
            "Hint: pass a function (state, gradients, average)."
        )
    for wrapped in wrapped_modules:
        if wrapped.hook is not None:
            raise ArgumentError(
                f"libddp fsdp: A communication hook is already registered for {wrapped.name!r}. "
                "Hint: register one, before training."
            )
        if wrapped.sharding.shard is not None and wrapped.sharding.replicate is not None:
            raise ArgumentError(
                "libddp fsdp: Communication hook is currently unsupported for hybrid sharding "
                "strategies, in torch too. Hint: FULL_SHARD, SHARD_GRAD_OP or NO_SHARD."
            )
    for wrapped in wrapped_modules:
        wrapped.hook = partial(hook, state)
        wrapped.unit.reduce_by(wrapped.hook)


def after_move(hook: Callable, before, group) -> Callable:
    """A hook of `register` whose state may be, or have, the group `before`: `group` comes there."""
    return partial(hook.func, state_after(hook.args[0], before, group))
