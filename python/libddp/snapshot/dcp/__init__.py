"""torch.distributed.checkpoint that saves into a libddp.Snapshot: memory, and a folder.

    from libddp.snapshot import dcp as slots

    snapshot = libddp.Snapshot("out/run")
    dcp.save(state_dict, storage_writer=slots.SlotWriter(snapshot), checkpoint_id="step-100")
    dcp.load(state_dict, storage_reader=slots.SlotReader(snapshot))   # the newest, any world size

    slots.save(state_dict, snapshot, step=100, storage=True)          # the same
    slots.load(state_dict, snapshot)                    # and passes over saves that are damaged

The ranks of the Snapshot are those of dcp.save's process group. dcp.async_save works in a thread:
give its Snapshot a process group of its own, so that its collectives do not meet the training's.
"""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as torchs
from torch.distributed.checkpoint.api import CheckpointException

from libddp import _C
from libddp.errors import SnapshotError
from libddp.snapshot._snapshot import Snapshot
from libddp.snapshot.dcp._reader import SlotReader
from libddp.snapshot.dcp._writer import SlotWriter

_log = logging.getLogger("libddp.snapshot")


def save(
    state_dict: dict[str, Any],
    snapshot: Snapshot,
    step: int,
    *,
    storage: bool = False,
    planner: torchs.SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """torch.distributed.checkpoint.save into a snapshot."""
    writer = SlotWriter(snapshot, step=step, storage=storage)
    torchs.save(state_dict, storage_writer=writer, planner=planner, process_group=process_group)


def load(
    state_dict: dict[str, Any],
    snapshot: Snapshot,
    *,
    step: int | None = None,
    planner: torchs.LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> int | None:
    """torch.distributed.checkpoint.load of the newest save that is whole.

    Returns:
        Its step; None where there is no save.

    Raises:
        SnapshotError: there are saves, and all of them are damaged.
    """
    reader, attempts = SlotReader(snapshot, step=step), _C.LoadAttempts()
    while reader.find_next():
        try:
            torchs.load(
                state_dict, storage_reader=reader, planner=planner, process_group=process_group
            )
            _note_opening(attempts, reader)
            if attempts.has_passed_over:
                _log.warning("libddp snapshot: %s", attempts.went_on(f"step {reader.step}"))
            return reader.step
        except (SnapshotError, CheckpointException):  # the latter: what failed on some rank
            if reader.damage is None:
                raise
            _log.warning("libddp snapshot: passed over: %s", reader.damage)
            attempts.pass_over(str(reader.damage), is_damaged=True)
    _note_opening(attempts, reader)
    attempts.check()
    return None


def _note_opening(attempts: _C.LoadAttempts, reader: SlotReader) -> None:
    for reason in reader.reasons:
        attempts.pass_over(reason, is_damaged=True)


__all__ = ["SlotReader", "SlotWriter", "load", "save"]
