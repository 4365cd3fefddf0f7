"""SlotWriter: torch.distributed.checkpoint's StorageWriter over a Snapshot."""

from __future__ import annotations

import io
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from libddp.errors import ArgumentError
from libddp.snapshot._pieces import Piece, StoredBy
from libddp.snapshot._snapshot import Snapshot
from libddp.snapshot._values import Encoder, decode
from libddp.snapshot.dcp._table import FORMAT, TABLE, Chunk, table_text, text_tensor, value_key
from libddp.snapshot.dcp._texts import gather_texts


class SlotWriter(StorageWriter):
    """Saves into a snapshot what torch.distributed.checkpoint plans.

    Of what several ranks have alike one of each host keeps a copy, so that every host can start
    over from its own memory. Values that are no tensors are kept as libddp.Snapshot's `extra` is.

    Args:
        snapshot: of the same ranks.
        step: of the save. None: the number at the end of checkpoint_id ("out/step-100").
        storage: it is stored in the snapshot's folder, behind the training.
    """

    def __init__(
        self, snapshot: Snapshot, *, step: int | None = None, storage: bool = False
    ) -> None:
        self._snapshot = snapshot
        self._given_step = step
        self._storage = storage
        self._checkpoint_id: str | os.PathLike | None = None
        self._local_plan: SavePlan | None = None

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        self._checkpoint_id = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # A planner that caches plans gives an empty one for the same as before.
        if getattr(plan, "usable", True):
            self._local_plan = plan
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        snapshot = self._snapshot
        snapshot._check_open()
        what = "save a checkpoint's plan"
        text = snapshot._together(what, lambda: self._describe(plan))
        ranks = [json.loads(each) for each in gather_texts(snapshot._group, text)]
        prepare = lambda: self._pieces(plan, planner, ranks)  # noqa: E731
        step, pieces = snapshot._together(what, prepare)
        tensors = [piece.for_core() for piece in pieces]
        snapshot._core.save(step, tensors, json.dumps({"format": FORMAT}), self._storage)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, _bytes_of(item), None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The save was whole when all ranks had written, and has its own table."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return step_of(checkpoint_id) is not None

    def storage_meta(self) -> StorageMeta | None:
        return None

    def _describe(self, plan: SavePlan) -> str:
        """What this rank has and what torch's plan says that it writes, as JSON."""
        local = plan if self._local_plan is None else self._local_plan
        return json.dumps(
            {
                "host": _host(),
                "has": [Chunk.of(item).as_json() for item in _unique(local.items)],
                "writes": [Chunk.of(item).key for item in plan.items],
                "planner": Encoder("").encode(local.planner_data or {}, "the planner's data"),
            }
        )

    def _pieces(self, plan: SavePlan, planner: SavePlanner, ranks: list[dict]):
        step = self._given_step
        if step is None:
            step = step_of(self._checkpoint_id)
        if step is None:
            raise ArgumentError(
                f"libddp snapshot: checkpoint_id={self._checkpoint_id!r} has no step at its end. "
                'Hint: SlotWriter(snapshot, step=100), or checkpoint_id="out/step-100".'
            )
        own = self._snapshot._rank()
        local = plan if self._local_plan is None else self._local_plan
        keeps = _keys_of(own, ranks)
        pieces = []
        for item in _unique([*plan.items, *local.items]):
            chunk = Chunk.of(item)
            if chunk.key not in keeps:
                continue
            data = planner.resolve_data(item)
            if chunk.dtype is None:
                pieces += _value_pieces(item, data, planner)
            else:
                pieces.append(Piece.whole(chunk.key, data, StoredBy.EACH_RANK))
        chunks = {json.dumps(entry): Chunk(*entry) for rank in ranks for entry in rank["has"]}
        paths: dict[str, Any] = {}
        for rank in ranks:
            paths.update(decode(rank["planner"], {}))
        table = text_tensor(table_text(list(chunks.values()), paths))
        pieces.append(Piece.whole(TABLE, table, StoredBy.FIRST_OF_HOST))
        return step, pieces


def step_of(checkpoint_id: str | os.PathLike | None) -> int | None:
    """The number at the end of its name."""
    found = re.search(r"(\d+)/*$", os.fspath(checkpoint_id or ""))
    return int(found[1]) if found else None


def _host() -> str:
    """As the C++ core tells hosts apart."""
    given = os.environ.get("LIBDDP_HOST_ID")
    return given or Path("/proc/sys/kernel/random/boot_id").read_text()


def _unique(items: list[WriteItem]) -> list[WriteItem]:
    return list({Chunk.of(item).key: item for item in reversed(items)}.values())[::-1]


def _keys_of(own: int, ranks: list[dict]) -> set[str]:
    """What this rank keeps: of each key a rank of each host that has it, the one that writes it in
    torch's plan if that is there, else any, not always the same."""
    here = [rank for rank, each in enumerate(ranks) if each["host"] == ranks[own]["host"]]
    has = {rank: {Chunk(*entry).key for entry in ranks[rank]["has"]} for rank in here}
    owners: dict[str, list[int]] = {}
    for rank in here:
        for key in has[rank]:
            owners.setdefault(key, []).append(rank)
    writers = {key: rank for rank in reversed(here) for key in ranks[rank]["writes"]}
    return {
        key
        for key, among in owners.items()
        if own == writers.get(key, among[zlib.crc32(key.encode()) % len(among)])
    }


def _value_pieces(item: WriteItem, data: io.BytesIO, planner: SavePlanner) -> list[Piece]:
    """A value as JSON and tensors: what the planner has pickled is not kept."""
    fqn = item.index.fqn
    if hasattr(planner, "lookup_object"):
        value = planner.lookup_object(item.index)
    else:
        value = torch.load(data, weights_only=True)
    encoder = Encoder(f"{value_key(fqn)}/")
    tree = json.dumps(encoder.encode(value, fqn))
    tensors = {value_key(fqn): text_tensor(tree), **encoder.tensors}
    return [Piece.whole(key, each, StoredBy.EACH_RANK) for key, each in tensors.items()]


def _bytes_of(item: WriteItem) -> int:
    if item.type == WriteItemType.BYTE_IO:
        return 0
    data = item.tensor_data
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize
