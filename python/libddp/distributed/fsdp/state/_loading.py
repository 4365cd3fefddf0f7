"""From state dicts of any kind to what this rank owns of them.

A state dict may hold whole tensors, DTensors and ShardedTensors, of a model that is divided in the
same way or in another one. Keys are canonical.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from libddp.distributed.fsdp.state._shard_specs import ShardSpec, shard_specs_of, whole_of
from libddp.distributed.fsdp.state._sharded_tensors import is_sharded, own_shard
from libddp.distributed.fsdp.wrap import _dtensors
from libddp.distributed.fsdp.wrap._names import canonical
from libddp.errors import ArgumentError


def named_options(strict: bool = True, assign: bool = False) -> dict[str, Any]:
    """Those of nn.Module.load_state_dict, however they were passed."""
    return {"strict": strict, "assign": assign}


def refuse_assign(assign: bool) -> None:
    """Parameters stay the same objects."""
    if assign:
        raise ArgumentError(
            "libddp fsdp: load_state_dict(assign=True) would replace sharded parameters. "
            "Hint: leave assign out."
        )


def has_shards(state: dict[str, Any]) -> bool:
    """Whether some entries are not whole tensors."""
    return any(is_sharded(value) for value in state.values())


def is_of_own_shards(model: torch.nn.Module, state: dict[str, Any]) -> bool:
    """Whether sharded parameters get what this rank owns of them: no other rank is asked."""
    specs = shard_specs_by_key(model)
    return all(key not in specs or own_shard(state[key], specs[key]) is not None for key in state)


def shard_specs_by_key(model: torch.nn.Module) -> dict[str, ShardSpec]:
    """Canonical name -> spec, of shared parameters by each of their names."""
    specs = shard_specs_of(model)
    named = torch.nn.Module.named_parameters(model, remove_duplicate=False)
    return {canonical(name): specs[id(p)] for name, p in named if id(p) in specs}


def local_state(model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """`state` with plain tensors, of sharded parameters this rank's parts.

    DTensors of other names stay what they are where parameters are DTensors: hooks of modules may
    make parameters of them.

    Raises:
        ArgumentError: a shape that is not the parameter's.

    Note:
        A collective where shards are divided in another way than the model.
    """
    specs = shard_specs_by_key(model)
    others = _dtensors_of_hooks(model, state)
    local = {
        key: value if key in others else _own(key, value, specs.get(key), model)
        for key, value in state.items()
    }
    if hasattr(state, "_metadata"):
        local = type(state)(local)
        local._metadata = state._metadata
    return local


def _dtensors_of_hooks(model: torch.nn.Module, state: dict[str, Any]) -> set[str]:
    parameters = list(torch.nn.Module.named_parameters(model, remove_duplicate=False))
    if not any(_dtensors.is_dtensor(parameter) for _, parameter in parameters):
        return set()
    buffers = torch.nn.Module.named_buffers(model, remove_duplicate=False)
    known = {canonical(name) for name, _ in (*parameters, *buffers)}
    return {key for key in state if key not in known and _dtensors.is_dtensor(state[key])}


def as_dtensors(model: torch.nn.Module, local: dict[str, Any]) -> dict[str, Any]:
    """The same with DTensors for parameters that are some."""
    named = torch.nn.Module.named_parameters(model, remove_duplicate=False)
    for name, parameter in named:
        key = canonical(name)
        if _dtensors.is_dtensor(parameter) and isinstance(local.get(key), torch.Tensor):
            local[key] = _dtensors.like(parameter, local[key])
    return local


def _own(key: str, value: Any, spec: ShardSpec | None, model: torch.nn.Module) -> Any:
    own = None if spec is None else own_shard(value, spec)
    if own is not None:
        return own
    value = whole_of(value)
    if spec is None or not isinstance(value, torch.Tensor):
        return value
    if value.shape != spec.shape:
        refuse_shape(key, value.shape, spec.shape, model)
    return spec.cut(value)


def refuse_shape(key: str, shape, wanted, model: torch.nn.Module) -> NoReturn:
    """A tensor in a state dict has another shape than the parameter."""
    raise ArgumentError(
        f"libddp fsdp: {key!r} has the shape {list(shape)} in the state dict, in "
        f"{type(model).__name__} {list(wanted)}. Hint: load the state of the same model."
    )
