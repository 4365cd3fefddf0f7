"""DLRover's DeepSpeedCheckpointer over a Snapshot.

DeepSpeed plans what each rank saves, and hands its CheckpointEngine one state per file. Here those
states go into the Snapshot of `checkpoint_dir`/snapshot, with DISK into DeepSpeed's own files as
well, which its tools read (zero_to_fp32.py). Loading writes what is newer in memory as those files,
and lets DeepSpeed load them. torch.save is not replaced, and no folder that DeepSpeed wrote is
removed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from libddp._whole_file import write_text
from libddp.errors import ArgumentError
from libddp.flash_checkpoint.checkpointer import Checkpointer, StorageType

#: The modules whose objects are taken apart and made again: ZeRO's states have a loss scaler, and
#: where in the flat arrays each parameter is.
_MODULES = ("deepspeed.runtime.fp16.loss_scaler", "deepspeed.utils.tensor_fragment")
_OBJECT = "libddp.flash_checkpoint.deepspeed.object"


class SlotEngine:
    """A CheckpointEngine of DeepSpeed's that keeps the states; what else it is asked, `inner`
    answers.

    Args:
        inner: the engine that writes files.
        writes: whether they are written.
    """

    def __init__(self, inner: Any, writes: bool) -> None:
        self.states: dict[str, Any] = {}
        self._inner = inner
        self._writes = writes

    def save(self, state_dict: Any, path: str) -> Any:
        self.states[os.fspath(path)] = state_dict
        return self._inner.save(state_dict, path) if self._writes else None

    def create(self, info: Any) -> Any:
        return self._inner.create(info) if self._writes else None

    def commit(self, info: Any) -> Any:
        return self._inner.commit(info) if self._writes else True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class DeepSpeedCheckpointer(Checkpointer):
    """Saves and loads a DeepSpeedEngine.

    Args:
        engine: what deepspeed.initialize returned.
        checkpoint_dir: the save_dir of its checkpoints.
        comm_backend, deletion_strategy, save_timeout: as DdpCheckpointer has them.

    Note:
        What a rank saves is loaded by as many ranks; DeepSpeed's universal checkpoints, made of
        its files, are for other numbers.
    """

    def __init__(
        self,
        engine: Any,
        checkpoint_dir: str,
        comm_backend: str = "",
        deletion_strategy: Any = None,
        save_timeout: int = 600,
    ) -> None:
        if not hasattr(engine, "checkpoint_engine"):
            raise ArgumentError(
                f"libddp flash_checkpoint: {type(engine).__name__} has no checkpoint_engine. Hint: "
                "give what deepspeed.initialize returned (DeepSpeed 0.9 or newer)."
            )
        super().__init__(os.path.join(checkpoint_dir, "snapshot"), deletion_strategy)
        self.engine = engine

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        storage_type: StorageType = StorageType.DISK,
    ) -> None:
        """DeepSpeedEngine.save_checkpoint; MEMORY writes no file, DISK as DeepSpeed does."""
        to_disk = self._to_disk(storage_type)
        tag = f"global_step{self.engine.global_steps}" if tag is None else str(tag)
        own = self.engine.checkpoint_engine
        slots = SlotEngine(own, to_disk)
        self.engine.checkpoint_engine = slots
        try:
            self.engine.save_checkpoint(
                save_dir,
                tag=tag,
                client_state=dict(client_state or {}),
                save_latest=save_latest and to_disk,
            )
        finally:
            self.engine.checkpoint_engine = own
        files = {os.path.relpath(path, save_dir): _plain(s) for path, s in slots.states.items()}
        extra = {"tag": tag, "num_ranks": self._num_ranks(), "files": files}
        self._snapshot.save(int(self.engine.global_steps), extra=extra)

    def load_checkpoint(self, load_dir: str, tag: Any = None, **arguments: Any) -> tuple:
        """DeepSpeedEngine.load_checkpoint, of what memory has where that is newer; with a tag, of
        that one."""
        found = self._snapshot.load()
        if found and tag in (None, found["tag"]):
            if found["num_ranks"] != self._num_ranks():
                raise ArgumentError(
                    f"libddp flash_checkpoint: memory has what {found['num_ranks']} ranks saved, "
                    f"here are {self._num_ranks()}. Hint: as many ranks, or the tag of an "
                    "older checkpoint that DeepSpeed can load from the disk."
                )
            for name, state in found["files"].items():
                _write(Path(load_dir, name), _objects(state))
            if self._rank() == 0:
                write_text(Path(load_dir, "latest"), found["tag"])
            if dist.is_available() and dist.is_initialized():
                dist.barrier()
            tag = found["tag"]
        return self.engine.load_checkpoint(load_dir, tag=tag, **arguments)


def _plain(state: Any) -> Any:
    """As values: DeepSpeed's enums (its ZeRO stage) are numbers, its objects what they have."""
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_plain(value) for value in state)
    if type(state).__module__ in _MODULES:
        kind = f"{type(state).__module__}:{type(state).__qualname__}"
        return {_OBJECT: kind, "has": _plain(vars(state))}
    return state.value if isinstance(state, Enum) else state


def _objects(state: Any) -> Any:
    """And back."""
    if isinstance(state, dict) and _OBJECT in state:
        module, _, name = state[_OBJECT].partition(":")
        kind = getattr(importlib.import_module(module), name) if module in _MODULES else None
        if not isinstance(kind, type):
            raise ArgumentError(
                f"libddp flash_checkpoint: the snapshot has a {state[_OBJECT]}, which this version "
                "does not make. Hint: load it with the libddp and DeepSpeed that saved it."
            )
        made = kind.__new__(kind)
        vars(made).update(_objects(state["has"]))
        return made
    if isinstance(state, dict):
        return {key: _objects(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_objects(value) for value in state)
    return state


def _write(path: Path, state: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    torch.save(state, whole)
    whole.replace(path)


__all__ = ["DeepSpeedCheckpointer", "SlotEngine", "StorageType"]
