"""State dicts of sharded models: canonical names, whole tensors or this rank's shards.

torch's modules collect state dicts module by module; a wrapped module adds its prefix, which is
taken out again here, so that names are those of the model before it was wrapped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from libddp.distributed.fsdp.wrap._summoned_forward import SummonedForward
from libddp.distributed.fsdp.wrap._wrapped_module import (
    WrappedModule,
    whole_parameters,
    wrapped_modules_in,
)
from torch.distributed.fsdp import StateDictType

#: What FullyShardedDataParallel puts in front of its module's names.
PREFIX = "_fsdp_wrapped_module."
#: Wrappers of activation checkpointing do the same.
_PREFIXES = (PREFIX, "_checkpoint_wrapped_module.")


def canonical(name: str, module: str = "") -> str:
    """The name that a parameter (of the module with that name) had before anything was wrapped."""
    if module:
        name = f"{module}.{name}"
    for prefix in _PREFIXES:
        name = name.replace(prefix, "")
    return name


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
    """Takes out what another rank gives: all of `module` but for its ignored parameters."""
    taken = {id(p) for wrapped in wrapped_modules_in(module) for _, p in wrapped.parameters}
    named = torch.nn.Module.named_parameters(module, remove_duplicate=False)
    ignored = {prefix + canonical(name) for name, p in named if id(p) not in taken}
    for key in [key for key in state if key.startswith(prefix) and key not in ignored]:
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


def wants_result(config, rank: int) -> bool:
    """Whether this rank gets the full state dict."""
    return not (getattr(config, "rank0_only", False) and rank != 0)


@contextmanager
def summoned(
    wrapped: WrappedModule,
    keep: bool,
    recurse: bool = True,
    with_gradients: bool = False,
    rank0_only: bool = False,
) -> Iterator[bool]:
    """whole_parameters of `wrapped` and what is under it, where they are not whole already.

    Yields:
        Whether anything was not.
    """
    wrapped_modules = [
        s
        for s in (wrapped_modules_in(wrapped.module) if recurse else [wrapped])
        if s.summoned is None
    ]
    if not wrapped_modules:
        yield False
        return
    group = wrapped.sharding.shard or wrapped.sharding.replicate
    here = not rank0_only or group is None or group.rank() == 0
    with whole_parameters(wrapped, [s.unit for s in wrapped_modules], keep, with_gradients, here):
        for each in wrapped_modules:
            each.summoned = SummonedForward(here)
        try:
            yield True
        finally:
            for each in wrapped_modules:
                each.summoned = None
