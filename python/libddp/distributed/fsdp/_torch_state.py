"""torch.distributed.checkpoint.state_dict's functions, for models that libddp has sharded.

libddp._torch_patches.checkpoint_state puts them in torch's place. Without options they give
DTensors or ShardedTensors, which DCP saves and loads in place; with full_state_dict whole tensors,
gathered one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import ShardedOptimStateDictConfig, StateDictType

from libddp.distributed.fsdp.state import _first_values, _loading, _optim_state
from libddp.distributed.fsdp.state._shard_specs import whole_of
from libddp.distributed.fsdp.state._sharded_state_dict import sharded_state
from libddp.distributed.fsdp.state._sharded_tensors import convert
from libddp.distributed.fsdp.state._state_methods import StateMethods
from libddp.distributed.fsdp.wrap import _deferred
from libddp.distributed.fsdp.wrap._lookup import wrapped_modules_in
from libddp.distributed.fsdp.wrap._names import canonical


def is_torchs(model: torch.nn.Module) -> bool:
    """Whether torch's functions know what is in it: plain parameters and DTensors."""
    return all(wrapped.sharding.use_dtensor for wrapped in wrapped_modules_in(model))


def settled(model: torch.nn.Module) -> torch.nn.Module:
    """The model itself, where it is compiled, with all of its units made; a collective then."""
    model = getattr(model, "_orig_mod", model)
    _deferred.settle(model)
    return model


def get_model(model, info) -> dict[str, Any]:
    """_get_model_state_dict: the pieces of this rank, or what the options want."""
    if not info.handle_model:
        return {}
    state = dict(sharded_state(model, use_dtensor=info.full_state_dict, copies=True))
    if info.submodule_prefixes:
        state = _under(state, info)
    if info.ignore_frozen_params:
        for name, parameter in torch.nn.Module.named_parameters(model, remove_duplicate=False):
            if not parameter.requires_grad:
                state.pop(canonical(name), None)
    return _finished(state, info)


def _under(state: dict[str, Any], info) -> dict[str, Any]:
    """What `submodules` have of a state; torch knows them by names with wrappers in them."""
    found = {}
    for prefix in {canonical(prefix): None for prefix in info.submodule_prefixes}:
        for key, value in state.items():
            if key.startswith(prefix):
                found[key if info.keep_submodule_prefixes else key.removeprefix(prefix)] = value
    return found


def get_optimizers(model, optimizers, info) -> dict[str, Any]:
    """_get_optim_state_dict: the same of optimizers' states."""
    if not info.handle_optim:
        return {}
    from torch.distributed.checkpoint import state_dict as torchs

    state: dict[str, Any] = {"state": {}, "param_groups": []}
    config = ShardedOptimStateDictConfig(_use_dtensor=info.full_state_dict)
    for optimizer in optimizers:
        torchs._init_optim_state(optimizer)
        found = _optim_state.sharded_state(model, optimizer, None, config, copies=True)
        state["state"].update(found["state"])
        state["param_groups"] += found["param_groups"]
    if info.flatten_optimizer_state_dict:
        state = torchs._flatten_optim_state_dict(state)
    return _finished(state, info, copies=True)


def load_model(model, state, info):
    """_load_model_state_dict: takes this rank's part."""
    from torch.nn.modules.module import _IncompatibleKeys

    if not info.handle_model or not (state or info.broadcast_from_rank0):
        return _IncompatibleKeys([], [])
    state = {canonical(key): value for key, value in state.items()}
    _deferred.settle(model)
    if _deferred.names_on_meta(model):
        keys = [list(state)]
        if info.broadcast_from_rank0:
            dist.broadcast_object_list(keys, src=0)
        own = {key: state.get(key) for key in keys[0]}
        takes = partial(torch.nn.Module.load_state_dict, model)
        _first_values.check(model, own, info.strict, takes)
        _deferred.give_memory(model)
    if info.broadcast_from_rank0:
        specs = _loading.shard_specs_by_key(model)
        state = _from_first(state, lambda path: specs.get(path[0]))
    state = _loading.local_state(model, state)
    with StateMethods.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        if isinstance(model, StateMethods):
            from torch.distributed.checkpoint import state_dict as torchs

            takes = torchs._state_dict_fn(model, "load_state_dict")
            return takes(state_dict=state, strict=info.strict)
        return torch.nn.Module.load_state_dict(model, state, strict=info.strict)


def load_optimizers(model, optimizers, state, info) -> None:
    """_load_optim_state_dict: the same of optimizers' states."""
    if not info.handle_optim:
        return
    from torch.distributed.checkpoint import state_dict as torchs

    if info.broadcast_from_rank0:
        specs = _loading.shard_specs_by_key(model)
        state = _from_first(state, lambda path: specs.get(path[1]) if len(path) > 2 else None)
    # As torch has it: what an optimizer without moments (SGD) has saved is empty, and torch itself
    # looks through a flattened state.
    refuses_missing = info.strict and bool(state.get("state"))
    for optimizer in optimizers:
        torchs._init_optim_state(optimizer)
        own = state
        if "state" not in state:
            own = torchs._unflatten_optim_state_dict(optimizer, state, _canonical(info))
        own = _optim_state.only_of(model, optimizer, own)
        if refuses_missing:
            _optim_state.refuse_missing(model, optimizer, own)
        optimizer.load_state_dict(_optim_state.state_to_load(model, optimizer, own))


def _canonical(info):
    """The same with names from before the wrapping."""

    def renamed(value):
        if isinstance(value, set):
            return {canonical(name) for name in value}
        return canonical(value) if isinstance(value, str) else value

    names = {
        field: {renamed(key): renamed(value) for key, value in getattr(info, field).items()}
        for field in ("fqn_param_mapping", "shared_params_mapping")
    }
    return replace(info, **names)


def _finished(state: dict[str, Any], info, copies: bool = False) -> dict[str, Any]:
    """As the options want it: shards, or whole tensors on all ranks or on rank 0.

    Args:
        copies: whole tensors are in memory of their own (an optimizer's `step`), as torch's.
    """
    wants = not info.full_state_dict or not info.cpu_offload or dist.get_rank() == 0

    def finish(_, value):
        if info.full_state_dict:
            whole = whole_of(value)
            if copies and whole is value and isinstance(whole, torch.Tensor):
                whole = whole.clone()
            value = whole
        return value if wants else None

    finished = _mapped(state, finish)
    return finished if wants else {}


def _from_first(state: dict[str, Any], spec_at: Callable) -> dict[str, Any]:
    """Rank 0's state on every rank, of each tensor that has a spec only this rank's part."""
    tensors = {}

    def take_out(path, value):
        if not isinstance(value, torch.Tensor):
            return value
        tensors[path] = value
        return torch.empty_like(value, device="meta")

    skeleton = [_mapped(state, take_out) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(skeleton, src=0)

    def receive(path, value):
        if not isinstance(value, torch.Tensor):
            return value
        whole = tensors[path].contiguous() if tensors else torch.empty_like(value, device="cpu")
        dist.broadcast(whole, src=0)
        spec = spec_at(path)
        is_cut = spec is not None and spec.group is not None and whole.shape == spec.shape
        return convert(spec.cut(whole), spec) if is_cut else whole

    return _mapped(skeleton[0], receive)


def _mapped(value: Any, function: Callable, path: tuple = ()) -> Any:
    """`function(path, leaf)` for the leaves of nested dicts and lists, in order."""
    if isinstance(value, dict):
        return {key: _mapped(child, function, (*path, key)) for key, child in value.items()}
    if isinstance(value, list):
        return [_mapped(child, function, (*path, i)) for i, child in enumerate(value)]
    return function(path, value)
