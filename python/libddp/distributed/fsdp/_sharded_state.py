"""Pieces of parameters in sharded state dicts, as torch's distributed checkpoint (DCP) takes them.

A `ShardedPiece` is a plain tensor, what this rank owns, that knows where it belongs in the whole
one. DCP writes and reads boxes of tensors; a piece is one box where it is whole rows, else a few.
Loading is in place: DCP writes into the memory of the piece, whatever number of ranks has saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import Shard

from libddp.distributed.fsdp._dtensors import local_of
from libddp.distributed.fsdp._pieces import ELSEWHERE, Piece, pieces_of
from libddp.distributed.fsdp._placement import placements_of
from libddp.distributed.fsdp._state_dict import canonical
from libddp.errors import ArgumentError


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


#: What gives a piece of the same tensor.
_KEEPING = {
    torch.Tensor.clone,
    torch.Tensor.contiguous,
    torch.Tensor.cpu,
    torch.Tensor.detach,
    torch.Tensor.new_empty,
    torch.Tensor.to,
    torch.clone,
    torch.empty_like,
    torch.zeros_like,
}


class ShardedPiece(torch.Tensor):
    """What this rank owns of a tensor; operations on it give plain tensors, copies give pieces.

    It has what scripts ask of DTensors: full_tensor(), to_local(), device_mesh, placements. It is
    none, because ranks own blocks of units, not equal parts of each tensor.

    Attributes:
        piece: which part of which tensor it is.
    """

    piece: Piece

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.set_ and len(args) == 5 and isinstance(args[0], ShardedPiece):
            # DCP's stager makes a copy of what size() says, which is the whole tensor's.
            args = (*args[:3], args[0].piece.own_shape, args[4])
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        source = args[0] if args else None
        is_copy = func in _KEEPING and isinstance(source, ShardedPiece)
        return ShardedPiece.of(result, source.piece) if is_copy else result

    @staticmethod
    def of(tensor: torch.Tensor, piece: Piece) -> ShardedPiece:
        """Shares the memory of `tensor`."""
        if not piece.is_rows():
            raise ArgumentError(
                f"libddp fsdp: {piece.name!r} is cut on dim {piece.dim}, or by tensor parallelism "
                "too, and snapshots hold rows of whole tensors. Hint: save the DTensors of "
                "state_dict() with torch.distributed.checkpoint."
            )
        made = torch.Tensor._make_subclass(ShardedPiece, tensor.detach())
        made.piece = piece
        return made

    def size(self, dim: int | None = None):
        """Of the whole tensor, which DCP compares; `shape` is that of the piece."""
        return self.piece.shape if dim is None else self.piece.shape[dim]

    def local(self) -> torch.Tensor:
        """The same memory as a plain tensor."""
        return self.as_subclass(torch.Tensor)

    def to_local(self) -> torch.Tensor:
        """local(), under DTensor's name."""
        return self.local()

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, in memory of its own; a collective."""
        return self.local().clone() if self.is_meta else self.piece.gather(self.local())

    @property
    def device_mesh(self):
        """Of the unit; None for a piece that came out of a file."""
        return self.piece.sharding and self.piece.sharding.mesh

    @property
    def placements(self) -> tuple:
        """(Shard(0),) or (Replicate(), Shard(0)), as DTensors that fully_shard made."""
        return placements_of(self.piece.sharding) if self.piece.sharding else (Shard(0),)

    def __deepcopy__(self, memo) -> ShardedPiece:
        return ShardedPiece.of(self.local().clone(), self.piece)

    def __reduce_ex__(self, protocol):
        piece, shapes = self.piece, (tuple(self.piece.shape), tuple(self.piece.own_shape))
        # A copy: what a view would take into the file is all of its memory.
        state = (self.local().clone(), piece.name, *shapes, piece.ranges, piece.rank)
        return piece_from_file, (*state, piece.group is not None, piece.is_writer)

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
        if piece is not None and piece.group is not None and key in state:
            state[key] = ShardedPiece.of(local_of(state[key]), replace(piece, name=key))


def piece_from_file(tensor, name, shape, own_shape, ranges, rank, is_cut, is_writer):
    """What torch.load makes of a piece: it knows its place, but not the other ranks."""
    group = ELSEWHERE if is_cut else None
    shapes = (torch.Size(shape), ranges, torch.Size(own_shape))
    return ShardedPiece.of(tensor, Piece(name, *shapes, group, rank, is_writer))


torch.serialization.add_safe_globals([piece_from_file])
