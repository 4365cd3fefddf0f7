"""DLRover's FlashCkptTrainer over a Snapshot: transformers' Trainer with saves to memory.

A save copies into memory and is stored in `output_dir`/snapshot behind the training; the
checkpoint-STEP folder that transformers reads is written from it when it is asked for:

    trainer = FlashCkptTrainer(model, args, train_dataset=data)
    trainer.train(resume_from_checkpoint=trainer.get_last_checkpoint())
    trainer.wait_latest_checkpoint()                # checkpoint-STEP of the last save is whole
"""

from __future__ import annotations

import os
from pathlib import Path

from transformers import Trainer

from libddp._whole_file import write_text
from libddp.flash_checkpoint.checkpointer import TRACKER
from libddp.snapshot._snapshot import Snapshot
from libddp.snapshot.transformers import TrainerSaves, refuse_sharded


class FlashCkptTrainer(Trainer):
    """Plain and DistributedDataParallel models; DeepSpeed and FSDP are refused."""

    _saves: TrainerSaves | None = None

    def get_last_checkpoint(self) -> str | bool:
        """The folder of the newest save, of memory or the disk, written now; False if none."""
        return self._flash().checkpoint(self) or False

    def wait_latest_checkpoint(self, timeout: float = 1800) -> None:
        """Until the last save is on the disk: stored, and its checkpoint-STEP folder written."""
        self._flash().snapshot.wait(timeout)
        folder = self.get_last_checkpoint()
        if folder and self.args.should_save:
            write_text(Path(self.args.output_dir, TRACKER), folder.rpartition("-")[2])

    def _save_checkpoint(self, model, trial, metrics=None) -> None:
        refuse_sharded(self)
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        self._flash().save(self.state, self.model, self.optimizer, self.lr_scheduler, storage=True)

    def _flash(self) -> TrainerSaves:
        if self._saves is None:
            keep = self.args.save_total_limit or 2**31 - 1
            folder = os.path.join(self.args.output_dir, "snapshot")
            self._saves = TrainerSaves(Snapshot(folder, keep=keep, random=False))
        return self._saves
