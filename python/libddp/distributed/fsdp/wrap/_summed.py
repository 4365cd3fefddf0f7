"""Gradients that are parts of a sum over ranks of a tensor-parallel mesh.

They are added up on their way to the unit, which averages over the other ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from libddp.distributed.fsdp.wrap._unchecked import unchecked


class Summed(torch.autograd.Function):
    """What a module has of the unit's tensor: `inner.of_local(local)`, an InnerDTensor's or an
    AnnotatedTensor's; its backward is `inner.summed(gradient, dtype)`.
    """

    @staticmethod
    def forward(ctx, local: torch.Tensor, inner: Any, dtype: torch.dtype | None):
        ctx.inner, ctx.dtype = inner, dtype
        return inner.of_local(local)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        with unchecked():
            return ctx.inner.summed(gradient, ctx.dtype), None, None
