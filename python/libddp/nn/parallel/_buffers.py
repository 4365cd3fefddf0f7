"""How the ranks keep buffers (running statistics, counters) alike.

Before the first forward, and before each one that follows a synchronising one, all ranks take rank
0's buffers. A buffer hook takes the place of that broadcast. What it still has in flight is done at
the end of the backward pass; where a forward leads to none, at the end of that forward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import Variable, _unsafe_preserve_version_counter
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation
from torch.utils._pytree import tree_leaves

from libddp.errors import ArgumentError
from libddp.nn.parallel import _join


class SynchronisesBuffers:
    """The part of DistributedDataParallel that has to do with buffers."""

    #: Set by _register_buffer_comm_hook.
    buffer_hook: _BufferCommHook | None = None

    def _assign_modules_buffers(self) -> None:
        """Learns where buffers stand; a forward may put other tensors there."""
        self._buffer_homes = [
            (prefix, module._buffers) for prefix, module in self.module.named_modules()
        ]
        self._has_buffers = any(True for _ in self._named_buffers())

    def _named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each buffer once, as it is now; several times as fast as named_buffers()."""
        ignored = self.parameters_to_ignore
        seen = set()
        for prefix, buffers in self._buffer_homes:
            for key, buffer in buffers.items():
                if buffer is None or id(buffer) in seen:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                if name not in ignored:
                    seen.add(id(buffer))
                    yield name, buffer

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that are kept alike, by name."""
        return dict(self._named_buffers())

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """The buffers that are kept alike."""
        return [buffer for _, buffer in self._named_buffers()]

    @property
    def broadcast_buffers(self) -> bool:
        """torch's former name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def will_sync_module_buffers(self) -> bool:
        """Are buffers exchanged around the next forward?"""
        return self.require_forward_param_sync and self.forward_sync_buffers and self._has_buffers

    def _register_buffer_comm_hook(
        self,
        state: object,
        hook: Callable[[Any, dict[str, torch.Tensor]], Any],
        comm_hook_location=_BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Lets `hook(state, buffers: dict[str, Tensor])` keep the buffers alike; on every rank.

        Args:
            state: passed to the hook.
            hook: called where the broadcast would be. It may return futures, which are waited for
                at the end of the backward pass.
            comm_hook_location: torch's _BufferCommHookLocation: before or after the forward.

        Raises:
            TypeError: the hook is not callable.
            ArgumentError: no such location.

        Note:
            Not together with join: a rank without data has no forward to call the hook around.
        """
        if not callable(hook):
            raise TypeError(f"hook must be callable, got {type(hook).__name__}")
        if not isinstance(comm_hook_location, _BufferCommHookLocation):
            raise ArgumentError(
                f"libddp: comm_hook_location is {comm_hook_location!r}. Hint: pass "
                "_BufferCommHookLocation.PRE_FORWARD or POST_FORWARD of "
                "torch.nn.parallel.distributed."
            )
        self.buffer_hook = _BufferCommHook(hook, state, comm_hook_location)
        self._syncs_before = comm_hook_location is _BufferCommHookLocation.PRE_FORWARD

    def _sync_buffers(self) -> None:
        """By broadcast from rank 0 (under join from a rank with data, behind it as torch from the
        last rank), or by the hook."""
        if self.buffer_hook is not None:
            self._run_buffer_hook()
            return
        self._replica.broadcast(self.modules_buffers, _join.buffers_root(self))

    def _run_buffer_hook(self) -> None:
        buffers = self.named_module_buffers
        hook = self.buffer_hook
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(buffers.values())):
            futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, buffers)
        if isinstance(futures, torch.futures.Future):
            futures = [futures]
        self._buffer_futures.extend(futures or ())

    def _wait_for_buffers(self) -> None:
        """Until all that the hook has returned is complete; raises what a future holds."""
        futures, self.__dict__["_buffer_futures"] = self._buffer_futures, []
        for future in futures:
            future.wait()

    def _wait_for_buffers_later(self, output: Any) -> None:
        """At the end of the backward pass through `output`; now where there will be none."""
        nodes = [t.grad_fn for t in _tensors_in(output) if t.grad_fn is not None]
        if not (nodes and torch.is_grad_enabled()):
            self._wait_for_buffers()

        def wait_at_end(_grads) -> None:
            Variable._execution_engine.queue_callback(self._wait_for_buffers)

        for node in nodes:
            node.register_prehook(wait_at_end)


def _tensors_in(output: Any) -> list[torch.Tensor]:
    """Tensors in containers and dataclasses."""
    found = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += _tensors_in([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])
    return found
