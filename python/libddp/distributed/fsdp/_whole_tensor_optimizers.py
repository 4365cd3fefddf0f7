"""A word to scripts whose optimizer looks at whole tensors where each rank has rows of them.

Elementwise optimizers do not care. Those that compute something from a whole parameter or gradient
(a norm, a factorisation, an orthogonalisation, a line search) get another result from rows. Under
fully_shard they see DTensors, whose operations are those of the whole tensor.
"""

from __future__ import annotations

import warnings
import weakref
from functools import cache

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from libddp.distributed.fsdp import _registry

#: Classes of torch and of well-known packages, in small letters.
_NAMES = {
    "adafactor",
    "adago",
    "adam_mini",
    "adammini",
    "adamp",
    "adamuon",
    "apollo",
    "apolloadamw",
    "distributedshampoo",
    "foreachmuon",
    "foreachpsgdkron",
    "foreachsoap",
    "galoreadafactor",
    "galoreadamw",
    "kron",
    "lamb",
    "lars",
    "lbfgs",
    "muon",
    "muonclip",
    "nero",
    "normuon",
    "novograd",
    "psgdkron",
    "scion",
    "scionlight",
    "sgdp",
    "shampoo",
    "sm3",
    "soap",
    "stablespam",
}
#: Optimizers that have been looked at.
_seen: weakref.WeakSet = weakref.WeakSet()


@cache
def watch() -> None:
    """From now on the first step of each such optimizer is looked at."""
    register_optimizer_step_pre_hook(_look)


def _look(optimizer, args, kwargs) -> None:
    if optimizer in _seen:
        return
    _seen.add(optimizer)
    kinds = {kind.__name__.lower() for kind in type(optimizer).__mro__}
    if kinds.isdisjoint(_NAMES):
        return
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    if any(_registry.spread_of(p) is not None for p in parameters):
        _say(type(optimizer).__name__)


@cache
def _say(name: str) -> None:
    if dist.get_rank() == 0:
        warnings.warn(
            f"libddp fsdp: {name} computes with whole tensors, and each rank has rows of the "
            "sharded parameters, so its steps are not those of one process, and it may raise an "
            "error of its own where a rank has no row. Hint: shard with "
            "fully_shard, whose parameters are DTensors, or use an optimizer that works element "
            "by element.",
            # Of this module: what stands around the step, a scheduler say, has its warnings ignored
            # by some trainers.
            stacklevel=1,
        )
