"""Backward passes of a FullyShardedDataParallel that average nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from libddp.distributed.fsdp import _unaveraged
from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule, model_of


@contextmanager
def without_sync(wrapped: WrappedModule) -> Iterator[None]:
    """Backward passes inside add up whole gradients on each rank."""
    model = model_of(wrapped)
    _unaveraged.watch(wrapped)
    before = model.syncs
    model.syncs = False
    try:
        yield
    finally:
        model.syncs = before
