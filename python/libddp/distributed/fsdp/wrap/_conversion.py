"""Sharding anew what is sharded already: in another dtype, in another precision, or a copy of it.

Parameters stay the same objects. Whole tensors are there meanwhile, so this takes the memory of an
unsharded model; it is a collective of all ranks of the model.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecision

from libddp.distributed.fsdp.wrap._lookup import wrapped_modules_in
from libddp.distributed.fsdp.wrap._sharding import Sharding
from libddp.distributed.fsdp.wrap._summon_full_params import summoned
from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule, model_of
from libddp.errors import StateError

#: Modules whose parameters are being changed as a whole.
_converting: set[int] = set()


def changes_dtype(wrapped: WrappedModule, function: Callable) -> bool:
    """Whether nn.Module._apply with this function gives the parameters another dtype."""
    dtypes = {p.dtype for each in wrapped_modules_in(wrapped.module) for _, p in each.parameters}
    return any(
        function(torch.empty(0, dtype=dtype, device="cpu")).dtype != dtype for dtype in dtypes
    )


def is_converting(wrapped: WrappedModule) -> bool:
    """Whether `convert` runs for a model that it is part of."""
    return id(wrapped) in _converting


def convert(root: WrappedModule, change: Callable[[], object]) -> None:
    """Calls `change` while parameters show whole tensors, to which it may give another dtype.

    Gradients stay, in the dtypes that `change` leaves them with.
    """
    wrapped_modules = list(wrapped_modules_in(root.module))
    _refuse(root, wrapped_modules)
    model = model_of(root)
    units = [wrapped.unit for wrapped in wrapped_modules]
    model.show_copies(units, with_gradients=True, here=True)
    _converting.update(id(wrapped) for wrapped in wrapped_modules)
    try:
        change()
    except BaseException:
        model.end_copies(units, False)
        raise
    finally:
        _converting.difference_update(id(wrapped) for wrapped in wrapped_modules)
    gradients = _without_gradients(wrapped_modules)
    for wrapped in wrapped_modules:
        wrapped.made = wrapped.model = wrapped.root = None
        wrapped.is_root, wrapped.all_wrapped = False, []
    del model, units
    for wrapped in wrapped_modules:
        wrapped.make()
        _give_back(wrapped, gradients)


def upcast(root: WrappedModule) -> None:
    """Makes the parameters of units that train some float32; where that changes any, with a
    warning, and a collective.
    """
    low = [wrapped for wrapped in wrapped_modules_in(root.module) if _trains_low(wrapped)]
    if not low:
        return

    def change() -> None:
        for wrapped in low:
            for _, parameter in wrapped.parameters:
                if parameter.is_floating_point():
                    parameter.data = parameter.data.float()

    convert(root, change)
    if dist.get_rank() == 0:
        units = ", ".join(sorted({wrapped.name for wrapped in low}))
        warnings.warn(
            f"libddp fsdp: the parameters of {units} have been made float32, as Accelerate does it "
            "for mixed precision. Hint: build the model in float32, or leave mixed precision out.",
            stacklevel=4,
        )


def _trains_low(wrapped: WrappedModule) -> bool:
    return any(
        p.requires_grad and p.is_floating_point() and p.dtype != torch.float32 and not p.is_meta
        for _, p in wrapped.parameters
    )


def _refuse(root: WrappedModule, wrapped_modules: list[WrappedModule]) -> None:
    name = type(root.module).__name__
    if any(wrapped.summoned or wrapped.is_running for wrapped in wrapped_modules):
        raise StateError(
            f"libddp fsdp: {name} cannot be converted while its parameters are whole. Hint: do it "
            "outside of summon_full_params and of forward."
        )
    if root.model is not None and not root.is_root:
        raise StateError(
            f"libddp fsdp: {name} is a part of a sharded model that is in use and cannot be "
            "converted alone. Hint: convert the whole model, or this part before its first forward."
        )


def _without_gradients(wrapped_modules: list[WrappedModule]) -> dict[int, torch.Tensor]:
    found = {}
    for wrapped in wrapped_modules:
        for _, parameter in wrapped.parameters:
            if parameter.grad is not None:
                found[id(parameter)] = parameter.grad
                parameter.grad = None
    return found


def _give_back(wrapped: WrappedModule, gradients: dict[int, torch.Tensor]) -> None:
    for _, parameter in wrapped.parameters:
        if id(parameter) in gradients:
            whole = gradients[id(parameter)].to(parameter.dtype)
            parameter.grad = wrapped.sharding.own_rows(whole).clone(
                memory_format=torch.contiguous_format
            )


@dataclass
class Precisions:
    """Of a module that FSDP_USE_FULL_PREC_IN_EVAL=1 lets compute in full precision after eval()."""

    low: Sharding
    full: Sharding
    is_full: bool = False
    #: In this process, so that a forward where there are none asks for nothing else.
    num_made: ClassVar[int] = 0

    @staticmethod
    def of(sharding: Sharding, precision: MixedPrecision) -> Precisions | None:
        """None without the variable, or where nothing is in another precision."""
        dtypes = (precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype)
        if os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") != "1" or not any(dtypes):
            return None
        Precisions.num_made += 1
        low = {"param_dtype": None, "reduce_dtype": None, "keep_low_gradients": False}
        return Precisions(
            sharding, replace(sharding, **low, cast_inputs=False, cast_root_inputs=False)
        )

    def __deepcopy__(self, memo) -> Precisions:
        return replace(self)


def choose_precision(root: torch.nn.Module, modules: list) -> None:
    """Before a forward: shards a model anew whose mode has changed. Only the outermost one does."""
    wrapped, want_full = root._wrapped, not root.training
    is_part = wrapped.model is not None and not wrapped.is_root
    if is_part or wrapped.is_running:
        return
    if all(m._precisions is None or m._precisions.is_full == want_full for m in modules):
        return

    def change() -> None:
        for module in modules:
            precisions = module._precisions
            if precisions is not None:
                precisions.is_full = want_full
                module._wrapped.sharding = precisions.full if want_full else precisions.low

    convert(wrapped, change)


def copied(wrapped: WrappedModule, copy: Callable) -> torch.nn.Module:
    """What `copy` makes of a module whose parameters are whole meanwhile, sharded alike."""
    with summoned(wrapped, keep=False) as is_outermost:
        made = copy()
    if is_outermost:
        for each in wrapped_modules_in(made):
            each.make()
    return made
