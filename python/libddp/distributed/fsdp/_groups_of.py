"""From torch's arguments (process_group, device_mesh, strategy) to the groups of a unit."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from libddp.distributed._groups import native
from libddp.errors import ArgumentError

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
#: Strategies that keep gathered parameters from forward to backward.
_KEEP = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)


def groups_of(process_group, device_mesh, strategy: ShardingStrategy) -> tuple:
    """(shard, replicate): C++ groups, either of which may be None."""
    if process_group is not None and device_mesh is not None:
        raise ArgumentError(
            "libddp fsdp: process_group and device_mesh exclude each other. Hint: pass one."
        )
    if strategy in _HYBRID:
        return _hybrid(process_group, device_mesh)
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise ArgumentError(
                f"libddp fsdp: a device_mesh of {device_mesh.ndim} dimensions shards and "
                f"replicates, which {strategy} does not. Hint: HYBRID_SHARD, or one dimension."
            )
        process_group = device_mesh.get_group()
    if isinstance(process_group, tuple):
        raise ArgumentError(
            f"libddp fsdp: two process groups are for HYBRID_SHARD, not for {strategy}. "
            "Hint: pass the one to shard over."
        )
    group = native(process_group)
    return (None, group) if strategy is ShardingStrategy.NO_SHARD else (group, None)


def mesh_of(process_group, device_mesh, strategy: ShardingStrategy):
    """The DeviceMesh of a unit; None where it was made with two groups."""
    if device_mesh is not None or strategy in _HYBRID:
        return device_mesh
    return DeviceMesh.from_group(process_group or dist.group.WORLD, "cpu")


def keeps_unsharded(strategy: ShardingStrategy) -> bool:
    """Whether gathered parameters stay from forward to backward."""
    return strategy in _KEEP


def _hybrid(process_group, device_mesh) -> tuple:
    if device_mesh is not None:
        if device_mesh.ndim != 2:
            raise ArgumentError(
                "libddp fsdp: HYBRID_SHARD needs a device_mesh of two dimensions (replicate, "
                f"shard), this one has {device_mesh.ndim}. Hint: init_device_mesh('cpu', (r, s))."
            )
        return native(device_mesh.get_group(1)), native(device_mesh.get_group(0))
    if isinstance(process_group, tuple):
        if len(process_group) != 2:
            raise ArgumentError(
                f"libddp fsdp: HYBRID_SHARD needs (shard group, replicate group), got "
                f"{len(process_group)}. Hint: pass two groups, a device_mesh, or None."
            )
        return native(process_group[0]), native(process_group[1])
    if process_group is not None:
        raise ArgumentError(
            "libddp fsdp: HYBRID_SHARD shards over one group and replicates over another. Hint: "
            "pass both as a tuple, a device_mesh, or None for hosts (LOCAL_WORLD_SIZE)."
        )
    return _by_host()


def _by_host() -> tuple:
    """Shards inside a host, replicates between hosts, as the launcher has placed the ranks."""
    world, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if local < 1 or world % local:
        raise ArgumentError(
            f"libddp fsdp: HYBRID_SHARD without groups shards over the ranks of a host, but "
            f"LOCAL_WORLD_SIZE={os.environ.get('LOCAL_WORLD_SIZE')!r} does not divide the {world} "
            "ranks. Hint: start with libddp run or torchrun, or pass groups or a device_mesh."
        )
    mesh = dist.init_device_mesh("cpu", (world // local, local))
    return native(mesh.get_group(1)), native(mesh.get_group(0))
