"""All tensors of a model and its optimizer by name, each with the part that this rank has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from libddp.distributed.fsdp.state import _loading, _optim_state
from libddp.distributed.fsdp.state._shard_specs import ShardSpec
from libddp.distributed.fsdp.state._sharded_state_dict import sharded_state
from libddp.distributed.fsdp.state._sharded_tensors import is_sharded, own_shard
from libddp.distributed.fsdp.wrap._names import canonical
from libddp.errors import ArgumentError

MODEL, STATE = "model.", "optimizer.state."


@dataclass
class Entry:
    """One tensor of the whole model."""

    key: str
    #: Of the whole tensor.
    shape: torch.Size
    #: Elements [begin, end) are this rank's.
    begin: int
    end: int
    #: They, in the memory of the parameter, buffer or optimizer.
    tensor: torch.Tensor
    #: Other ranks have other elements.
    is_part: bool


def aliases_of(model: torch.nn.Module) -> dict[str, str]:
    """Further name of a shared parameter -> its first one."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in torch.nn.Module.named_parameters(model, remove_duplicate=False):
        known = first.setdefault(id(parameter), canonical(name))
        if known != canonical(name):
            found[canonical(name)] = known
    return found


def of_model(model: torch.nn.Module) -> list[Entry]:
    """Parameters once each, and buffers; the same keys in one order on every rank."""
    state, aliases = sharded_state(model), aliases_of(model)
    specs = _loading.shard_specs_by_key(model)
    tensors = {k: v for k, v in state.items() if torch.is_tensor(v) and k not in aliases}
    return [_entry(MODEL + key, value, specs.get(key)) for key, value in tensors.items()]


def of_optimizer(model: torch.nn.Module, optimizer) -> list[Entry]:
    """What its state has of tensors."""
    specs = _loading.shard_specs_by_key(model)
    return [
        _entry(STATE + f"{name}.{key}", value, specs.get(name))
        for name, key, value in _leaves(model, optimizer)
        if torch.is_tensor(value)
    ]


def groups_of(model: torch.nn.Module, optimizer) -> list[dict[str, Any]]:
    """The settings of the optimizer's groups, with names of parameters, as JSON has them.

    Raises:
        ArgumentError: the optimizer's state has something that is neither tensor nor None.
    """
    for name, key, value in _leaves(model, optimizer):
        if value is not None and not torch.is_tensor(value):
            raise ArgumentError(
                f"libddp snapshot: optimizer state '{name}.{key}' is a {type(value).__name__}, not "
                "a tensor. Hint: save this optimizer through FSDP.optim_state_dict and torch.save."
            )
    groups = _optim_state.sharded_state(model, optimizer, None)["param_groups"]
    return [
        {key: value.item() if torch.is_tensor(value) else value for key, value in group.items()}
        for group in groups
    ]


def _leaves(model, optimizer) -> Iterator[tuple[str, str, Any]]:
    found = _optim_state.sharded_state(model, optimizer, None)["state"]
    for name, entries in found.items():
        for key, value in entries.items():
            yield name, key, value


def _entry(key: str, value: torch.Tensor, spec: ShardSpec | None) -> Entry:
    if is_sharded(value):
        if not spec.is_rows():
            raise ArgumentError(
                f"libddp snapshot: {key!r} is cut on dim {spec.dim}, or by tensor parallelism too,"
                " and snapshots hold rows of whole tensors. Hint: save the DTensors of "
                "state_dict() with torch.distributed.checkpoint."
            )
        own = own_shard(value, spec)
        return Entry(key, spec.shape, spec.begin, spec.end, own, True)
    tensor = value.detach()
    return Entry(key, tensor.shape, 0, tensor.numel(), tensor, False)
