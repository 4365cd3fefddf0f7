"""Which part of each parameter lies on which rank, and whole tensors made of such parts.

specs = shard_specs_of(model)                    # id(parameter) -> ShardSpec
whole = specs[id(p)].gather(state["exp_avg"])
mine = specs[id(p)].cut(whole)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from libddp.distributed.fsdp.wrap import _deferred
from libddp.distributed.fsdp.wrap._lookup import wrapped_modules_in
from libddp.distributed.fsdp.wrap._names import canonical
from libddp.distributed.fsdp.wrap._sharding import Sharding
from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule


@dataclass
class ShardSpec:
    """What this rank owns of one parameter."""

    #: Canonical, in the model that shard_specs_of was asked for.
    name: str
    #: Of the whole parameter.
    shape: torch.Size
    #: Elements [begin, end) of each rank of the group.
    ranges: list[tuple[int, int]]
    #: Shape of this rank's part.
    own_shape: torch.Size
    #: C++ group; None where every rank owns everything.
    group: Any
    #: In the group.
    rank: int = 0
    #: Of the unit.
    sharding: Sharding = field(default_factory=Sharding)
    #: The dimension that is cut; `ranges` are of the tensor that has it in front.
    dim: int = 0
    #: Of a parameter that is a DTensor.
    dtensor_spec: Any = None

    def is_rows(self) -> bool:
        """Whether it is rows of the whole tensor, which is what snapshots can describe."""
        return self.dim == 0 and (
            self.dtensor_spec is None or self.dtensor_spec.shape == self.shape
        )

    @property
    def begin(self) -> int:
        return self.ranges[self.rank][0]

    @property
    def end(self) -> int:
        return self.ranges[self.rank][1]

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole tensor of which each rank brings its part; a collective."""
        if self.group is None:
            return tensor.detach().clone()
        moved = tensor.detach().movedim(self.dim, 0)
        whole = tensor.new_empty(math.prod(self.shape))
        outputs = [whole[begin:end] for begin, end in self.ranges]
        self.group.all_gather(outputs, moved.reshape(-1).contiguous())
        if self.dim == 0:
            return whole.view(self.shape)
        rest = [size for dim, size in enumerate(self.shape) if dim != self.dim]
        return whole.view(self.shape[self.dim], *rest).movedim(0, self.dim).contiguous()

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor, with memory of its own."""
        if self.dim:
            size = self.own_shape[self.dim]
            return whole.narrow(self.dim, size * self.rank, size).clone()
        return whole.reshape(-1)[self.begin : self.end].clone().view(self.own_shape)


def whole_of(value: Any) -> Any:
    """The whole tensor of a DTensor or a ShardedTensor, a collective; others as they are."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not isinstance(value, ShardedTensor):
        return value
    group = value._process_group
    shards = value.metadata().shards_metadata
    kind = shards[0].placement.device().type
    whole = torch.empty(value.size(), dtype=value.dtype, device=kind)
    own = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in value.local_shards()}
    for shard in shards:  # torch's gather takes ranks of the group for those of the job
        rows = whole.narrow(0, shard.shard_offsets[0], shard.shard_sizes[0])
        if tuple(shard.shard_offsets) in own:
            rows.copy_(own[tuple(shard.shard_offsets)])
        dist.broadcast(rows, src=shard.placement.rank(), group=group)
    return whole


def shard_specs_of(model: torch.nn.Module) -> dict[int, ShardSpec]:
    """id of each sharded parameter -> its spec; all of them in one order on every rank.

    Units that are not made yet are made first, but for those whose parameters are on the meta
    device: of these every rank has everything.

    Raises:
        StateError: a parameter was replaced by another object.
    """
    _deferred.settle(model)
    found: dict[int, ShardSpec] = {}
    names = {id(parameter): canonical(name) for name, parameter in model.named_parameters()}
    for wrapped in wrapped_modules_in(model):
        wrapped.check_places()
        for key, spec in shard_specs_of_unit(wrapped).items():
            found[key] = replace(spec, name=names.get(key, spec.name))
    return found


def shard_specs_of_unit(wrapped: WrappedModule) -> dict[int, ShardSpec]:
    """The same for the parameters of one unit, with their names in its module."""
    if wrapped.made is None:
        return _without_values(wrapped)
    found = {}
    parameters = dict(wrapped.parameters)
    sharding = wrapped.sharding
    group = sharding.shard
    own_rank = group.rank() if group else 0
    layouts = [wrapped.made.layout(rank) for rank in range(group.size() if group else 1)]
    for rows in zip(*layouts, strict=True):
        name, shape = rows[0][:2]
        found[id(parameters[name])] = ShardSpec(
            name,
            torch.Size(shape),
            [(begin, end) for _, _, begin, end, _ in rows],
            torch.Size(rows[own_rank][4]),
            group,
            own_rank,
            sharding,
        )
    for param in wrapped.params:
        spec = found[id(param.sharded)]
        spec.dim, spec.dtensor_spec = param.dim, param.spec
        spec.shape, spec.own_shape = param.inner_shape(), param.sharded._local_tensor.shape
    return found


def _without_values(wrapped: WrappedModule) -> dict[int, ShardSpec]:
    sharding = wrapped.sharding
    group = sharding.shard
    size = group.size() if group else 1
    return {
        id(p): ShardSpec(name, p.shape, [(0, p.numel())] * size, p.shape, group, sharding=sharding)
        for name, p in wrapped.own_parameters()
    }
