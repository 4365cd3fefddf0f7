"""Model and optimizer of which each rank has a part: FullyShardedDataParallel, fully_shard."""

from __future__ import annotations

from typing import Any

import torch

from libddp.distributed.fsdp.snapshot import _model_tensors
from libddp.distributed.fsdp.state import _optim_state
from libddp.distributed.fsdp.state._loading import shard_specs_by_key
from libddp.distributed.fsdp.wrap import _deferred
from libddp.errors import ArgumentError
from libddp.snapshot._pieces import Piece, StoredBy
from libddp.snapshot._replicated import MODEL, STATE


def is_sharded(model: torch.nn.Module | None) -> bool:
    """Whether ranks have parts of its parameters."""
    return model is not None and bool(shard_specs_by_key(model))


class ShardedState:
    """The tensors that this rank has of a sharded model and its optimizer."""

    def __init__(self, model: torch.nn.Module, optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    def model_pieces(self) -> tuple[list[Piece], dict[str, Any], dict[str, str]]:
        """As ReplicatedState has it; values that are no tensors are not kept of sharded models."""
        entries = _model_tensors.of_model(self._model)
        return [_piece(entry) for entry in entries], {}, _model_tensors.aliases_of(self._model)

    def load_model_values(self, values: dict[str, Any]) -> None:
        """There are none."""

    def optimizer_pieces(self) -> tuple[list[Piece], dict[str, Any]]:
        """As ReplicatedState has it."""
        if self._optimizer is None:
            return [], {}
        groups = _model_tensors.groups_of(self._model, self._optimizer)
        entries = _model_tensors.of_optimizer(self._model, self._optimizer)
        return [_piece(entry) for entry in entries], {"groups": groups, "others": {}}

    def prepare(self) -> None:
        """Memory for parameters that wait for it; a collective if there are any."""
        _deferred.give_memory(self._model)

    def wanted_of_optimizer(self, stored: dict[str, tuple]) -> list[Piece]:
        """Its own tensors, which it gets where it has made no step yet, or has other rows than this
        rank's, from before the model was sharded anew.
        """
        if not any(key.startswith(STATE) for key in stored):
            return []
        if self._has_other_rows(stored):
            self._optimizer.state.clear()
        _give_moments(self._optimizer)
        return self.optimizer_pieces()[0]

    def _has_other_rows(self, stored: dict[str, tuple]) -> bool:
        """Whether a moment, stored in its parameter's shape, is no part of it that we own."""
        whole = {piece.key: piece.shape for piece in self.model_pieces()[0]}
        for piece in self.optimizer_pieces()[0]:
            shape = whole.get(MODEL + piece.key.removeprefix(STATE).rpartition(".")[0])
            is_elementwise = piece.key in stored and list(stored[piece.key][1]) == list(shape or ())
            if is_elementwise and piece.shape != shape:
                return True
        return False

    def load_optimizer(self, pieces: list[Piece], saved: dict[str, Any]) -> None:
        """Settings; the pieces are its own tensors, and filled."""
        if not pieces:
            self._optimizer.state.clear()  # it had made no step
        groups = _optim_state.groups_to_load(
            self._model, self._optimizer, {"param_groups": saved["groups"]}
        )
        for group, settings in zip(self._optimizer.param_groups, groups, strict=True):
            for key, value in settings.items():
                if key != "params":
                    group[key] = _like(group.get(key), value)
        if saved["others"]:
            raise ArgumentError(
                "libddp snapshot: the optimizer state has values that are no tensors, which "
                "sharded models do not load. Hint: load it into a model that is not sharded."
            )


def _give_moments(optimizer: torch.optim.Optimizer) -> None:
    """To one that has none, also where gradients are there, which torch's function respects."""
    from torch.distributed.checkpoint import state_dict as torchs

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [(p, p.grad) for p in parameters if p.grad is not None]
    for parameter, _ in gradients:
        parameter.grad = None
    torchs._init_optim_state(optimizer)
    for parameter, gradient in gradients:
        parameter.grad = gradient


def _like(before: Any, value: Any) -> Any:
    return torch.full_like(before, value) if isinstance(before, torch.Tensor) else value


def _piece(entry: _model_tensors.Entry) -> Piece:
    by = StoredBy.EACH_RANK if entry.is_part else StoredBy.FIRST_OF_HOST
    return Piece(entry.key, entry.tensor, entry.shape, entry.begin, entry.end, by)
