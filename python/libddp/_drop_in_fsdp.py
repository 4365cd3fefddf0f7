"""Which of torch's names for sharded training become libddp's.

    replace(torch.distributed.fsdp, put)    # put(owner, name, replacement) remembers what was there

Replaced are names that scripts import. What torch's own classes call inside of their modules stays:
a class that was imported before goes on working as it did.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import torch

PACKAGE = "torch.distributed.fsdp"
#: Packages that show FSDP2's names too.
COMPOSABLE = tuple(f"torch.distributed._composable.{name}" for name in ("fsdp", "fsdp.fully_shard"))
#: Works on the inside of torch's FSDP1 class, which it imports by its name.
KEEPS_TORCHS = "torch.distributed.checkpoint.state_dict"
_FSDP1 = f"{PACKAGE}.fully_sharded_data_parallel"
_FSDP2_NAMES = (
    "FSDPModule",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
)


def is_offered() -> bool:
    """libddp shards on the CPU so far: on a machine with CUDA torch's FSDP stays."""
    return not torch.cuda.is_available()


def replace(package: ModuleType, put: Callable) -> None:
    """In torch.distributed.fsdp and the modules that it has imported."""
    if not is_offered():
        return
    from libddp.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel

    put(package, "FullyShardedDataParallel", FullyShardedDataParallel)
    for owner in (package, package._fully_shard):
        replace_composable(owner, put)
    # torch's class looks itself up among the globals of its module, so these must stay: scripts
    # are shown another module with the same contents.
    theirs = sys.modules[_FSDP1]
    shown = ModuleType(_FSDP1, theirs.__doc__)
    shown.__dict__.update(vars(theirs))
    shown.FullyShardedDataParallel = FullyShardedDataParallel
    shown._libddp_torchs = theirs.FullyShardedDataParallel
    put(package, "fully_sharded_data_parallel", shown)
    put(sys.modules, _FSDP1, shown)


def replace_composable(owner: ModuleType, put: Callable) -> None:
    """FSDP2's names in a module that shows them."""
    if not is_offered():
        return
    from libddp.distributed.fsdp import _fsdp_module, _fully_shard

    ours = {**vars(_fsdp_module), **vars(_fully_shard)}
    for name in _FSDP2_NAMES:
        if hasattr(owner, name):
            put(owner, name, ours[name])


def keep_torchs(owner: ModuleType, _: Callable) -> None:
    """torch's FSDP1 class, for good, under the name by which `owner` asks for it."""
    owner.FSDP = getattr(sys.modules[_FSDP1], "_libddp_torchs", owner.FSDP)
