"""What the first save of a model will hold, before its optimizer has moments."""

from __future__ import annotations

import dataclasses

import torch

from libddp.snapshot._pieces import Piece, StoredBy
from libddp.snapshot._replicated import MODEL, STATE, ReplicatedState
from libddp.snapshot._sharded import ShardedState, is_sharded


def state_parts(model, optimizer) -> ShardedState | ReplicatedState:
    """Its tensors, however it is wrapped."""
    if is_sharded(model):
        return ShardedState(model, optimizer)
    return ReplicatedState(model, optimizer)


def expected_pieces(model, optimizer) -> list[Piece]:
    """Pieces as large as those of the first save; a moment is stood in for by its parameter.

    Of an optimizer that is not known here, only what it has. None of a model whose memory waits.
    """
    parts = state_parts(model, optimizer)
    pieces = parts.model_pieces()[0]
    if any(piece.tensor.is_meta for piece in pieces):
        return []
    own = parts.optimizer_pieces()[0]
    pieces += own
    if own or optimizer is None:
        return pieces
    names = {name for group in optimizer.param_groups for name in moments_of(optimizer, group)}
    trained = _storages(model, optimizer)
    for piece in list(pieces):
        is_parameter = piece.stored_by != StoredBy.FIRST_OF_HOST
        if not is_parameter or piece.tensor.layout != torch.strided:
            continue
        if piece.tensor.data_ptr() not in trained:
            continue
        key = piece.key.removeprefix(MODEL)
        pieces += [dataclasses.replace(piece, key=f"{STATE}{key}.{name}") for name in sorted(names)]
    return pieces


def moments_of(optimizer: torch.optim.Optimizer, group: dict) -> list[str]:
    """What it will have of each parameter of a group, as large as the parameter."""
    if isinstance(optimizer, torch.optim.SGD):
        return ["momentum_buffer"] if group["momentum"] else []
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):  # libddp's, too
        return ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * bool(group.get("amsgrad"))]
    return []


def _storages(model, optimizer) -> set[int]:
    """Where the parameters lie that the optimizer trains."""
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [p for p in model.parameters() if id(p) in given and p.requires_grad]
    trained = [getattr(p, "_local_tensor", p) for p in trained]
    return {p.data_ptr() for p in trained if p.layout == torch.strided}


__all__ = ["expected_pieces", "moments_of", "state_parts"]
