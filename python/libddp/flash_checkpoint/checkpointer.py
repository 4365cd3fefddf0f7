"""What DLRover's checkpointers have in common: a Snapshot, the tracker file, and labels of saves.

The checkpoint directory is the Snapshot's folder (step-N.M/ with safetensors and JSON). Beside it:

    dlrover_latest.txt        the step of the newest save that is known to be in the folder
    100/rank_0.pt             what `path` was: a label, JSON that names the step

A label stands where DLRover has a file, as its scripts hand that path to load_checkpoint and to
nothing else; torch.load does not take it. Files that DLRover or torch.save wrote at such a path are
loaded, too, so that a run goes on that was begun with DLRover.
"""

from __future__ import annotations

import os
from enum import Enum, auto
from pathlib import Path
from typing import Any

from libddp._whole_file import write_text
from libddp.errors import ArgumentError
from libddp.snapshot._labels import read_label, write_label
from libddp.snapshot._snapshot import Snapshot

TRACKER = "dlrover_latest.txt"
#: DLRover keeps all of them where no deletion strategy is given.
_ALL = 2**31 - 1


class StorageType(Enum):
    """Where a checkpoint goes."""

    MEMORY = auto()
    DISK = auto()


class Checkpointer:
    """The base of the faces; `save_checkpoint` and `load_checkpoint` are collectives."""

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike,
        deletion_strategy: Any = None,
        replica_count: int = 0,
    ) -> None:
        self.checkpoint_dir = os.fspath(checkpoint_dir)
        options = {"replicas": replica_count} if replica_count else {}
        keep = _num_kept(deletion_strategy)
        self._snapshot = Snapshot(checkpoint_dir, keep=keep, random=False, **options)
        #: Steps that are on their way into the folder, with their labels.
        self._storing: int | None = None

    def wait_latest_checkpoint(self, timeout: float = 1800) -> None:
        """Until the newest checkpoint for the disk is there."""
        self._snapshot.wait(timeout)
        if self._storing is not None:
            self._track(self._storing)
            self._storing = None

    def close(self) -> None:
        """The training has reached its end: nothing stays in memory. DLRover has no such call; a
        program that ends without an exception calls it as it ends."""
        self._snapshot.close()

    def _rank(self) -> int:
        return self._snapshot._rank()

    def _to_disk(self, storage_type: StorageType) -> bool:
        # By name: a script may mix StorageType of DLRover's other packages in.
        name = getattr(storage_type, "name", storage_type)
        if name not in ("MEMORY", "DISK"):
            raise ArgumentError(
                f"libddp flash_checkpoint: storage_type={storage_type!r} is none. Hint: "
                "StorageType.MEMORY or StorageType.DISK."
            )
        return name == "DISK"

    def _note_saved(self, step: int, path: str | os.PathLike, to_disk: bool) -> None:
        """Labels what was saved, and tracks the checkpoint before it if it has been stored."""
        if self._storing is not None and self._is_stored(self._storing):
            self._track(self._storing)
            self._storing = None
        if to_disk:
            self._storing = step
            if self._rank() == 0:
                write_label(path, step)

    def _is_stored(self, step: int) -> bool:
        found = Path(self.checkpoint_dir).glob(f"step-{step}.*")
        return any(path.suffix != ".part" for path in found)

    def _resume_step(self, resume_path: str | os.PathLike) -> int | None:
        """Of the label at a path, where it is to be followed: memory goes before it, as a script
        that is started again has the arguments of its first start."""
        return None if not resume_path or self._is_in_memory() else read_label(resume_path)

    def _is_in_memory(self) -> bool:
        return any(version.is_in_memory for version in self._snapshot._core.versions())

    def _num_ranks(self) -> int:
        group = self._snapshot._group
        return 1 if group is None else group.size()

    def _check_found(self, found: Any, resume_path: str | os.PathLike, step: int | None) -> None:
        if not found and step is not None:
            raise ArgumentError(
                f"libddp flash_checkpoint: {resume_path} is of step {step}, which "
                f"{self.checkpoint_dir} does not have (any more). Hint: '' loads the "
                "newest; deletion_strategy says what stays."
            )

    def _track(self, step: int) -> None:
        if self._rank() == 0:
            write_text(Path(self.checkpoint_dir, TRACKER), str(step))


def _num_kept(strategy: Any) -> int:
    """Of DLRover's KeepLatestStepStrategy, or a number."""
    if strategy is None:
        return _ALL
    count = getattr(strategy, "_max_to_keep", strategy)
    if type(count) is int and count >= 1:
        return count
    raise ArgumentError(
        f"libddp flash_checkpoint: deletion_strategy={type(strategy).__name__} says no number of "
        "checkpoints to keep. Hint: KeepLatestStepStrategy, a number, or None for all of them."
    )
