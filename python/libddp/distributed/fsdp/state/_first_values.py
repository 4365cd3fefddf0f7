"""State dicts for models on the meta device: mistakes are known before there is memory.

What had memory and no values could not be told from what was loaded. Where parameters are DTensors,
pieces of a state dict may come one by one (`strict=False, assign=True`), as with torch: each gives
memory to what it has. The first forward refuses what is on the meta device still.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from libddp.distributed.fsdp.state import _collective_errors, _loading
from libddp.distributed.fsdp.state._shard_specs import whole_of
from libddp.distributed.fsdp.wrap import _deferred, _dtensors
from libddp.distributed.fsdp.wrap._names import canonical
from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule


def check(model: torch.nn.Module, state: dict, strict: bool, takes: Callable) -> None:
    """Whether `state` gives values to all that waits for memory.

    Args:
        takes: the model's own load_state_dict.

    Raises:
        RuntimeError: torch's, of the keys that are missing.
        ArgumentError: the same without `strict`; a shape that is not the parameter's.
    """
    waiting = _deferred.names_on_meta(model)
    if not strict:
        _deferred.check_loaded(waiting, state)
    elif _deferred.missing_of(waiting, state):
        takes({**state, **_of_the_model(model, state)}, strict=True)
    for key, own in _of_the_model(model, state).items():
        size = getattr(state[key], "size", None)
        if own.is_meta and size is not None and size() != own.size():
            _loading.refuse_shape(key, size(), own.size(), model)


def is_piece(wrapped: WrappedModule, state: dict) -> bool:
    """Whether on some rank `state` leaves parameters of the module without values; a collective."""
    lacks = bool(_deferred.missing_of(_deferred.names_on_meta(wrapped.module), state))
    found = torch.full((1,), float(lacks), device="cpu")
    for group in wrapped.groups():
        if group is not None and group.size() > 1:
            group.all_reduce(found, op=dist.ReduceOp.SUM)
    return found.item() > 0


def load_piece(wrapped: WrappedModule, state: dict, takes: Callable) -> Any:
    """What `takes` gives; parameters that are DTensors get memory as they are loaded; collective.

    Raises:
        ArgumentError: a shape that is not the parameter's; no rank has changed anything then.
    """
    model = wrapped.module
    own = _of_the_model(model, state)

    def convert() -> dict[str, torch.Tensor]:
        return {
            key: _local_of(key, state[key], tensor, model)
            for key, tensor in own.items()
            if _dtensors.is_dtensor(tensor)
        }

    local = _collective_errors.together(wrapped.groups(), "load a state dict", convert)
    with torch.no_grad():
        for key, piece in local.items():
            if own[key].is_meta:
                filled = DTensor(piece.clone(), own[key]._spec, requires_grad=False)
                _deferred.replace_inside(own[key], filled)
            else:
                own[key]._local_tensor.copy_(piece)
    _deferred.give_buffers_memory(model, state)
    own = {key: tensor for key, tensor in own.items() if key in local}
    return takes({**state, **own}, strict=False)


def _of_the_model(model: torch.nn.Module, state: dict) -> dict[str, torch.Tensor]:
    """What the model has under the names of `state`."""
    parameters = torch.nn.Module.named_parameters(model, remove_duplicate=False)
    buffers = torch.nn.Module.named_buffers(model, remove_duplicate=False)
    named = ((canonical(name), tensor) for name, tensor in (*parameters, *buffers))
    return {name: tensor for name, tensor in named if name in state}


def _local_of(key: str, value: Any, parameter: DTensor, model: torch.nn.Module) -> torch.Tensor:
    value = value if isinstance(value, DTensor) else whole_of(value)
    if value.size() != parameter.size():
        _loading.refuse_shape(key, value.size(), parameter.size(), model)
    spec = parameter._spec
    if not isinstance(value, DTensor):
        value = distribute_tensor(value, spec.mesh, spec.placements, src_data_rank=None)
    elif value.placements != spec.placements:
        value = value.redistribute(spec.mesh, spec.placements)
    return value._local_tensor.detach().to(parameter.dtype)
