"""Lightning's CheckpointIO over a Snapshot.

from libddp.snapshot.lightning import SnapshotCheckpointIO

trainer = Trainer(plugins=[SnapshotCheckpointIO("out/run", store_every=10)])
trainer.fit(model, ckpt_path="last")
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

try:
    from lightning.fabric.plugins import CheckpointIO
except ImportError:  # the package of that name before Lightning 2.0's
    from lightning_fabric.plugins import CheckpointIO

from libddp.errors import ArgumentError, SnapshotError
from libddp.snapshot._labels import read_file, read_label, write_label
from libddp.snapshot._snapshot import ALONE, Snapshot


class SnapshotCheckpointIO(CheckpointIO):
    """Saves of Lightning's single-device and DDP strategies, in memory and in a folder behind it.

    Rank 0 saves, as Lightning has it, so it is in the memory of its host; loading is a collective
    of all ranks, which get what it reads. At a checkpoint's path lies a label that names its step;
    Lightning's own files are loaded, too, with weights_only. What a Snapshot cannot keep is refused
    by name (hyperparameters that are objects, for instance): nothing is pickled.

    Args:
        folder: of the Snapshot.
        store_every: every n-th save is stored in the folder; the others are in memory only.
        keep: saves that stay in the folder. Lightning's save_top_k removes labels.
        options: of the Snapshot.
    """

    def __init__(
        self, folder: str | os.PathLike, store_every: int = 1, keep: int = 2, **options: Any
    ) -> None:
        if store_every < 1:
            raise ArgumentError(
                f"libddp snapshot: store_every={store_every}. Hint: 1 stores each save."
            )
        self._arguments = {"folder": folder, "keep": keep, "random": False, **options}
        self._store_every = store_every
        self._num_saves = 0
        self._made: Snapshot | None = None

    @property
    def snapshot(self) -> Snapshot:
        """Of rank 0, made when it is first needed."""
        if self._made is None:
            self._made = Snapshot(process_group=ALONE, **self._arguments)
        return self._made

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike, storage_options: Any = None
    ) -> None:
        """storage_options: {"storage": False} for memory only, True for the folder as well."""
        self._num_saves += 1
        storage = (storage_options or {}).get("storage", self._num_saves % self._store_every == 0)
        step = int(checkpoint.get("global_step", self._num_saves))
        self.snapshot.save(step, state={"checkpoint": checkpoint}, storage=storage)
        write_label(path, step)

    def load_checkpoint(
        self, path: str | os.PathLike, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint of a path; its tensors are on the CPU."""
        is_shared = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        box: list[Any] = [None, ""]
        error: Exception | None = None
        if not is_shared or dist.get_rank() == 0:
            try:
                box[0] = self._load(path)
            except Exception as caught:
                error, box[1] = caught, f"{type(caught).__name__}: {caught}"
        if is_shared:
            dist.broadcast_object_list(box, src=0)
        if error is not None:
            raise error
        if box[1]:
            raise SnapshotError(f"libddp snapshot: rank 0 could not load {path}: {box[1]}")
        return box[0]

    def remove_checkpoint(self, path: str | os.PathLike) -> None:
        """Removes the label; `keep` says what stays in the folder."""
        Path(path).unlink(missing_ok=True)

    def teardown(self) -> None:
        """What is being stored is stored; the memory stays until the program ends without an
        error, as a training that fails is to be started again."""
        if self._made is not None and sys.exc_info()[0] is None:
            self._made.wait()

    def _load(self, path: str | os.PathLike) -> dict[str, Any]:
        step = read_label(path)
        if step is None:
            return read_file(path)
        found = self.snapshot.load(step=step)
        if not found:
            raise ArgumentError(
                f"libddp snapshot: {path} is of step {step}, which is neither in memory nor in "
                f"{self._arguments['folder']} (any more). Hint: a larger keep or a smaller "
                "store_every."
            )
        return found["checkpoint"]
