"""What set_all_reduce_hook() asks for: a script's own reduction behind that of the shards.

For averages over groups that libddp does not know: replicas whose number changes, as in torchft.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import contextmanager

import torch
import torch.distributed as dist

from libddp.distributed.fsdp.wrap._lookup import wrapped_module_of
from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule
from libddp.errors import ArgumentError

Hook = Callable[[torch.Tensor], None]


def put(module: torch.nn.Module, hook: Hook | None, stream: torch.Stream | None) -> None:
    """See FSDPModule.set_all_reduce_hook."""
    wrapped = wrapped_module_of(module)
    if wrapped.beside:
        raise ArgumentError(
            f"libddp fsdp: set_all_reduce_hook: parameters of {wrapped.name!r} are sharded over "
            "different meshes (shard_placement_fn), and the hook would not know over which. Hint: "
            "call fully_shard with modules of one mesh each."
        )
    if stream is not None and wrapped.sharding.replicate is not None:
        raise ArgumentError(
            f"libddp fsdp: set_all_reduce_hook: {wrapped.name!r} is replicated (HSDP), so the hook "
            "runs behind that all-reduce. Hint: leave out stream."
        )
    if hook is not None and not callable(hook):
        raise ArgumentError(
            f"libddp fsdp: set_all_reduce_hook: {hook!r} is no function. Hint: hook(reduced)."
        )
    wrapped.hook = None if hook is None else _Reduction(wrapped, hook, stream)
    if wrapped.made is not None:
        wrapped.made.reduce_by(wrapped.hook)


class _Reduction:
    """A unit's own, and the script's behind it."""

    def __init__(self, wrapped: WrappedModule, hook: Hook, stream: torch.Stream | None) -> None:
        self._wrapped = weakref.ref(wrapped)  # which has this
        self._hook = hook
        self._stream = stream

    def __call__(self, gradients: torch.Tensor, reduced: torch.Tensor | None = None) -> None:
        """`reduced`: the own block; None: nothing is sharded, it is the same."""
        wrapped = self._wrapped()
        shard, replicate = wrapped.groups()
        divisor = wrapped.divisor
        op = dist.ReduceOp.AVG if divisor is None else dist.ReduceOp.SUM
        is_divided = shard is None and replicate is None
        if reduced is None:
            reduced = gradients
        else:
            shard.reduce_scatter_into(reduced, gradients, op)
        if replicate is not None:
            replicate.all_reduce(reduced, op)
        if divisor is not None and not is_divided:
            reduced.div_(divisor)
        with self._on_stream(reduced):
            self._hook(reduced)

    @contextmanager
    def _on_stream(self, reduced: torch.Tensor):
        if self._stream is None or reduced.device.type == "cpu":
            yield
            return
        device_module = torch.get_device_module(reduced.device)
        before = device_module.current_stream(reduced.device)
        self._stream.wait_stream(before)
        with device_module.stream(self._stream):
            yield
        before.wait_stream(self._stream)
