"""What a module has of a tensor-parallel parameter while it computes: a DTensor on the inner mesh.

The gradient of a replicated one may be a part of a sum over that mesh (norms under
SequenceParallel). torch's fully_shard adds it up in the dtype that gradients are averaged in, from
2.15 on; autograd's own way back from a DTensor does it in the dtype that the module computes in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    from libddp.distributed.fsdp.wrap._sharding import Sharding


class SummedWide(torch.autograd.Function):
    """DTensor.from_local, whose backward adds up parts of a sum in a wider dtype."""

    @staticmethod
    def forward(ctx, local: torch.Tensor, spec: DTensorSpec, dtype: torch.dtype) -> DTensor:
        ctx.spec, ctx.dtype = spec, dtype
        return _from_local(local, spec)

    @staticmethod
    def backward(ctx, gradient: DTensor):
        if gradient.placements != ctx.spec.placements:
            gradient = gradient.to(ctx.dtype)
            gradient = gradient.redistribute(ctx.spec.mesh, ctx.spec.placements)
        local = gradient.to_local()
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local, None, None


def wide_dtype(
    spec: DTensorSpec, name: str, dtype: torch.dtype, sharding: Sharding
) -> torch.dtype | None:
    """In which parts of a sum are added up; None: as autograd does."""
    if not sharding.wide_gradients or not any(isinstance(p, Replicate) for p in spec.placements):
        return None
    low = dtype if name in sharding.keep_dtype else sharding.param_dtype or dtype
    wide = sharding.reduce_dtype or dtype
    both_float = wide.is_floating_point and low.is_floating_point
    return wide if both_float and wide.itemsize > low.itemsize else None


def whole(local: torch.Tensor, spec: DTensorSpec, wide: torch.dtype | None) -> DTensor:
    """With a graph to `local`; `wide`: as wide_dtype answers."""
    return _from_local(local, spec) if wide is None else SummedWide.apply(local, spec, wide)


def _from_local(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    return DTensor.from_local(
        local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )
