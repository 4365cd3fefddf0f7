"""What a plan needs to know of a model, an optimizer and a job. Plain data.

    facts = ModelFacts(parameters, units=("", "blocks.0"), passes=..., buffers=0)

Words: a *unit* is what one wrapped module owns (0 is the root, which has what no other unit has); a
*pass* is a forward and a backward with one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    name: str
    shape: Shape
    #: Bytes of an element.
    itemsize: int = 4
    trained: bool = True
    #: Position in ModelFacts.units.
    unit: int = 0

    @property
    def numel(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Event:
    """ "forward" and "forward_end" of a unit, or "gradient": that of a parameter has come."""

    what: str
    #: Position of the unit, or of the parameter.
    which: int
    #: Of a gradient: the most bytes (see Pass) since the one before it, or since the beginning.
    peak: int = 0


@dataclass(frozen=True)
class Pass:
    """Bytes beyond parameters and buffers; a parameter's gradient is freed once it has come."""

    #: The most at any moment of forward and backward.
    peak: int
    #: What is kept between the two: the activations.
    kept: int
    events: tuple[Event, ...] = ()


@dataclass(frozen=True)
class ModelFacts:
    parameters: tuple[Parameter, ...]
    #: Names; the first is "" for the root.
    units: tuple[str, ...]
    plain: Pass
    #: With every block recomputed in backward; None where there are no blocks.
    recomputed: Pass | None = None
    #: Bytes of the model's buffers.
    buffers: int = 0

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.bytes for parameter in self.parameters)

    def passes(self) -> list[tuple[bool, Pass]]:
        """(whether blocks are recomputed, the pass)."""
        both = [(False, self.plain), (True, self.recomputed)]
        return [(recompute, one) for recompute, one in both if one is not None]


@dataclass(frozen=True)
class OptimizerCost:
    #: Bytes kept from step to step, and needed beyond that during a step.
    state: int
    transient: int = 0


#: From the shapes and element sizes of what is updated to what that takes.
Optimizer = Callable[[Sequence[tuple[Shape, int]]], OptimizerCost]


@dataclass(frozen=True)
class Job:
    ranks: int
    ranks_per_host: int
    #: Bytes of an element in the computation and in averages; None: those of the parameters.
    param_itemsize: int | None = None
    reduce_itemsize: int | None = None
    #: The model is on the meta device while FSDP wraps it.
    deferred: bool = False

    @property
    def hosts(self) -> int:
        return self.ranks // self.ranks_per_host


@dataclass(frozen=True)
class Memory:
    """Bytes that training takes under one setting, beyond those of a process without a model.

    Those of one rank, the one that needs most; `shared_parameters` exist once per host.
    """

    setting: str
    recompute: bool
    ranks_per_host: int
    parameters: int = 0
    shared_parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    #: Buffers for what travels, which a step leaves for the next one.
    communication: int = 0
    #: The model's own buffers.
    buffers: int = 0
    #: The most that a pass, or the optimizer's step, takes for a moment. Where gradients come into
    #: being during the pass: what it takes beyond all of them at its highest moment.
    activations: int = 0
    transient: int = 0
    #: The most on a host while the model is wrapped; every rank holds a whole one then.
    wrapping: int = 0

    @property
    def private(self) -> int:
        kept = self.parameters + self.gradients + self.optimizer + self.communication + self.buffers
        return kept + max(self.activations, self.transient)

    @property
    def state_per_host(self) -> int:
        """Parameters, gradients, optimizer state and buffers of all ranks of a host."""
        moment = max(self.activations, self.transient)
        return (self.private - moment) * self.ranks_per_host + self.shared_parameters

    @property
    def per_rank(self) -> int:
        """At the peak of a step, with this rank's part of what the host has once."""
        return self.private + -(-self.shared_parameters // self.ranks_per_host)

    @property
    def step_per_host(self) -> int:
        """All ranks of a host, at the peak of a step."""
        return self.private * self.ranks_per_host + self.shared_parameters

    @property
    def per_host(self) -> int:
        """All ranks of a host, at the most: in a step or while the model is wrapped."""
        return max(self.step_per_host, self.wrapping)
