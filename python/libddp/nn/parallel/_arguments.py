"""What the arguments of DistributedDataParallel mean, with torch's rules and words."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _get_device_index
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from libddp.distributed._foreign_groups import take_over
from libddp.distributed._groups import torch_side
from libddp.errors import ArgumentError


def check_devices(device_ids: Any, output_device: Any) -> None:
    """They must name at most one device.

    Raises:
        ArgumentError: several devices, or something that names none.
    """
    for name, value in (("device_ids", device_ids), ("output_device", output_device)):
        entries = list(value) if isinstance(value, (list, tuple)) else [value]
        if len(entries) > 1:
            raise ArgumentError(
                f"libddp: {name} can only be None or contain a single element, and it is {value}. "
                "Hint: one process drives one device; start more ranks instead."
            )
        for entry in entries:
            if not (entry is None or isinstance(entry, (int, str, torch.device))):
                raise ArgumentError(
                    f"libddp: {name} is {value!r}, which names no device. Hint: pass an index, a "
                    "torch.device or a list with one of them, or leave it out."
                )


def devices_of(module: torch.nn.Module, device_ids: Any, output_device: Any):
    """torch's attributes: what both are for a model on one device, None and None on the CPU.

    Without `device_ids` a script brings inputs to the device by itself.

    Raises:
        ArgumentError: they name another device than the model's, or only the output's.
    """
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    ids = list(device_ids) if isinstance(device_ids, (list, tuple)) else [device_ids]
    ids = [entry for entry in ids if entry is not None]
    if device.type in ("cpu", "meta"):
        _refuse_elsewhere(device, ids)
        return None, None
    if not ids:
        if output_device is None:
            return None, None
        raise ArgumentError(
            f"libddp: output_device is {output_device!r} and device_ids is {device_ids}, for a "
            f"model on {device}. Hint: pass device_ids=[{device.index}], or leave out both."
        )
    if isinstance(output_device, (list, tuple)):
        output_device = output_device[0] if output_device else None
    named = ids[0] if output_device is None else output_device
    indices = [_get_device_index(entry, True) for entry in (ids[0], named)]
    for name, index in zip(("device_ids", "output_device"), indices, strict=True):
        if index != device.index:
            raise ArgumentError(
                f"libddp: {name} names device {index}, and the model is on {device}. Hint: move "
                f"the model there before wrapping it, or pass {device.index}."
            )
    return [indices[0]], indices[1]


def _refuse_elsewhere(device: torch.device, ids: list) -> None:
    """device_ids of a model on the CPU: without effect on a machine without an accelerator, where
    scripts that always pass them run too; else the model has been forgotten there."""
    named = [entry for entry in ids if not str(entry).startswith("cpu")]
    found = torch.accelerator.current_accelerator(check_available=True)
    if not named or found is None or device.type != "cpu":
        return
    raise ArgumentError(
        f"libddp: device_ids names {found.type} device {named[0]}, and the model is on {device}. "
        "Hint: move the model there before wrapping it, or leave out device_ids."
    )


def group_of(process_group: Any, device_mesh: Any):
    """torch's group that the gradients are averaged over.

    Raises:
        ArgumentError: both are given; the mesh has several dimensions; this is no group.
        StateError: there is no default group.
    """
    if device_mesh is not None:
        process_group = _group_of_mesh(process_group, device_mesh)
    take_over(process_group, "DistributedDataParallel")
    return dist.group.WORLD if process_group is None else torch_side(process_group)


def _group_of_mesh(process_group: Any, mesh: Any):
    if process_group is not None:
        raise ArgumentError(
            "Cannot specify both process_group and device_mesh arguments. Hint: the mesh brings "
            "its own group."
        )
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(
            f"libddp: device_mesh is {mesh!r}. Hint: pass what init_device_mesh() returns."
        )
    if mesh.ndim != 1:
        raise ArgumentError(
            f"Only 1D device mesh is supported, but got {mesh}. Hint: pass the dimension that "
            'replicates the model, as in mesh["dp"].'
        )
    return mesh.get_group(mesh_dim=0)


def localize_sliced_parameters(module: torch.nn.Module, device_mesh: Any) -> bool:
    """For a mesh that is a slice of a larger one: DTensor parameters become local tensors.

    They are DTensors inside each forward, so that tensor parallelism of the other dimensions works.

    Returns:
        Whether it is one.
    """
    if device_mesh is None or device_mesh._get_root_mesh() == device_mesh:
        return False
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    _pre_dp_module_transform(module)
    return True


def buffer_rules(broadcast_buffers: bool | None, forward_sync_buffers: bool | None):
    """Are buffers rank 0's before forwards, and are they at construction?"""
    if forward_sync_buffers is None:
        wanted = True if broadcast_buffers is None else bool(broadcast_buffers)
        return wanted, wanted
    if broadcast_buffers is not None and bool(broadcast_buffers) != bool(forward_sync_buffers):
        warnings.warn(
            f"libddp: broadcast_buffers={broadcast_buffers} is ignored, because "
            f"forward_sync_buffers={forward_sync_buffers} is given too.",
            FutureWarning,
            stacklevel=4,
        )
    return bool(forward_sync_buffers), True


def check_module(module: torch.nn.Module, parameters: list[tuple[str, torch.Tensor]]) -> None:
    """Raises ArgumentError for a model that cannot be wrapped on any rank."""
    for name, parameter in parameters:
        if isinstance(parameter, UninitializedParameter):
            raise ArgumentError(
                "Modules with uninitialized parameters can't be used with "
                f"`DistributedDataParallel`: {name!r}. Hint: run a dummy forward pass first."
            )
        if is_traceable_wrapper_subclass(parameter):
            raise ArgumentError(
                f"libddp: DistributedDataParallel: parameter {name!r} is a "
                f"{type(parameter.data).__name__}, whose values are not in memory of its own. "
                "Hint: shard and replicate the whole model by fully_shard with a mesh of two "
                "dimensions, or pass the mesh's slice as device_mesh for tensor parallelism, or "
                "leave it out (_ddp_params_and_buffers_to_ignore)."
            )
    if any(not parameter.is_cpu for _, parameter in parameters):
        return
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm):
            raise ArgumentError(
                f"SyncBatchNorm layers only work with GPU modules: {name!r}. Hint: keep BatchNorm; "
                "libddp gives every rank rank 0's running statistics."
            )
