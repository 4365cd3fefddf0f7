"""Which parameters of a module can be in one unit: those that the same ranks shard."""

from __future__ import annotations

from dataclasses import replace

from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from libddp.distributed.fsdp.wrap._mesh_info import MeshInfo
from libddp.distributed.fsdp.wrap._placement import chosen_by
from libddp.distributed.fsdp.wrap._sharding import Sharding
from libddp.errors import ArgumentError


def divided(parameters: list, sharding: Sharding) -> list[tuple[Sharding, list]]:
    """What shard_placement_fn says of each, as (how, parameters) of each unit; at least one.

    Raises:
        ArgumentError: it gives no mesh info that shards.
    """
    own = sharding.mesh, sharding.mesh_info is not None
    found: dict[tuple, tuple[Sharding, list]] = {own: (sharding, [])}
    for name, parameter in parameters:
        _, torchs = chosen_by(sharding.choose_placement, parameter)
        if torchs is None:
            found[own][1].append((name, parameter))
            continue
        if not isinstance(torchs, FSDPMeshInfo):
            raise ArgumentError(
                f"libddp fsdp: shard_placement_fn gives mesh_info={torchs!r} for parameter "
                f"{name!r}. Hint: torch's FSDPMeshInfo or HSDPMeshInfo."
            )
        info = MeshInfo(torchs)
        if info.key not in found:
            found[info.key] = (_over(sharding, info), [])
        found[info.key][1].append((name, parameter))
    return [unit for unit in found.values() if unit[1]] or [found[own]]


def _over(sharding: Sharding, info: MeshInfo) -> Sharding:
    return replace(sharding.over(info.groups()), mesh_info=info if info.is_spmd else None)
