"""What these tests test: libddp on CUDA, or whatever two variables put in their place.

    from subject import DEVICE, DDP, dist

LIBDDP_GPU_TEST_DEVICE=cpu runs on CPU tensors what makes sense there, LIBDDP_GPU_TEST_LIBRARY=torch
runs torch's own classes over torch's own backends: both find mistakes in the tests themselves.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as c10d

DEVICE = torch.device(os.environ.get("LIBDDP_GPU_TEST_DEVICE", "cuda:0"))
LIBRARY = os.environ.get("LIBDDP_GPU_TEST_LIBRARY", "libddp")
IS_CUDA = DEVICE.type == "cuda"
IS_LIBDDP = LIBRARY == "libddp"

if IS_LIBDDP:
    import libddp.distributed as dist
    from libddp.distributed.fsdp import FullyShardedDataParallel as FSDP
    from libddp.distributed.fsdp import fully_shard
    from libddp.nn.parallel import DistributedDataParallel as DDP
    from libddp.utils.checkpoint import checkpoint
else:
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.checkpoint import checkpoint

__all__ = ["DDP", "DEVICE", "FSDP", "IS_CUDA", "IS_LIBDDP", "checkpoint", "dist", "fully_shard"]

#: Of torch's own engine, to compare with.
_torch_group = None


def start() -> None:
    """The default group, of one rank."""
    if IS_CUDA:
        torch.cuda.set_device(DEVICE)
    backend = "cpu:gloo,cuda:nccl" if IS_CUDA else "gloo"
    dist.init_process_group(backend, store=c10d.HashStore(), rank=0, world_size=1)


def stop() -> None:
    global _torch_group
    _torch_group = None
    dist.destroy_process_group()


def torch_group():
    """A group of torch's own backend over the same ranks."""
    global _torch_group
    if _torch_group is None:
        _torch_group = c10d.new_group(backend="nccl" if IS_CUDA else "gloo")
    return _torch_group


def nothing_here() -> bool:
    return IS_CUDA and not torch.cuda.is_available()


def missing(item) -> str:
    """Why a test cannot run, or ""."""
    if nothing_here():
        return "needs a GPU"
    if item.get_closest_marker("cuda") and not IS_CUDA:
        return "is about CUDA"
    if item.get_closest_marker("libddp") and not IS_LIBDDP:
        return "is about libddp"
    return ""


def synchronize() -> None:
    if IS_CUDA:
        torch.cuda.synchronize()


def device_works() -> bool:
    try:
        synchronize()
    except RuntimeError:
        return False
    return True
