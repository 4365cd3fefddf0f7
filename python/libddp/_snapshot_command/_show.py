"""libddp snapshot show: tensors and values of one."""

from __future__ import annotations

import argparse
import json

from libddp._snapshot_command._address import open_folder
from libddp._snapshot_command._pieces import Tensor, open_files, tensors_of
from libddp._snapshot_command._text import brief, listed, shown, shown_path, table, when
from libddp.errors import SnapshotError
from libddp.plan.sizes import show_bytes

#: Of a tensor, in one line.
_MAX_PIECES = 8


def run(chosen: argparse.Namespace) -> int:
    """The command; returns the exit status."""
    folder = open_folder(chosen.folder)
    stored = folder.choose(chosen.step)
    index = folder.read(stored)
    files = open_files(folder, stored)
    tensors = tensors_of(files)
    size = show_bytes(sum(rank.bytes for rank in index.ranks))
    print(f"{shown_path(stored.path)}: {stored.name}, {size}, {when(folder.modified(stored))}")
    own = [rank.rank for rank in index.ranks]
    print(f"ranks: {index.world_size}, of which {listed(own) or 'none'} stored something")
    print(f"{len(tensors)} tensors")
    if tensors:
        rows = [["name", "type", "shape", "elements by rank"]]
        rows += [_row(tensor) for tensor in tensors.values()]
        print(table(rows))
    _print_values(index, chosen.rank)
    return 0


def _row(tensor: Tensor) -> list[str]:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return [shown(tensor.key), shown(tensor.dtype), shape, _places(tensor)]


def _places(tensor: Tensor) -> str:
    whole = [rank for rank, begin, end in tensor.pieces if (begin, end) == (0, tensor.numel)]
    parts = [piece for piece in tensor.pieces if piece[0] not in whole]
    places = [f"all: {listed(whole)}"] if whole else []
    places += [f"{rank}: {begin} to {end}" for rank, begin, end in parts[:_MAX_PIECES]]
    if len(parts) > _MAX_PIECES:
        places.append(f"{len(parts) - _MAX_PIECES} more")
    return "; ".join(places)


def _print_values(index, rank: int | None) -> None:
    by_rank = {each.rank: each.values for each in index.ranks}
    if not by_rank:
        return
    chosen = min(by_rank) if rank is None else rank
    if chosen not in by_rank:
        raise SnapshotError(
            f"rank {chosen} stored nothing. Hint: those that did are {listed(list(by_rank))}."
        )
    values = json.loads(by_rank[chosen])
    same = [each for each, text in by_rank.items() if text == by_rank[chosen]]
    print(f"values of rank{'s' if len(same) > 1 else ''} {listed(same)}")
    if not isinstance(values, dict):
        print(f"  {brief(values)}")
        return
    for key, value in values.items():
        print(f"  {shown(key)}: {brief(value)}")
