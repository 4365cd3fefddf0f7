"""Which ranks shard a parameter, where that is not all that it is placed on, or not for all alike.

With dp_mesh_dims fully_shard is given a mesh of all dimensions (SPMD), of which some are
data-parallel. Parameters are DTensors on that mesh, replicated on these dimensions, or plain
tensors with annotations of spmd_types. How either is placed once it is sharded is what torch's own
FSDPParam says, so state dicts are torch's. shard_placement_fn may give such a mesh for each
parameter by itself (ShardPlacementResult): experts are sharded over fewer ranks than the rest.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from libddp.distributed.fsdp.wrap._annotated import AnnotatedTensor, annotation_of
from libddp.distributed.fsdp.wrap._dtensors import local_of
from libddp.distributed.fsdp.wrap._inner_dtensor import InnerDTensor
from libddp.distributed.fsdp.wrap._placement import spec_of
from libddp.distributed.fsdp.wrap._process_groups import Groups
from libddp.distributed.fsdp.wrap._sharding import Sharding
from libddp.errors import ArgumentError

_HINT = (
    "Hint: mesh is the whole mesh, init_device_mesh(..., mesh_dim_names=...), "
    "dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...) names dimensions of it, and "
    "parameters are DTensors on it (distribute_module), replicated on these."
)


class MeshInfo:
    """torch's DataParallelMeshInfo: the ranks that parameters are sharded and replicated over."""

    def __init__(self, info: Any) -> None:
        self._info = info

    @classmethod
    def of(cls, mesh: DeviceMesh | None, dp_mesh_dims: Any) -> MeshInfo:
        """What fully_shard was given; a collective where several dimensions become one, which makes
        a group.

        Raises:
            ArgumentError: no such mesh, no such dimensions.
        """
        if not isinstance(dp_mesh_dims, getattr(fsdp, "DataParallelMeshDims", ())):
            raise ArgumentError(
                "libddp fsdp: dp_mesh_dims is torch's DataParallelMeshDims, which older "
                f"torch lacks, not a {type(dp_mesh_dims).__name__}. {_HINT}"
            )
        if mesh is None:
            raise ArgumentError(f"libddp fsdp: dp_mesh_dims is given without a mesh. {_HINT}")
        try:
            _fsdp_init._validate_mesh(mesh, dp_mesh_dims)
            return cls(_fsdp_init._get_mesh_info(mesh, dp_mesh_dims))
        except ValueError as error:
            raise ArgumentError(f"libddp fsdp: dp_mesh_dims: {error}. {_HINT}") from error

    @property
    def key(self) -> tuple:
        """Equal where parameters can be in one unit."""
        return self._info.mesh, self.is_spmd

    @property
    def is_spmd(self) -> bool:
        """Whether its ranks are a part of a mesh that parameters are placed on already."""
        return getattr(self._info, "is_spmd_mesh", False)

    def groups(self) -> Groups:
        """The ranks that shard, and those that replicate; either may be None."""
        info = self._info
        shard, replicate = info.shard_mesh_dim, info.replicate_mesh_dim
        return Groups(
            None if shard is None else info.mesh.get_group(shard),
            None if replicate is None else info.mesh.get_group(replicate),
            info.mesh,
        )

    def place(self, name: str, parameter: torch.nn.Parameter, dim: int) -> tuple:
        """As placed_of; with dp_mesh_dims.

        Raises:
            ArgumentError: a parameter that is not on the mesh, or not replicated where it is to be
                sharded.
        """
        asked = _fsdp_param.FSDPParam.__new__(_fsdp_param.FSDPParam)
        asked.mesh_info, asked._module_info = self._info, SimpleNamespace(param_name=name)
        annotation = annotation_of(parameter)
        asked.is_spmd_types = bool(annotation)
        try:
            if annotation:
                spec = _fsdp_param.get_partition_spec(parameter)
                self._check_order(name, annotation, spec)
                parameter = asked._resolve_spmd_types_for_storage(
                    parameter, spec, annotation, self._info
                )
            asked.is_dtensor = isinstance(parameter, DTensor)
            local = asked._init_sharding_spec(parameter, Shard(dim), dim)
        except ValueError as error:
            raise ArgumentError(f"libddp fsdp: parameter {name!r}: {error} {_HINT}") from error
        inner = InnerDTensor(asked._unsharded_dtensor_spec, asked._dp_dim_indices)
        if annotation:
            gradients = tuple(asked._spmd_grad_placements)
            inner = AnnotatedTensor(inner, gradients, asked._restore_spmd_types)
        return asked._sharding_spec, inner, local

    def _check_order(self, name: str, annotation: dict, spec: Any) -> None:
        """torch takes what annotations say in another order than the mesh's, and would add up
        gradients over other ranks than they are parts on.
        """
        mesh, dims = self._info.spmd_mesh, self._info.dp_mesh_dims
        own = {*dims.shard_names, *dims.replicate_names}
        others = [dim for dim in mesh.mesh_dim_names if dim not in own]
        said = dict(annotation)
        if spec is not None:
            said |= _fsdp_param.partition_spec_to_shard_types(spec)
        axes = [_fsdp_param.spmd.MeshAxis.of(mesh.get_group(dim)) for dim in others]
        found = [axis for axis in said if axis in axes]
        is_first = mesh.mesh_dim_names[len(own) :] == tuple(others)
        if len(found) == len(axes) and (found != axes or not is_first):
            raise ArgumentError(
                f"libddp fsdp: parameter {name!r} has annotations of spmd_types on a mesh of "
                f"{mesh.mesh_dim_names}, where {', '.join(own)} should come first, and the others "
                "in the order of the annotations. Hint: name dimensions and annotations so."
            )


def placed_of(
    name: str, parameter: torch.nn.Parameter, sharding: Sharding, dim: int
) -> tuple[DTensorSpec, InnerDTensor | AnnotatedTensor | None, torch.Tensor]:
    """Of a parameter that is to be cut on `dim`: where the parts lie; what it is whole, if it is no
    plain tensor; what the ranks cut.

    Raises:
        ArgumentError: it is placed in a way that cannot be sharded.
    """
    if sharding.mesh_info is not None:
        return sharding.mesh_info.place(name, parameter, dim)
    if annotation_of(parameter):
        raise ArgumentError(
            f"libddp fsdp: parameter {name!r} has annotations of spmd_types, which say what it is "
            f"on a mesh of all dimensions; this one is to be sharded over {sharding.mesh}. {_HINT}"
        )
    spec = spec_of(name, parameter, sharding, dim)
    inner = InnerDTensor(parameter._spec) if isinstance(parameter, DTensor) else None
    return spec, inner, local_of(parameter)
