"""Pipeline schedules that compute the gradients of inputs and of weights apart (zero bubble).

Replaces `backward_maybe_with_nosync` of torch's pipeline stages, which such schedules call for
either half of a backward pass. The half of the weights computes the gradients of what
`module.parameters()` gives, and writes them into `.grad` itself: no module that averages gradients
in a backward pass is told. Whoever makes such modules has halves of its own, or refuses those of
its modules, for good; whole passes and other modules go the old way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import torch

from libddp._torch_patches.replacing import WRAPPING
from libddp.errors import ArgumentError

#: What a module is that must not be in a stage, or None.
Objection = Callable[[torch.nn.Module], str | None]
#: The two of a stage's module: called with "input" or "weight", and with what the stage knows of
#: the microbatch. Returns what the stage's method does.
Halves = Callable[[str, dict], tuple]
#: Those of a module; None: it has none of its own.
FindHalves = Callable[[torch.nn.Module], Halves | None]
_objections: list[Objection] = []
_finders: list[FindHalves] = []


@functools.cache
def put(objection: Objection) -> None:
    """Once there is something to refuse.

    Args:
        objection: what about a stage's module, or one under it, stands against halves of passes:
            "is sharded, and ..."; None: nothing.
    """
    _objections.append(objection)
    if len(_objections) == 1:
        WRAPPING.put_after_import("torch.distributed.pipelining.stage", _put)


def take_over(find: FindHalves) -> None:
    """Modules for which `find` has halves are not asked about objections."""
    if find not in _finders:
        _finders.append(find)


def _put(stage: ModuleType) -> None:
    kind = stage._PipelineStageBase
    original = kind.backward_maybe_with_nosync

    @functools.wraps(original)
    def backward_maybe_with_nosync(self, backward_type, bwd_kwargs, *args, **kwargs):
        if backward_type != "full":
            for find in _finders:
                if halves := find(self.submod):
                    return halves(backward_type, bwd_kwargs)
            _check(self.submod)
        return original(self, backward_type, bwd_kwargs, *args, **kwargs)

    WRAPPING.put(kind, "backward_maybe_with_nosync", backward_maybe_with_nosync)


def _check(module: torch.nn.Module) -> None:
    for objection in _objections:
        if what := objection(module):
            raise ArgumentError(
                f"libddp: a stage of a pipeline, {type(module).__name__}, {what}, and the schedule "
                "computes the gradients of inputs and of weights apart (zero bubble). Hint: a "
                "schedule with whole backward passes (GPipe, 1F1B, Interleaved1F1B, LoopedBFS), "
                "or fully_shard(stage_module)."
            )
