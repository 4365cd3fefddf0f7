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


class SummedIn(torch.autograd.Function):
    """DTensor.from_local, whose backward adds up parts of a sum in another dtype."""

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


def whole(local: torch.Tensor, spec: DTensorSpec, dtype: torch.dtype | None) -> DTensor:
    """With a graph to `local`; `dtype`: that sums of parts are made in, None = as they come."""
    if dtype is None or not any(isinstance(p, Replicate) for p in spec.placements):
        return _from_local(local, spec)
    return SummedIn.apply(local, spec, dtype)


def _from_local(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    return DTensor.from_local(
        local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )
