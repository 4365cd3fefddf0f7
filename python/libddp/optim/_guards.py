"""What in torch looks at the gradients of a whole model, told that a rank has parts of them.

Nothing of torch changes before the first optimizer with shard_gradients.
"""

from __future__ import annotations

import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import TensorWeakRef

from libddp.errors import StateError

#: Optimizers that have been looked at -> (parameters, sharded optimizers) then.
_seen: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_num_watched = 0


class SharedWork:
    """Gradients of which a rank has the averages of a part: the registry's entry."""

    def __init__(self, shards, parameter: torch.Tensor) -> None:
        self._shards = weakref.ref(shards)
        # The registry has this object as long as the parameter lives.
        self._parameter = TensorWeakRef(parameter)

    def is_in_use(self) -> bool:
        return self._shards() is not None

    def spread(self):
        """The model's group, once it is known who owns what; the first time, a collective."""
        shards = self._shards()
        if shards is None or shards.group.size() == 1 or not shards.make_ready():
            return None
        return shards.group

    def norm_group(self):
        return self.spread()

    def deciding(self) -> tuple:
        shards = self._shards()
        return () if shards is None or shards.group.size() == 1 else (shards.group,)

    def own(self, gradient: torch.Tensor) -> torch.Tensor:
        """Out of `.grad`, which is `gradient`."""
        return self._shards().own_gradient(self._parameter())

    def has_parts_of_values(self) -> bool:
        return False


def watch(shards) -> None:
    """Norms, gradient scalers and other optimizers respect `shards` from now on."""
    global _num_watched
    from libddp._torch_patches import clip_grad_norm, grad_scaler
    from libddp.distributed.fsdp import _registry

    if _num_watched == 0:
        register_optimizer_step_pre_hook(_refuse_others)
        clip_grad_norm.put()
        grad_scaler.put()
    _num_watched += 1
    for parameter in shards.parameters:
        _registry.register(parameter, SharedWork(shards, parameter))


def _refuse_others(optimizer, args, kwargs) -> None:
    if getattr(optimizer, "_shards", None) is not None:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    mark = (len(parameters), _num_watched)
    if _seen.get(optimizer) == mark:
        return
    from libddp.distributed.fsdp import _registry

    places = [_registry.place_of(p) for p in parameters]
    if any(isinstance(place, SharedWork) and place.is_in_use() for place in places):
        raise StateError(
            f"libddp: {type(optimizer).__name__}.step(): its parameters belong to a model whose "
            "gradients are sharded (AdamW(shard_over=model, shard_gradients=True)), so each rank "
            "has a part of the averages only. Hint: step that optimizer; for another one, wrap the "
            "module again, or leave out shard_gradients."
        )
    _seen[optimizer] = mark
