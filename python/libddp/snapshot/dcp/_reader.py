"""SlotReader: torch.distributed.checkpoint's StorageReader over a Snapshot."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from libddp.errors import SnapshotError
from libddp.snapshot._pieces import Piece, StoredBy
from libddp.snapshot._snapshot import Snapshot, _tensor_keys
from libddp.snapshot._values import decode
from libddp.snapshot.dcp._table import FORMAT, TABLE, chunk_key, metadata_of, tensor_text, value_key
from libddp.snapshot.dcp._writer import step_of

_log = logging.getLogger("libddp.snapshot")


class _NoMetadata(Metadata):
    """Of no save: torch.distributed.checkpoint.load drops what read_metadata raises (2.11)."""

    def __init__(self, why: str) -> None:
        self.planner_data = self.storage_data = self.storage_meta = None
        self.version = None
        self._why = why

    def refuse(self) -> NoReturn:
        raise SnapshotError(self._why)

    @property
    def state_dict_metadata(self) -> NoReturn:
        self.refuse()


class SlotReader(StorageReader):
    """Loads what SlotWriter has saved, on any number of ranks.

    A save whose bytes turn out to be damaged fails the load with SnapshotError; the next load with
    the same reader takes the next older one (libddp.snapshot.dcp.load does that by itself).

    Args:
        snapshot: of the same ranks.
        step: of the save. None: the number at the end of checkpoint_id; without one the newest.

    Attributes:
        step: of the save that is being loaded.
        damage: why the last load failed, if its save is damaged.
        reasons: why saves were passed over before a load began.
    """

    def __init__(self, snapshot: Snapshot, *, step: int | None = None) -> None:
        self.step: int | None = None
        self.damage: SnapshotError | None = None
        self.reasons: list[str] = []
        self._snapshot = snapshot
        self._given_step = step
        self._asked_step = step
        self._version: Any = None
        self._metadata: Metadata | None = None
        self._damaged: set[tuple[int, bool]] = set()

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        if checkpoint_id is not None and self._given_step is None:
            self._asked_step = step_of(checkpoint_id)

    def find_next(self) -> bool:
        """Whether there is a save to load, which is then opened; a collective."""
        snapshot = self._snapshot
        snapshot._check_open()
        self.damage = None
        for version in snapshot._core.versions():
            key = (version.sequence, version.is_in_memory)
            if key in self._damaged or self._asked_step not in (None, version.step):
                continue
            try:
                self._open(version)
                return True
            except SnapshotError as error:
                self._damaged.add(key)
                _log.warning("libddp snapshot: passed over: %s", error)
                self.reasons.append(str(error))
        return False

    def read_metadata(self) -> Metadata:
        """Of the save; where there is none, what raises SnapshotError as soon as it is used."""
        if self._metadata is None and not self.find_next():
            wanted = "" if self._asked_step is None else f" of step {self._asked_step}"
            return _NoMetadata(
                f"libddp snapshot: there is no save{wanted} that can be loaded. "
                f"{' '.join(self.reasons)} Hint: save with a SlotWriter of the same folder or run."
            )
        metadata, self._metadata = self._metadata, None
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(metadata, _NoMetadata):
            metadata.refuse()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            self._read(plan, planner)
        except SnapshotError as error:
            self.damage = error
            self._damaged.add((self._version.sequence, self._version.is_in_memory))
            raise
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return step_of(checkpoint_id) is not None

    def _open(self, version: Any) -> None:
        self._snapshot._core.open(version)
        self._version = version
        self._together(self._check_format)
        text = self._read_whole([TABLE])[TABLE]
        self._metadata = self._together(lambda: metadata_of(tensor_text(text)))
        self.step = version.step

    def _check_format(self) -> None:
        values = json.loads(self._version.values)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise SnapshotError(
                f"libddp snapshot: {self._version.name} was not saved by a SlotWriter of this "
                "version. Hint: load it as it was saved, with libddp.Snapshot.load."
            )

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        keys = list(dict.fromkeys(value_key(item.storage_index.fqn) for item in values))
        texts = self._read_whole(keys)
        trees = self._together(lambda: {k: json.loads(tensor_text(t)) for k, t in texts.items()})
        inside = self._read_whole([key for tree in trees.values() for key in _tensor_keys(tree)])
        reads = self._together(
            lambda: [
                _Read(item, planner, self._version.tensors)
                for item in plan.items
                if item.type != LoadItemType.BYTE_IO
            ]
        )
        self._snapshot._core.read(self._version, [read.piece.for_core() for read in reads])
        for read in reads:
            read.finish(planner)
        for item in values:
            value = decode(trees[value_key(item.storage_index.fqn)], inside)
            # Planners take what torch.save writes; it was made here, of checked values.
            data = io.BytesIO()
            torch.save(value, data)
            data.seek(0)
            planner.load_bytes(item, data)

    def _read_whole(self, keys: list[str]) -> dict[str, torch.Tensor]:
        """Tensors of their own; a collective."""
        pieces = self._together(lambda: [self._fresh(key) for key in keys])
        self._snapshot._core.read(self._version, [piece.for_core() for piece in pieces])
        return {piece.key: piece.tensor for piece in pieces}

    def _fresh(self, key: str) -> Piece:
        dtype, shape = _stored(self._version.tensors, key)
        return Piece.whole(key, torch.empty(shape, dtype=dtype, device="cpu"), StoredBy.EACH_RANK)

    def _together(self, function: Callable[[], Any]) -> Any:
        return self._snapshot._together(f"load {self._version.name}", function)


class _Read:
    """One item of a plan: rows of a chunk, straight into their place where that is all of it."""

    def __init__(self, item: ReadItem, planner: LoadPlanner, stored: dict[str, tuple]) -> None:
        self._item = item
        self._target = planner.resolve_tensor(item).detach()
        key = chunk_key(item.storage_index)
        dtype, shape = _stored(stored, key)
        offsets, lengths = list(item.storage_offsets), list(item.lengths)
        row = 1
        for size in shape[1:]:
            row *= size
        begin = offsets[0] * row if shape else 0
        end = begin + lengths[0] * row if shape else 1
        is_rows = offsets[1:] == [0] * len(offsets[1:]) and lengths[1:] == list(shape[1:])
        self._rows = None
        into = self._target
        if not (is_rows and into.is_contiguous() and into.dtype == dtype):
            self._rows = into = torch.empty([*lengths[:1], *shape[1:]], dtype=dtype, device="cpu")
        self.piece = Piece(key, into, torch.Size(shape), begin, end, StoredBy.EACH_RANK)

    def finish(self, planner: LoadPlanner) -> None:
        """Puts it into its place, if it is not there yet, and tells the planner."""
        if self._rows is not None:
            part = self._rows
            for dim in range(1, part.dim()):
                part = part.narrow(dim, self._item.storage_offsets[dim], self._item.lengths[dim])
            self._target.copy_(part)
        planner.commit_tensor(self._item, self._target)


def _stored(stored: dict[str, tuple], key: str) -> tuple:
    if key not in stored:
        raise SnapshotError(f"libddp snapshot: the save has no {key!r} on this host.")
    return stored[key]
