"""What scripts ask of FSDP2's parameters, DTensors there: whole tensors, mesh, placements.

    p.full_tensor(); p.grad.full_tensor()      # collectives
    p.to_local(); p.device_mesh; p.placements

Sharded parameters are ordinary ones, which costs nothing in each operation, so these are attributes
of the objects. Their gradients get them at the end of each backward pass. Files and copies do
not have them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from libddp.distributed.fsdp._pieces import Piece, pieces_of_shard
from libddp.distributed.fsdp._shards import Shard
from libddp.distributed.fsdp._state_dict import is_summoned
from libddp.errors import StateError

_NAMES = ("full_tensor", "to_local", "device_mesh", "placements", "__getstate__")


class _Place:
    """Where a parameter, or its gradient, belongs."""

    def __init__(self, shard: Shard, parameter: torch.nn.Parameter, is_gradient: bool) -> None:
        # The tensor has this object among its attributes: neither keeps the other alive.
        self._shard = weakref.ref(shard)
        self._key = id(parameter)
        self._is_gradient = is_gradient

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, in memory of its own, without a graph; a collective."""
        tensor, shard = self._tensor(), self._shard()
        is_whole = shard.made is None or shard.is_running or is_summoned(shard)
        if is_whole and not self._is_gradient:
            return tensor.clone()
        return self._piece(shard).gather(tensor)

    def to_local(self) -> torch.Tensor:
        """What this rank owns, in the same memory."""
        return self._tensor()

    def state(self) -> dict[str, Any] | None:
        """What else the tensor has of attributes: that is what files get."""
        own = self._parameter().grad if self._is_gradient else self._parameter()
        return {k: v for k, v in vars(own).items() if k not in _NAMES} or None

    def __deepcopy__(self, memo) -> _Place:
        copied = _Place.__new__(_Place)
        copied._shard, copied._key, copied._is_gradient = (lambda: None), 0, self._is_gradient
        return copied

    def _tensor(self) -> torch.Tensor:
        parameter = self._parameter()
        if not self._is_gradient:
            return parameter.detach()
        if parameter.grad is None:
            raise StateError("libddp fsdp: this gradient was set to None. Hint: ask p.grad again.")
        return parameter.grad

    def _parameter(self) -> torch.nn.Parameter:
        shard = self._shard()
        for _, parameter in shard.parameters if shard is not None else ():
            if id(parameter) == self._key:
                return parameter
        raise StateError(
            "libddp fsdp: this tensor belongs to no sharded model: the model is gone, or it is a "
            "copy. Hint: ask the parameter of the model, or its gradient."
        )

    def _piece(self, shard: Shard) -> Piece:
        if not shard.pieces:
            shard.pieces = pieces_of_shard(shard)
        return shard.pieces[self._key]


def mark(shard: Shard) -> None:
    """Gives the parameters of a unit their attributes."""
    for _, parameter in shard.parameters:
        vars(parameter).update(_attributes(shard, _Place(shard, parameter, is_gradient=False)))


def mark_gradients(root: Shard) -> None:
    """The same for the gradients of a whole model, which come anew with each backward pass."""
    for shard in root.all_shards:
        for parameter, attributes in shard.of_gradients or _of_gradients(shard):
            grad = parameter.grad
            if grad is not None:
                vars(grad).update(attributes)


def _of_gradients(shard: Shard) -> list[tuple[torch.nn.Parameter, dict[str, Any]]]:
    """Made once, because all gradients get them in each step."""
    shard.of_gradients = [
        (parameter, _attributes(shard, _Place(shard, parameter, is_gradient=True)))
        for _, parameter in shard.parameters
    ]
    return shard.of_gradients


def _attributes(shard: Shard, place: _Place) -> dict[str, Any]:
    return {
        "full_tensor": place.full_tensor,
        "to_local": place.to_local,
        "device_mesh": shard.sharding.mesh,
        "placements": shard.sharding.placements(),
        "__getstate__": place.state,
    }
