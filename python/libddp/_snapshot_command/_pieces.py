"""The tensors of a snapshot, of which each file has pieces.

tensors = tensors_of(files)          # rank -> FileSource
tensors["model.weight"].missing()    # None, or the first elements that no rank has
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from libddp._snapshot_command._folder import Folder, Stored
from libddp._snapshot_command._text import shown


@dataclass
class Tensor:
    """One of them, put together."""

    key: str
    #: As safetensors names it.
    dtype: str
    shape: list[int]
    #: Rank, and its elements [begin, end) of the whole in C order.
    pieces: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def missing(self) -> tuple[int, int] | None:
        """The first elements that no rank has."""
        reached = 0
        for _, begin, end in sorted(self.pieces, key=lambda piece: piece[1:]):
            if begin > reached:
                return reached, begin
            reached = max(reached, end)
        return None if reached >= self.numel else (reached, self.numel)


def open_files(folder: Folder, stored: Stored) -> dict:
    """Rank -> its file. Raises: SnapshotError for the first that cannot be read."""
    index = folder.read(stored)
    return {rank.rank: folder.open(stored, rank) for rank in index.ranks}


def tensors_of(files: Mapping) -> dict[str, Tensor]:
    """By key, in the order in which the bytes lie."""
    found: dict[str, Tensor] = {}
    for rank, file in files.items():
        for key, dtype, shape, begin, end in file.pieces:
            tensor = found.setdefault(key, Tensor(key, dtype, shape))
            tensor.pieces.append((rank, begin, end))
    return found


def lacks(tensor: Tensor) -> str | None:
    """What of it is nowhere, in words."""
    missing = tensor.missing()
    if missing is None:
        return None
    return f"elements {missing[0]} to {missing[1]} of '{shown(tensor.key)}' are in no file"
