"""Which parameters have gradients of which each rank has a part: the one place that knows.

    register(parameter, place)           # by whoever shards it
    place = place_of(parameter)          # None: an ordinary parameter
    group = place.spread()               # of the ranks that have the parts; None: all of it is here
    place.own(parameter.grad)            # what counts for this rank

Norms, gradient scalers and what scripts ask of FSDP2's DTensors go by the parameter: it is the same
object on every rank at all times, whereas its gradient may be another tensor on one rank only, or
none. So all ranks decide alike whether they talk. Entries end with their parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef


class Place(Protocol):
    """Where the parts of a parameter, or of its gradient alone, lie."""

    def spread(self) -> Any:
        """C++ group whose ranks have a part of the gradient each; None where it is whole here."""

    def norm_group(self) -> Any:
        """The same for a norm: where some ranks of a model have other parameters than others
        (experts, each sharded over some), all of its ranks, as the norm is over all of these.
        """

    def deciding(self) -> tuple:
        """C++ groups of all ranks that must take a step, or skip it, together."""

    def own(self, gradient: torch.Tensor) -> torch.Tensor:
        """What this rank has of the gradient: together, the ranks' make the whole."""

    def has_parts_of_values(self) -> bool:
        """Whether the parameter itself shows a part now."""


_places: WeakIdKeyDictionary = WeakIdKeyDictionary(ref_type=WeakIdRef)


def register(parameter: torch.Tensor, place: Place) -> None:
    """From now on `place` answers for `parameter`; who sharded it last is right."""
    _places[parameter] = place


def place_of(parameter: torch.Tensor) -> Place | None:
    """None for an ordinary parameter."""
    return _places.get(parameter)


def spread_of(parameter: torch.Tensor) -> Any:
    """C++ group whose ranks have a part of the gradient each; None where it is whole here."""
    place = _places.get(parameter)
    return None if place is None else place.spread()


def norm_group_of(parameter: torch.Tensor) -> Any:
    """C++ group over whose ranks a norm of its gradient adds up; None: it is whole here."""
    place = _places.get(parameter)
    return None if place is None else place.norm_group()


def deciding(parameters: Iterable[torch.Tensor]) -> list:
    """C++ groups that must take a step of these parameters together, each once."""
    found: list = []
    for parameter in parameters:
        place = _places.get(parameter)
        for group in () if place is None else place.deciding():
            if group not in found:
                found.append(group)
    return found


def all_places() -> Iterator[tuple[torch.Tensor, Place]]:
    """(parameter, place) of all that is known."""
    yield from list(_places.items())
