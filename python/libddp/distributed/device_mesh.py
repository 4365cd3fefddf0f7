"""torch.distributed.device_mesh; init_device_mesh makes libddp's group where there is none."""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed.device_mesh as _torch
from torch.distributed.device_mesh import DeviceMesh

from libddp.distributed._init import init_process_group

__all__ = ["DeviceMesh", "init_device_mesh"]


def init_device_mesh(device_type: str, mesh_shape: tuple[int, ...], **arguments) -> DeviceMesh:
    """torch's, on libddp's process group.

    Args:
        device_type, mesh_shape: as in torch, and so are the other arguments, which take names only:
            mesh_dim_names, backend_override.

    Note:
        A collective. Without a process group it makes the default one, from the environment, as
        torch's does (on Gloo or NCCL).

    Example:
        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))  # doctest: +SKIP
    """
    if not dist.is_initialized():
        init_process_group()
    return _torch.init_device_mesh(device_type, mesh_shape, **arguments)


def __getattr__(name: str):
    return getattr(_torch, name)
