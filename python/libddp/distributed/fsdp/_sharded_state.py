"""What this rank owns of a tensor in torch's words: a DTensor, or a ShardedTensor as torch's FSDP1
has it. Either has the memory of the tensor that it is made of, and torch's distributed checkpoint
(DCP) writes it, and reads into it from a checkpoint of any number of ranks.

    value = as_dtensor(exp_avg, piece)
    local = own_part(value, piece)          # None where it is divided in another way
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from libddp._load import load
from libddp.distributed.fsdp._pieces import Piece, pieces_of
from libddp.distributed.fsdp._placement import placements_of, with_dtype
from libddp.distributed.fsdp._state_dict import canonical
from libddp.errors import StateError

_C = load()


def as_dtensor(tensor: torch.Tensor, piece: Piece) -> DTensor:
    """Of the whole tensor that `tensor` is this rank's part of."""
    spec = with_dtype(_spec_of(piece, tensor.dtype), tensor.dtype)
    if tensor.is_meta:  # the parameter has no values yet, and is whole
        return DTensor(piece.sharding.own_rows(tensor.detach()), spec, requires_grad=False)
    return DTensor(_C.alias_of(tensor.detach()), spec, requires_grad=False)


def as_sharded_tensor(tensor: torch.Tensor, piece: Piece) -> ShardedTensor:
    """The same in the words of torch's FSDP1; ranks without rows have no shard."""
    group = piece.sharding.process_group
    ranks = dist.get_process_group_ranks(group)
    metadata = [
        ShardMetadata(offsets, sizes, f"rank:{ranks[rank]}/{tensor.device}")
        for rank, (offsets, sizes) in enumerate(_chunks(piece))
    ]
    properties = TensorProperties(dtype=tensor.dtype, requires_grad=False)
    local = _C.alias_of(tensor.detach())
    own = [Shard(local, metadata[piece.rank])] if piece.rank < len(metadata) else []
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        own, ShardedTensorMetadata(metadata, piece.shape, properties), process_group=group
    )


def is_sharded(value: Any) -> bool:
    """Whether it is a part of a tensor that knows its place."""
    return isinstance(value, (DTensor, ShardedTensor))


def own_part(value: Any, piece: Piece) -> torch.Tensor | None:
    """The local tensor of what as_dtensor or as_sharded_tensor has made, on the same ranks; None
    for anything else, the same answer on every rank.
    """
    if isinstance(value, DTensor):
        if not _has_mesh(piece):
            return None
        wanted, found = _spec_of(piece, value.dtype), value._spec
        is_placed = found.placements == wanted.placements and found.mesh == wanted.mesh
        return value._local_tensor if is_placed and found.shape == wanted.shape else None
    if not isinstance(value, ShardedTensor):
        return None
    parts = [(part.shard_offsets, part.shard_sizes) for part in value.metadata().shards_metadata]
    ranks = dist.get_process_group_ranks(piece.sharding.process_group)
    if parts != _chunks(piece) or dist.get_process_group_ranks(value._process_group) != ranks:
        return None
    shards = value.local_shards()
    return (
        shards[0].tensor
        if shards
        else torch.empty(piece.own_shape, dtype=value.dtype, device="cpu")
    )


def convert(tensor: torch.Tensor, piece: Piece, config: Any = None) -> torch.Tensor:
    """As torch's configuration of a sharded state dict wants it; None = DTensors."""
    if tensor.shape != piece.own_shape and not tensor.is_meta:
        raise StateError(
            f"libddp fsdp: {piece.name!r} has the shape {list(tensor.shape)}, and this rank owns "
            f"{list(piece.own_shape)} of it. Hint: change shapes before wrapping."
        )
    wished = config is None or getattr(config, "_use_dtensor", False)
    wants_dtensor = wished or piece.sharding.saves_dtensors
    return (as_dtensor if wants_dtensor and _has_mesh(piece) else as_sharded_tensor)(tensor, piece)


def convert_all(
    state: dict[str, Any], module: torch.nn.Module, prefix: str, config: Any = None
) -> None:
    """What a state dict of `module` has of sharded parameters, in place; names are canonical."""
    pieces = pieces_of(module)
    for name, parameter in torch.nn.Module.named_parameters(module, remove_duplicate=False):
        piece = pieces.get(id(parameter))
        key = prefix + canonical(name)
        is_cut = piece is not None and piece.group is not None
        if is_cut and key in state and not is_sharded(state[key]):
            state[key] = convert(state[key], piece, config)


def _has_mesh(piece: Piece) -> bool:
    return piece.spec is not None or piece.sharding.mesh is not None


def _spec_of(piece: Piece, dtype: torch.dtype) -> DTensorSpec:
    if piece.spec is not None:
        return piece.spec
    meta = TensorMeta(piece.shape, torch.empty(piece.shape, device="meta").stride(), dtype)
    placements = placements_of(piece.sharding, piece.dim)
    return DTensorSpec(piece.sharding.mesh, placements, tensor_meta=meta)


def _chunks(piece: Piece) -> list[tuple[list[int], list[int]]]:
    """Offsets and sizes of the rows of each rank that has some."""
    row = piece.shape[1:].numel()
    rest = [0] * len(piece.shape[1:])
    return [
        ([begin // row, *rest], [(end - begin) // row, *piece.shape[1:]])
        for begin, end in piece.ranges
        if end > begin
    ]
