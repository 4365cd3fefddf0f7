"""Pieces of parameters in sharded state dicts, as torch's distributed checkpoint (DCP) takes them.

A `ShardedPiece` is a plain tensor, what this rank owns, that knows where it belongs in the whole
one. DCP writes and reads boxes of tensors; a piece is one box where it is whole rows, else a few.
Loading is in place: DCP writes into the memory of the piece, whatever number of ranks has saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from libddp.distributed.fsdp._pieces import Piece, pieces_of
from libddp.distributed.fsdp._state_dict import canonical


@dataclass
class Box:
    """A rectangular part of a tensor; [begin, end) are its elements in the flat tensor."""

    offsets: list[int]
    sizes: list[int]
    begin: int
    end: int

    def inside(self, row: int, base: int) -> Box:
        """The same box in a tensor of one dimension more, in its row `row` at element `base`."""
        return Box([row, *self.offsets], [1, *self.sizes], self.begin + base, self.end + base)


def boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Cuts elements [begin, end) of a tensor of `shape` into boxes, in order."""
    if begin >= end:
        return
    if not shape:
        yield Box([], [], begin, end)
        return
    row = math.prod(shape[1:])
    first, last = begin // row, (end - 1) // row
    if begin % row == 0 and end % row == 0:
        rest = [0] * (len(shape) - 1)
        yield Box([first, *rest], [last - first + 1, *shape[1:]], begin, end)
    elif first == last:
        base = first * row
        for box in boxes(shape[1:], begin - base, end - base):
            yield box.inside(first, base)
    else:
        head = begin if begin % row == 0 else (first + 1) * row
        tail = end - end % row
        yield from boxes(shape, begin, head)
        yield from boxes(shape, head, tail)
        yield from boxes(shape, tail, end)


class ShardedPiece(torch.Tensor):
    """What this rank owns of a tensor; operations on it give plain tensors.

    Attributes:
        piece: which part of which tensor it is.
    """

    piece: Piece
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(tensor: torch.Tensor, piece: Piece) -> ShardedPiece:
        """Shares the memory of `tensor`."""
        made = tensor.detach().as_subclass(ShardedPiece)
        made.piece = piece
        return made

    def size(self, dim: int | None = None):
        """Of the whole tensor, which DCP compares; `shape` is that of the piece."""
        return self.piece.shape if dim is None else self.piece.shape[dim]

    def local(self) -> torch.Tensor:
        """The same memory as a plain tensor."""
        return self.as_subclass(torch.Tensor)

    def _boxes(self) -> list[Box]:
        return list(boxes(self.piece.shape, self.piece.begin, self.piece.end))

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local())
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(box), properties, self.piece.shape),
            )
            for box in self._boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for box in self._boxes():
            if index.offset is None or list(index.offset) == box.offsets:
                begin = box.begin - self.piece.begin
                end = box.end - self.piece.begin
                return self.local().reshape(-1)[begin:end].view(box.sizes)
        raise ValueError(f"{self.piece.name}: this rank has no part at {index.offset}")


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def mark_pieces(state: dict[str, Any], module: torch.nn.Module, prefix: str) -> None:
    """Turns the parameters in a state dict of `module` into ShardedPieces, in place."""
    pieces = pieces_of(module)
    for name, parameter in torch.nn.Module.named_parameters(module, remove_duplicate=False):
        piece = pieces.get(id(parameter))
        key = prefix + canonical(name)
        if piece is None or piece.group is None or key not in state:
            continue
        if not isinstance(state[key], ShardedPiece):
            state[key] = ShardedPiece.of(state[key], piece)
