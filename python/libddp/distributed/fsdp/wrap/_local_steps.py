"""torch's elementwise optimizers work on what a rank has of DTensors, not on the DTensors.

    compute_locally(owner)               # whose `sharded` is a parameter that is a DTensor

An operation of a DTensor takes tens of microseconds until that of its local tensor begins, and Adam
makes a dozen of them for each parameter: under torch's default, a loop, the optimizer takes several
times as long as on plain tensors. Element by element the local tensors' results are the DTensor's,
bit for bit, so the function that a `step()` calls with its lists gets the local tensors in them.

torch has these functions in its modules (torch.optim.adam.adam), where they are replaced when the
first parameter comes. Lists without such a parameter go to torch's own function as they are, and so
does what may not be the same: see `_are_alike` and `_is_watched`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import _default_to_fused_or_foreach

from libddp._torch_patches import optimizer_functions
from libddp.distributed.fsdp.wrap._dtensors import is_dtensor, like, local_of

#: Modules of torch.optim, each with a function of its own name, whose results for an element come
#: from that element alone.
_MODULES = (
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "asgd",
    "nadam",
    "radam",
    "rmsprop",
    "rprop",
    "sgd",
)
#: What a DTensor's own operations exclude for those of its local tensor: the versions that autograd
#: compares are those of the DTensor.
_VERSIONS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


class Owner(Protocol):
    """Of a parameter."""

    sharded: torch.nn.Parameter


#: By the id of the parameter: torch exchanges what is in a parameter, as `to_empty` does, only
#: where nobody has a weak reference to it.
_owners: WeakValueDictionary[int, Owner] = WeakValueDictionary()


def compute_locally(owner: Owner) -> None:
    """From now on for its parameter."""
    _owners[id(owner.sharded)] = owner
    _replace()


@cache
def _replace() -> None:
    for name in _MODULES:
        optimizer_functions.replace(name, _on_local_tensors)


def _on_local_tensors(function: Callable) -> Callable:
    def step(params: list, *others: Any, **options: Any) -> None:
        if not any(map(_is_ours, params)):
            return function(params, *others, **options)
        lists = [each for each in (params, *others) if isinstance(each, list)]
        singles = [each for each in (*others, *options.values()) if not isinstance(each, list)]
        if any(map(is_dtensor, singles)) or not _are_alike(params, lists) or _is_watched():
            return function(params, *others, **options)
        if options.get("foreach") is None and options.get("fused") is None:
            # torch decides by the classes of the parameters.
            is_differentiable = bool(options.get("differentiable"))
            options["foreach"] = _default_to_fused_or_foreach(params, is_differentiable)[1]
        local = [
            [local_of(t) for t in each] if isinstance(each, list) else each
            for each in (params, *others)
        ]
        with torch._C._ExcludeDispatchKeyGuard(_VERSIONS):
            function(*local, **options)
        increment_version(params)
        for before, after in zip((params, *others), local, strict=True):
            if isinstance(before, list):
                _fill_in(before, after, params)

    return step


def _are_alike(params: list, lists: list[list]) -> bool:
    """Whether each DTensor of the lists is placed as its parameter is, and has an ordinary tensor;
    and that no parameter is a sum that is to come.
    """
    specs = [p._spec if is_dtensor(p) else None for p in params]
    if any(place.is_partial() for spec in specs if spec is not None for place in spec.placements):
        return False
    return all(
        not tensors or (len(tensors) == len(specs) and all(map(_is_alike, tensors, specs)))
        for tensors in lists
    )


def _is_alike(tensor: Any, spec: Any) -> bool:
    if not is_dtensor(tensor):
        return True
    own = tensor._spec
    if own is not spec and (
        spec is None or own.placements != spec.placements or own.mesh != spec.mesh
    ):
        return False
    return type(tensor._local_tensor) is torch.Tensor


def _fill_in(before: list, after: list, params: list) -> None:
    """What the function has made (SGD's first momenta), as DTensors."""
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if old is not None or new is None:
            continue
        before[index] = like(params[index], new) if is_dtensor(params[index]) else new


def _is_ours(parameter: torch.Tensor) -> bool:
    if not is_dtensor(parameter):
        return False
    owner = _owners.get(id(parameter))
    return owner is not None and owner.sharded is parameter


def _is_watched() -> bool:
    """Whether a mode counts or replaces operations, which would be others."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())
