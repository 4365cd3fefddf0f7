"""DLRover's DdpCheckpointer over a Snapshot: one state of all ranks, or a shard of each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from libddp.errors import ArgumentError
from libddp.flash_checkpoint.checkpointer import TRACKER, Checkpointer, StorageType
from libddp.snapshot._labels import read_file, read_label


class DdpCheckpointer(Checkpointer):
    """Saves and loads state dicts.

    Args:
        checkpoint_dir: the Snapshot's folder (checkpointer.py says what lies there).
        local_shard_num: above 1: each rank's state is its own; they are loaded by as many ranks.
        global_shard_num: likewise.
        comm_backend: taken and not needed: the default group's is used.
        deletion_strategy: DLRover's KeepLatestStepStrategy, or how many stay. None: all.
        save_timeout: taken and not needed: ranks save together, or none does.
        replica_count: 0, or 1: each save goes to the next host, too.

    Note:
        All ranks call each of these, as with DLRover. The state has numbers, texts, lists, dicts
        and tensors; other objects are refused by name, as nothing is pickled.
    """

    def __init__(
        self,
        checkpoint_dir: str,
        local_shard_num: int = 1,
        global_shard_num: int = 1,
        comm_backend: str = "",
        deletion_strategy: Any = None,
        save_timeout: int = 600,
        replica_count: int = 0,
    ) -> None:
        super().__init__(checkpoint_dir, deletion_strategy, replica_count)
        self._is_sharded = max(local_shard_num, global_shard_num) > 1

    def save_checkpoint(
        self,
        step: int,
        state_dict: dict[str, Any],
        path: str = "",
        storage_type: StorageType = StorageType.DISK,
    ) -> None:
        """Copies the state into memory; DISK also stores it, behind the training."""
        to_disk = self._to_disk(storage_type)
        if self._is_sharded:
            extra = {"shard": state_dict, "num_ranks": self._num_ranks()}
            self._snapshot.save(step, extra=extra, storage=to_disk)
        else:
            self._snapshot.save(step, state=state_dict, storage=to_disk)
        self._note_saved(step, path or self._default_path(step, 0), to_disk)

    def load_checkpoint(self, resume_path: str = "") -> dict[str, Any]:
        """The newest state: of memory, else of `resume_path`, else of the directory; {} if none.

        Raises:
            SnapshotError: what is there is damaged; says how.
            ArgumentError: `resume_path` is not there.
        """
        step = self._resume_step(resume_path)
        is_file = bool(resume_path) and step is None and not self._is_in_memory()
        if is_file:
            return read_file(resume_path)
        found = self._snapshot.load(step=step)
        self._check_found(found, resume_path, step)
        if not found:
            return self._load_dlrovers()
        return self._own_shard(found) if self._is_sharded else found

    def _own_shard(self, found: dict[str, Any]) -> dict[str, Any]:
        saved = found.get("num_ranks") if set(found) == {"shard", "num_ranks"} else None
        if saved != self._num_ranks():
            raise ArgumentError(
                f"libddp flash_checkpoint: {self.checkpoint_dir} has the shards of {saved or 'no'} "
                f"ranks, here are {self._num_ranks()}. Hint: load with as many ranks and the same "
                "global_shard_num, or use FsdpShardCheckpointer, which reshards."
            )
        return found["shard"]

    def _load_dlrovers(self) -> dict[str, Any]:
        """What DLRover left in this directory before the script was changed."""
        tracker = Path(self.checkpoint_dir, TRACKER)
        if not tracker.exists():
            return {}
        rank = self._rank() if self._is_sharded else 0
        path = self._default_path(int(tracker.read_text()), rank)
        return {} if not os.path.exists(path) or read_label(path) is not None else read_file(path)

    def _default_path(self, step: int, rank: int) -> str:
        return os.path.join(self.checkpoint_dir, str(step), f"rank_{rank}.pt")


__all__ = ["Checkpointer", "DdpCheckpointer", "StorageType"]
