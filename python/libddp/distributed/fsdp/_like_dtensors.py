"""What scripts ask of FSDP2's parameters, DTensors there: whole tensors, mesh, placements.

    p.full_tensor(); p.grad.full_tensor()      # collectives
    p.to_local(); p.device_mesh; p.placements

Sharded parameters are ordinary ones, which costs nothing in each operation, so these are attributes
of the objects. Their gradients get them at the end of each backward pass, and keep them: one that a
script has kept answers for itself. Files and copies do not have them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from libddp.distributed.fsdp import _registry
from libddp.distributed.fsdp._pieces import Piece, pieces_of_shard
from libddp.distributed.fsdp._shards import Shard
from libddp.distributed.fsdp._state_dict import is_summoned
from libddp.errors import StateError

_NAMES = ("full_tensor", "to_local", "device_mesh", "placements", "__getstate__")


class ShardedPlace:
    """Where a sharded parameter and its gradients lie: the registry's entry."""

    def __init__(self, shard: Shard, parameter: torch.nn.Parameter) -> None:
        # The shard has the parameter, whose entry in the registry this is.
        self._shard = weakref.ref(shard)
        self._key = id(parameter)

    @property
    def piece(self) -> Piece:
        """What this rank owns of the parameter."""
        shard = self._living()
        if not shard.pieces:
            shard.pieces = pieces_of_shard(shard)
        return shard.pieces[self._key]

    def parameter(self) -> torch.nn.Parameter | None:
        """The parameter; None where the shard has others by now."""
        parameters = self._living().parameters
        return next((p for _, p in parameters if id(p) == self._key), None)

    def is_whole(self) -> bool:
        """Whether the parameter shows the whole tensor now."""
        shard = self._living()
        return shard.made is None or shard.is_running or is_summoned(shard)

    def has_parts_of_values(self) -> bool:
        return self.spread() is not None

    def spread(self) -> Any:
        shard = self._shard()
        if shard is None or self.is_whole():
            return None
        group = shard.sharding.shard
        return group if group is not None and group.size() > 1 else None

    def deciding(self) -> tuple:
        shard = self._shard()
        groups = () if shard is None else shard.groups()
        return tuple(group for group in groups if group is not None and group.size() > 1)

    def own(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient

    def _living(self) -> Shard:
        shard = self._shard()
        if shard is None:
            raise StateError(
                "libddp fsdp: this tensor belongs to no sharded model: the model is gone, or it is "
                "a copy. Hint: ask the parameter of the model, or its gradient."
            )
        return shard


class _LikeDTensor:
    """The attributes of one tensor, a parameter or a gradient."""

    def __init__(self, tensor: torch.Tensor, place: ShardedPlace, is_gradient: bool) -> None:
        # The tensor has this object among its attributes: neither keeps the other alive.
        # torch cannot swap what weak references know, as parameters that leave the meta device are.
        self._ref = TensorWeakRef(tensor) if is_gradient else place.parameter
        self.place = place
        self._is_gradient = is_gradient

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, in memory of its own, without a graph; a collective."""
        tensor = self.to_local()
        if not self._is_gradient and self.place.is_whole():
            return tensor.clone()
        return self.place.piece.gather(tensor)

    def to_local(self) -> torch.Tensor:
        """What this rank owns, in the same memory."""
        tensor = self._tensor()
        return tensor if self._is_gradient else tensor.detach()

    def state(self) -> dict[str, Any] | None:
        """What else the tensor has of attributes: that is what files get."""
        return {k: v for k, v in vars(self._tensor()).items() if k not in _NAMES} or None

    def _tensor(self) -> torch.Tensor:
        tensor = self._ref()
        if tensor is None:
            raise StateError(
                "libddp fsdp: this tensor is a copy, and belongs to no sharded model. "
                "Hint: ask the parameter of the model, or its gradient."
            )
        return tensor

    def __deepcopy__(self, memo) -> _LikeDTensor:
        copied = _LikeDTensor.__new__(_LikeDTensor)
        copied._ref, copied.place, copied._is_gradient = (lambda: None), None, self._is_gradient
        return copied


def mark(shard: Shard) -> None:
    """Gives the parameters of a unit their attributes, and registers those that are sharded."""
    for _, parameter in shard.parameters:
        place = ShardedPlace(shard, parameter)
        if shard.made is not None:
            _registry.register(parameter, place)
        _give(parameter, shard, place, is_gradient=False)


def mark_gradients(root: Shard) -> None:
    """The same for the gradients of a whole model; most come anew with each backward pass."""
    for shard in root.all_shards:
        for _, parameter in shard.parameters:
            grad = parameter.grad
            if grad is not None:
                place = _registry.place_of(parameter)
                known = vars(grad).get("full_tensor")
                if known is None or known.__self__.place is not place:
                    _give(grad, shard, place, is_gradient=True)


def _give(tensor: torch.Tensor, shard: Shard, place: ShardedPlace, is_gradient: bool) -> None:
    like = _LikeDTensor(tensor, place, is_gradient)
    vars(tensor).update(
        full_tensor=like.full_tensor,
        to_local=like.to_local,
        device_mesh=shard.sharding.mesh,
        placements=shard.placements,
        __getstate__=like.state,
    )
