"""Sharding anew what is sharded already: in another dtype, in another precision, or a copy of it.

Parameters stay the same objects. Whole tensors are there meanwhile, so this takes the memory of an
unsharded model; it is a collective of all ranks of the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.distributed.fsdp import MixedPrecision

from libddp.distributed.fsdp import _shards
from libddp.distributed.fsdp._pieces import pieces_of_shard
from libddp.distributed.fsdp._state_dict import summoned
from libddp.errors import StateError

#: Modules whose parameters are being changed as a whole.
_changing: set[int] = set()


def converts(shard: _shards.Shard, function: Callable) -> bool:
    """Whether nn.Module._apply with this function gives the parameters another dtype."""
    dtypes = {p.dtype for each in _shards.shards_in(shard.module) for _, p in each.parameters}
    return any(
        function(torch.empty(0, dtype=dtype, device="cpu")).dtype != dtype for dtype in dtypes
    )


def is_changing(shard: _shards.Shard) -> bool:
    """Whether `again` runs for a model that it is part of."""
    return id(shard) in _changing


def again(root: _shards.Shard, change: Callable[[], object]) -> None:
    """Calls `change` while parameters show whole tensors, to which it may give another dtype.

    Gradients stay, in the dtypes that `change` leaves them with.
    """
    shards = list(_shards.shards_in(root.module))
    _refuse(root, shards)
    model = _shards.model_of(root)
    units = [shard.unit for shard in shards]
    model.show_copies(units, with_gradients=True, here=True)
    _changing.update(id(shard) for shard in shards)
    try:
        change()
    except BaseException:
        model.end_copies(units, False)
        raise
    finally:
        _changing.difference_update(id(shard) for shard in shards)
    gradients = _without_gradients(shards)
    for shard in shards:
        shard.made = shard.model = None
        shard.is_root, shard.all_shards = False, []
    del model, units
    for shard in shards:
        shard.make()
        _give_back(shard, gradients)


def _refuse(root: _shards.Shard, shards: list[_shards.Shard]) -> None:
    name = type(root.module).__name__
    if any(shard.summoned or shard.is_running for shard in shards):
        raise StateError(
            f"libddp fsdp: {name} cannot be converted while its parameters are whole. Hint: do it "
            "outside of summon_full_params and of forward."
        )
    if root.model is not None and not root.is_root:
        raise StateError(
            f"libddp fsdp: {name} is a part of a sharded model that is in use and cannot be "
            "converted alone. Hint: convert the whole model, or this part before its first forward."
        )


def _without_gradients(shards: list[_shards.Shard]) -> dict[int, torch.Tensor]:
    found = {}
    for shard in shards:
        for _, parameter in shard.parameters:
            if parameter.grad is not None:
                found[id(parameter)] = parameter.grad
                parameter.grad = None
    return found


def _give_back(shard: _shards.Shard, gradients: dict[int, torch.Tensor]) -> None:
    pieces = pieces_of_shard(shard)
    for _, parameter in shard.parameters:
        if id(parameter) in gradients:
            whole = gradients[id(parameter)].to(parameter.dtype)
            parameter.grad = pieces[id(parameter)].cut(whole)


@dataclass
class Precisions:
    """Of a module that FSDP_USE_FULL_PREC_IN_EVAL=1 lets compute in full precision after eval()."""

    low: _shards.Sharding
    full: _shards.Sharding
    is_full: bool = False

    @staticmethod
    def of(sharding: _shards.Sharding, precision: MixedPrecision) -> Precisions | None:
        """None without the variable, or where nothing is in another precision."""
        dtypes = (precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype)
        if os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") != "1" or not any(dtypes):
            return None
        low = {"param_dtype": None, "reduce_dtype": None, "keep_low_gradients": False}
        return Precisions(
            sharding, replace(sharding, **low, cast_inputs=False, cast_root_inputs=False)
        )

    def __deepcopy__(self, memo) -> Precisions:
        return replace(self)


def choose_precision(root: torch.nn.Module, wrapped: list) -> None:
    """Before a forward: shards a model anew whose mode has changed. Only the outermost one does."""
    shard, want_full = root._shard, not root.training
    is_part = shard.model is not None and not shard.is_root
    if is_part or shard.is_running or root._precisions.is_full == want_full:
        return

    def change() -> None:
        for module in wrapped:
            precisions = module._precisions
            if precisions is not None:
                precisions.is_full = want_full
                module._shard.sharding = precisions.full if want_full else precisions.low

    again(shard, change)


def copied(shard: _shards.Shard, copy: Callable) -> torch.nn.Module:
    """What `copy` makes of a module whose parameters are whole meanwhile, sharded alike."""
    with summoned(shard, keep=False) as is_outermost:
        made = copy()
    if is_outermost:
        for each in _shards.shards_in(made):
            each.make()
    return made
