"""Refuses pipeline schedules that compute the gradients of inputs and of weights apart.

Replaces `backward_maybe_with_nosync` of torch's pipeline stages, which zero-bubble schedules call
for either half of a backward pass. The half of the weights computes the gradients of what
`module.parameters()` gives, and writes them into `.grad` itself: no module that averages gradients
in a backward pass is told. After a forward of a sharded module of libddp's what they are given are
this rank's parts, which are not in the graph. Whoever makes such modules asks for it, for good;
whole passes and other modules go the old way.
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
_objections: list[Objection] = []


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


def _put(stage: ModuleType) -> None:
    kind = stage._PipelineStageBase
    original = kind.backward_maybe_with_nosync

    @functools.wraps(original)
    def backward_maybe_with_nosync(self, backward_type, *args, **kwargs):
        if backward_type == "input":
            _check(self.submod)
        return original(self, backward_type, *args, **kwargs)

    WRAPPING.put(kind, "backward_maybe_with_nosync", backward_maybe_with_nosync)


def _check(module: torch.nn.Module) -> None:
    for objection in _objections:
        if what := objection(module):
            raise ArgumentError(
                f"libddp: a stage of a pipeline, {type(module).__name__}, {what}, and the schedule "
                "computes the gradients of inputs and of weights apart (zero bubble). Hint: a "
                "schedule with whole backward passes (GPipe, 1F1B, Interleaved1F1B, LoopedBFS)."
            )
