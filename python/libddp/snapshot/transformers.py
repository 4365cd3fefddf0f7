"""Snapshots under transformers' Trainer: a callback, and checkpoint folders made of what it saved.

from libddp.snapshot.transformers import SnapshotCallback

callback = SnapshotCallback(libddp.Snapshot("out/run"), every=10)
trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
trainer.train(resume_from_checkpoint=callback.checkpoint(trainer))
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from libddp.errors import ArgumentError
from libddp.snapshot import _random
from libddp.snapshot._snapshot import Snapshot


class TrainerSaves:
    """Saves of a Trainer's parts, and the folder that Trainer.train resumes from.

    Plain and DistributedDataParallel models; save and checkpoint are collectives.

    Args:
        snapshot: made with random=False or not: each rank's generators are in its own save.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._generators = _Generators()

    def save(self, state, model, optimizer, scheduler, storage: bool) -> None:
        """Saves the step that a TrainerState is at."""
        parts = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            # As TrainerState.save_to_json has it.
            "trainer": json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True),
        }
        self.snapshot.save(
            state.global_step, state=parts, storage=storage, generators=self._generators
        )

    def checkpoint(self, trainer, output_dir: str | os.PathLike | None = None) -> str | None:
        """Writes the newest save as transformers' own checkpoint-STEP folder; None if there is no
        save. Trainer.train(resume_from_checkpoint=...) takes what it returns."""
        refuse_sharded(trainer)
        parts = self.snapshot.load(generators=self._generators)
        if not parts:
            return None
        step = json.loads(parts["trainer"])["global_step"]
        folder = Path(output_dir or trainer.args.output_dir, f"checkpoint-{step}")
        folder.mkdir(parents=True, exist_ok=True)
        rank, world = trainer.args.process_index, trainer.args.world_size
        name = "rng_state.pth" if world <= 1 else f"rng_state_{rank}.pth"
        torch.save(self._generators.as_transformers_has_them(), folder / name)
        if trainer.args.should_save:
            _write(trainer.model, parts, folder)
        if dist.is_available() and dist.is_initialized():
            dist.barrier()
        return str(folder)


class SnapshotCallback(TrainerCallback):
    """Saves every n-th step in memory, and in the folder where the Trainer saves (on_save).

    Args:
        snapshot: of the Trainer's ranks; make it after TrainingArguments, which make the group.
        every: steps from one save to the next.
    """

    def __init__(self, snapshot: Snapshot, every: int = 1) -> None:
        if every < 1:
            raise ArgumentError(f"libddp snapshot: every={every}. Hint: 1 saves each step.")
        self._saves = TrainerSaves(snapshot)
        self._every = every

    def checkpoint(self, trainer) -> str | None:
        """TrainerSaves.checkpoint."""
        return self._saves.checkpoint(trainer)

    def on_step_end(self, args, state, control, **parts: Any) -> None:
        if state.global_step % self._every == 0 and not control.should_save:
            self._save(state, parts, storage=False)

    def on_save(self, args, state, control, **parts: Any) -> None:
        self._save(state, parts, storage=True)

    def _save(self, state, parts: dict[str, Any], storage: bool) -> None:
        self._saves.save(state, parts["model"], parts["optimizer"], parts["lr_scheduler"], storage)


class _Generators:
    """The states of this rank's random number generators."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return _random.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def as_transformers_has_them(self) -> dict[str, Any]:
        names = {"torch": "cpu"}
        return {names.get(name, name): state for name, state in self._loaded.items()}


def refuse_sharded(trainer) -> None:
    """Only what every rank has all of fits into a transformers folder by way of a state dict."""
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ArgumentError(
            "libddp snapshot: the Trainer runs DeepSpeed or FSDP, of which each rank has a part. "
            "Hint: libddp.flash_checkpoint.deepspeed or .fsdp in a loop of your own."
        )


def _write(model, parts: dict[str, Any], folder: Path) -> None:
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder, state_dict=parts["model"])
    else:
        torch.save(parts["model"], folder / "pytorch_model.bin")
    torch.save(parts["optimizer"], folder / "optimizer.pt")
    if parts["scheduler"] is not None:
        torch.save(parts["scheduler"], folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(parts["trainer"] + "\n")
