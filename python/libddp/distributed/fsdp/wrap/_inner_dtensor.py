"""What a module has of a parameter that is a DTensor by itself while it computes: the same DTensor.

The gradient of a replicated one may be a part of a sum over its mesh (norms under
SequenceParallel). torch's fully_shard adds it up in the dtype that gradients are averaged in, from
2.15 on; autograd's own way back from a DTensor does it in the dtype that the module computes in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate

from libddp.distributed.fsdp.wrap._summed import Summed

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


class InnerDTensor:
    """Of one parameter; the unit has the local part."""

    def __init__(self, spec: DTensorSpec, averaged: frozenset[int] = frozenset()) -> None:
        self.spec = spec
        #: Dimensions of the mesh over which the unit averages gradients.
        self.averaged = averaged
        self._may_sum = any(
            isinstance(placement, Replicate)
            for dim, placement in enumerate(spec.placements)
            if dim not in averaged
        )

    def whole(self, local: torch.Tensor, dtype: torch.dtype | None) -> DTensor:
        """With a graph to `local`; `dtype`: that sums of parts are made in, None = as they come."""
        if self.averaged or (dtype is not None and self._may_sum):
            return Summed.apply(local, self, dtype)
        return self.of_local(local)

    def of_local(self, local: torch.Tensor) -> DTensor:
        """What Summed gives."""
        spec = self.spec
        return DTensor.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )

    def summed(self, gradient: DTensor, dtype: torch.dtype | None) -> torch.Tensor:
        """What the unit averages of a gradient: parts of a sum over other dimensions are added."""
        placements = tuple(
            found if dim in self.averaged else wanted
            for dim, (found, wanted) in enumerate(
                zip(gradient.placements, self.spec.placements, strict=True)
            )
        )
        if gradient.placements != placements:
            gradient = gradient if dtype is None else gradient.to(dtype)
            gradient = gradient.redistribute(self.spec.mesh, placements)
        local = gradient.to_local()
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local
