"""From state dicts of any kind to what this rank owns of them.

A state dict may hold whole tensors, DTensors and ShardedTensors, of a model that is divided in the
same way or in another one. Keys are canonical.
"""

from __future__ import annotations

from typing import Any

import torch

from libddp.distributed.fsdp import _dtensors
from libddp.distributed.fsdp._pieces import Piece, pieces_of, whole_of
from libddp.distributed.fsdp._sharded_state import is_sharded, own_part
from libddp.distributed.fsdp._state_dict import canonical
from libddp.errors import ArgumentError


def has_pieces(state: dict[str, Any]) -> bool:
    """Whether some entries are not whole tensors."""
    return any(is_sharded(value) for value in state.values())


def pieces_by_key(model: torch.nn.Module) -> dict[str, Piece]:
    """Canonical name -> piece, of shared parameters by each of their names."""
    pieces = pieces_of(model)
    named = torch.nn.Module.named_parameters(model, remove_duplicate=False)
    return {canonical(name): pieces[id(p)] for name, p in named if id(p) in pieces}


def local_state(model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """`state` with plain tensors, of sharded parameters this rank's parts.

    Raises:
        ArgumentError: a shape that is not the parameter's.

    Note:
        A collective where pieces are divided in another way than the model.
    """
    pieces = pieces_by_key(model)
    local = {key: _own(key, value, pieces.get(key), model) for key, value in state.items()}
    if hasattr(state, "_metadata"):
        local = type(state)(local)
        local._metadata = state._metadata
    return local


def as_dtensors(model: torch.nn.Module, local: dict[str, Any]) -> dict[str, Any]:
    """The same with DTensors for parameters that are some."""
    named = torch.nn.Module.named_parameters(model, remove_duplicate=False)
    for name, parameter in named:
        key = canonical(name)
        if _dtensors.is_dtensor(parameter) and isinstance(local.get(key), torch.Tensor):
            local[key] = _dtensors.like(parameter, local[key])
    return local


def _own(key: str, value: Any, piece: Piece | None, model: torch.nn.Module) -> Any:
    own = None if piece is None else own_part(value, piece)
    if own is not None:
        return own
    value = whole_of(value)
    if piece is None or not isinstance(value, torch.Tensor):
        return value
    if value.shape != piece.shape:
        raise ArgumentError(
            f"libddp fsdp: {key!r} has the shape {list(value.shape)} in the state dict, in "
            f"{type(model).__name__} {list(piece.shape)}. Hint: load the state of the same model."
        )
    return piece.cut(value)
