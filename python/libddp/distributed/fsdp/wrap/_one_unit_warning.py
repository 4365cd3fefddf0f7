"""A warning for models that were wrapped as one unit, which saves less than it could."""

from __future__ import annotations

import math
import warnings
from functools import cache

import torch

#: Elements from which a unit of several like modules is worth dividing.
_WORTH_DIVIDING = 1 << 20


def warn_of_one_unit(module: torch.nn.Module, parameters: list, unit) -> None:
    """Warns, once in a process, of a root that holds alone what could be several units.

    Args:
        module: the root; no module under it is wrapped.
        parameters: (name, parameter) of its unit.
        unit: the C++ unit.
    """
    owned = dict(parameters)
    sizes = {id(owned[row[0]]): math.prod(row[1]) for row in unit.layout(0)}
    kind = repeated_kind(module, sizes)
    if kind is not None:
        _say(kind)


def repeated_kind(module: torch.nn.Module, sizes: dict[int, int]) -> str | None:
    """The class whose instances hold most of a large unit.

    Args:
        sizes: id of a parameter of the unit -> its elements.
    """
    numels: dict[type, list[int]] = {}
    for child in module.modules():
        has_forward = type(child).forward is not torch.nn.Module.forward
        if child is not module and has_forward and next(child.children(), None) is not None:
            numels.setdefault(type(child), []).append(_numel(child, sizes))
    shares = {k.__name__: sum(n) for k, n in numels.items() if len(n) - n.count(0) > 1}
    kind = max(shares, key=shares.__getitem__, default=None)
    whole = sum(sizes.values())
    return None if kind is None or whole < _WORTH_DIVIDING or 2 * shares[kind] < whole else kind


def _numel(module: torch.nn.Module, sizes: dict[int, int]) -> int:
    return sum(sizes.get(id(parameter), 0) for parameter in module.parameters())


@cache
def _say(kind: str) -> None:
    warnings.warn(
        "libddp fsdp: only the whole model is wrapped, as one unit: all of its parameters are "
        "gathered at once, and no gradient is averaged before the backward pass ends. Hint: make "
        f"each {kind} a unit, by auto_wrap_policy=ModuleWrapPolicy({{{kind}}}), or by "
        f"fully_shard(part) for each {kind} before the whole model.",
        stacklevel=2,
    )
