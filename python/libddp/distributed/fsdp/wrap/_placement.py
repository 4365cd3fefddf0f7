"""On which dimension a parameter is cut, and the DTensorSpec that says so in torch's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from libddp.distributed.fsdp.wrap._errors import NotSupportedError
from libddp.distributed.fsdp.wrap._sharding import Sharding
from libddp.errors import ArgumentError


def placements_of(sharding: Sharding, dim: int = 0) -> tuple:
    """Of a parameter that is sharded on `dim`."""
    replicate = (Replicate(),) if sharding.replicate is not None else ()
    return (*replicate, Shard(dim)) if sharding.shard is not None else replicate


def shard_mesh_of(sharding: Sharding) -> DeviceMesh:
    """The ranks that own parts, without those that own the same."""
    mesh = sharding.mesh
    return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]


def with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """The same of a tensor of another dtype."""
    if spec.tensor_meta.dtype == dtype:
        return spec
    meta = TensorMeta(spec.shape, spec.stride, dtype)
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)


def chosen_by(choose: Callable | None, parameter: torch.nn.Parameter) -> tuple[Any, Any]:
    """What fully_shard's shard_placement_fn gives: the placement, and torch's mesh info of the
    ranks that shard; None = dim 0, and those of the module.
    """
    found = None if choose is None else choose(parameter)
    if isinstance(found, getattr(_fsdp_common, "ShardPlacementResult", ())):  # torch 2.15
        return found.placement, found.mesh_info
    return found, None


def dim_of(
    name: str, parameter: torch.nn.Parameter, choose: Callable | None, num_ranks: int
) -> int:
    """That fully_shard's shard_placement_fn wants to be cut.

    Raises:
        ArgumentError: it is no dimension of the parameter, or no torch.distributed.tensor.Shard.
        NotSupportedError: (a NotImplementedError too) ranks would have parts of different sizes on
            another dimension than 0, which torch refuses as well.
    """
    placement, _ = chosen_by(choose, parameter)
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ArgumentError(
            f"libddp fsdp: shard_placement_fn gives {placement!r} for parameter {name!r}. Hint: "
            "return torch.distributed.tensor.Shard(dim), or None for dim 0."
        )
    dim = placement.dim + parameter.dim() if placement.dim < 0 else placement.dim
    if not 0 <= dim < max(1, parameter.dim()):
        raise ArgumentError(
            f"libddp fsdp: shard_placement_fn gives {placement!r} for parameter {name!r} of shape "
            f"{list(parameter.shape)}. Hint: return a dimension that the parameter has."
        )
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    check_dim(name, own.shape, dim, num_ranks)
    return dim


def check_dim(name: str, shape: torch.Size, dim: int, num_ranks: int) -> None:
    """Raises: NotSupportedError, ranks would have parts of different sizes of `dim`."""
    if dim > 0 and shape[dim] % num_ranks:
        raise NotSupportedError(
            f"libddp fsdp: dim {dim} of parameter {name!r}, of shape {list(shape)}, cannot be "
            f"divided evenly by {num_ranks} ranks. Hint: only dim 0 may be divided unevenly."
        )


def spec_of(name: str, parameter: torch.nn.Parameter, sharding: Sharding, dim: int) -> DTensorSpec:
    """Of the DTensor that scripts see; of one that is a DTensor already, over both meshes.

    Raises:
        ArgumentError: the parameter is a DTensor whose mesh is not beside the one that it is to be
            sharded over.
    """
    if isinstance(parameter, DTensor):
        return _spec_over_both(name, parameter._spec, sharding, dim)
    meta = TensorMeta(parameter.shape, parameter.stride(), parameter.dtype)
    return DTensorSpec(sharding.mesh, placements_of(sharding, dim), tensor_meta=meta)


def _spec_over_both(name: str, inner: DTensorSpec, sharding: Sharding, dim: int) -> DTensorSpec:
    """Tensor parallelism inside, sharding outside: as torch's fully_shard has it."""
    try:
        mesh = DeviceMesh._concatenate([sharding.mesh, inner.mesh])
    except Exception as error:
        raise ArgumentError(
            f"libddp fsdp: parameter {name!r} is a DTensor on {inner.mesh}, which is no other "
            f"dimension of the mesh that it is to be sharded over, {sharding.mesh}: {error} Hint: "
            "make one mesh (init_device_mesh), and pass its slices: mesh['dp'] here, mesh['tp'] to "
            "parallelize_module."
        ) from error
    outer = list(placements_of(sharding, dim))
    num_parts = inner.num_shards_map[dim]
    if num_parts > 1:
        # The inner mesh has cut this dimension first.
        outer[-1] = _StridedShard(dim, split_factor=num_parts)
    return DTensorSpec(mesh, (*outer, *inner.placements), tensor_meta=inner.tensor_meta)
