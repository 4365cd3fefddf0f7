"""Makes torch.nn.utils.clip_grad_norm_ respect sharded parameters.

Replaces it, or what it calls behind its name. torch scales by the norm of the tensors that it is
given; of sharded gradients each rank has another part, so each would scale by another factor, and
scripts and trainers call this function. It asks the registry about each parameter; models that are
not sharded go the old way. The first model that is sharded into plain tensors asks for it, or the
first optimizer with shard_gradients; it stays for good.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.utils.clip_grad as torchs
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from libddp._torch_patches.replacing import SHARDING

#: Parameters of FullyShardedDataParallel, of which torch's function takes each rank's own norm.
_told_of: WeakIdKeyDictionary = WeakIdKeyDictionary(ref_type=WeakIdRef)
_TOLD = (
    "libddp fsdp: torch.nn.utils.clip_grad_norm_ takes the norm over all ranks here; with torch's "
    "FullyShardedDataParallel it takes the norm of each rank's part, so losses will differ from "
    "such a run. Hint: model.clip_grad_norm_() is the same in both."
)
_NAME = "clip_grad_norm_"


@functools.cache
def put() -> None:
    """Once; also for scripts that have imported the function by its name already.

    torch wraps it in one that switches autograd off; what that one calls is replaced.
    """
    function = torchs.clip_grad_norm_
    names = function.__code__.co_freevars
    if "func" in names:
        cell = function.__closure__[names.index("func")]
        over_all_ranks = _over_all_ranks(cell.cell_contents)
        listed_as = f"{torchs.__name__}.{_NAME}"
        SHARDING.put(cell, "cell_contents", over_all_ranks, listed_as)
        return
    over_all_ranks = torch.no_grad()(_over_all_ranks(function))
    for owner in (torchs, torch.nn.utils):
        SHARDING.put(owner, _NAME, over_all_ranks)


def tell_of(parameters: Iterable[torch.nn.Parameter]) -> None:
    """A run that gives these to torch's function learns once what differs."""
    for parameter in parameters:
        _told_of[parameter] = True


@functools.cache
def _tell() -> None:
    """On the first rank, once."""
    if dist.get_rank() == 0:
        warnings.warn(_TOLD, stacklevel=4)


def _over_all_ranks(original: Callable) -> Callable:
    """clip_grad_norm_ whose collectives depend on the parameters alone."""
    from libddp.distributed.fsdp import _clip, _registry

    @functools.wraps(original)
    def clip(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
        listed = _clip.listed_of(parameters)
        spread = [_registry.norm_group_of(parameter) for parameter in listed]
        if not any(spread):
            is_spent = inspect.isgenerator(parameters) and listed
            given = listed if is_spent else parameters
            return original(given, max_norm, norm_type, error_if_nonfinite, foreach)
        if any(g is not None and p in _told_of for p, g in zip(listed, spread, strict=True)):
            _tell()
        return _clip.clip(listed, spread, max_norm, norm_type, error_if_nonfinite, foreach)

    return clip
