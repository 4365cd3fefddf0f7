"""Which part of each parameter lies on which rank, and whole tensors made of such parts.

pieces = pieces_of(model)                    # id(parameter) -> Piece
whole = pieces[id(p)].gather(state["exp_avg"])
mine = pieces[id(p)].cut(whole)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from libddp.distributed.fsdp._shards import shards_in
from libddp.distributed.fsdp._state_dict import canonical


@dataclass
class Piece:
    """What this rank owns of one parameter."""

    #: Canonical, in the model that pieces_of was asked for.
    name: str
    #: Of the whole parameter.
    shape: torch.Size
    #: Elements [begin, end) of each rank of the group.
    ranges: list[tuple[int, int]]
    #: Shape of this rank's part.
    own_shape: torch.Size
    #: C++ group; None where every rank owns everything.
    group: Any

    @property
    def rank(self) -> int:
        return self.group.rank() if self.group is not None else 0

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
        whole = tensor.new_empty(math.prod(self.shape))
        outputs = [whole[begin:end] for begin, end in self.ranges]
        self.group.all_gather(outputs, tensor.detach().reshape(-1).contiguous())
        return whole.view(self.shape)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor, with memory of its own."""
        return whole.reshape(-1)[self.begin : self.end].clone().view(self.own_shape)


def pieces_of(model: torch.nn.Module) -> dict[int, Piece]:
    """id of each sharded parameter -> its piece; all of them in one order on every rank."""
    found: dict[int, Piece] = {}
    names = {id(module): name for name, module in model.named_modules()}
    for shard in shards_in(model):
        prefix = names[id(shard.module)]
        parameters = dict(shard.parameters)
        group = shard.sharding.shard
        layouts = [shard.unit.layout(rank) for rank in range(group.size() if group else 1)]
        for rows in zip(*layouts, strict=True):
            name, shape = rows[0][:2]
            full = canonical(f"{prefix}.{name}" if prefix else name)
            ranges = [(begin, end) for _, _, begin, end, _ in rows]
            own_shape = torch.Size(rows[group.rank() if group else 0][4])
            found[id(parameters[name])] = Piece(full, torch.Size(shape), ranges, own_shape, group)
    return found
