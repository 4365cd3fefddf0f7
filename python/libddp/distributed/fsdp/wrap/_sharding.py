"""How the parameters of a unit are sharded and computed with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch


@dataclass
class Sharding:
    """How parameters are sharded and computed with."""

    #: Ranks that own a block each, and ranks that own the same one; C++ groups or None.
    shard: Any = None
    replicate: Any = None
    keep_unsharded: bool = False
    param_dtype: torch.dtype | None = None
    #: Names in the unit of parameters that keep their own dtype all the same.
    keep_dtype: set[str] = field(default_factory=set)
    reduce_dtype: torch.dtype | None = None
    #: As torch's fully_shard from 2.15 on, see ShardOptions.
    wide_gradients: bool = False
    output_dtype: torch.dtype | None = None
    cast_inputs: bool = False
    #: Where the module is the outermost one.
    cast_root_inputs: bool = False
    keep_low_gradients: bool = False
    #: CPU offload: what parameters are computed with on; None = everything is where they are.
    compute_device: torch.device | None = None
    #: The memory of what is offloaded is page-locked.
    pin_memory: bool = True
    forward_prefetch: bool = True
    backward_prefetch: bool = True
    #: torch's group behind `shard`.
    process_group: Any = None
    #: The same ranks as a DeviceMesh; None where it is not known.
    mesh: Any = None
    #: MeshInfo of fully_shard's dp_mesh_dims; None = parameters are not placed on such a mesh.
    mesh_info: Any = None
    #: Sharded state dicts hold DTensors; else torch's ShardedTensors.
    saves_dtensors: bool = True
    #: torch's MixedPrecisionPolicy, where there is one.
    policy: Any = None
    #: torch's shard_placement_fn.
    choose_placement: Callable | None = None
    #: A parameter of a used unit that got no gradient on any rank has zeros (True), what it had
    #: (False), zeros where others of the unit got one (None, as torch's FSDP1 has it).
    zeroes_unused: bool | None = None
    #: `.grad` shows what passes without synchronisation have left: whole gradients of this rank.
    shows_waiting: bool = True
    #: Scripts see DTensors; else the parameters themselves, which show what this rank owns.
    use_dtensor: bool = False

    @property
    def num_shards(self) -> int:
        """Ranks that have a part of a parameter each."""
        return self.shard.size() if self.shard is not None else 1

    def gradient_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype | None:
        """That gradients of a parameter of the unit, which is of `dtype`, are added up in; None: as
        autograd does, in the dtype that the module computes in.
        """
        computes_in = dtype if name in self.keep_dtype else self.param_dtype or dtype
        wanted = self.reduce_dtype or dtype
        both_float = wanted.is_floating_point and computes_in.is_floating_point
        return wanted if self.wide_gradients and both_float and wanted != computes_in else None

    def over(self, groups) -> Sharding:
        """The same over other groups (_process_groups.Groups)."""
        shard, replicate = groups.natives()
        return replace(
            self,
            shard=shard,
            replicate=replicate,
            process_group=groups.shard,
            mesh=groups.mesh,
        )

    def own_rows(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of `whole`, in its memory."""
        if self.shard is None:
            return whole
        chunks = whole.chunk(self.shard.size())
        return chunks[self.shard.rank()] if self.shard.rank() < len(chunks) else whole[:0]
