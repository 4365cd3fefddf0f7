"""Makes torch's names for sharded training libddp's.

Replaces the names that scripts import from torch.distributed.fsdp, its module
fully_sharded_data_parallel and torch.distributed._composable.fsdp. What torch's own classes call
inside of their modules stays: a class that was imported before goes on working as it did, and so
does torch.distributed.checkpoint.state_dict, which works on the inside of torch's FSDP1 class. The
drop-in asks for it, with and without CUDA; undone by uninstall.
"""

from __future__ import annotations

import sys
from types import ModuleType

from libddp._torch_patches import announcing
from libddp._torch_patches.replacing import Replacements

_PACKAGE = "torch.distributed.fsdp"
#: Packages that show FSDP2's names too.
_COMPOSABLE = tuple(
    f"torch.distributed._composable.{name}" for name in ("fsdp", "fsdp.fully_shard")
)
_STATE = "torch.distributed.checkpoint.state_dict"
_FSDP1 = f"{_PACKAGE}.fully_sharded_data_parallel"
_FSDP2 = f"{_PACKAGE}._fully_shard._fsdp_state"
_FSDP2_NAMES = (
    "FSDPModule",
    "GradientReductionHandle",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
)
_KEPT = (
    "libddp: this FSDP is torch's own, on libddp's process group: its name was imported before "
    "libddp was installed. Hint: call libddp.install() before `from torch.distributed.fsdp import "
    "...`, or start the script with `libddp run --drop-in`."
)


def put(replacements: Replacements) -> None:
    """Once each module is imported."""
    replacements.put_after_import(_PACKAGE, lambda found: _put_names(found, replacements))
    for module in _COMPOSABLE:
        replacements.put_after_import(module, lambda found: _put_composable(found, replacements))
    replacements.put_after_import(_STATE, lambda found: _keep_torchs(found, replacements))
    for module, name in ((_FSDP1, "FullyShardedDataParallel"), (_FSDP2, "FSDPState")):
        replacements.put_after_import(
            module, lambda found, name=name: _announce(getattr(found, name), replacements)
        )


def _announce(found: type, replacements: Replacements) -> None:
    announcing.put(replacements.torchs(found), _KEPT, replacements)


def _put_names(package: ModuleType, replacements: Replacements) -> None:
    """In torch.distributed.fsdp and the modules that it has imported."""
    from libddp.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel

    replacements.put(package, "FullyShardedDataParallel", FullyShardedDataParallel)
    for owner in (package, package._fully_shard):
        _put_composable(owner, replacements)
    # torch's class looks itself up among the globals of its module, so these must stay: scripts
    # are shown another module with the same contents.
    theirs = sys.modules[_FSDP1]
    shown = ModuleType(_FSDP1, theirs.__doc__)
    shown.__dict__.update(vars(theirs))
    shown.FullyShardedDataParallel = FullyShardedDataParallel
    replacements.put(package, "fully_sharded_data_parallel", shown)
    replacements.put(sys.modules, _FSDP1, shown)


def _put_composable(owner: ModuleType, replacements: Replacements) -> None:
    """FSDP2's names in a module that shows them."""
    from libddp.distributed.fsdp import _fsdp_module, _fully_shard

    ours = {**vars(_fsdp_module), **vars(_fully_shard)}
    for name in _FSDP2_NAMES:
        if hasattr(owner, name):
            replacements.put(owner, name, ours[name])


def _keep_torchs(owner: ModuleType, replacements: Replacements) -> None:
    """torch's FSDP1 class under the name by which `owner` asks for it."""
    replacements.put(owner, "FSDP", replacements.torchs(owner.FSDP))
