"""Snapshots amid an epoch, by libddp.Snapshot, from which the next start of a run goes on.

    restarts = Restarts(trainer)            # behind DistributedDataParallel
    if restarts.resume(): ...               # trainer.done_steps of an epoch are done
    restarts.save(epoch, number, loss_sum)  # after each step
    restarts.close()

The file at snapshot_path is for later, and for other programs; these are for a run that has died:
in memory every snapshot_every steps, in snapshot_folder every snapshot_storage. The position in the
data and the random state are inside, so that repeated steps are those that were lost.
"""
# ruff: noqa: E402 (the path comes before what is found on it)

import sys
from dataclasses import asdict
from pathlib import Path

NANOGPT = Path(__file__).resolve().parents[1] / "nanogpt"
if str(NANOGPT) not in sys.path:
    sys.path.append(str(NANOGPT))  # behind this folder, whose modules have the same names

import torch
from errors import UserError
from snapshot import differences, options_of_now
from snapshots import Snapshots


class Restarts:
    """Thread rule: one thread. Every rank makes the same calls."""

    def __init__(self, trainer):
        config = trainer.config
        self._trainer = trainer
        self._snapshots = Snapshots(
            config.snapshot_folder, config.snapshot_every, config.snapshot_storage
        )

    def resume(self) -> bool:
        """Whether there was one that is newer than the file. Raises: UserError."""
        trainer = self._trainer
        if not self._snapshots.is_newer_than(self._step(trainer.finished_epochs, 0)):
            return False
        with options_of_now(trainer.optimizer):
            extra = self._snapshots.load(trainer.model, trainer.optimizer, **self._stateful())
        different = differences(extra, trainer)
        if different:
            folder = trainer.config.snapshot_folder
            raise UserError(
                f"the snapshots in {folder} are of another model: {different}. Hint: another "
                f"trainer_config.snapshot_folder, or move {folder} away to start anew"
            )
        trainer.finished_epochs, trainer.done_steps = extra["epoch"], extra["done_steps"]
        trainer.loss_sum = torch.tensor(self._share(extra["loss_sums"]), dtype=torch.float64)
        return True

    def save(self, epoch: int, number: int, loss_sum: torch.Tensor) -> None:
        """After step `number` of the epoch, where one is due."""
        trainer, step = self._trainer, self._step(epoch, number)
        if not self._snapshots.is_due(step):
            return
        extra = {"epoch": epoch, "done_steps": number, "loss_sums": self._of_all(loss_sum)}
        extra |= {"gpt_config": asdict(trainer.core.config), "chars": trainer.chars}
        self._snapshots.save(step, extra, trainer.model, trainer.optimizer, **self._stateful())

    def close(self) -> None:
        self._snapshots.close()

    def _step(self, epoch: int, number: int) -> int:
        return epoch * self._trainer.num_steps["train"] + number

    def _stateful(self) -> dict:
        return {"scaler": self._trainer.scaler, "sampler": self._trainer.loaders["train"]}

    def _of_all(self, loss_sum: torch.Tensor) -> list[float]:
        """Of each rank, exactly: zeros change nothing."""
        ranks = self._trainer.ranks
        table = torch.zeros(ranks.world, dtype=torch.float64, device=ranks.device)
        table[ranks.rank] = loss_sum
        return ranks.sum(table).tolist()

    def _share(self, loss_sums: list[float]) -> float:
        """This rank's; of another number of ranks the first one takes all."""
        ranks = self._trainer.ranks
        if len(loss_sums) == ranks.world:
            return loss_sums[ranks.rank]
        return sum(loss_sums) if ranks.rank == 0 else 0.0
