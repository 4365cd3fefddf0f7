"""fully_shard with torch's names and arguments (FSDP2), on libddp's C++ units."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.distributed.utils import _get_root_modules

from libddp._torch_patches import checkpoint_state, clip_grad_norm, grad_scaler, split_backward
from libddp.distributed._init import init_process_group
from libddp.distributed.fsdp import _argument_checks, _split_passes
from libddp.distributed.fsdp._fsdp_module import FSDPModule
from libddp.distributed.fsdp._fsdp_state import FsdpState
from libddp.distributed.fsdp.wrap import (
    _composable,
    _managed,
    _modules,
    _process_groups,
    _sharded_class,
    _state_hooks,
    _wrapped_module,
)
from libddp.distributed.fsdp.wrap._divided import divided
from libddp.distributed.fsdp.wrap._lookup import own_parameters_of
from libddp.distributed.fsdp.wrap._mesh_info import MeshInfo
from libddp.distributed.fsdp.wrap._sharding import Sharding
from libddp.errors import ArgumentError

#: From it on, fully_shard averages in the parameters' dtype where there is no reduce_dtype, and
#: rounds no gradient of autograd's to param_dtype.
_TORCH_OF_WIDE_GRADIENTS = (2, 15)


@_wrapped_module.announcing
def fully_shard(
    module: torch.nn.Module | list[torch.nn.Module],
    *,
    mesh=None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[torch.nn.Parameter] | None = None,
    dp_mesh_dims=None,
    use_dtensor: bool = True,
) -> FSDPModule | list[FSDPModule]:
    """Shards the parameters of `module` that no sharded module under it has.

    Call it on the parts first and on the whole model last. The module stays the same object; its
    class becomes one that is an FSDPModule too. Its parameters become DTensors, whose local tensors
    are the rows that torch.chunk gives this rank; while the module's forward runs it has whole
    plain tensors.

    Args:
        module: parameters on the CPU or a GPU; or all on the meta device, which get memory and
            values later, by `to_empty` and an initialisation, or by loading a state dict. The
            modules of a list become one unit. As with torch, parameters and buffers go to the
            mesh's kind of device first.
        mesh: one dimension (shard) or two (replicate, shard); None = the default group, which is
            made from the environment if there is none, on GPUs where there are any. A model for
            the CPU beside a GPU has init_device_mesh("cpu", (world_size,)).
        reshard_after_forward: gathered parameters are freed between forward and backward; None =
            all but the root's. A number (torch: reshard to a smaller group) counts as True, 1 as
            False; like torch's it must divide the number of ranks.
        mp_policy: MixedPrecisionPolicy.
        offload_policy: CPUOffloadPolicy keeps shards, gradients and so the optimizer's state in
            the CPU's memory, while a GPU computes; without effect on the CPU.
        ignored_params: are left alone, as are those of modules under torch's `replicate`.
        shard_placement_fn: gives torch.distributed.tensor.Shard(dim) for a parameter, or None for
            dim 0; other dimensions than 0 must be divisible by the number of ranks. torch's
            ShardPlacementResult names other ranks for it, too.
        dp_mesh_dims: DataParallelMeshDims: names the dimensions of `mesh`, which has all of them,
            that shard and replicate; parameters are DTensors on it then, replicated on these, or
            have annotations of spmd_types.
        use_dtensor: False = parameters stay the same objects and plain tensors, which show the rows
            that this rank owns outside of a forward or backward; torch's optimizers are faster
            then. libddp's own; all modules of a model alike.

    Raises:
        ArgumentError: (a ValueError and a RuntimeError) what is not supported, a module that is
            sharded already, ranks that shard different modules.

    Note:
        A collective of all ranks of the mesh; so are forward, backward, and load_state_dict but
        where it is given what state_dict() gives.

    Example:
        >>> for block in model.blocks: fully_shard(block)              # doctest: +SKIP
        >>> fully_shard(model)                                         # doctest: +SKIP
    """
    modules = _modules_of(module)
    home = _modules.home_on(mesh)
    mesh_info = MeshInfo.of(mesh, dp_mesh_dims) if dp_mesh_dims is not None else None
    sharding = _sharding_of(
        mesh, mesh_info, mp_policy or MixedPrecisionPolicy(), shard_placement_fn, use_dtensor, home
    )
    sharding.keep_unsharded = _argument_checks.keeps_unsharded(
        reshard_after_forward, sharding.num_shards
    )
    ignored = [*(ignored_params or ()), *_composable.replicated_parameters(modules)]
    for each in modules:
        _modules.move(each, home, _modules.Ignored(set(), set(ignored)))
    parameters = own_parameters_of(modules, ignored)
    sharding.keep_dtype = _keeping_dtype(parameters, sharding.policy)
    if isinstance(offload_policy, CPUOffloadPolicy):
        own = [parameter for _, parameter in parameters]
        sharding.compute_device = _modules.offloaded_from(own, None, mesh)
        sharding.pin_memory = offload_policy.pin_memory
    _attach(modules, parameters, sharding, ignored)
    _managed.mark(modules)
    split_backward.take_over(_split_passes.halves_of)
    for each in modules:
        _make_sharded(each, sharding)
    return module


def _make_sharded(module: torch.nn.Module, sharding: Sharding) -> None:
    """It is an FSDPModule from now on."""
    if sharding.output_dtype is not None:
        module.register_forward_hook(partial(_cast_output, sharding.output_dtype))
    _composable.mark_sharded(module)
    module.__class__ = _sharded_class.sharded_class(FSDPModule, type(module))


def _cast_output(dtype: torch.dtype, module, args, output):
    """As torch does it, so that hooks from later on see what a caller gets, those from before do
    not.
    """
    return _wrapped_module.cast(output, dtype)


def _attach(modules: list[torch.nn.Module], parameters: list, sharding: Sharding, ignored) -> None:
    """The parameters as one unit, or as several where they are sharded over different ranks."""
    name = ", ".join(type(each).__name__ for each in modules)
    (own, first), *others = divided(parameters, sharding)
    if others and len(modules) > 1:
        raise ArgumentError(
            f"libddp fsdp: shard_placement_fn gives different meshes for parameters of {name}, "
            "which are one unit. Hint: call fully_shard with each of the modules."
        )
    wrapped = _wrapped_module.attach(modules, name, first, own, ignored)
    for other, more in others:
        named = f"{name} over {', '.join(other.mesh.mesh_dim_names or ())}"
        _wrapped_module.attach_beside(wrapped, named, more, other)
    for each in wrapped.together:
        _state_hooks.watch(each)
    if not sharding.use_dtensor:
        for patch in (clip_grad_norm, grad_scaler, checkpoint_state):
            patch.put()


def _keeping_dtype(parameters: list, policy: MixedPrecisionPolicy) -> set[str]:
    """Names of those that the policy's param_dtype_override_fn excepts from its param_dtype.

    Raises:
        ValueError: torch's, of a function that gives anything else.
    """
    if getattr(policy, "param_dtype_override_fn", None) is None:
        return set()
    resolved = ((name, policy._resolve_for_param(parameter)) for name, parameter in parameters)
    differing = {name for name, of_one in resolved if of_one.param_dtype != policy.param_dtype}
    return differing if policy.param_dtype is not None else set()


def _sharding_of(
    mesh,
    mesh_info: MeshInfo | None,
    policy: MixedPrecisionPolicy,
    shard_placement_fn: Callable | None,
    use_dtensor: bool,
    home: torch.device,
) -> Sharding:
    needing = "dp_mesh_dims" if mesh_info is not None else "shard_placement_fn"
    if not use_dtensor and (mesh_info is not None or shard_placement_fn is not None):
        raise ArgumentError(
            f"libddp fsdp: {needing} needs DTensors: plain tensors are cut into rows. "
            f"Hint: leave out use_dtensor=False, or {needing}."
        )
    groups = mesh_info.groups() if mesh_info is not None else _groups_of(mesh, home.type)
    shard, replicate = groups.natives()
    return Sharding(
        shard=shard,
        replicate=replicate,
        policy=policy,
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        wide_gradients=torch.__version__ >= _TORCH_OF_WIDE_GRADIENTS,
        output_dtype=policy.output_dtype,
        cast_inputs=policy.cast_forward_inputs and policy.param_dtype is not None,
        process_group=groups.shard,
        mesh=groups.mesh,
        mesh_info=mesh_info,
        choose_placement=shard_placement_fn,
        zeroes_unused=False,
        shows_waiting=False,
        use_dtensor=use_dtensor,
    )


def _groups_of(mesh, device_type: str) -> _process_groups.Groups:
    if mesh is None and not dist.is_initialized():
        init_process_group()
    if mesh is not None and mesh.ndim > 2:
        raise ArgumentError(
            f"libddp fsdp: fully_shard expects a 1D or 2D DeviceMesh but got {mesh}. Hint: take a "
            "slice of it, or name the dimensions that shard and replicate by dp_mesh_dims."
        )
    is_hybrid = mesh is not None and mesh.ndim == 2
    strategy = ShardingStrategy.HYBRID_SHARD if is_hybrid else ShardingStrategy.FULL_SHARD
    return _process_groups.groups_of(None, mesh, strategy, device_type)


def _modules_of(module) -> list[torch.nn.Module]:
    if not isinstance(module, (list, tuple)):
        _refuse(module)
        return [module]
    _refuse_empty(module)
    for each in module:
        _refuse(each)
    return list(_get_root_modules(list(module)))


def _refuse_empty(modules) -> None:
    if not modules or not all(isinstance(part, torch.nn.Module) for part in modules):
        kinds = ", ".join(sorted({type(part).__name__ for part in modules})) or "nothing"
        raise ArgumentError(
            f"libddp fsdp: fully_shard takes a module or a list of modules, not a list of {kinds}. "
            "Hint: pass the modules themselves."
        )


def _refuse(module) -> None:
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(
            "libddp fsdp: fully_shard takes a module or a list of modules, not a "
            f"{type(module).__name__}. Hint: call it once for each module."
        )
    if _modules.is_container(module):
        raise ArgumentError(
            "libddp fsdp: fully_shard does not support containers that do not implement forward: "
            f"{type(module).__name__}. Hint: call it once for each element."
        )
    _composable.refuse_replicated(module)


def _state_of(module: torch.nn.Module) -> FsdpState | None:
    """What torch's `fully_shard.state` answers: None for a module that it was not called with."""
    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


fully_shard.state = _state_of
