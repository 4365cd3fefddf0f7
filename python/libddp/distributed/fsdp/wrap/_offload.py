"""Optimizers step when no copy of offloaded parameters is under way any more.

After a backward pass none is. After a forward with gradients whose backward has not run, some may
be: the device would read what the step has half written.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import TYPE_CHECKING

from libddp.distributed.fsdp import _optimizer_steps

if TYPE_CHECKING:
    from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule

#: Roots of models with offloaded parameters.
_watched: weakref.WeakSet[WrappedModule] = weakref.WeakSet()


def watch(root: WrappedModule) -> None:
    """From now on each optimizer's step waits for the copies of this model."""
    _watched.add(root)
    _watch_steps()


@cache
def _watch_steps() -> None:
    _optimizer_steps.watch(_finish, before_closures=True)


def _finish(optimizer) -> None:
    for root in _watched:
        if root.model is not None:
            root.model.finish_copies()
