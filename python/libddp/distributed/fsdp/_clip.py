"""Gradient norms over the whole model, also where a script calls torch's clip_grad_norm_.

torch computes the norm of the tensors that it is given; of sharded gradients a rank has only part.
Once something is sharded, clip_grad_norm_ asks the registry about each parameter, and adds what the
other ranks have; models that are not sharded go the old way. get_total_norm knows no parameters: it
looks for tensors that are, or share memory with, the gradient of a sharded one.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.utils.clip_grad as torchs
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from libddp._load import load
from libddp.distributed.fsdp import _registry

_C = load()


def watch() -> None:
    """Norms respect sharded parameters from now on."""
    if hasattr(torchs._get_total_norm, "_libddp"):
        return
    torchs._get_total_norm = _of_tensors(torchs._get_total_norm)
    torchs.get_total_norm = torchs._get_total_norm
    torch.nn.utils.get_total_norm = torchs._get_total_norm
    _replace_clipping()


#: Parameters of FullyShardedDataParallel, of which torch's function takes each rank's own norm.
_told_of: WeakIdKeyDictionary = WeakIdKeyDictionary(ref_type=WeakIdRef)
_TOLD = (
    "libddp fsdp: torch.nn.utils.clip_grad_norm_ takes the norm over all ranks here; with torch's "
    "FullyShardedDataParallel it takes the norm of each rank's part, so losses will differ from "
    "such a run. Hint: model.clip_grad_norm_() is the same in both."
)


def tell_of(parameters: Iterable[torch.nn.Parameter]) -> None:
    """A run that gives these to torch's function learns once what differs."""
    for parameter in parameters:
        _told_of[parameter] = True


@functools.cache
def _tell() -> None:
    """On the first rank, once."""
    if dist.get_rank() == 0:
        warnings.warn(_TOLD, stacklevel=4)


def _replace_clipping() -> None:
    """Also for scripts that have imported the function by its name already.

    torch wraps it in one that switches autograd off; what that one calls is replaced.
    """
    function = torchs.clip_grad_norm_
    names = function.__code__.co_freevars
    if "func" in names:
        cell = function.__closure__[names.index("func")]
        cell.cell_contents = _of_parameters(cell.cell_contents)
        return
    torchs.clip_grad_norm_ = torch.no_grad()(_of_parameters(function))
    torch.nn.utils.clip_grad_norm_ = torchs.clip_grad_norm_


def _of_parameters(original: Callable) -> Callable:
    """clip_grad_norm_ whose collectives depend on the parameters alone."""

    @functools.wraps(original)
    def clip(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
        listed = _listed(parameters)
        spread = [_registry.spread_of(parameter) for parameter in listed]
        if not any(spread):
            is_spent = inspect.isgenerator(parameters) and listed
            given = listed if is_spent else parameters
            return original(given, max_norm, norm_type, error_if_nonfinite, foreach)
        if any(g is not None and p in _told_of for p, g in zip(listed, spread, strict=True)):
            _tell()
        return _clip(listed, spread, max_norm, norm_type, error_if_nonfinite, foreach)

    return clip


def _clip(listed, spread, max_norm, norm_type, error_if_nonfinite=False, foreach=None):
    parts = {group: _Part(group) for group in spread}
    for parameter, group in zip(listed, spread, strict=True):
        parts[group].add_gradient(parameter)
    total = _total(parts.values(), float(norm_type), error_if_nonfinite)
    torchs._clip_grads_with_norm_(listed, max_norm, total, foreach)
    return total


def _listed(tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


class _Part:
    """Gradients of which the ranks of one group have a part each; or, without one, all."""

    def __init__(self, group) -> None:
        self.group = group
        #: None where this rank has no gradient.
        self._entries: list[torch.Tensor | None] = []
        self._dtypes: list[torch.dtype] = []

    def add_gradient(self, parameter: torch.Tensor) -> None:
        self._dtypes.append(parameter.dtype)
        own = parameter.grad
        if own is None:
            self._entries.append(None)
            return
        if self.group is not None:
            own = _registry.place_of(parameter).own(own)
        self.add(own)

    def add(self, tensor: torch.Tensor) -> None:
        self._dtypes.append(tensor.dtype)
        self._entries.append(tensor)

    def for_norm(self) -> tuple:
        """What libddp/module/grad_norm.h makes a norm of."""
        return self.group, functools.reduce(torch.promote_types, self._dtypes), self._entries


def _of_tensors(original: Callable) -> Callable:
    @functools.wraps(original)
    @torch.no_grad()
    def total_norm(tensors, norm_type=2.0, error_if_nonfinite=False, foreach=None):
        tensors = _listed(tensors)
        known = _Known()
        found = [known.find(tensor) for tensor in tensors]
        groups = [place.spread() if place else None for place in found]
        if not any(groups):
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        parts = {group: _Part(group) for group in groups}
        for tensor, place, group in zip(tensors, found, groups, strict=True):
            parts[group].add(place.own(tensor) if group else tensor)
        return _total(parts.values(), float(norm_type), error_if_nonfinite)

    total_norm._libddp = True
    return total_norm


class _Known:
    """Tensors that belong to sharded parameters now."""

    def __init__(self) -> None:
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

    def find(self, tensor: torch.Tensor) -> _registry.Place | None:
        place = self._by_id.get(id(tensor))
        if place is None and self._by_memory and _has_memory(tensor):
            place = self._by_memory.get(tensor.untyped_storage().data_ptr())
        return place


def _has_memory(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout == torch.strided and type(tensor) is torch.Tensor
    return is_plain and tensor.untyped_storage().data_ptr() != 0


def _total(parts: Iterable[_Part], norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
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

    In the dtype of this rank's gradients, as torch's method; float32 without any.
    """
    listed = list(parameters)
    total = _clip(listed, [_registry.spread_of(p) for p in listed], max_norm, norm_type)
    dtypes = [p.grad.dtype for p in listed if p.grad is not None]
    return total.to(functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32)
