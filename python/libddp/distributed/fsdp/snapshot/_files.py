"""The files that save_snapshot wrote once: what lies where, and reading any range of any tensor.

They have no checksums; nothing writes them any more.

    index.json                               written last; without it there is no snapshot
    rank-0-of-2.3f9c01ab.safetensors         what rank 0 had; the id is that of this saving

index.json: {"format", "version", "libddp", "world_size", "id", "files": {name: bytes},
"tensors": {key: {"dtype", "shape", "pieces": [{"file", "begin", "end", "offset", "length"}]}},
"aliases": {key: key}, "values": ...}. A piece is the elements [begin, end) of the flat tensor, and
the bytes [offset, offset + length) of its file. Thread rule: immutable once opened.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from libddp.distributed.fsdp.snapshot._safetensors import DTYPES, Reader
from libddp.errors import SnapshotError

INDEX, FORMAT, VERSION = "index.json", "libddp-snapshot", 1


@dataclass
class Stored:
    """One tensor of a snapshot."""

    dtype: torch.dtype
    shape: torch.Size
    #: {"file", "begin", "end", "offset", "length"}, in order.
    pieces: list[dict[str, Any]]


@dataclass
class Snapshot:
    """An opened snapshot whose files are all there."""

    folder: Path
    tensors: dict[str, Stored]
    aliases: dict[str, str]
    values: dict[str, Any]
    #: By the name of the file.
    readers: dict[str, Reader]

    @staticmethod
    def open(folder: Path) -> Snapshot:
        """Reads the index and looks at all files.

        Raises:
            SnapshotError: no index, a file that is missing, truncated or of another snapshot, a
                tensor that is not there in full; names file and tensor.
        """
        index = read_index(folder)
        try:
            tensors = {
                key: Stored(DTYPES[entry["dtype"]], torch.Size(entry["shape"]), entry["pieces"])
                for key, entry in index["tensors"].items()
            }
            readers = {name: _open(folder, name, size) for name, size in index["files"].items()}
            found = Snapshot(folder, tensors, index["aliases"], index["values"], readers)
            for key, stored in tensors.items():
                _check_pieces(folder, key, stored, readers)
        except (KeyError, TypeError, ValueError) as error:
            raise SnapshotError(
                f"libddp snapshot {folder}: {INDEX} lacks or misstates {error}. Hint: it was "
                "damaged; take another copy."
            ) from error
        return found

    def read(self, key: str, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of a tensor, in one dimension."""
        stored = self.tensors[key]
        out = torch.empty(end - begin, dtype=stored.dtype, device="cpu")
        for piece in stored.pieces:
            first, last = max(begin, piece["begin"]), min(end, piece["end"])
            if first < last:
                reader = self.readers[piece["file"]]
                part = reader.read(key, first - piece["begin"], last - piece["begin"])
                out[first - begin : last - begin] = part
        return out


def read_index(folder: Path) -> dict[str, Any]:
    """Raises: SnapshotError, there is none that this version knows."""
    try:
        index = json.loads((folder / INDEX).read_text())
    except (OSError, ValueError) as error:
        raise SnapshotError(
            f"libddp snapshot {folder}: cannot read {INDEX}: {error}. Hint: pass the folder that "
            "save_snapshot wrote; one without an index was not finished."
        ) from error
    if index.get("format") != FORMAT or index.get("version") != VERSION:
        raise SnapshotError(
            f"libddp snapshot {folder}: {INDEX} says {index.get('format')!r} version "
            f"{index.get('version')!r}, this is {FORMAT!r} version {VERSION}. Hint: pass the "
            "folder that it is in, or load it with the version of libddp that wrote it "
            f"({index.get('libddp')})."
        )
    return index


def _open(folder: Path, name: str, size: int) -> Reader:
    path = folder / name
    if not path.exists():
        raise SnapshotError(
            f"libddp snapshot {folder}: {name} is missing. Hint: all files of the folder belong "
            "together; copy it again."
        )
    if path.stat().st_size != size:
        raise SnapshotError(
            f"libddp snapshot {folder}: {name} has {path.stat().st_size} bytes, not {size}. "
            "Hint: it was truncated or replaced; take another copy."
        )
    return Reader(path)


def _check_pieces(folder: Path, key: str, stored: Stored, readers: dict[str, Reader]) -> None:
    reached = 0
    for piece in stored.pieces:
        reader, numel = readers[piece["file"]], piece["end"] - piece["begin"]
        entry = reader.entries.get(key)
        length = numel * stored.dtype.itemsize
        is_there = entry is not None and reader.dtype(key) == stored.dtype
        is_there = is_there and math.prod(entry["shape"]) == numel
        places = (piece["offset"], piece["length"])
        if piece["begin"] != reached or not is_there or places != (reader.offset(key), length):
            raise SnapshotError(
                f"libddp snapshot {folder}: elements from {reached} of {key!r} are not in "
                f"{piece['file']} as {INDEX} says. Hint: the files are of different snapshots."
            )
        reached = piece["end"]
    if reached != math.prod(stored.shape):
        raise SnapshotError(
            f"libddp snapshot {folder}: {key!r} has {math.prod(stored.shape)} elements, of which "
            f"{reached} are there. Hint: {INDEX} was damaged; take another copy."
        )
