"""Parameters of a tensor class that says itself what the ranks gather, as torch's fully_shard asks.

Such a class has `fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)`, or with
the mesh alone, which gives (tensors to gather, anything), and `fsdp_post_all_gather(gathered,
anything, dtype)`, which gives (the whole parameter, ...): it may send fewer bytes, or tensors of
its own. Both may also be attributes of this rank's rows (`p._local_tensor`), which a script has set
before the first forward. The rows are of that class, in memory of their own. The unit has a plain
parameter of the same shape for each, whose values nobody reads: gradients go through it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from libddp.distributed.fsdp.wrap._placement import shard_mesh_of
from libddp.distributed.fsdp.wrap._sharding import Sharding


def has_extension(tensor: Any) -> bool:
    """Whether its class says what is gathered."""
    return hasattr(tensor, "fsdp_pre_all_gather") and hasattr(tensor, "fsdp_post_all_gather")


class Extension:
    """Of one parameter."""

    def __init__(
        self,
        parameter: torch.Tensor,
        sharding: Sharding,
        module: torch.nn.Module | None,
        local: torch.Tensor | None = None,
    ) -> None:
        self._sharding, self._module = sharding, module
        self._shape, self._stride = parameter.shape, parameter.stride()
        self._dtype = sharding.param_dtype or parameter.dtype
        #: What this rank owns.
        self.local = sharding.own_rows(parameter.detach()).clone() if local is None else local

    def whole(self, unsharded: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """The parameter, whose gradient goes to `unsharded`; a collective."""
        return _Whole.apply(unsharded, lambda: self._gather(local))

    def _gather(self, local: torch.Tensor) -> torch.Tensor:
        mesh = shard_mesh_of(self._sharding)
        arguments = (mesh, self._shape, self._stride, self._module, self._sharding.policy)
        if len(inspect.signature(local.fsdp_pre_all_gather).parameters) == 1:
            arguments = (mesh,)
        inputs, metadata = local.fsdp_pre_all_gather(*arguments)
        outputs = tuple(self._all_gather(tensor) for tensor in inputs)
        whole, _ = local.fsdp_post_all_gather(outputs, metadata, self._dtype)
        return whole if whole.shape == self._shape else whole[: self._shape[0]]  # without padding

    def _all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        group = self._sharding.shard
        if group is None:
            return tensor
        found = tensor.new_empty(group.size() * tensor.numel())
        group.all_gather_into(found, tensor.contiguous().view(-1))
        return found.view(-1, *tensor.shape[1:])


class _Whole(torch.autograd.Function):
    """Another tensor in the place of one that has no values."""

    @staticmethod
    def forward(ctx, unsharded, gather):
        ctx.dtype = unsharded.dtype
        return gather()

    @staticmethod
    def backward(ctx, grad):
        if type(grad) is not torch.Tensor:
            grad = torch.empty(grad.shape, dtype=grad.dtype, device="cpu").copy_(grad)
        return grad.to(ctx.dtype), None
