"""Makes torch.nn.utils.get_total_norm give the norm of whole gradients.

Replaces it, and `_get_total_norm` of torch.nn.utils.clip_grad, which is the same function. torch
computes the norm of the tensors that it is given; of sharded gradients a rank has only part, and
the function is given no parameters, which could tell. So this one looks for tensors that are, or
share memory with, the gradient of a sharded parameter. The drop-in asks for it, as soon as
libddp's sharding is imported; undone by uninstall. Without it each rank gets the norm of what it
has, as with torch's FullyShardedDataParallel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.utils.clip_grad as torchs

from libddp._torch_patches.replacing import Replacements

_SHARDING = "libddp.distributed.fsdp._clip"


def put(replacements: Replacements) -> None:
    """Once something may be sharded."""
    replacements.put_after_import(_SHARDING, lambda found: _put(found, replacements))


def _put(_: ModuleType, replacements: Replacements) -> None:
    of_whole_gradients = _of_whole_gradients(torchs._get_total_norm)
    replacements.put(torchs, "_get_total_norm", of_whole_gradients)
    replacements.put(torch.nn.utils, "get_total_norm", of_whole_gradients)


def _of_whole_gradients(original: Callable) -> Callable:
    from libddp.distributed.fsdp import _clip

    @functools.wraps(original)
    @torch.no_grad()
    def total_norm(tensors, norm_type=2.0, error_if_nonfinite=False, foreach=None):
        tensors = _clip.listed_of(tensors)
        known = _Known()
        found = [known.find(tensor) for tensor in tensors]
        groups = [place.norm_group() if place else None for place in found]
        if not any(groups):
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        parts: dict[tuple, _clip.Part] = {}
        for tensor, place, group in zip(tensors, found, groups, strict=True):
            key = group, tensor.device
            part = parts.setdefault(key, _clip.Part(*key))
            part.add(place.own(tensor) if group else tensor)
        return _clip.total_norm(parts.values(), float(norm_type), error_if_nonfinite)

    return total_norm


class _Known:
    """Tensors that belong to sharded parameters now."""

    def __init__(self) -> None:
        from libddp.distributed.fsdp import _registry

        self._by_id: dict[int, _registry.Place] = {}
        self._by_memory: dict[int, _registry.Place] = {}
        for parameter, place in _registry.all_places():
            shows_part, grad = place.has_parts_of_values(), parameter.grad
            if shows_part:
                self._by_id[id(parameter)] = place
            if grad is None:
                continue
            self._by_id[id(grad)] = place
            if shows_part and _has_memory(grad):
                self._by_memory[grad.untyped_storage().data_ptr()] = place

    def find(self, tensor: torch.Tensor):
        """The registry's entry of the parameter that it belongs to, or None."""
        place = self._by_id.get(id(tensor))
        if place is None and self._by_memory and _has_memory(tensor):
            place = self._by_memory.get(tensor.untyped_storage().data_ptr())
        return place


def _has_memory(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout == torch.strided and type(tensor) is torch.Tensor
    return is_plain and tensor.untyped_storage().data_ptr() != 0
