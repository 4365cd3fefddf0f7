"""State dicts of sharded models: canonical names, whole tensors or this rank's shards.

torch's modules collect state dicts module by module; a wrapped module adds its prefix, which is
taken out again here, so that names are those of the model before it was wrapped.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import StateDictType

from libddp.distributed.fsdp.wrap._lookup import wrapped_modules_in
from libddp.distributed.fsdp.wrap._names import PREFIX, canonical

#: torch's name for it.
_EXTRA_STATE = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


def without_prefix(destination, prefix: str) -> None:
    """Takes PREFIX out of the names that begin with `prefix`, in place and in order."""
    for key in [key for key in destination if key.startswith(prefix + PREFIX)]:
        value = destination.pop(key)
        destination[prefix + key[len(prefix + PREFIX) :]] = value


def with_prefix(state_dict, prefix: str) -> None:
    """Puts PREFIX into the names that begin with `prefix`, for the wrapper's own loading."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        rest = key[len(prefix) :]
        if not rest.startswith(PREFIX):
            state_dict[prefix + PREFIX + rest] = state_dict.pop(key)


def keep_copies(state: OrderedDict, prefix: str) -> None:
    """Lets the entries that begin with `prefix` keep the whole tensors that parameters show now.

    They have memory of their own, which goes with the last entry; a parameter itself (keep_vars)
    will show its shard again.
    """
    for key, value in state.items():
        if key.startswith(prefix) and isinstance(value, torch.nn.Parameter):
            state[key] = value.detach()


def drop(state: OrderedDict, module: torch.nn.Module, prefix: str) -> None:
    """Takes out what another rank gives: all of `module` but for its ignored parameters, and what
    modules have of their own accord (get_extra_state).
    """
    taken = {id(p) for wrapped in wrapped_modules_in(module) for _, p in wrapped.parameters}
    named = torch.nn.Module.named_parameters(module, remove_duplicate=False)
    ignored = {prefix + canonical(name) for name, p in named if id(p) not in taken}
    for key in [key for key in state if key.startswith(prefix) and key not in ignored]:
        if key.rpartition(".")[2] != _EXTRA_STATE:
            del state[key]


def restore_buffers(state, prefix: str, dtypes: dict[str, torch.dtype]) -> None:
    """Gives buffers in `state` the dtypes from before they were cast for the computation."""
    for name, dtype in dtypes.items():
        key = prefix + canonical(name)
        if key in state:
            state[key] = state[key].to(dtype)


def is_full(kind: StateDictType) -> bool:
    """Whether state dicts of this kind hold whole tensors."""
    return kind is StateDictType.FULL_STATE_DICT


def is_sharded(kind: StateDictType) -> bool:
    """Whether state dicts of this kind hold shards that know their place."""
    return kind is StateDictType.SHARDED_STATE_DICT


def offloaded(state, config):
    """`state` with its tensors on the CPU, where the configuration wants them there."""
    if not getattr(config, "offload_to_cpu", False):
        return state
    if isinstance(state, ShardedTensor):
        return state.cpu()  # torch asks the group for the device of one without a row on this rank
    if torch.is_tensor(state):
        return state if state.device.type == "cpu" else state.cpu()
    if isinstance(state, dict):
        for key, value in state.items():
            state[key] = offloaded(value, config)
    return state


def wants_result(config, rank: int) -> bool:
    """Whether this rank gets the full state dict."""
    return not (getattr(config, "rank0_only", False) and rank != 0)
