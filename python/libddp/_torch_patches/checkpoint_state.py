"""Makes torch.distributed.checkpoint.state_dict know models that libddp has sharded.

Replaces `_get_model_state_dict`, `_load_model_state_dict`, `_get_optim_state_dict` and
`_load_optim_state_dict`, behind get_model_state_dict and its five siblings, which scripts and DCP
import by their names. torch asks for its own FSDP class, and would save a rank's rows as whole
tensors. Models that are not sharded go the old way. The first model that is sharded into plain
tensors asks for it; it stays for good.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType

import torch

from libddp._torch_patches.replacing import SHARDING

_MODULE = "torch.distributed.checkpoint.state_dict"


@cache
def put() -> None:
    """Once, when torch's module is imported."""
    SHARDING.put_after_import(_MODULE, _put)


def _put(torchs: ModuleType) -> None:
    from libddp.distributed.fsdp import _torch_state

    ours = {
        "_get_model_state_dict": _torch_state.get_model,
        "_load_model_state_dict": _torch_state.load_model,
        "_get_optim_state_dict": _torch_state.get_optimizers,
        "_load_optim_state_dict": _torch_state.load_optimizers,
    }
    for name, function in ours.items():
        SHARDING.put(torchs, name, _for_sharded(getattr(torchs, name), function))


def _for_sharded(theirs: Callable, ours: Callable) -> Callable:
    from libddp.distributed.fsdp import _torch_state

    @wraps(theirs)
    @torch.no_grad()
    def choose(model, *args, **kwargs):
        if _torch_state.is_torchs(model):
            return theirs(model, *args, **kwargs)
        return ours(_torch_state.settled(model), *args, **kwargs)

    return choose
