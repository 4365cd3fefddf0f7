"""reset_iter_state: what passes without synchronisation have left is not averaged any more.

C++ lets go of such sums as FullyShardedDataParallel does, once `.grad` has shown them and a script
has cleared it. So here they are shown by the next forward, which makes each unit whole and ends
that, and cleared behind it: no collective beside its own.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch

from libddp.distributed.fsdp.wrap import _gradient_sync
from libddp.errors import StateError

if TYPE_CHECKING:
    from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule


def begin(root: WrappedModule) -> None:
    """Gradients of all units go, and what waits goes with the next forward."""
    for wrapped in root.all_wrapped:
        wrapped.let_go()
        _clear(wrapped)
    if any(wrapped.sharding.num_shards == 1 for wrapped in root.all_wrapped):
        _average(root)
    for wrapped in [each for each in root.all_wrapped if _has_waiting(each)]:
        wrapped.discards = root.discards = True
        wrapped.unit.show_waiting(True)
        wrapped.unit.reduce_by(partial(_refuse_pass, weakref.proxy(wrapped)))


def finish(root: WrappedModule) -> None:
    """Behind a forward.

    Raises:
        StateError: it has left out a unit of which something waits.
    """
    discarding = [wrapped for wrapped in root.all_wrapped if wrapped.discards]
    root.discards = False
    for wrapped in discarding:
        _clear(wrapped)
        wrapped.discards = False
        wrapped.unit.show_waiting(wrapped.sharding.shows_waiting)
        wrapped.unit.reduce_by(wrapped.hook)
    for wrapped in discarding:
        if _has_waiting(wrapped):
            begin(root)
            _refuse_forward(wrapped)


def _clear(wrapped: WrappedModule) -> None:
    for _, parameter in wrapped.parameters:
        parameter.grad = None
    for param in wrapped.params:
        param.unsharded.grad = None


def _has_waiting(wrapped: WrappedModule) -> bool:
    """Of units whose `.grad` does not show it; the others' are cleared."""
    wrapped.unit.show_waiting(True)
    found = wrapped.model.shows_larger_gradients()
    wrapped.unit.show_waiting(wrapped.sharding.shows_waiting)
    return found


def _average(root: WrappedModule) -> None:
    """Of units that are not cut a forward shows nothing: the sums are averaged, and cleared."""
    for wrapped in root.all_wrapped:
        for name, parameter in wrapped.parameters:
            if parameter._post_accumulate_grad_hooks:
                raise StateError(
                    f"libddp fsdp: reset_iter_state: parameter {name!r} of unit {wrapped.name!r} "
                    "is not cut, and its hooks would run once more. Hint: remove them for the call."
                )
    for wrapped in root.all_wrapped:
        wrapped.unit.set_sync(True)
    root.model.syncs = True
    try:
        root.model.average_waiting()
    finally:
        _gradient_sync.settle(root)
    for wrapped in root.all_wrapped:
        _clear(wrapped)


def _refuse_pass(wrapped: WrappedModule, *gradients: torch.Tensor) -> NoReturn:
    raise StateError(
        f"libddp fsdp: unit {wrapped.name!r}: a backward pass after reset_iter_state() through a "
        "forward from before. Hint: run the forward again."
    )


def _refuse_forward(wrapped: WrappedModule) -> NoReturn:
    raise StateError(
        f"libddp fsdp: reset_iter_state: unit {wrapped.name!r} has sums of passes without "
        "synchronisation, and the forward after the call has not used it. Hint: run the whole "
        "model next."
    )
