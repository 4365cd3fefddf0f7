"""Sharded models that go on in another process group, with the same parameter objects.

Newcomers of the new group construct the model meanwhile, so what they do there is repeated here in
its order: the groups of each wrapped module, its values where these are taken from rank 0, its
unit. The rows of other ranks went with the group before; so values are NaN afterwards, which
nobody takes for a state that was loaded, and optimizers have none of these parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from libddp.distributed.fsdp.wrap import _optimizers, _process_groups
from libddp.distributed.fsdp.wrap._lookup import wrapped_modules_in
from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule
from libddp.errors import ArgumentError, StateError


@dataclass
class Step:
    """Of the construction of a model, in its place among the others."""

    number: int
    repeat: Callable[[], None]


def rejoin(module: torch.nn.Module, steps: Callable[[WrappedModule], list[Step]]) -> None:
    """Repeats the steps of all wrapped modules in `module`; a collective.

    Args:
        module: the outermost wrapped one.
        steps: of one wrapped module, once it may rejoin; the last one ends in its `join_group`.

    Raises:
        StateError: it is a part of a wrapped model.
        ArgumentError: a parameter that cannot go on; says which.
    """
    wrapped_modules = list(wrapped_modules_in(module))
    for wrapped in wrapped_modules:
        _refuse(wrapped, module)
    meshes = [wrapped.sharding.mesh for wrapped in wrapped_modules]
    all_steps = [step for wrapped in wrapped_modules for step in steps(wrapped)]
    for wrapped in wrapped_modules:
        wrapped.leave_model()
    _optimizers.forget_states(p for wrapped in wrapped_modules for _, p in wrapped.parameters)
    for step in sorted(all_steps, key=lambda step: step.number):
        step.repeat()
    for mesh in meshes:
        _process_groups.forget_lost_groups(mesh)


def _refuse(wrapped: WrappedModule, module: torch.nn.Module) -> None:
    if module in wrapped.modules and wrapped.model is not None and not wrapped.is_root:
        raise StateError(
            f"libddp fsdp: rejoin(): {wrapped.name!r} is a part of a sharded model. Hint: call it "
            "on the outermost wrapped module."
        )
    if wrapped.beside:
        raise ArgumentError(
            f"libddp fsdp: rejoin(): unit {wrapped.name!r} has parameters that are sharded over "
            "other groups, which cannot go on. Hint: build the model anew."
        )
    for param in wrapped.params:
        if param.inner is None and param.extension is None:
            continue
        why = "tensor parallelism" if param.inner is not None else "an all-gather of its own"
        raise ArgumentError(
            f"libddp fsdp: rejoin(): unit {wrapped.name!r}: parameter {param.name!r} has {why}, "
            "which cannot go on in another group. Hint: build the model anew."
        )
