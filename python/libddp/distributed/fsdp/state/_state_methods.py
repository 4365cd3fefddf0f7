"""What FullyShardedDataParallel knows about state dicts of models and optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)

from libddp.distributed.fsdp.state import (
    _collective_errors,
    _load_hooks,
    _loading,
    _optim_state,
    _sharded_tensors,
    _state_dict,
)
from libddp.distributed.fsdp.wrap._summon_full_params import summoned
from libddp.errors import ArgumentError

#: Of a configuration: for who fills state dicts, or saves them at once.
_IN_OWN_MEMORY = "_libddp_in_own_memory"


class StateMethods:
    """Methods of FullyShardedDataParallel."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Whole tensors under their names from before the wrapping, or shards; collective.

        With SHARDED_STATE_DICT they are torch's: DTensors where the model was given a device_mesh,
        else ShardedTensors; copies, as torch's. torch.distributed.checkpoint saves them, and loads
        into them from a checkpoint of any number of ranks; load_state_dict takes them. With
        LOCAL_STATE_DICT they are in the parameters' memory.
        """
        _refuse_local(self)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        if not _state_dict.is_full(self._state_dict_type):
            state = super().state_dict(*args, **kwargs)
            _state_dict.without_prefix(state, prefix)
            is_sharded = _state_dict.is_sharded(self._state_dict_type)
            config = self._state_dict_config
            copies = is_sharded and not getattr(config, _IN_OWN_MEMORY, False)
            _sharded_tensors.convert_all(state, self, prefix, config, copies)
            if is_sharded:
                _state_dict.restore_buffers(state, prefix, self._buffer_dtypes)
            return _state_dict.offloaded(state, self._state_dict_config)
        with summoned(self._wrapped, keep=False) as is_outermost:
            state = super().state_dict(*args, **kwargs)
            _state_dict.without_prefix(state, prefix)
            _state_dict.restore_buffers(state, prefix, self._buffer_dtypes)
            if is_outermost:
                _state_dict.keep_copies(state, prefix)
        # As torch, whose ranks have it then: what is whole everywhere, each of them gives.
        is_sharded = self._wrapped.sharding.shard is not None
        if is_sharded and not _state_dict.wants_result(self._state_dict_config, self.rank):
            _state_dict.drop(state, self, prefix)
        return _state_dict.offloaded(state, self._state_dict_config)

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """The opposite of state_dict: whole tensors, shards or DTensors; collective.

        Raises:
            RuntimeError: keys that are missing or too many, shapes; on every rank.
        """
        _loading.refuse_assign(assign)

        def load():
            own = state_dict
            if _load_hooks.is_cut(self, state_dict):
                own = _loading.local_state(self, state_dict)
            return super(StateMethods, self).load_state_dict(own, strict)

        def load_together():
            return _collective_errors.together(self._wrapped.groups(), "load a state dict", load)

        with _load_hooks.prepared(self):
            if _load_hooks.wants_shards(self, state_dict):
                return load_together()
            with summoned(self._wrapped, keep=True):
                return load_together()

    @staticmethod
    def in_own_memory(config: ShardedStateDictConfig, wanted: bool) -> None:
        """Whether state dicts by this configuration are in the parameters' memory."""
        setattr(config, _IN_OWN_MEMORY, wanted)

    @staticmethod
    def set_state_dict_type(
        module: torch.nn.Module,
        state_dict_type: StateDictType,
        state_dict_config=None,
        optim_state_dict_config=None,
    ) -> StateDictSettings:
        """Chooses what state dicts of the wrapped modules hold; returns the choice before.

        Raises:
            ArgumentError: a configuration of another type of state dict.
        """
        before = StateMethods.get_state_dict_type(module)
        state_dict_config = _checked(
            "state_dict_config", state_dict_config, _CONFIGS, state_dict_type
        )
        optim_state_dict_config = _checked(
            "optim_state_dict_config", optim_state_dict_config, _OPTIMIZERS, state_dict_type
        )
        for wrapped in _wrapped(module):
            wrapped._state_dict_type = state_dict_type
            wrapped._state_dict_config = state_dict_config
            wrapped._optim_state_dict_config = optim_state_dict_config
            if _state_dict.is_sharded(state_dict_type) and wrapped._device_mesh is not None:
                state_dict_config._use_dtensor = optim_state_dict_config._use_dtensor = True
        return before

    @staticmethod
    def get_state_dict_type(module: torch.nn.Module) -> StateDictSettings:
        """What set_state_dict_type has chosen."""
        for wrapped in _wrapped(module):
            return StateDictSettings(
                wrapped._state_dict_type,
                wrapped._state_dict_config,
                wrapped._optim_state_dict_config,
            )
        return StateDictSettings(
            StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
        )

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: torch.nn.Module,
        state_dict_type: StateDictType,
        state_dict_config=None,
        optim_state_dict_config=None,
    ) -> Iterator[None]:
        """set_state_dict_type for the time of the context."""
        before = StateMethods.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            StateMethods.set_state_dict_type(
                module,
                before.state_dict_type,
                before.state_dict_config,
                before.optim_state_dict_config,
            )

    @staticmethod
    def optim_state_dict(
        model: torch.nn.Module, optim, optim_state_dict=None, group=None
    ) -> dict[str, Any]:
        """The optimizer's state with whole tensors (or shards) by parameter name; a collective.

        Args:
            model: wrapped, or with wrapped modules under it.
            optim: an optimizer of its parameters.
            optim_state_dict: its state_dict(); None = asked for here.
            group: of whose ranks the first one gets the state, where a configuration with
                rank0_only was chosen; None = the default group.
        """
        roots = _roots(model)
        for root in roots:
            _refuse_local(root)
            if _state_dict.is_sharded(root._state_dict_type):
                config = root._optim_state_dict_config
                sharded = _optim_state.sharded_state(model, optim, optim_state_dict, config, True)
                return _state_dict.offloaded(sharded, config)
        full = _optim_state.full_state(model, optim, optim_state_dict)
        for root in roots:
            full = _state_dict.offloaded(full, root._optim_state_dict_config)
        rank = torch.distributed.get_rank(group)
        if all(_state_dict.wants_result(r._optim_state_dict_config, rank) for r in roots):
            return full
        return {}

    @staticmethod
    def full_optim_state_dict(
        model: torch.nn.Module, optim, optim_input=None, rank0_only: bool = True, group=None
    ) -> dict[str, Any]:
        """optim_state_dict with whole tensors, on rank 0 of the group (torch's older name)."""
        _optim_state.Order.of(model, optim_input, optim)
        full = _optim_state.full_state(model, optim, None)
        return full if not rank0_only or torch.distributed.get_rank(group) == 0 else {}

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict, model: torch.nn.Module, optim_input=None, optim=None, group=None
    ) -> dict[str, Any]:
        """What `optim.load_state_dict` takes on each rank, from rank 0's full_optim_state_dict.

        Args:
            optim: whose order of parameters counts; None = that of `optim_input`, or of the model.
        """
        order = _optim_state.Order.of(model, optim_input, optim)
        holder = [full_optim_state_dict]
        torch.distributed.broadcast_object_list(holder, src=0, group=group)
        return _optim_state.state_to_load(model, order, holder[0])

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict, model: torch.nn.Module, optim_input=None, optim=None
    ) -> dict[str, Any]:
        """scatter_full_optim_state_dict where every rank has the state (torch's older name)."""
        order = _optim_state.Order.of(model, optim_input, optim)
        return _optim_state.state_to_load(model, order, full_optim_state_dict)

    @staticmethod
    def sharded_optim_state_dict(model: torch.nn.Module, optim, group=None) -> dict[str, Any]:
        """optim_state_dict with shards (torch's older name)."""
        config = ShardedOptimStateDictConfig()
        return _optim_state.sharded_state(model, optim, None, config, copies=True)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict, model: torch.nn.Module, optim
    ) -> dict[str, Any]:
        """optim_state_dict_to_load (torch's older name)."""
        return _optim_state.state_to_load(model, optim, sharded_optim_state_dict)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict, optim_state_key_type, model: torch.nn.Module, optim_input=None, optim=None
    ) -> dict[str, Any]:
        """The same state with parameters' names, or with their numbers, as keys.

        Args:
            optim_state_key_type: OptimStateKeyType.PARAM_NAME or PARAM_ID.
            model: the one that the numbers belong to, wrapped or not.
            optim: whose numbers they are; None = those in the order of model.parameters().
        """
        with_names = optim_state_key_type is OptimStateKeyType.PARAM_NAME
        order = _optim_state.Order.of(model, optim_input, optim)
        return _optim_state.rekeyed(optim_state_dict, with_names, model, order)

    @staticmethod
    def optim_state_dict_to_load(
        model: torch.nn.Module,
        optim,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group=None,
    ) -> dict[str, Any]:
        """What `optim.load_state_dict` takes on this rank, from what optim_state_dict gave.

        Args:
            load_directly: also load it.
            is_named_optimizer: `optim` has names as keys (torch's _NamedOptimizer).
            group: of the ranks that take it from their first one, where a configuration with
                rank0_only was chosen.
        """
        if any(getattr(r._optim_state_dict_config, "rank0_only", False) for r in _roots(model)):
            holder = [optim_state_dict]
            torch.distributed.broadcast_object_list(holder, src=0, group=group)
            optim_state_dict = holder[0]
        state = _optim_state.state_to_load(model, optim, optim_state_dict, is_named_optimizer)
        if load_directly:
            optim.load_state_dict(state)
        return state


_CONFIGS = {
    StateDictType.FULL_STATE_DICT: FullStateDictConfig,
    StateDictType.LOCAL_STATE_DICT: LocalStateDictConfig,
    StateDictType.SHARDED_STATE_DICT: ShardedStateDictConfig,
}
_OPTIMIZERS = {
    StateDictType.FULL_STATE_DICT: FullOptimStateDictConfig,
    StateDictType.LOCAL_STATE_DICT: LocalOptimStateDictConfig,
    StateDictType.SHARDED_STATE_DICT: ShardedOptimStateDictConfig,
}


def _checked(what: str, config, kinds: dict, state_dict_type: StateDictType):
    """The configuration, or the usual one, for this type of state dict."""
    kind = kinds[state_dict_type]
    if config is None:
        return kind()
    if type(config) is kind:
        return config
    raise ArgumentError(
        f"libddp fsdp: Expected {what} of type {kind} but got {type(config)}. "
        f"Hint: {state_dict_type} goes with {kind.__name__}."
    )


def _refuse_local(wrapped: StateMethods) -> None:
    if wrapped._state_dict_type is StateDictType.LOCAL_STATE_DICT and wrapped._device_mesh:
        raise ArgumentError(
            "libddp fsdp: DeviceMesh is not compatible with LOCAL_STATE_DICT. Hint: take "
            "SHARDED_STATE_DICT, whose DTensors have to_local()."
        )


def _wrapped(model: torch.nn.Module) -> list[StateMethods]:
    return [module for module in model.modules() if isinstance(module, StateMethods)]


def _roots(model: torch.nn.Module) -> list[StateMethods]:
    inner = {id(m) for outer in _wrapped(model) for m in outer.modules() if m is not outer}
    return [module for module in _wrapped(model) if id(module) not in inner]
