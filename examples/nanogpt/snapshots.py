"""How a run keeps snapshots by libddp.Snapshot, so that a restart repeats next to nothing.

    snapshots = Snapshots("out/nanogpt/snapshots", every=1, storage=100)
    if snapshots.is_newer_than(iteration):
        extra = snapshots.load(model, optimizer, scaler=scaler)
    snapshots.save(iteration, extra, model, optimizer, scaler=scaler)     # where one is due
    snapshots.close()

A checkpoint is for later and for other programs; a snapshot is for the next start of this run. With
both intervals 0 there are none, and all of this does nothing.
"""

import os

import libddp


class Snapshots:
    """Thread rule: one thread. All ranks make the same calls.

    Args:
        folder: all ranks see it, and it is this run's alone.
        every: iterations between snapshots in memory that outlives the processes; 0: none.
        storage: iterations between those that are stored in the folder too; 0: none.
    """

    def __init__(self, folder: str | os.PathLike, every: int, storage: int):
        self.every, self.storage = every, storage
        self.snapshot = libddp.Snapshot(folder) if every or storage else None

    def is_newer_than(self, iteration: int) -> bool:
        """Whether a start before this one has left one that is."""
        if self.snapshot is None:
            return False
        newest = self.snapshot.latest_step()
        return newest is not None and newest > iteration

    def load(self, model, optimizer, **stateful) -> dict:
        """Fill these from the newest; return the `extra` that was saved with it."""
        return self.snapshot.load(model, optimizer, **stateful)

    def is_due(self, iteration: int) -> bool:
        return any(each and iteration % each == 0 for each in (self.every, self.storage))

    def save(self, iteration: int, extra: dict, model, optimizer, **stateful) -> None:
        """If one is due: as fast as memory is copied; the folder is written behind the training."""
        if self.is_due(iteration):
            stored = bool(self.storage) and iteration % self.storage == 0
            self.snapshot.save(iteration, model, optimizer, extra=extra, storage=stored, **stateful)

    def close(self) -> None:
        """The run is over and its checkpoint newer: nothing stays in memory."""
        if self.snapshot is not None:
            self.snapshot.close()
