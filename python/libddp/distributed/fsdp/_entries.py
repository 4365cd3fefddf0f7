"""All tensors of a model and its optimizer by name, each with the part that this rank has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from libddp.distributed.fsdp import _optim_state, _torch_state
from libddp.distributed.fsdp._sharded_state import ShardedPiece
from libddp.distributed.fsdp._state_dict import canonical
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
    #: Whether this rank writes them into a snapshot.
    is_writer: bool


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
    state, aliases = _torch_state.pieces_in_state(model), aliases_of(model)
    tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and k not in aliases}
    return [_entry(MODEL + key, value) for key, value in tensors.items()]


def of_optimizer(model: torch.nn.Module, optimizer) -> list[Entry]:
    """What its state has of tensors."""
    return [_entry(STATE + key, v) for key, v in _leaves(model, optimizer) if torch.is_tensor(v)]


def groups_of(model: torch.nn.Module, optimizer) -> list[dict[str, Any]]:
    """The settings of the optimizer's groups, with names of parameters, as JSON has them.

    Raises:
        ArgumentError: the optimizer's state has something that is neither tensor nor None.
    """
    for key, value in _leaves(model, optimizer):
        if value is not None and not torch.is_tensor(value):
            raise ArgumentError(
                f"libddp snapshot: optimizer state {key!r} is a {type(value).__name__}, not a "
                "tensor. Hint: save this optimizer through FSDP.optim_state_dict and torch.save."
            )
    groups = _optim_state.sharded_state(model, optimizer, None)["param_groups"]
    return [
        {key: value.item() if torch.is_tensor(value) else value for key, value in group.items()}
        for group in groups
    ]


def _leaves(model, optimizer) -> Iterator[tuple[str, Any]]:
    found = _optim_state.sharded_state(model, optimizer, None)["state"]
    for name, entries in found.items():
        for key, value in entries.items():
            yield f"{name}.{key}", value


def _entry(key: str, value: torch.Tensor) -> Entry:
    if isinstance(value, ShardedPiece):
        piece = value.piece
        own = value.local()
        return Entry(key, piece.shape, piece.begin, piece.end, own, piece.is_writer)
    tensor = value.detach()
    return Entry(key, tensor.shape, 0, tensor.numel(), tensor, dist.get_rank() == 0)
