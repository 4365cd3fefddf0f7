"""Model and optimizer where every rank has all of them: plain modules, DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch

from libddp.errors import ArgumentError
from libddp.snapshot._pieces import Piece, StoredBy

MODEL, STATE = "model.", "optimizer.state."
_COMPILED = "_orig_mod."


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """What a DistributedDataParallel, ours or torch's, or torch.compile has wrapped."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel) or (
            type(model).__name__ == "DistributedDataParallel" and hasattr(model, "module")
        ):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def name_of(key: str) -> str:
    """The name that a tensor has without what torch.compile puts around modules."""
    return key.replace(_COMPILED, "")


class ReplicatedState:
    """The tensors of a model and its optimizer.

    Parameters and their optimizer state are the same on all ranks, so those of a host share the
    copying. Buffers may differ (running statistics), as DDP sends rank 0's before a forward: those
    of the first rank are kept.
    """

    def __init__(self, model: torch.nn.Module | None, optimizer) -> None:
        self._model = unwrapped(model) if model is not None else None
        self._optimizer = optimizer

    def model_pieces(self) -> tuple[list[Piece], dict[str, Any], dict[str, str]]:
        """Pieces, values that are no tensors, and further names of a tensor -> its first one."""
        pieces, values, aliases = [], {}, {}
        if self._model is None:
            return pieces, values, aliases
        parameters = {id(p) for p in self._model.parameters()}
        first: dict[int, str] = {}
        for key, value in self._model.state_dict(keep_vars=True).items():
            name = name_of(key)
            if not torch.is_tensor(value):
                values[name] = value
            elif id(value) in first:
                aliases[name] = first[id(value)]
            else:
                first[id(value)] = name
                is_parameter = id(value) in parameters
                by = StoredBy.HOST_TOGETHER if is_parameter else StoredBy.FIRST_OF_HOST
                pieces.append(Piece.whole(MODEL + name, value, by))
        return pieces, values, aliases

    def load_model_values(self, values: dict[str, Any]) -> None:
        """What load_state_dict does with what is no tensor (get_extra_state)."""
        if not values:
            return
        keys = {name_of(key): key for key in self._model.state_dict(keep_vars=True)}
        self._model.load_state_dict(
            {keys[name]: value for name, value in values.items() if name in keys}, strict=False
        )

    def optimizer_pieces(self) -> tuple[list[Piece], dict[str, Any]]:
        """Pieces of its state, and what it has of other values: by name, and its groups."""
        pieces: list[Piece] = []
        if self._optimizer is None:
            return pieces, {}
        state_dict, names = self._optimizer.state_dict(), self._names()
        others: dict[str, dict[str, Any]] = {}
        for number, entries in state_dict["state"].items():
            for key, value in entries.items():
                if torch.is_tensor(value):
                    full_key = f"{STATE}{names[number]}.{key}"
                    pieces.append(Piece.whole(full_key, value, StoredBy.HOST_TOGETHER))
                else:
                    others.setdefault(names[number], {})[key] = value
        groups = [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in state_dict["param_groups"]
        ]
        more = {k: v for k, v in state_dict.items() if k not in ("state", "param_groups")}
        return pieces, {"groups": groups, "others": others, "more": more}

    def wanted_of_optimizer(self, stored: dict[str, tuple]) -> list[Piece]:
        """Where the stored state goes: its own tensors where they fit, else fresh ones.

        Args:
            stored: key -> dtype, shape of the snapshot.
        """
        own = {piece.key: piece for piece in self.optimizer_pieces()[0]}
        keys = [key for key in stored if key.startswith(STATE)]
        if len(own) == len(keys) and all(_fits(own.get(key), stored[key]) for key in keys):
            return list(own.values())
        return [
            Piece.whole(
                key,
                torch.empty(stored[key][1], dtype=stored[key][0], device="cpu"),
                StoredBy.HOST_TOGETHER,
            )
            for key in keys
        ]

    def load_optimizer(self, pieces: list[Piece], saved: dict[str, Any]) -> None:
        """Puts filled pieces, values and settings in their places."""
        names = self._names()
        numbers = {name: number for number, name in enumerate(names)}
        _check_names(numbers, saved["groups"])
        state: dict[int, dict[str, Any]] = {}
        for name, entries in saved["others"].items():
            state.setdefault(numbers[name], {}).update(entries)
        for piece in pieces:
            name, _, key = piece.key.removeprefix(STATE).rpartition(".")
            state.setdefault(numbers[name], {})[key] = piece.tensor
        groups = [
            {**group, "params": [numbers[name] for name in group["params"]]}
            for group in saved["groups"]
        ]
        self._optimizer.load_state_dict(
            {"state": state, "param_groups": groups, **saved.get("more", {})}
        )

    def _names(self) -> list[str]:
        """Of the optimizer's parameters, by their numbers in its state_dict."""
        by_id: dict[int, str] = {}
        if self._model is not None:
            for name, parameter in self._model.named_parameters(remove_duplicate=False):
                by_id.setdefault(id(parameter), name_of(name))
        names = []
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in by_id:
                    raise ArgumentError(
                        "libddp snapshot: the optimizer has a parameter of shape "
                        f"{list(parameter.shape)} that the model has not. Hint: give the model "
                        "that the optimizer was built for."
                    )
                names.append(by_id[id(parameter)])
        return names


def _fits(piece: Piece | None, stored: tuple) -> bool:
    return (
        piece is not None
        and (piece.tensor.dtype, list(piece.shape)) == (stored[0], list(stored[1]))
        and piece.tensor.is_contiguous()
    )


def _check_names(numbers: dict[str, int], groups: list[dict[str, Any]]) -> None:
    saved = [name for group in groups for name in group["params"]]
    for name in saved:
        if name not in numbers:
            raise ArgumentError(
                f"libddp snapshot: its optimizer has the parameter {name!r}, this one has not. "
                "Hint: load into the model and optimizer that were saved."
            )
    for name in numbers:
        if name not in saved:
            raise ArgumentError(
                f"libddp snapshot: its optimizer has no parameter {name!r}. Hint: load into the "
                "model and optimizer that were saved."
            )
