"""Parameters with annotations of the package spmd_types: a module computes with plain tensors, and
an annotation says for each dimension of a mesh what they are of the whole.

    R, I   every rank has all of it; gradients are parts of a sum (R), or all there (I)
    S(dim) each rank has its part of that dimension
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial

from libddp.distributed.fsdp.wrap._summed import Summed

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

    from libddp.distributed.fsdp.wrap._inner_dtensor import InnerDTensor


def annotation_of(parameter: torch.Tensor) -> Any:
    """Axis of a mesh -> type; empty for a tensor that has none."""
    is_known = getattr(dist, "_is_spmd_types_available", None)  # torch 2.15
    if is_known is None or isinstance(parameter, DTensor) or not is_known():
        return {}
    import spmd_types

    return spmd_types.get_local_type(parameter)


class AnnotatedTensor:
    """Of one parameter; the unit has it as a plain tensor."""

    def __init__(
        self,
        inner: InnerDTensor,
        gradients: tuple[Placement, ...],
        annotate: Callable[[torch.Tensor], None],
    ) -> None:
        #: The same as a DTensor.
        self.inner = inner
        #: What gradients are on each dimension of the mesh.
        self._gradients = gradients
        #: Puts the annotation on a tensor, where annotations are checked.
        self.annotate = annotate
        self._sums = any(
            isinstance(placement, Partial)
            for dim, placement in enumerate(gradients)
            if dim not in inner.averaged
        )

    def whole(self, local: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """With a graph to `local`; `dtype`: that sums of parts are made in, None = as they come."""
        return Summed.apply(local, self, dtype) if self._sums else local

    def of_local(self, local: torch.Tensor) -> torch.Tensor:
        """What Summed gives."""
        return local.view_as(local)

    def summed(self, gradient: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """See InnerDTensor."""
        mesh = self.inner.spec.mesh
        placed = DTensor.from_local(gradient, mesh, self._gradients, run_check=False)
        return self.inner.summed(placed, dtype)
