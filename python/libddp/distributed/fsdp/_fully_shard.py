"""fully_shard with torch's names and arguments (FSDP2), on libddp's C++ units."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, ShardingStrategy
from torch.distributed.utils import _get_root_modules

from libddp.distributed.fsdp import (
    _agreement,
    _clip,
    _deferred,
    _groups_of,
    _loading,
    _modules,
    _scaler,
    _sharded_state,
    _shards,
    _torch_state,
)
from libddp.errors import ArgumentError


@_shards.announcing
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
) -> FSDPModule | list[FSDPModule]:
    """Shards the parameters of `module` that no sharded module under it has.

    Call it on the parts first and on the whole model last. The module stays the same object; its
    class becomes one that is an FSDPModule too. Parameters stay the same objects and plain tensors:
    outside of a forward or backward each shows the rows that this rank owns.

    Args:
        module: parameters on the CPU; or all on the meta device, which get memory and values later,
            by `to_empty` and an initialisation, or by loading a state dict. Of a list each module
            becomes a unit (torch: all of them one unit), but for those inside of another.
        mesh: one dimension (shard) or two (replicate, shard); None = the default group.
        reshard_after_forward: gathered parameters are freed between forward and backward; None =
            all but the root's. A number (torch: reshard to a smaller group) counts as True.
        mp_policy: MixedPrecisionPolicy.
        offload_policy: parameters are on the CPU anyway.
        ignored_params: are left alone.
        shard_placement_fn, dp_mesh_dims: not supported; ArgumentError.

    Raises:
        ArgumentError: (a ValueError and a RuntimeError) what is not supported, a module that is
            sharded already, ranks that shard different modules.

    Note:
        A collective of all ranks of the mesh; so are forward, backward and load_state_dict.

    Example:
        >>> for block in model.blocks: fully_shard(block)              # doctest: +SKIP
        >>> fully_shard(model)                                         # doctest: +SKIP
    """
    if isinstance(module, (list, tuple)):
        _refuse_empty(module)
        for part in _get_root_modules(list(module)):
            fully_shard(
                part,
                mesh=mesh,
                reshard_after_forward=reshard_after_forward,
                shard_placement_fn=shard_placement_fn,
                mp_policy=mp_policy,
                offload_policy=offload_policy,
                ignored_params=ignored_params,
                dp_mesh_dims=dp_mesh_dims,
            )
        return module
    _refuse(module, shard_placement_fn, dp_mesh_dims)
    policy = mp_policy or MixedPrecisionPolicy()
    is_hybrid = mesh is not None and mesh.ndim == 2
    strategy = ShardingStrategy.HYBRID_SHARD if is_hybrid else ShardingStrategy.FULL_SHARD
    shard, replicate = _groups_of.groups_of(None, mesh, strategy)
    sharding = _shards.Sharding(
        shard=shard,
        replicate=replicate,
        keep_unsharded=reshard_after_forward is False,
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        output_dtype=policy.output_dtype,
        cast_inputs=policy.cast_forward_inputs and policy.param_dtype is not None,
        mesh=_groups_of.mesh_of(None, mesh, strategy),
    )
    ignored = list(ignored_params or ())
    parameters = _shards.own_parameters(module, ignored)
    _shards.attach(module, type(module).__name__, parameters, sharding, ignored)
    _clip.watch()
    _scaler.watch()
    _torch_state.watch()
    module.__class__ = _sharded_class(type(module))
    return module


def _refuse_empty(modules) -> None:
    if not modules or not all(isinstance(part, torch.nn.Module) for part in modules):
        kinds = ", ".join(sorted({type(part).__name__ for part in modules})) or "nothing"
        raise ArgumentError(
            f"libddp fsdp: fully_shard takes a module or a list of modules, not a list of {kinds}. "
            "Hint: pass the modules themselves."
        )


def _refuse(module, shard_placement_fn, dp_mesh_dims) -> None:
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(
            "libddp fsdp: fully_shard takes a module or a list of modules, not a "
            f"{type(module).__name__}. Hint: call it once for each module."
        )
    for name, value in (("shard_placement_fn", shard_placement_fn), ("dp_mesh_dims", dp_mesh_dims)):
        if value is not None:
            raise ArgumentError(
                f"libddp fsdp: {name} is not supported: parameters are cut between rows. "
                "Hint: leave it out."
            )


@cache
def _sharded_class(cls: type) -> type:
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Without effect: there are no streams to share."""


class UnshardHandle:
    """What unshard(async_op=True) returns."""

    def wait(self) -> None:
        """Without effect: parameters are unsharded where they are used."""


def register_fsdp_forward_method(module: torch.nn.Module, method_name: str) -> None:
    """Lets a method of a sharded module see whole parameters, as forward does.

    Without effect where the module is not sharded.

    Raises:
        ArgumentError: (a ValueError) the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise ArgumentError(
            f"libddp fsdp: {type(module).__name__} has no method {method_name!r}. "
            "Hint: pass the name of the method that computes with the module's parameters."
        )

    @wraps(method)
    def with_whole_parameters(*args: Any, **kwargs: Any) -> Any:
        return _shards.shard_of(module).run(method, args, kwargs)

    setattr(module, method_name, with_whole_parameters)


class FSDPModule:
    """What a module is too once fully_shard has been called with it."""

    def __new__(cls, *args: Any, **kwargs: Any):
        """A slice of a sharded container is a plain container."""
        original = cls.__mro__[2]
        made = original.__new__(original)
        made.__init__(*args, **kwargs)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _shards.shard_of(self).run(super().__call__, args, kwargs)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward passes average gradients, of the whole model."""
        _shards.model_of(_shards.shard_of(self)).syncs = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Without effect: every pass ends by itself."""

    def set_modules_to_forward_prefetch(self, modules: list) -> None:
        """Without effect: the next module is known from the first step."""

    def set_modules_to_backward_prefetch(self, modules: list) -> None:
        """Without effect: the next module is known from the first step."""

    def reshard(self) -> None:
        """Without effect: parameters are resharded after each use."""

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Without effect: parameters are unsharded where they are used."""
        return UnshardHandle() if async_op else None

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Without effect: as the module was sharded."""

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Without effect: parameters are resharded after each use."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Without effect: parameters are unsharded where they are used."""

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Without effect: each pass that averages does it over all ranks, to the same sums."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Without effect: how an average is computed is the same for all strategies."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Without effect: flat arrays lie in the group's memory anyway."""

    def set_post_optim_event(self, event: Any) -> None:
        """Without effect: there are no streams."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Gradients are averaged: another divisor than the number of ranks is an ArgumentError."""
        sharding = _shards.shard_of(self).sharding
        ranks = math.prod(group.size() for group in (sharding.shard, sharding.replicate) if group)
        if factor != ranks:
            raise ArgumentError(
                f"libddp fsdp: gradients are divided by the {ranks} ranks, not by {factor}. "
                f"Hint: multiply the loss by {ranks / factor:g}."
            )

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """set_gradient_divide_factor, under torch's older name."""
        self.set_gradient_divide_factor(factor)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What this rank owns, as ShardedPieces: full_tensor() of one gives the whole tensor.

        torch.distributed.checkpoint saves them, and loads in place from a checkpoint of any number
        of ranks; whole tensors come from get_model_state_dict(full_state_dict=True).
        """
        _deferred.settle(self)
        state = super().state_dict(*args, **kwargs)
        _sharded_state.mark_pieces(state, self, kwargs.get("prefix", ""))
        return state

    def _apply(self, fn, recurse: bool = True):
        """nn.Module's; what leaves the meta device stays the same parameter."""
        _deferred.apply(self, fn, recurse)
        return super()._apply(fn, recurse)

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """Takes whole tensors, ShardedPieces or DTensors; collective.

        Parameters on the meta device get memory; `assign` is for these, and has no effect on them.

        Raises:
            RuntimeError: keys that are missing or too many, on every rank.
            ArgumentError: a shape that is not the parameter's, on every rank.
        """
        waiting = _deferred.give_memory(self)
        if not waiting and not _loading.has_pieces(state_dict):
            _modules.refuse_assign(assign)

        def load():
            if not strict:
                _deferred.check_loaded(waiting, state_dict)
            local = _loading.local_state(self, state_dict)
            return super(FSDPModule, self).load_state_dict(local, strict)

        return _agreement.together(_shards.shard_of(self).groups(), "load a state dict", load)
