"""Refuses pipeline schedules that compute the gradients of inputs and of weights apart.

Replaces `backward_maybe_with_nosync` of torch's pipeline stages, which zero-bubble schedules call
for either half of a backward pass. The half of the weights computes the gradients of what
`module.parameters()` gives, and writes them into `.grad` itself. After a forward of a sharded
module of libddp's those are this rank's parts, which are not in the graph: the gradients would be
left out without a word, and nothing tells the module of it. The first `fully_shard` asks for it,
for good; whole passes and other modules go the old way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import torch

from libddp._torch_patches.replacing import WRAPPING
from libddp.errors import ArgumentError


@functools.cache
def put(is_sharded: Callable[[torch.nn.Module], bool]) -> None:
    """Once something is sharded.

    Args:
        is_sharded: whether a module is sharded, or one under it.
    """
    WRAPPING.put_after_import(
        "torch.distributed.pipelining.stage", lambda stage: _put(stage, is_sharded)
    )


def _put(stage: ModuleType, is_sharded: Callable[[torch.nn.Module], bool]) -> None:
    kind = stage._PipelineStageBase
    original = kind.backward_maybe_with_nosync

    @functools.wraps(original)
    def backward_maybe_with_nosync(self, backward_type, *args, **kwargs):
        if backward_type == "input" and is_sharded(self.submod):
            raise ArgumentError(_refusal(self.submod))
        return original(self, backward_type, *args, **kwargs)

    WRAPPING.put(kind, "backward_maybe_with_nosync", backward_maybe_with_nosync)


def _refusal(module: torch.nn.Module) -> str:
    return (
        f"libddp fsdp: a stage of a pipeline, {type(module).__name__}, is sharded, and the "
        "schedule computes the gradients of inputs and of weights apart (zero bubble): the "
        "weights are whole in whole passes only, and would not be trained. Hint: a schedule with "
        "whole backward passes (GPipe, 1F1B, Interleaved1F1B, LoopedBFS), or stages in "
        "DistributedDataParallel."
    )
