"""FullyShardedDataParallel with torch's names and arguments, on libddp's C++ units.

The class wraps once; unsharding, averaging and prefetching run in C++. See docs/fsdp.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import OptimStateKeyType as OptimStateKeyType  # scripts ask for it here
from torch.distributed.fsdp._common_utils import TrainingState, _set_fsdp_flattened

from libddp._torch_patches import backend_name, checkpoint_state, clip_grad_norm, grad_scaler
from libddp.distributed._groups import find, native
from libddp.distributed._init import get_backend
from libddp.distributed.fsdp import _clip
from libddp.distributed.fsdp._rejoins_groups import RejoinsGroups
from libddp.distributed.fsdp.state import _load_hooks
from libddp.distributed.fsdp.state._state_methods import StateMethods
from libddp.distributed.fsdp.wrap import (
    _auto_wrap,
    _comm_hooks,
    _conversion,
    _managed,
    _modules,
    _no_sync,
    _process_groups,
    _summon_full_params,
    _wrapped_module,
)
from libddp.distributed.fsdp.wrap._lookup import own_parameters
from libddp.distributed.fsdp.wrap._names import without_units
from libddp.distributed.fsdp.wrap._sharding import Sharding
from libddp.errors import StateError

#: Of the inside of torch's class; trainers move what these have between devices.
_OF_FLAT_PARAMETERS = ("_all_handles", "_flat_param", "_handle", "_is_root")


class FullyShardedDataParallel(StateMethods, RejoinsGroups, torch.nn.Module):
    """Shards the parameters of a module over the ranks of a process group.

    Each rank keeps, updates and averages its part; whole parameters are there while the module
    computes. On one host they exist once in memory that all ranks map, so nothing is copied. The
    parameter objects stay those of the module: outside of a forward or backward each shows the rows
    that this rank owns, with as many dimensions as before (torch's `use_orig_params=True`), so an
    optimizer may be built before or after wrapping, and in groups by `p.dim()`.

    Args:
        module: the model, or a part of it; parameters on the CPU or a GPU, or on the meta device
            together with `param_init_fn` or modules that have `reset_parameters`.
        process_group: a group of libddp or of torch on backend "libddp", what `from_c10d` made of
            another one, a (shard, replicate) tuple of them for HYBRID_SHARD; None = the default
            group. The attribute `process_group` is the group to shard over (NO_SHARD: to average
            over), torch's where there is one; `rank` and `world_size` are those in it.
        sharding_strategy: FULL_SHARD (None), SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD,
            _HYBRID_SHARD_ZERO2.
        cpu_offload: CPUOffload or bool: shards, gradients and so the optimizer's state are in the
            CPU's memory, while a GPU computes; without effect on the CPU.
        auto_wrap_policy: which modules under `module` become units of their own: a policy of
            libddp.distributed.fsdp.wrap, or a function (module, recurse, nonwrapped_numel).
        backward_prefetch: BACKWARD_PRE, BACKWARD_POST (gathers as late, without effect on one
            host) or None.
        mixed_precision: MixedPrecision: compute in `param_dtype`, average in `reduce_dtype`, keep
            buffers in `buffer_dtype`; parameters, their gradients and the optimizer stay in full
            precision.
        ignored_modules, ignored_states: modules (or parameters) that are left alone.
        param_init_fn: called with the module and each one under it, level by level, where there
            are parameters on the meta device.
        device_id: where the module goes before it is sharded, and where parameters on the meta
            device get their memory; None = where it is.
        sync_module_states: start from rank 0's parameters and buffers.
        forward_prefetch: gather the next unit while one computes its forward.
        limit_all_gathers: without effect: there are never more than two gathered units waiting.
        use_orig_params: without effect: parameters are always the original ones.
        device_mesh: one dimension, or (replicate, shard) for HYBRID_SHARD, in place of
            `process_group`.

    Raises:
        ArgumentError: (a ValueError and a RuntimeError) arguments that exclude each other, modules
            that are wrapped twice, ranks that wrap different modules.

    Note:
        Construction is a collective of all ranks, and so are forward, backward, clip_grad_norm_,
        summon_full_params, state_dict and load_state_dict.

    Example:
        >>> model = FullyShardedDataParallel(net, auto_wrap_policy=policy)  # doctest: +SKIP
        >>> model(x).sum().backward()                                       # doctest: +SKIP
    """

    @_wrapped_module.announcing
    def __init__(
        self,
        module: torch.nn.Module,
        process_group=None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | bool | None = None,
        auto_wrap_policy=None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[torch.nn.Module] | None = None,
        param_init_fn: Callable[[torch.nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states=None,
        device_mesh=None,
    ) -> None:
        super().__init__()
        strategy = _process_groups.strategy_of(sharding_strategy)
        device = _modules.device_of(device_id)
        device_type = _modules.device_type_of([module], device)
        self._groups_number = _wrapped_module.next_number()
        groups = _process_groups.groups_of(process_group, device_mesh, strategy, device_type)
        shard, replicate = groups.natives()
        precision = mixed_precision or MixedPrecision()
        _modules.warn_of_container(module)
        ignored = _modules.Ignored.of(module, ignored_modules, ignored_states)
        if auto_wrap_policy is not None:
            _auto_wrap.wrap_children(
                module,
                auto_wrap_policy,
                type(self),
                ignored,
                process_group=process_group,
                sharding_strategy=strategy,
                cpu_offload=cpu_offload,
                backward_prefetch=backward_prefetch,
                mixed_precision=mixed_precision,
                param_init_fn=param_init_fn,
                device_id=device_id,
                sync_module_states=sync_module_states,
                forward_prefetch=forward_prefetch,
                limit_all_gathers=limit_all_gathers,
                use_orig_params=use_orig_params,
                ignored_states=list(ignored.parameters),
                device_mesh=device_mesh,
            )
        self._note_groups(groups, _process_groups.known(process_group), device_mesh)
        self._sync_module_states = sync_module_states
        self.sharding_strategy, self.mixed_precision = strategy, precision
        self.cpu_offload = _modules.offload_of(cpu_offload)
        self.backward_prefetch, self.forward_prefetch = backward_prefetch, forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        _modules.place(module, device, param_init_fn, ignored)
        parameters = self._own(module, ignored.parameters)
        if sync_module_states:
            _modules.take_from_first(parameters, module, shard, replicate)
        self._buffer_dtypes = _modules.buffers_to_cast(module, precision.buffer_dtype, ignored)
        self._fsdp_wrapped_module = module
        _managed.mark([module], ignored.modules)
        casts = precision.param_dtype is not None
        sharding = Sharding(
            shard=shard,
            replicate=replicate,
            keep_unsharded=_process_groups.keeps_unsharded(strategy),
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            cast_inputs=precision.cast_forward_inputs and casts and bool(parameters),
            cast_root_inputs=precision.cast_root_forward_inputs and casts,
            keep_low_gradients=precision.keep_low_precision_grads,
            forward_prefetch=forward_prefetch,
            backward_prefetch=backward_prefetch is BackwardPrefetch.BACKWARD_PRE,
            process_group=groups.shard,
            mesh=groups.mesh,
            saves_dtensors=device_mesh is not None,
            compute_device=self._offloaded_from(parameters, device),
        )
        self._make(parameters, sharding)

    def _note_groups(self, groups: _process_groups.Groups, given: Any, device_mesh) -> None:
        """For scripts that ask.

        Args:
            given: the argument process_group, as torch's functions know it.
        """
        self.process_group = groups.shard or groups.replicate
        own = native(self.process_group)
        self.rank, self.world_size = own.rank(), own.size()
        self._given_groups, self._device_mesh = given, device_mesh

    @staticmethod
    def _own(module: torch.nn.Module, ignored: set[torch.nn.Parameter]) -> list:
        """Of a module that is wrapped already, none: the inner one has them."""
        is_wrapped = isinstance(module, FullyShardedDataParallel)
        return [] if is_wrapped else own_parameters(module, ignored)

    def _offloaded_from(self, parameters: list, device) -> torch.device | None:
        own = [parameter for _, parameter in parameters]
        return _modules.offloaded_from(own, device) if self.cpu_offload.offload_params else None

    def _make(self, parameters: list, sharding: Sharding) -> None:
        """Shards the parameters: the part of the construction that is a collective."""
        module = self._fsdp_wrapped_module
        self._wrapped = _wrapped_module.attach(
            self, _auto_wrap.name_of(module), parameters, sharding
        )
        self._wrapped.on_join = self._cast_buffers
        self._precisions = _conversion.Precisions.of(sharding, self.mixed_precision)
        for patch in (clip_grad_norm, grad_scaler, checkpoint_state):
            patch.put()
        backend_name.put(_backend_passed_for)
        clip_grad_norm.tell_of(parameter for _, parameter in parameters)
        for _, parameter in parameters:
            _set_fsdp_flattened(parameter)  # by which Lightning knows what an optimizer has
        self._state_dict_type = StateDictType.FULL_STATE_DICT
        self._state_dict_config: Any = FullStateDictConfig()
        self._optim_state_dict_config: Any = FullOptimStateDictConfig()
        _load_hooks.watch(self)

    def _cast_buffers(self) -> None:
        """At the first use of the model, as torch does it."""
        dtype = self.mixed_precision.buffer_dtype
        if self._precisions is not None and self._precisions.is_full:
            dtype = None
        _modules.cast_buffers(self._fsdp_wrapped_module, self._buffer_dtypes, dtype)

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    @property
    def compute_device(self) -> torch.device:
        """Where parameters are whole, and the module computes."""
        own = (parameter.device for parameter in self.params)
        return self._wrapped.sharding.compute_device or next(own, torch.device("cpu"))

    @property
    def training_state(self) -> TrainingState:
        """Of this module, in torch's words."""
        if self._wrapped.summoned is not None:
            return TrainingState.SUMMON_FULL_PARAMS
        is_running = self._wrapped.is_running
        return TrainingState.FORWARD_BACKWARD if is_running else TrainingState.IDLE

    @property
    def params(self) -> list[torch.nn.Parameter]:
        """The parameters of this unit: without those of wrapped modules under it."""
        return [parameter for _, parameter in self._wrapped.parameters]

    @property
    def _has_params(self) -> bool:
        """What Accelerate asks of torch's class before it makes trained parameters float32, for
        mixed precision. They are made that here, in a collective then, and nothing is left to do.
        """
        _conversion.upcast(self._wrapped)
        return False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, with whole parameters."""
        if _conversion.Precisions.num_made:
            _conversion.choose_precision(self, self.fsdp_modules(self))
        return self._wrapped.run(self._fsdp_wrapped_module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_fsdp_wrapped_module":
                raise
        try:
            return getattr(self._fsdp_wrapped_module, name)
        except AttributeError as error:
            if name not in _OF_FLAT_PARAMETERS:
                raise
            raise AttributeError(
                f"libddp fsdp: {error}. Hint: torch's class keeps a flat parameter there; here "
                "parameters() are this rank's rows of each, whole under summon_full_params."
            ) from None

    def __getitem__(self, key: int) -> Any:
        return self._fsdp_wrapped_module[key]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """As torch's: `_fsdp_wrapped_module.` is in names, except under summon_full_params."""
        return self._as_summoned(super().named_parameters(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As torch's: `_fsdp_wrapped_module.` is in names, except under summon_full_params."""
        return self._as_summoned(super().named_buffers(*args, **kwargs))

    def _as_summoned(self, named: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, value in named:
            yield name if self._wrapped.summoned is None else without_units(name), value

    def check_is_root(self) -> bool:
        """Whether this is the outermost wrapped module."""
        _wrapped_module.model_of(self._wrapped)
        return self._wrapped.is_root

    def no_sync(self):
        """Backward passes inside add up gradients on each rank; the next one averages the sum.

        Whole gradients take the memory of whole parameters until then. `.grad` shows them: what a
        script makes of them (scaling, clearing) counts. An optimizer's step with them is refused.
        """
        return _no_sync.without_sync(self._wrapped)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the gradients of the whole model to a norm of at most `max_norm`.

        Returns:
            The norm before, the same on every rank. Collective.

        Raises:
            StateError: this is not the outermost wrapped module.
        """
        if not self.check_is_root():
            raise StateError(
                "libddp fsdp: `clip_grad_norm_()` should only be called on the root FSDP instance; "
                f"{self._wrapped.name!r} is a part of one. Hint: the norm is over the whole model."
            )
        parameters = list(self.parameters())
        total = _clip.clip_grad_norm(parameters, max_norm, norm_type)
        if any(parameter.grad is not None for parameter in parameters):
            return total
        warnings.warn(
            f"libddp fsdp: called clip_grad_norm_() on rank {self.rank} with no gradients -- "
            "returning the total norm in the default dtype torch.float32. Hint: call it after "
            "backward().",
            stacklevel=2,
        )
        return total

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """Lets `hook` make each unit's averages, in place of libddp's collectives.

        Args:
            state: its first argument.
            hook: `hook(state, gradients, average)` is called once per unit and dtype in each
                backward pass that averages, in the same order on every rank. `gradients`: this
                rank's whole gradients in the reduction's dtype, one dimension, equal blocks for the
                ranks one behind the other. `average`: this rank's block, to be filled. Under
                NO_SHARD, and on one rank, `hook(state, gradients)` works in place. torch's
                default_hooks fit.

        Raises:
            StateError: this is not the outermost wrapped module.
            ArgumentError: it is not callable, there is one already, or the strategy is hybrid.
        """
        _comm_hooks.register(self, state, hook)

    def _apply(self, fn: Callable, recurse: bool = True) -> FullyShardedDataParallel:
        """half(), to(dtype) and the like; with another dtype the model is sharded anew."""
        if _conversion.is_converting(self._wrapped) or not _conversion.changes_dtype(
            self._wrapped, fn
        ):
            return super()._apply(fn, recurse)
        apply = super()._apply
        _conversion.convert(self._wrapped, lambda: apply(fn, recurse))
        return self

    def __deepcopy__(self, memo) -> FullyShardedDataParallel:
        """A sharded copy with values of its own, in the same groups; collective."""

        def copy() -> FullyShardedDataParallel:
            made = type(self).__new__(type(self))
            memo[id(self)] = made
            given = self._given_groups
            for group in (self.process_group, *(given if isinstance(given, tuple) else (given,))):
                memo[id(group)] = group
            made.__dict__.update(deepcopy(self.__dict__, memo))
            return made

        return _conversion.copied(self._wrapped, copy)

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> FullyShardedDataParallel:
        """nn.Module.apply on whole parameters; each rank keeps its part of the changes."""
        with _summon_full_params.summoned(self._wrapped, keep=True):
            return super().apply(fn)

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: torch.nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Parameters show copies of the whole tensors inside; collective.

        Args:
            module: wrapped, or with wrapped modules under it.
            writeback: changes become the parameters' values; each rank takes the part it owns.
            recurse: wrapped modules under `module` too; otherwise its own parameters alone.
            rank0_only: only rank 0 of the process group; not with `writeback`.
            offload_to_cpu: without effect; torch's warning and refusals.
            with_grads: `.grad` shows whole gradients; not with `offload_to_cpu`.

        Raises:
            NotImplementedError: (an ArgumentError too) arguments that exclude each other.
        """
        arguments = _summon_full_params.SummonArguments(
            writeback, rank0_only, offload_to_cpu, with_grads
        )
        roots = FullyShardedDataParallel.fsdp_modules(module, root_only=True)
        shards = [root._wrapped for root in roots if recurse or root is module]
        with _summon_full_params.summon(shards, recurse, arguments):
            yield

    @staticmethod
    def fsdp_modules(
        module: torch.nn.Module, root_only: bool = False
    ) -> list[FullyShardedDataParallel]:
        """The wrapped modules in `module`, all or the outermost ones."""
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        if not root_only:
            return found
        inner = {id(m) for outer in found for m in outer.modules() if m is not outer}
        return [m for m in found if id(m) not in inner]


def _backend_passed_for(group: dist.ProcessGroup) -> str | None:
    return None if find(group) is None else get_backend(group)
