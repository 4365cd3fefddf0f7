"""What a module is too once fully_shard has been called with it: torch's FSDPModule."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import torch
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp._fully_shard import _fully_shard as torchs

from libddp.distributed.fsdp import _all_reduce_hook, _argument_checks
from libddp.distributed.fsdp._fsdp_state import FsdpState
from libddp.distributed.fsdp._methods_without_effect import with_methods_without_effect
from libddp.distributed.fsdp.state import (
    _collective_errors,
    _first_values,
    _loading,
    _sharded_tensors,
)
from libddp.distributed.fsdp.wrap import (
    _deferred,
    _discarding,
    _gradient_sync,
    _process_groups,
    _rejoin,
)
from libddp.distributed.fsdp.wrap._lookup import wrapped_module_of, wrapped_modules_in
from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule, announcing, cast
from libddp.errors import ArgumentError, StateError


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Without effect: there are no streams to share. torch gets those that it has sharded itself.

    Raises:
        ArgumentError: (a ValueError) something else than sharded modules.
    """
    theirs = [module for module in modules if isinstance(module, torchs.FSDPModule)]
    if theirs:
        torchs.share_comm_ctx(theirs)
    _argument_checks.check_sharded("share_comm_ctx", [m for m in modules if m not in theirs])


class UnshardHandle:
    """What unshard(async_op=True) returns."""

    def wait(self) -> None:
        """Without effect: parameters are whole already."""


class GradientReductionHandle:
    """What finalize_backward(async_op=True) returns."""

    def wait(self) -> None:
        """Without effect: gradients are averaged already."""


def register_fsdp_forward_method(module: torch.nn.Module, method_name: str) -> None:
    """Lets a method of a sharded module see whole parameters, as forward does.

    Without effect where the module is not sharded; torch's own where torch has sharded it.

    Raises:
        ArgumentError: (a ValueError) the module has no such method.
    """
    if isinstance(module, torchs.FSDPModule):
        return torchs.register_fsdp_forward_method(module, method_name)
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
        wrapped = wrapped_module_of(module)
        return cast(wrapped.run(method, args, kwargs), wrapped.sharding.output_dtype)

    setattr(module, method_name, with_whole_parameters)


def _rejoin_step(wrapped: WrappedModule, mesh) -> _rejoin.Step:
    sharding = wrapped.sharding
    is_hybrid = sharding.replicate is not None
    if is_hybrid != (mesh is not None and mesh.ndim == 2):
        raise ArgumentError(
            f"libddp fsdp: rejoin(): unit {wrapped.name!r} was sharded over a mesh of "
            f"{2 if is_hybrid else 1} dimension{'s' * is_hybrid}. Hint: pass such a mesh."
        )
    strategy = ShardingStrategy.HYBRID_SHARD if is_hybrid else ShardingStrategy.FULL_SHARD
    device_type = sharding.mesh.device_type

    def join() -> None:
        groups = _process_groups.groups_of(None, mesh, strategy, device_type)
        wrapped.sharding = wrapped.sharding.over(groups)
        wrapped.leave_group()
        wrapped.join_group()

    return _rejoin.Step(wrapped.number, join)


@with_methods_without_effect
class FSDPModule:
    """What a module is too once fully_shard has been called with it."""

    def __new__(cls, *args: Any, **kwargs: Any):
        """A slice of a sharded container is a plain container."""
        original = cls.__mro__[2]
        made = original.__new__(original)
        made.__init__(*args, **kwargs)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return wrapped_module_of(self).run(super().__call__, args, kwargs, self)

    @announcing
    def rejoin(self, mesh=None) -> None:
        """Goes on in another group, of any number of ranks: one of survivors and newcomers.

        libddp's own; torch has no such method. Parameters stay the same objects, with DTensors over
        the new mesh; the old group may have failed, be destroyed, or be whole. Each rank owns other
        rows now, and those of before are gone with the old group: parameters are NaN, and
        optimizers have no state of them, until a snapshot or a state dict is loaded. Gradients are
        dropped. Buffers stay.

        Args:
            mesh: as for fully_shard, of as many dimensions as before; None = the default group.

        Raises:
            StateError: this is not the outermost sharded module; there is no default group.
            ArgumentError: a mesh of other dimensions; parameters with tensor parallelism or an
                all-gather of their own; the ranks' modules differ.

        Note:
            A collective of the new group, the one that fully_shard is: survivors call it on the
            outermost module, where newcomers shard theirs.

        Example:
            >>> model.rejoin()                                                  # doctest: +SKIP
            >>> state = snapshot.load(model, optimizer)                         # doctest: +SKIP
        """
        _rejoin.rejoin(self, lambda wrapped: [_rejoin_step(wrapped, mesh)])

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward passes average gradients: of this module's unit and of those under it.

        It counts from the next backward pass on. What passes without have summed is averaged by the
        end of the first one with it. All ranks say the same.
        """
        units = wrapped_modules_in(self) if recurse else wrapped_module_of(self).together
        roots = {}
        for wrapped in units:
            wrapped.syncs = bool(requires_gradient_sync)
            roots[wrapped.root] = None
        for root in roots:
            if root is not None:  # else the first forward does it
                _gradient_sync.settle(root)

    def reshard(self) -> None:
        """Ends unshard()."""
        wrapped_module_of(self).let_go()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """The module's own parameters are whole plain tensors until its next forward ends.

        Or until a state dict is taken of them, or loaded. For reading: what is written into them is
        lost, or other ranks see it. Parameters that are not DTensors stay what they are.

        Note:
            A collective.
        """
        wrapped = wrapped_module_of(self)
        if wrapped.sharding.use_dtensor:
            wrapped.hold()
        return UnshardHandle() if async_op else None

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Averages what passes without gradient synchronisation have left; a collective."""
        wrapped = wrapped_module_of(self)
        if wrapped.model is not None:
            wrapped.model.average_waiting()
        return GradientReductionHandle() if async_op else None

    def reset_iter_state(self) -> None:
        """Lets go of all gradients, and of what passes without synchronisation have left.

        A forward after an exception begins anew by itself; this is for a script that begins its
        sequence of passes again. Of the outermost module; on every rank.

        Raises:
            StateError: (a RuntimeError) this is a part of a sharded model.
        """
        wrapped = wrapped_module_of(self)
        if wrapped.model is None:  # nothing has run
            return
        if not wrapped.is_root:
            raise StateError(
                "libddp fsdp: reset_iter_state must be called on the root FSDP module; "
                f"{wrapped.name!r} is a part of one. Hint: call it on the outermost module."
            )
        _discarding.begin(wrapped)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters of a used unit that got no gradient on any rank have zeros then;
        otherwise their gradients stay what they were. On some ranks only, zeros count in any case.
        """
        units = wrapped_modules_in(self) if recurse else wrapped_module_of(self).together
        for wrapped in units:
            wrapped.sharding.zeroes_unused = reduce_scatter_unused_params
            if wrapped.made is not None:
                wrapped.made.zero_unused(reduce_scatter_unused_params)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Gradients become their sum over all ranks divided by `factor`, of this module's unit."""
        if not factor > 0:
            raise ArgumentError(
                f"libddp fsdp: gradients cannot be divided by {factor}. Hint: a number above zero."
            )
        for wrapped in wrapped_module_of(self).together:
            wrapped.divisor = float(factor)
            if wrapped.made is not None:
                wrapped.made.divide_gradients_by(wrapped.divisor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """set_gradient_divide_factor, under torch's older name."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook, *, stream: torch.Stream | None = None) -> None:
        """Calls `hook(reduced)` with this rank's part of the average, of this module's unit, before
        it is in `.grad`: behind the reduce-scatter, and the all-reduce of HSDP.

        Args:
            hook: may change `reduced` [numel], in reduce_dtype, as dist.all_reduce(reduced,
                group=...) does; the unit's parts one behind the other, with padding between. Of a
                unit with parameters of several dtypes it is called with each of these. None takes
                the one before away.
            stream: that it runs on, of a model on a GPU without HSDP; None = the current one.

        Note:
            The unit's own reduction is not beside the backward pass then, but in it. All ranks set
            hooks of the same units.

        Raises:
            ArgumentError: (a ValueError) the module's parameters are sharded over different meshes;
                a stream with HSDP; no function.
        """
        _all_reduce_hook.put(self, hook, stream)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """The next gathers come after `event`, recorded behind an optimizer's step: the current
        stream waits for it, and gathers for the current stream.
        """
        if event is not None:
            event.wait()

    def _get_fsdp_state(self) -> FsdpState:
        """For torch's own code."""
        return FsdpState(wrapped_module_of(self))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What this rank owns, as DTensors, in the memory of the parameters.

        torch.distributed.checkpoint saves them, and loads in place from a checkpoint of any number
        of ranks; whole tensors come from get_model_state_dict(full_state_dict=True).
        """
        if wrapped_module_of(self).sharding.use_dtensor:
            return super().state_dict(*args, **kwargs)
        _deferred.settle(self)
        state = super().state_dict(*args, **kwargs)
        _sharded_tensors.convert_all(state, self, kwargs.get("prefix", ""))
        return state

    def __deepcopy__(self, memo):
        raise StateError(
            f"libddp fsdp: {type(self).__name__} cannot be copied: its parameters are in memory "
            "that the ranks share. Hint: build a second model, shard it alike and load the "
            "state_dict() of this one."
        )

    def _apply(self, fn, recurse: bool = True):
        """nn.Module's; what leaves the meta device stays the same parameter."""
        _deferred.apply(self, fn, recurse)
        return super()._apply(fn, recurse)

    def load_state_dict(self, state_dict, *args, **kwargs):
        """Takes whole tensors, DTensors or ShardedTensors.

        A collective, but where all sharded parameters in `state_dict` are DTensors as state_dict()
        has them: such a state a rank may load by itself, as with torch (a replica of several ranks
        that recovers), and what is wrong with it raises on this rank alone.

        What else it takes is what the module's own load_state_dict does: nn.Module's `strict` and
        `assign`. Parameters on the meta device get memory; `assign` is for these, and has no
        effect on them but with strict=False: pieces of a state dict may come one by one then.

        Raises:
            RuntimeError: keys that are missing or too many; of a collective on every rank.
            ArgumentError: a shape that is not the parameter's, on every rank.
        """
        takes = super().load_state_dict
        if takes.__func__ is torch.nn.Module.load_state_dict:
            args, kwargs = (), _loading.named_options(*args, **kwargs)
        wrapped, strict = wrapped_module_of(self), kwargs.get("strict", True)
        assign = kwargs.pop("assign", False)
        for each in wrapped_modules_in(self):  # before what is loaded is cut
            each.let_go()
        _deferred.settle(self)
        if _deferred.names_on_meta(self):
            is_piece = assign and not strict and wrapped.sharding.use_dtensor
            if is_piece and _first_values.is_piece(wrapped, state_dict):
                return _first_values.load_piece(wrapped, state_dict, takes)
            check = partial(_first_values.check, self, state_dict, strict, takes)
            _collective_errors.together(wrapped.groups(), "load a state dict", check)
            _deferred.give_memory(self)
        elif not _loading.has_shards(state_dict):
            _loading.refuse_assign(assign)

        def load():
            local = _loading.local_state(self, state_dict)
            local = _loading.as_dtensors(self, local)
            return takes(local, *args, **kwargs)

        if _loading.is_of_own_shards(self, state_dict):
            return load()
        return _collective_errors.together(wrapped.groups(), "load a state dict", load)
