"""Units of modules on the meta device: fully_shard first, memory and values later.

    with torch.device("meta"): model = Net()
    for block in model.blocks: fully_shard(block)     # no unit yet: there is nothing to divide
    fully_shard(model)
    model.to_empty(device="cpu")                      # whole parameters, in the same objects
    model.init_weights()                              # what it would write into an ordinary model
    model(x)                                          # the units are made, one after the other

Initialisation sees whole parameters, so it gives the same values on any number of ranks. Memory of
whole parameters is touched by what writes to it: a state dict that is loaded in place of an
initialisation needs that of one unit at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from libddp.distributed.fsdp.wrap._lookup import (
    wrapped_module_of,
    wrapped_modules_in,
)
from libddp.distributed.fsdp.wrap._names import canonical
from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule
from libddp.errors import ArgumentError


def is_on_meta(wrapped: WrappedModule) -> bool:
    """Whether a unit waits for memory."""
    return wrapped.made is None and any(p.is_meta for _, p in wrapped.own_parameters())


def settle(model: torch.nn.Module) -> None:
    """Makes the units whose parameters have memory by now; a collective if there are any."""
    for wrapped in wrapped_modules_in(model):
        if wrapped.made is None and not is_on_meta(wrapped):
            _ = wrapped.unit


def apply(module: torch.nn.Module, function: Callable, recurse: bool) -> None:
    """What comes before nn.Module._apply: parameters that leave the meta device stay the same.

    Module._apply would put others in their place, apart from an optimizer that has them, and one
    for each name of a shared parameter.
    """
    wrapped = wrapped_module_of(module)
    # DTensors stay the same objects by themselves.
    if wrapped is None or wrapped.made is not None or wrapped.sharding.use_dtensor:
        return
    _leave_meta(wrapped, function, recurse)


def _leave_meta(wrapped: WrappedModule, function: Callable, recurse: bool = True) -> None:
    for name, parameter in wrapped.own_parameters():
        if parameter.is_meta and (recurse or "." not in name):
            with torch.no_grad():
                replace_inside(parameter, function(parameter))


def replace_inside(parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    """The same object has what `tensor` has, unless that is on the meta device."""
    if tensor.is_meta:
        return
    fresh = torch.nn.Parameter(tensor, parameter.requires_grad)
    fresh.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, fresh)


def give_memory(model: torch.nn.Module) -> None:
    """Makes the units that wait for memory, of arbitrary values; a collective if there are any."""
    settle(model)
    for wrapped in wrapped_modules_in(model):
        if wrapped.made is None:
            _leave_meta(wrapped, _empty)
            _ = wrapped.unit
    for part in model.modules():
        for parameter in part._parameters.values():
            if parameter is not None and parameter.is_meta:
                replace_inside(parameter, _empty(parameter))
    give_buffers_memory(model)


def give_buffers_memory(model: torch.nn.Module, keys: Iterable[str] | None = None) -> None:
    """Of arbitrary values, where state dicts have them; `keys`: only to these."""
    for prefix, part in model.named_modules():
        for name, buffer in part._buffers.items():
            is_kept = name not in part._non_persistent_buffers_set
            is_wanted = keys is None or canonical(name, prefix) in keys
            if buffer is not None and buffer.is_meta and is_kept and is_wanted:
                part._buffers[name] = _empty(buffer)


def missing_of(waiting: list[list[str]], keys: Iterable[str]) -> list[str]:
    """What a state dict with these keys leaves without values, of names_on_meta."""
    keys = set(keys)
    return [names[0] for names in waiting if keys.isdisjoint(names)]


def check_loaded(waiting: list[list[str]], keys: Iterable[str]) -> None:
    """Raises: ArgumentError, a state dict with these keys leaves something without values."""
    missing = missing_of(waiting, keys)
    if missing:
        raise ArgumentError(
            f"libddp fsdp: the state dict has no {missing[0]!r}"
            f"{f', and lacks {len(missing) - 1} more' if len(missing) > 1 else ''}; the model was "
            "on the meta device, so there is no value to keep. Hint: load a whole state dict, or "
            'call to_empty(device="cpu") and initialise the model before.'
        )


def names_on_meta(model: torch.nn.Module) -> list[list[str]]:
    """Canonical names of each parameter there, and of each buffer that state dicts have."""
    names: dict[int, list[str]] = {}
    for prefix, part in model.named_modules(remove_duplicate=False):
        kept = {k: b for k, b in part._buffers.items() if k not in part._non_persistent_buffers_set}
        for name, tensor in (*part._parameters.items(), *kept.items()):
            if tensor is not None and tensor.is_meta:
                names.setdefault(id(tensor), []).append(canonical(name, prefix))
    return list(names.values())


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu")
