"""fully_shard beside torch's composable `replicate`: what one of them has, the other leaves alone.

torch's composable functions write in a registry on a module what was applied to it, and look there.
Both of torch's `replicate` (by DistributedDataParallel, and by FSDP2's engine) do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

from libddp.errors import ArgumentError


def mark_sharded(module: torch.nn.Module) -> None:
    """`replicate` over `module` leaves its parameters alone from now on."""
    registry = module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())
    registry["fully_shard"] = RegistryItem()


def replicated_parameters(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Of the modules under `modules` to which `replicate` was applied."""
    parts = (part for module in modules for part in module.modules() if _is_replicated(part))
    return [parameter for part in parts for parameter in part.parameters()]


def refuse_replicated(module: torch.nn.Module) -> None:
    """Raises ArgumentError if `replicate` was applied to `module` itself."""
    if _is_replicated(module):
        raise ArgumentError(
            "libddp fsdp: Cannot apply `fully_shard` on a Module already managed by `replicate`: "
            f"{type(module).__name__}. Hint: fully_shard with a mesh of two dimensions (replicate, "
            "shard) does both."
        )


def _is_replicated(module: torch.nn.Module) -> bool:
    return "replicate" in module.__dict__.get(REGISTRY_KEY, ())
