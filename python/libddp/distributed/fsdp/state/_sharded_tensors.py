"""What this rank owns of a tensor in torch's words: a DTensor, or a ShardedTensor as torch's FSDP1
has it. Either has the memory of the tensor that it is made of, and torch's distributed checkpoint
(DCP) writes it, and reads into it from a checkpoint of any number of ranks.

    value = as_dtensor(exp_avg, spec)
    local = own_shard(value, spec)          # None where it is divided in another way
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
from libddp.distributed.fsdp.state._shard_specs import ShardSpec, shard_specs_of
from libddp.distributed.fsdp.wrap._names import canonical
from libddp.distributed.fsdp.wrap._placement import placements_of, with_dtype
from libddp.errors import StateError

_C = load()


def as_dtensor(tensor: torch.Tensor, spec: ShardSpec) -> DTensor:
    """Of the whole tensor that `tensor` is this rank's part of."""
    dtensor_spec = with_dtype(_dtensor_spec_of(spec, tensor.dtype), tensor.dtype)
    if tensor.is_meta:  # the parameter has no values yet, and is whole
        return DTensor(spec.sharding.own_rows(tensor.detach()), dtensor_spec, requires_grad=False)
    return DTensor(_C.alias_of(tensor.detach()), dtensor_spec, requires_grad=False)


def as_sharded_tensor(tensor: torch.Tensor, spec: ShardSpec) -> ShardedTensor:
    """The same in the words of torch's FSDP1; ranks without rows have no shard."""
    group = spec.sharding.process_group
    ranks = dist.get_process_group_ranks(group)
    metadata = [
        ShardMetadata(offsets, sizes, _place_of(ranks[rank], rank == spec.rank, tensor))
        for rank, (offsets, sizes) in enumerate(_chunks(spec))
    ]
    properties = TensorProperties(dtype=tensor.dtype, requires_grad=False)
    local = _C.alias_of(tensor.detach())
    own = [Shard(local, metadata[spec.rank])] if spec.rank < len(metadata) else []
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        own, ShardedTensorMetadata(metadata, spec.shape, properties), process_group=group
    )


def _place_of(global_rank: int, is_own: bool, tensor: torch.Tensor) -> str:
    """Where a rank has its part: as torch has it, ranks of one host on one device each."""
    device = tensor.device
    if not is_own and device.index is not None:
        count = torch.get_device_module(device).device_count()
        device = torch.device(device.type, global_rank % count)
    return f"rank:{global_rank}/{device}"


def is_sharded(value: Any) -> bool:
    """Whether it is a part of a tensor that knows its place."""
    return isinstance(value, (DTensor, ShardedTensor))


def own_shard(value: Any, spec: ShardSpec) -> torch.Tensor | None:
    """The local tensor of what as_dtensor or as_sharded_tensor has made, on the same ranks; None
    for anything else, the same answer on every rank.
    """
    if isinstance(value, DTensor):
        if not _has_mesh(spec):
            return None
        wanted, found = _dtensor_spec_of(spec, value.dtype), value._spec
        is_placed = found.placements == wanted.placements and found.mesh == wanted.mesh
        return value._local_tensor if is_placed and found.shape == wanted.shape else None
    if not isinstance(value, ShardedTensor):
        return None
    parts = [(part.shard_offsets, part.shard_sizes) for part in value.metadata().shards_metadata]
    ranks = dist.get_process_group_ranks(spec.sharding.process_group)
    if parts != _chunks(spec) or dist.get_process_group_ranks(value._process_group) != ranks:
        return None
    shards = value.local_shards()
    return (
        shards[0].tensor if shards else torch.empty(spec.own_shape, dtype=value.dtype, device="cpu")
    )


def convert(
    tensor: torch.Tensor, spec: ShardSpec, config: Any = None, copies: bool = False
) -> torch.Tensor:
    """As torch's configuration of a sharded state dict wants it; None = DTensors.

    Args:
        copies: in memory of its own, as torch's FSDP1 has it.
    """
    if tensor.shape == spec.shape != spec.own_shape:
        tensor, copies = spec.cut(tensor.detach()), False  # summoned; a copy
    if tensor.shape != spec.own_shape and not tensor.is_meta:
        raise StateError(
            f"libddp fsdp: {spec.name!r} has the shape {list(tensor.shape)}, and this rank owns "
            f"{list(spec.own_shape)} of it. Hint: change shapes before wrapping."
        )
    if copies and not tensor.is_meta:
        tensor = tensor.detach().clone()
    wished = config is None or getattr(config, "_use_dtensor", False)
    wants_dtensor = wished or spec.sharding.saves_dtensors
    return (as_dtensor if wants_dtensor and _has_mesh(spec) else as_sharded_tensor)(tensor, spec)


def convert_all(
    state: dict[str, Any],
    module: torch.nn.Module,
    prefix: str,
    config: Any = None,
    copies: bool = False,
) -> None:
    """What a state dict of `module` has of sharded parameters, in place; names are canonical."""
    specs = shard_specs_of(module)
    for name, parameter in torch.nn.Module.named_parameters(module, remove_duplicate=False):
        spec = specs.get(id(parameter))
        key = prefix + canonical(name)
        is_cut = spec is not None and spec.group is not None
        if is_cut and key in state and not is_sharded(state[key]):
            state[key] = convert(state[key], spec, config, copies)
        elif copies and spec is not None and key in state and not is_sharded(state[key]):
            state[key] = state[key].detach().clone()


def _has_mesh(spec: ShardSpec) -> bool:
    return spec.dtensor_spec is not None or spec.sharding.mesh is not None


def _dtensor_spec_of(spec: ShardSpec, dtype: torch.dtype) -> DTensorSpec:
    if spec.dtensor_spec is not None:
        return spec.dtensor_spec
    meta = TensorMeta(spec.shape, torch.empty(spec.shape, device="meta").stride(), dtype)
    placements = placements_of(spec.sharding, spec.dim)
    return DTensorSpec(spec.sharding.mesh, placements, tensor_meta=meta)


def _chunks(spec: ShardSpec) -> list[tuple[list[int], list[int]]]:
    """Offsets and sizes of the rows of each rank that has some."""
    row = spec.shape[1:].numel()
    rest = [0] * len(spec.shape[1:])
    return [
        ([begin // row, *rest], [(end - begin) // row, *spec.shape[1:]])
        for begin, end in spec.ranges
        if end > begin
    ]
