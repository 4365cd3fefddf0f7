"""DLRover's FSDP checkpointers over a Snapshot: each rank saves its part, and any number loads.

Models are of libddp's FullyShardedDataParallel and fully_shard, or of torch's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from libddp.errors import ArgumentError
from libddp.flash_checkpoint.checkpointer import Checkpointer, StorageType
from libddp.snapshot import dcp
from libddp.snapshot._sharded import is_sharded
from libddp.snapshot._values import Encoder, decode

_WHOLE = StateDictOptions(full_state_dict=True)


def _text_of(extra: dict[str, Any]) -> str:
    """As one value, which loads whatever keys it has."""
    encoder = Encoder("")
    text = json.dumps(encoder.encode(extra, "extra_sd"))
    if encoder.tensors:
        raise ArgumentError(
            "libddp flash_checkpoint: extra_sd has tensors, which are not kept beside a model of "
            "torch's FSDP. Hint: tolist(), or libddp's FullyShardedDataParallel or fully_shard."
        )
    return text


class _FsdpCheckpointer(Checkpointer):
    """Arguments as DdpCheckpointer has them."""

    def __init__(
        self,
        checkpoint_dir: str,
        comm_backend: str = "",
        deletion_strategy: Any = None,
        save_timeout: int = 600,
    ) -> None:
        super().__init__(checkpoint_dir, deletion_strategy)

    def save_checkpoint(
        self,
        step: int,
        model,
        optimizer,
        extra_sd: Mapping[str, Any] | None = None,
        path: str = "",
        storage_type: StorageType = StorageType.DISK,
    ) -> None:
        """Copies model, optimizer and extra_sd into memory; DISK also stores them, behind the
        training."""
        to_disk = self._to_disk(storage_type)
        self._save(step, model, optimizer, {"step": step, **(extra_sd or {})}, to_disk)
        self._note_saved(step, path or self._default_path(step), to_disk)

    def load_checkpoint(self, model, optimizer, resume_path: str = "") -> dict[str, Any]:
        """Fills model and optimizer; returns extra_sd with "step", {} where there is nothing."""
        step = self._resume_step(resume_path)
        if resume_path and step is None and not self._is_in_memory():
            raise ArgumentError(
                f"libddp flash_checkpoint: {resume_path} was not saved by libddp. Hint: load it "
                "with torch.distributed.checkpoint, and save it again."
            )
        found = self._load(model, optimizer, step)
        self._check_found(found, resume_path, step)
        return found

    def _default_path(self, step: int) -> str:
        return os.path.join(self.checkpoint_dir, str(step))


class FsdpShardCheckpointer(_FsdpCheckpointer):
    """Each rank's part as it is; nothing is gathered, and other numbers of ranks load it."""

    def _save(self, step, model, optimizer, extra: dict[str, Any], to_disk: bool) -> None:
        if is_sharded(model):
            self._snapshot.save(step, model, optimizer, extra=extra, storage=to_disk)
            return
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments, "extra": _text_of(extra)}
        dcp.save(state, self._snapshot, step, storage=to_disk)

    def _load(self, model, optimizer, step: int | None) -> dict[str, Any]:
        if is_sharded(model):
            return self._snapshot.load(model, optimizer, step=step)
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments, "extra": ""}
        if dcp.load(state, self._snapshot, step=step) is None:
            return {}
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        return decode(json.loads(state["extra"]), {})


class FsdpFullCheckpointer(_FsdpCheckpointer):
    """The whole state, gathered on all ranks, of which each host keeps one copy."""

    def _save(self, step, model, optimizer, extra: dict[str, Any], to_disk: bool) -> None:
        weights, moments = get_state_dict(model, optimizer, options=_WHOLE)
        state = {"model": weights, "optimizer": moments, "extra": extra}
        self._snapshot.save(step, state=state, storage=to_disk)

    def _load(self, model, optimizer, step: int | None) -> dict[str, Any]:
        state = self._snapshot.load(step=step)
        if not state:
            return {}
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=_WHOLE,
        )
        return state["extra"]

    def _default_path(self, step: int) -> str:
        return os.path.join(super()._default_path(step), "rank_0.pt")


__all__ = ["Checkpointer", "FsdpFullCheckpointer", "FsdpShardCheckpointer", "StorageType"]
