"""No optimizer steps with what passes under no_sync have left: whole gradients of one rank.

Beside the rows that a rank owns they would be an error in most optimizers; a fused one goes by the
number of the parameter's elements and takes the wrong ones, without a word.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import TYPE_CHECKING

from libddp.distributed.fsdp import _optimizer_steps
from libddp.errors import StateError

if TYPE_CHECKING:
    from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule

#: Of models that have been under no_sync.
_watched: weakref.WeakSet[WrappedModule] = weakref.WeakSet()


def watch(wrapped: WrappedModule) -> None:
    """From now on each optimizer's step asks the model of `wrapped`, in C++, for such gradients."""
    _watched.add(wrapped)
    _watch_steps()


@cache
def _watch_steps() -> None:
    _optimizer_steps.watch(_check, before_closures=False)  # the averaging pass may be in them


def _check(optimizer) -> None:
    for wrapped in _watched:
        if wrapped.model is not None and wrapped.model.shows_larger_gradients():
            _refuse(wrapped, optimizer)


def _refuse(wrapped: WrappedModule, optimizer) -> None:
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for each in wrapped.all_wrapped or [wrapped]:
        waiting = each.made.waiting()
        for name, parameter in each.parameters:
            if id(parameter) not in own or name not in waiting:
                continue
            raise StateError(
                f"libddp fsdp: unit {each.name!r}: the gradient of {name!r} is that of this rank, "
                "from a pass under no_sync, and no pass has averaged it. Hint: run the last "
                "backward pass before a step outside of no_sync, or call zero_grad()."
            )
