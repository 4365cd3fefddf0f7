"""Gradient norms over the whole model, of which each rank has a part.

Also what libddp._torch_patches puts behind torch's clip_grad_norm_ and get_total_norm.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
import torch.nn.utils.clip_grad as torchs

from libddp._load import load
from libddp.distributed.fsdp import _registry

_C = load()


def clip(listed, spread, max_norm, norm_type, error_if_nonfinite=False, foreach=None):
    """Scales the gradients of `listed`, each spread over a group or None; the norm before."""
    total = total_norm(_parts_of(listed, spread), float(norm_type), error_if_nonfinite)
    torchs._clip_grads_with_norm_(listed, max_norm, total, foreach)
    return total


def _parts_of(listed, spread) -> Iterable[Part]:
    parts: dict[tuple, Part] = {}
    for parameter, group in zip(listed, spread, strict=True):
        key = group, parameter.device
        parts.setdefault(key, Part(*key)).add_gradient(parameter)
    return parts.values()


def listed_of(tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


class Part:
    """Gradients on one device of which the ranks of one group have a part each; or, without one,
    all."""

    def __init__(self, group, device: torch.device) -> None:
        self.group, self.device = group, device
        #: None where this rank has no gradient.
        self._entries: list[torch.Tensor | None] = []
        self._dtypes: list[torch.dtype] = []

    def add_gradient(self, parameter: torch.Tensor) -> None:
        self._dtypes.append(parameter.dtype)
        own = parameter.grad
        if own is None:
            self._entries.append(None)
            return
        place = None if self.group is None else _registry.place_of(parameter)
        self.add(own if place is None else place.own(own))

    def add(self, tensor: torch.Tensor) -> None:
        self._dtypes.append(tensor.dtype)
        self._entries.append(tensor)

    def for_norm(self) -> tuple:
        """What libddp/module/grad_norm.h makes a norm of."""
        dtype = functools.reduce(torch.promote_types, self._dtypes)
        return self.group, dtype, self._entries, self.device


def total_norm(parts: Iterable[Part], norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    total = _C.total_norm([part.for_norm() for part in parts], norm_type)
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and scale the gradients by the "
            "non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    return total


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[torch.nn.Parameter], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scales the gradients of a whole model to at most `max_norm`; returns the norm before.

    As torch's method: computed in float32, and the factor rounded to each gradient's dtype; the
    norm in that of this rank's gradients, float32 without any.
    """
    listed, norm_type = list(parameters), float(norm_type)
    spread = [_registry.norm_group_of(p) for p in listed]
    if norm_type == math.inf:
        # As torch, also of what is whole here (ignored modules): ranks may have different ones.
        first = next((group for group in spread if group is not None), None)
        spread = [first if group is None else group for group in spread]
    parts = _parts_of(listed, spread)
    dtype = functools.reduce(torch.promote_types, [p.dtype for p in listed], torch.float32)
    computed_in = None if dtype.is_complex else dtype
    total = _C.total_norm([part.for_norm() for part in parts], norm_type, computed_in)
    gradients: dict[tuple, list[torch.Tensor]] = {}
    for gradient in (p.grad for p in listed if p.grad is not None):
        gradients.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for (device, kind), alike in gradients.items():
        torch._foreach_mul_(alike, factor.to(device, kind))
    dtypes = [kind for _, kind in gradients]
    return total.to(functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32)
