"""How the workers of goodput.py and restart.py group, wrap, save and load: a class for each way.

    saves_class = recovery_saves.find("TorchFile")
    dist, wrap = saves_class.parts()          # imports what its scripts import, and nothing else
    dist.init_process_group(saves_class.backend)
    saves = saves_class(folder, wrap(net), optimizer, file_every=20)
    step = saves.load()
    saves.save(step + 1)

All store a file each `file_every` steps; Libddp and DlroverMemory also save to memory in each step.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future
from pathlib import Path

import torch


class Saves:
    """torch's DDP on gloo, and one file of rank 0."""

    backend = "gloo"

    def __init__(self, folder: str, model, optimizer, file_every: int) -> None:
        import torch.distributed as dist

        self._folder, self._every = folder, file_every
        self._model, self._optimizer = model, optimizer
        self._is_first = dist.get_rank() == 0

    @staticmethod
    def parts():
        """torch.distributed or what has its names, and what wraps a model."""
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        return dist, DistributedDataParallel

    @staticmethod
    def run(main):
        """What makes a worker's main() one that is called again, where there is such a thing."""
        return main

    def finish(self) -> None:
        """What is saved is whole by now."""

    def close(self) -> None:
        """The training is at its end."""

    def _is_due(self, step: int) -> bool:
        return step % self._every == 0

    def _state(self, step: int) -> dict:
        model, optimizer = self._model.module.state_dict(), self._optimizer.state_dict()
        return {"model": model, "optimizer": optimizer, "step": step}

    def _take(self, found: dict) -> int:
        if not found:
            return 0
        self._model.module.load_state_dict(found["model"])
        self._optimizer.load_state_dict(found["optimizer"])
        return found["step"]


class Libddp(Saves):
    """libddp's group, DDP and Snapshot."""

    def __init__(self, folder: str, model, optimizer, file_every: int) -> None:
        import libddp

        super().__init__(folder, model, optimizer, file_every)
        self._snapshot = libddp.Snapshot(os.path.join(folder, "snapshots"), linger=10)

    @staticmethod
    def parts():
        import libddp.distributed as dist
        from libddp.nn.parallel import DistributedDataParallel

        return dist, DistributedDataParallel

    @staticmethod
    def run(main):
        import libddp

        return libddp.elastic.run(main)

    def load(self) -> int:
        return self._snapshot.load(self._model, self._optimizer).get("step", 0)

    def save(self, step: int) -> None:
        parts = self._model, self._optimizer
        self._snapshot.save(step, *parts, extra={"step": step}, storage=self._is_due(step))

    def close(self) -> None:
        self._snapshot.close()


class TorchFile(Saves):
    """torch.save."""

    @property
    def _path(self) -> str:
        return os.path.join(self._folder, "checkpoint.pt")

    def load(self) -> int:
        is_there = os.path.exists(self._path)
        return self._take(torch.load(self._path, weights_only=True) if is_there else {})

    def save(self, step: int) -> None:
        if self._is_due(step) and self._is_first:
            torch.save(self._state(step), self._path + ".part")
            os.replace(self._path + ".part", self._path)


class DcpAsync(Saves):
    """torch.distributed.checkpoint.async_save, as torch's recipe has it, in a group of its own."""

    def __init__(self, folder: str, model, optimizer, file_every: int) -> None:
        import torch.distributed as dist

        super().__init__(folder, model, optimizer, file_every)
        self._group = dist.new_group(backend="gloo")
        self._future: Future | None = None

    @staticmethod
    def parts():
        import torch.distributed.checkpoint
        import torch.distributed.checkpoint.state_dict  # noqa: F401

        return Saves.parts()

    def load(self) -> int:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        if not (paths := self._stored()):
            return 0
        model, optimizer = get_state_dict(self._model, self._optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=paths[-1], process_group=self._group)
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return int(paths[-1].name.removeprefix("step-"))

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        if not self._is_due(step):
            return
        self.finish()
        model, optimizer = get_state_dict(self._model, self._optimizer)
        self._future = dcp.async_save(
            {"model": model, "optimizer": optimizer},
            checkpoint_id=os.path.join(self._folder, f"step-{step:08}"),
            process_group=self._group,
        )

    def finish(self) -> None:
        """The two newest saves stay."""
        if self._future is not None:
            self._future.result()
        if self._is_first:
            for old in self._stored()[:-2]:
                shutil.rmtree(old)

    def _stored(self) -> list[Path]:
        """Those that are whole: .metadata is written last."""
        return sorted(path.parent for path in Path(self._folder).glob("step-*/.metadata"))


class DlroverMemory(Saves):
    """DLRover's DdpCheckpointer, as its nanoGPT example calls it."""

    def __init__(self, folder: str, model, optimizer, file_every: int) -> None:
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

        super().__init__(folder, model, optimizer, file_every)
        self._kinds = StorageType
        self._checkpointer = DdpCheckpointer(os.path.join(folder, "checkpoints"))

    @staticmethod
    def parts():
        import dlrover.trainer.torch.flash_checkpoint.ddp  # noqa: F401

        return Saves.parts()

    def load(self) -> int:
        return self._take(self._checkpointer.load_checkpoint())

    def save(self, step: int) -> None:
        kind = self._kinds.DISK if self._is_due(step) else self._kinds.MEMORY
        self._checkpointer.save_checkpoint(step, self._state(step), storage_type=kind)


def find(name: str) -> type[Saves]:
    kinds = {kind.__name__: kind for kind in (Libddp, TorchFile, DcpAsync, DlroverMemory)}
    return kinds[name]
