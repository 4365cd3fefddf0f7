"""The optimizers of sharded parameters, whose states are of the rows that a rank owns.

    watch()                       # when parameters are sharded
    forget_states(parameters)     # when the rank gets other rows

torch has no list of optimizers. Those that have stepped are known by a hook; where some parameter
has none of these, the collector's objects are looked through, which takes a tenth of a second.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from functools import cache

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


@cache
def watch() -> None:
    """From now on optimizers are known by their steps."""
    register_optimizer_step_pre_hook(_note)


def _note(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    if optimizer not in _seen:
        _seen.add(optimizer)


def forget_states(parameters: Iterable[torch.Tensor]) -> None:
    """Optimizers have no state of these parameters any more, as new ones have none."""
    parameters = list(parameters)
    trained = {id(p) for p in parameters if p.requires_grad}
    optimizers = set(_seen)
    held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    if not trained <= held:
        optimizers.update(_all_there_are())
    known = {id(parameter) for parameter in parameters}
    for optimizer in optimizers:
        state = vars(optimizer).get("state", {})  # of one that wraps another: that one's
        for parameter in [p for p in state if id(p) in known]:
            del state[parameter]


def _all_there_are() -> list[torch.optim.Optimizer]:
    classes = _with_subclasses(torch.optim.Optimizer)
    return [each for each in gc.get_objects() if type(each) in classes]


def _with_subclasses(base: type) -> set[type]:
    return {base}.union(*(_with_subclasses(each) for each in base.__subclasses__()))
