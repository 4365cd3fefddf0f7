"""Snapshots: each rank writes and reads what it owns, and any number of ranks takes it up again."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from libddp._version import __version__
from libddp.distributed._groups import native
from libddp.distributed.fsdp.snapshot import _model_tensors
from libddp.distributed.fsdp.snapshot._files import FORMAT, INDEX, VERSION, Snapshot, write_index
from libddp.distributed.fsdp.snapshot._safetensors import Writer, name_of, writing
from libddp.distributed.fsdp.state import _collective_errors, _optim_state
from libddp.distributed.fsdp.wrap import _deferred
from libddp.errors import ArgumentError


@torch.no_grad()
def save_snapshot(
    folder: str | os.PathLike, model: torch.nn.Module, optimizer=None, extra: Any = None
) -> None:
    """Writes model and optimizer, each rank what it owns; a collective of all ranks.

    Files are written beside those of an earlier snapshot in the folder, and index.json is replaced
    last: at every moment one of the two is whole. Then the earlier files are removed.

    Args:
        folder: one that all ranks see.
        model: sharded by FullyShardedDataParallel or fully_shard.
        optimizer: of its parameters, or None.
        extra: what else belongs to it; anything that JSON has.

    Raises:
        SnapshotError: a rank cannot write, on every rank; names the path, and says why.

    Example:
        >>> save_snapshot("out/snapshot", model, optimizer, {"step": 100})  # doctest: +SKIP
    """
    folder, rank, world = Path(folder), dist.get_rank(), dist.get_world_size()
    holder = [secrets.token_hex(4)]
    dist.broadcast_object_list(holder, src=0)
    name = f"rank-{rank}-of-{world}.{holder[0]}.safetensors"
    entries, groups = _model_tensors.of_model(model), None
    if optimizer is not None:
        groups = _model_tensors.groups_of(model, optimizer)
        entries += _model_tensors.of_optimizer(model, optimizer)
    together = _together(f"write {folder}")
    tables: list[Any] = [None] * world
    dist.all_gather_object(tables, together(lambda: _write(folder, name, entries)))
    index = {
        "format": FORMAT,
        "version": VERSION,
        "libddp": __version__,
        "world_size": world,
        "id": holder[0],
        "files": {table["file"]: table["size"] for table in tables},
        "tensors": _tensors(entries, tables),
        "aliases": {
            _model_tensors.MODEL + name: _model_tensors.MODEL + first
            for name, first in _model_tensors.aliases_of(model).items()
        },
        "values": {"param_groups": groups, "extra": extra},
    }
    together(lambda: _publish(folder, index) if rank == 0 else None)


@torch.no_grad()
def load_snapshot(folder: str | os.PathLike, model: torch.nn.Module, optimizer=None) -> Any:
    """Loads what save_snapshot wrote on any number of ranks; a collective of all ranks.

    Files, keys and shapes are checked on all ranks before anything is changed.

    Args:
        folder: the same for all ranks.
        model: sharded, with the parameters of the one that was saved.
        optimizer: of its parameters, or None; one that has made no step yet will do.

    Returns:
        The `extra` of save_snapshot.

    Raises:
        SnapshotError: a file is missing, truncated or of another snapshot, for this rank or
            another one; names it.
        ArgumentError: parameters that are missing, too many or of another shape, of which the
            first is named with its module; or another rank's error.
    """
    together = _together(f"load {folder}")
    snapshot = together(lambda: Snapshot.open(Path(folder)))
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


def _together(what: str):
    return lambda function: _collective_errors.together([native(None)], what, function)


def _write(folder: Path, name: str, entries: list[_model_tensors.Entry]) -> dict[str, Any]:
    """This rank's file; returns what the index has to know of it."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    own = [entry for entry in entries if entry.is_writer and entry.end > entry.begin]
    shapes = {entry.key: (entry.tensor.dtype, entry.tensor.shape) for entry in own}
    with Writer(folder / name, shapes) as file:
        for entry in own:
            file.write(entry.key, entry.tensor)
    pieces = {
        entry.key: {
            "file": name,
            "begin": entry.begin,
            "end": entry.end,
            "offset": file.offsets[entry.key],
            "length": entry.tensor.nbytes,
        }
        for entry in own
    }
    return {"file": name, "size": file.size, "pieces": pieces}


def _tensors(entries: list[_model_tensors.Entry], tables: list[dict]) -> dict[str, Any]:
    found = {}
    for entry in entries:
        pieces = [table["pieces"][entry.key] for table in tables if entry.key in table["pieces"]]
        found[entry.key] = {
            "dtype": name_of(entry.tensor.dtype),
            "shape": list(entry.shape),
            "pieces": sorted(pieces, key=lambda piece: piece["begin"]),
        }
    return found


def _publish(folder: Path, index: dict[str, Any]) -> None:
    write_index(folder, index)
    for path in folder.glob("rank-*-of-*.*.safetensors*"):
        if path.name not in index["files"]:
            with writing(folder):
                path.unlink(missing_ok=True)


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
