"""Makes torch ask libddp's groups for a backend that it knows.

Replaces `ProcessGroup._get_backend_name`, by which torch's ShardedTensor tells where the tensors of
a rank are that has no rows of one: "gloo" is the CPU, everything else a GPU. Of a group whose
backend is libddp's it is the name that the script passed, or Gloo's or NCCL's by the devices that
there are. Other groups answer as before. The first FullyShardedDataParallel asks for it, whose
sharded state dicts hold ShardedTensors; it stays for good.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from libddp._torch_patches.replacing import SHARDING

_KNOWN = ("gloo", "nccl")


@functools.cache
def put(name_of: Callable[[dist.ProcessGroup], str | None]) -> None:
    """Once something is sharded.

    Args:
        name_of: what the script passed for a group; None = it is not one of libddp's.
    """
    original = dist.ProcessGroup._get_backend_name

    @functools.wraps(original)
    def _get_backend_name(self):
        passed = name_of(self)
        if passed is None:
            return original(self)
        if passed in _KNOWN:
            return passed
        moves_cuda = any(device.type == "cuda" for device in self._device_types)
        return "nccl" if moves_cuda and torch.cuda.is_available() else "gloo"

    SHARDING.put(dist.ProcessGroup, "_get_backend_name", _get_backend_name)
