"""torch.distributed.fsdp's names on libddp's C++ engine.

    from libddp.distributed.fsdp import FullyShardedDataParallel as FSDP
    from libddp.distributed.fsdp.wrap import transformer_auto_wrap_policy

What only describes (strategies, precisions, configurations) is torch's own. See docs/fsdp.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING

import torch.distributed.fsdp as _torch
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from libddp.distributed.fsdp._fsdp_module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from libddp.distributed.fsdp._fully_shard import fully_shard
from libddp.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from libddp.distributed.fsdp.snapshot._consolidate import consolidate, save_safetensors

if TYPE_CHECKING:
    from libddp.snapshot._in_one_call import load_snapshot, save_snapshot

#: Of libddp.snapshot, which builds on this package: they come when they are asked for.
_SNAPSHOTS = ("load_snapshot", "save_snapshot")

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "consolidate",
    "fully_shard",
    "load_snapshot",
    "register_fsdp_forward_method",
    "save_safetensors",
    "save_snapshot",
    "share_comm_ctx",
]


def __getattr__(name: str):
    """Also what newer versions of torch have to describe meshes and placements with."""
    if name in _SNAPSHOTS:
        return getattr(import_module("libddp.snapshot._in_one_call"), name)
    return getattr(_torch, name)
