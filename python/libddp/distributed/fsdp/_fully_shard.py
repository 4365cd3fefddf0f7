"""fully_shard with torch's names and arguments (FSDP2), on libddp's C++ units."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, ShardingStrategy

from libddp.distributed.fsdp import (
    _agreement,
    _clip,
    _deferred,
    _groups_of,
    _loading,
    _modules,
    _sharded_state,
    _shards,
    _torch_state,
)
from libddp.errors import ArgumentError


@_shards.announcing
def fully_shard(
    module: torch.nn.Module,
    *,
    mesh=None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[torch.nn.Parameter] | None = None,
    dp_mesh_dims=None,
) -> FSDPModule:
    """Shards the parameters of `module` that no sharded module under it has.

    Call it on the parts first and on the whole model last. The module stays the same object; its
    class becomes one that is an FSDPModule too. Parameters stay the same objects and plain tensors:
    outside of a forward or backward each shows the rows that this rank owns.

    Args:
        module: parameters on the CPU; or all on the meta device, which get memory and values later,
            by `to_empty` and an initialisation, or by loading a state dict.
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
    state = _shards.attach(module, type(module).__name__, parameters, sharding, ignored)
    _clip.watch(state)
    _torch_state.watch()
    module.__class__ = _sharded_class(type(module))
    return module


def _refuse(module, shard_placement_fn, dp_mesh_dims) -> None:
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(
            f"libddp fsdp: fully_shard takes a module, not a {type(module).__name__}. "
            "Hint: call it once for each module."
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
