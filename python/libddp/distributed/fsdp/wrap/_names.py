"""Names of modules, and of their parameters from before anything was wrapped."""

from __future__ import annotations

from collections.abc import Iterable

import torch

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


def without_units(name: str) -> str:
    """The name without what FullyShardedDataParallel puts into it; that of checkpointing stays."""
    return name.replace(PREFIX, "")


def names_of(modules: Iterable[tuple[str, torch.nn.Module]]) -> dict[int, str]:
    """id of a module -> its name."""
    return {id(module): name for name, module in modules}
