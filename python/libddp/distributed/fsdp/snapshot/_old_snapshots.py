"""Loading what save_snapshot wrote before it wrote libddp.Snapshot's format (see _files.py).

if is_there(folder):
    extra = load(folder, model, optimizer)
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from libddp.distributed._groups import native
from libddp.distributed.fsdp.snapshot import _model_tensors
from libddp.distributed.fsdp.snapshot._files import INDEX, Snapshot, read_index
from libddp.distributed.fsdp.state import _collective_errors, _optim_state
from libddp.distributed.fsdp.wrap import _deferred
from libddp.errors import ArgumentError, SnapshotError


def is_there(folder: Path) -> bool:
    """Whether the folder has one, whole or not."""
    return (folder / INDEX).exists()


@torch.no_grad()
def load(folder: Path, model: torch.nn.Module, optimizer=None) -> Any:
    """Loads it on any number of ranks; a collective of all ranks.

    Files, keys and shapes are checked on all ranks before anything is changed.

    Returns:
        The `extra` of save_snapshot.

    Raises:
        SnapshotError: a file is missing, truncated or of another snapshot, for this rank or
            another one; names it.
        ArgumentError: parameters that are missing, too many or of another shape, of which the
            first is named with its module; or another rank's error.
    """
    together = _together(f"load {folder}")
    snapshot = together(lambda: Snapshot.open(folder))
    _deferred.give_memory(model)
    entries = _model_tensors.of_model(model)
    together(lambda: _check(snapshot, entries, _model_tensors.MODEL))
    if optimizer is not None:
        from torch.distributed.checkpoint import state_dict as torchs

        torchs._init_optim_state(optimizer)
        moments = _model_tensors.of_optimizer(model, optimizer)
        groups = together(lambda: _check_optimizer(snapshot, moments, model, optimizer))
        entries += moments
    together(lambda: _read(snapshot, entries))
    if optimizer is not None:
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.update(settings)
    return snapshot.values["extra"]


def remove(folder: Path) -> None:
    """What of it is there, the index first."""
    try:
        files = read_index(folder)["files"]
    except SnapshotError:  # not one that this version knows: left alone
        return
    (folder / INDEX).unlink(missing_ok=True)
    for path in folder.glob("rank-*-of-*.*.safetensors"):
        if path.name in files:
            with contextlib.suppress(OSError):  # without the index it is nothing
                path.unlink()


def _together(what: str):
    return lambda function: _collective_errors.together([native(None)], what, function)


def _check(snapshot: Snapshot, entries: list[_model_tensors.Entry], prefix: str) -> None:
    where = f"libddp snapshot {snapshot.folder}"
    wanted = {entry.key: entry for entry in entries}
    there = {key for key in snapshot.tensors if key.startswith(prefix)}
    hint = "Hint: load the snapshot of the same model and optimizer."
    for key in wanted:
        if key not in there:
            raise ArgumentError(f"{where}: {_named(key, prefix)} is not in {INDEX}. {hint}")
    for key in snapshot.tensors:
        if key in there and key not in wanted:
            raise ArgumentError(f"{where}: {_named(key, prefix)} is not in the model. {hint}")
    for key, entry in wanted.items():
        if snapshot.tensors[key].shape != entry.shape:
            raise ArgumentError(
                f"{where}: {_named(key, prefix)} has the shape "
                f"{list(snapshot.tensors[key].shape)}, in the model {list(entry.shape)}. {hint}"
            )


def _named(key: str, prefix: str) -> str:
    module, _, name = key[len(prefix) :].rpartition(".")
    what = "parameter or buffer" if prefix == _model_tensors.MODEL else "optimizer state"
    return f"{what} {name!r} of {module!r}"


def _check_optimizer(snapshot: Snapshot, moments, model, optimizer) -> list[dict[str, Any]]:
    """Returns the settings of each group."""
    saved = snapshot.values["param_groups"]
    if saved is None:
        raise ArgumentError(
            f"libddp snapshot {snapshot.folder}: it has no optimizer. Hint: load it without one."
        )
    _check(snapshot, moments, _model_tensors.STATE)
    groups = _optim_state.groups_to_load(model, optimizer, {"param_groups": saved})
    return [
        {key: _as(old.get(key), value) for key, value in group.items() if key != "params"}
        for group, old in zip(groups, optimizer.param_groups, strict=True)
    ]


def _as(before: Any, value: Any) -> Any:
    """JSON has neither tuples nor tensors."""
    if isinstance(before, torch.Tensor):
        return torch.full_like(before, value)
    return tuple(value) if isinstance(before, tuple) else value


def _read(snapshot: Snapshot, entries: list[_model_tensors.Entry]) -> None:
    for entry in entries:
        if entry.end > entry.begin:
            part = snapshot.read(entry.key, entry.begin, entry.end)
            entry.tensor.copy_(part.view(entry.tensor.shape))
