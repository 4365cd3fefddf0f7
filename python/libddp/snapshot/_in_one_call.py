"""save_snapshot and load_snapshot: one snapshot in a folder, without memory, in one call each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from libddp.distributed._groups import native
from libddp.distributed.fsdp.snapshot import _old_snapshots
from libddp.distributed.fsdp.state import _collective_errors
from libddp.errors import SnapshotError
from libddp.snapshot._place import local
from libddp.snapshot._snapshot import NO_EXTRA, Snapshot


def save_snapshot(
    folder: str | os.PathLike, model: torch.nn.Module, optimizer=None, extra: Any = None
) -> None:
    """Writes model and optimizer, each rank what it owns; a collective of all ranks.

    The folder has it when this returns, in libddp.Snapshot's format (docs/snapshots.md): it is
    written beside an earlier one, and is there at once when the disk has all of it; then the
    earlier one is removed. It takes no memory beside what is saved.

    Args:
        folder: one that all ranks see, or an address that fsspec knows.
        model: sharded by FullyShardedDataParallel or fully_shard, or one that all ranks have.
        optimizer: of its parameters, or None.
        extra: what else belongs to it, rank 0's: anything that libddp.Snapshot.save takes.

    Raises:
        SnapshotError: a rank cannot write, on every rank; names the path, and says why.

    Example:
        >>> save_snapshot("out/snapshot", model, optimizer, {"step": 100})  # doctest: +SKIP
    """
    holder = [extra]
    dist.broadcast_object_list(holder, src=0)
    extra = NO_EXTRA if holder[0] is None else holder[0]
    with _only(folder) as snapshot:
        snapshot.save(0, model, optimizer, extra=extra, storage=True)
    path = local(folder)

    def remove() -> None:
        if "://" not in path and dist.get_rank() == 0:
            _old_snapshots.remove(Path(path))

    # Together: a rank may look into the folder when this returns.
    _collective_errors.together([native(None)], f"save {path}", remove, of="snapshot")


def load_snapshot(folder: str | os.PathLike, model: torch.nn.Module, optimizer=None) -> Any:
    """Loads what save_snapshot wrote on any number of ranks; a collective of all ranks.

    Also the newest of libddp.Snapshot's, and what save_snapshot wrote in its earlier format. Files,
    keys and shapes are checked on all ranks before anything is changed.

    Args:
        folder: the same for all ranks.
        model: with the parameters of the one that was saved, in any wrapper.
        optimizer: of its parameters, or None; one that has made no step yet will do.

    Returns:
        The `extra` of save_snapshot.

    Raises:
        SnapshotError: there is none; a file is missing, truncated, damaged or of another snapshot,
            for this rank or another one; names it.
        ArgumentError: parameters that are missing, too many or of another shape, of which the
            first is named; or another rank's error.
    """
    path = local(folder)
    with _only(folder) as snapshot:
        if snapshot.latest_step() is not None:
            return snapshot.load(model, optimizer)
    look = lambda: "://" not in path and _old_snapshots.is_there(Path(path))  # noqa: E731
    if _collective_errors.together([native(None)], f"load {path}", look, of="snapshot"):
        return _old_snapshots.load(Path(path), model, optimizer)
    raise SnapshotError(
        f"libddp snapshot: {path} has none that is whole. Hint: pass the folder that save_snapshot "
        "wrote; one without an index was not finished."
    )


def _only(folder) -> Snapshot:
    return Snapshot(folder, keep=1, random=False, in_memory=False)
