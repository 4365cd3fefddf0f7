"""Inputs whose values a collective is still writing (torch's AsyncCollectiveTensor).

What a tensor-parallel layer returns is one, and requires a gradient though the tensor in it does
not. A compiled block goes by the inner one and leaves the gradient out: behind torch's fully_shard
zeros reach the layer, without it autograd fails. So blocks get what they need anyway, the values.
"""

from __future__ import annotations

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor


def awaited(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The same with plain tensors in the place of those that are passed by themselves."""
    if any(_is_pending(value) for value in (*args, *kwargs.values())):
        args = tuple(_values(value) for value in args)
        kwargs = {name: _values(value) for name, value in kwargs.items()}
    return args, kwargs


def _is_pending(value) -> bool:
    return type(value) is AsyncCollectiveTensor and value.requires_grad


def _values(value):
    return _Awaited.apply(value) if _is_pending(value) else value


class _Awaited(torch.autograd.Function):
    @staticmethod
    def forward(ctx, pending: AsyncCollectiveTensor) -> torch.Tensor:
        return pending.wait().detach()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
