"""What in torch looks at the gradients of a whole model, told that a rank has parts of them.

Nothing of torch changes before the first optimizer is sharded.
"""

from __future__ import annotations

import functools
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from libddp.errors import StateError

_watched: weakref.WeakSet = weakref.WeakSet()
#: Optimizers that have been looked at -> (parameters, sharded optimizers) then.
_seen: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_num_watched = 0


def watch(shards) -> None:
    """Norms, gradient scalers and other optimizers respect `shards` from now on."""
    global _num_watched
    from libddp.distributed.fsdp import _clip

    if _num_watched == 0:
        register_optimizer_step_pre_hook(_refuse_others)
        scaler = torch.amp.GradScaler
        scaler._unscale_grads_ = _on_all_ranks(scaler._unscale_grads_)
    _num_watched += 1
    _watched.add(shards)
    _clip.watch_parts(shards)


def _refuse_others(optimizer, args, kwargs) -> None:
    if getattr(optimizer, "_shards", None) is not None:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    mark = (len(parameters), _num_watched)
    if _seen.get(optimizer) == mark:
        return
    sharded = {id(p) for shards in list(_watched) for p in shards.parameters}
    if any(id(p) in sharded for p in parameters):
        raise StateError(
            f"libddp: {type(optimizer).__name__}.step(): its parameters belong to a model whose "
            "gradients are sharded by AdamW(shard_over=model), so each rank has a part of the "
            "averages only. Hint: step that optimizer; for another one, wrap the module again."
        )
    _seen[optimizer] = mark


def _on_all_ranks(original):
    """torch.amp.GradScaler skips a step on every rank if one of them has found an infinity."""

    @functools.wraps(original)
    def unscale(self, optimizer, *args, **kwargs):
        found = original(self, optimizer, *args, **kwargs)
        shards = getattr(optimizer, "_shards", None)
        if shards is not None:
            for found_inf in found.values():
                shards.agree(found_inf)
        return found

    return unscale
