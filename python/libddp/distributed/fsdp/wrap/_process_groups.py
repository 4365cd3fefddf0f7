"""From torch's arguments (process_group, device_mesh, strategy) to the groups of a unit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from libddp.distributed._foreign_groups import take_over
from libddp.distributed._groups import has_name, torch_side
from libddp.errors import ArgumentError, StateError

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
#: Strategies that keep gathered parameters from forward to backward.
_KEEP = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)


@dataclass
class Groups:
    """Of a unit; torch's, either of which may be None, and their mesh, if it is known."""

    shard: Any
    replicate: Any
    mesh: DeviceMesh | None

    @staticmethod
    def of(mesh: DeviceMesh) -> Groups:
        """Of a mesh (replicate, shard)."""
        return Groups(mesh.get_group(1), mesh.get_group(0), mesh)

    def natives(self) -> tuple:
        """(shard, replicate), the C++ groups."""
        groups = (self.shard, self.replicate)
        return tuple(None if group is None else take_over(group, "FSDP") for group in groups)


def groups_of(
    process_group, device_mesh, strategy: ShardingStrategy, device_type: str = "cpu"
) -> Groups:
    """The groups that torch's arguments mean; of a model on devices of this type.

    Raises:
        ArgumentError: arguments that exclude each other, what is no group, or one that this rank is
            not in.
    """
    if process_group is not None and device_mesh is not None:
        raise ArgumentError(
            "libddp fsdp: process_group and device_mesh exclude each other. Hint: pass one."
        )
    if strategy in _HYBRID:
        return _hybrid(process_group, device_mesh, device_type)
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
    take_over(process_group, "FSDP")
    group = known(process_group)
    mesh = device_mesh or _mesh_of(group, device_type)
    if strategy is ShardingStrategy.NO_SHARD:
        return Groups(None, group, mesh)
    return Groups(group, None, mesh)


def known(process_group):
    """A process_group argument as torch's functions know it, part by part; None: the default."""
    if isinstance(process_group, tuple):
        return tuple(torch_side(group) for group in process_group)
    return torch_side(process_group) or dist.group.WORLD


def _mesh_of(group, device_type: str) -> DeviceMesh | None:
    """None of what a program has made by hand, a backend or a ProcessGroup: no mesh can hold it."""
    if not isinstance(group, dist.ProcessGroup) or not has_name(group):
        return None
    try:
        return DeviceMesh.from_group(group, device_type)
    except KeyError as error:  # torch does not know it any more
        raise StateError(
            f"libddp fsdp: the process group {group!r} has been destroyed (destroy_process_group). "
            "Hint: pass another one, or None for the default group."
        ) from error


def forget_lost_groups(mesh: DeviceMesh | None) -> None:
    """Of a mesh that no parameter has any more: what torch does not know any more.

    torch 2.11's meshes hold their groups, and DTensor's caches hold meshes: without this a group
    that was destroyed, and its memory, would stay as long as the process.
    """
    known = c10d._world.pg_map
    for holder in (mesh, getattr(mesh, "_root_mesh", None)):
        registry = getattr(holder, "_pg_registry", {})
        for name in [name for name, group in registry.items() if group not in known]:
            del registry[name]


def strategy_of(value: ShardingStrategy | None) -> ShardingStrategy:
    """The one that is meant.

    Raises:
        ArgumentError: it is none.
    """
    strategy = ShardingStrategy.FULL_SHARD if value is None else value
    if not isinstance(strategy, ShardingStrategy):
        names = ", ".join(one.name for one in ShardingStrategy)
        raise ArgumentError(
            f"libddp fsdp: sharding_strategy={value!r} is no ShardingStrategy. Hint: one of "
            f"ShardingStrategy's: {names}."
        )
    return strategy


def keeps_unsharded(strategy: ShardingStrategy) -> bool:
    """Whether gathered parameters stay from forward to backward."""
    return strategy in _KEEP


def _hybrid(process_group, device_mesh, device_type: str) -> Groups:
    if device_mesh is not None:
        if device_mesh.ndim != 2:
            raise ArgumentError(
                "libddp fsdp: HYBRID_SHARD needs a device_mesh of two dimensions (replicate, "
                f"shard), this one has {device_mesh.ndim}. Hint: init_device_mesh('cpu', (r, s))."
            )
        return Groups.of(device_mesh)
    if isinstance(process_group, tuple):
        if len(process_group) != 2:
            raise ArgumentError(
                f"libddp fsdp: HYBRID_SHARD needs (shard group, replicate group), got "
                f"{len(process_group)}. Hint: pass two groups, a device_mesh, or None."
            )
        return Groups(*known(process_group), None)
    if process_group is not None:
        raise ArgumentError(
            "libddp fsdp: HYBRID_SHARD shards over one group and replicates over another. Hint: "
            "pass both as a tuple, a device_mesh, or None for hosts (LOCAL_WORLD_SIZE)."
        )
    return _by_host(device_type)


def _by_host(device_type: str) -> Groups:
    """Shards inside a host, replicates between hosts, as the launcher has placed the ranks."""
    world, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if local < 1 or world % local:
        raise ArgumentError(
            f"libddp fsdp: HYBRID_SHARD without groups shards over the ranks of a host, but "
            f"LOCAL_WORLD_SIZE={os.environ.get('LOCAL_WORLD_SIZE')!r} does not divide the {world} "
            "ranks. Hint: start with libddp run or torchrun, or pass groups or a device_mesh."
        )
    return Groups.of(dist.init_device_mesh(device_type, (world // local, local)))
