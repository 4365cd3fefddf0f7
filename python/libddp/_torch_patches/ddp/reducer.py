"""`model.reducer`: what libraries ask of the inside of torch's DistributedDataParallel.

Lightning arms the reducer itself where a loop decides late to synchronise; torch's own algorithms
ask for its buckets and futures.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from libddp.errors import StateError


class Reducer:
    """torch's names for the reducer of a wrapped model; keeps no model alive."""

    def __init__(self, model) -> None:
        self._model = weakref.ref(model)

    def prepare_for_forward(self) -> None:
        """torch takes a time stamp here."""

    def prepare_for_backward(self, outputs) -> None:
        """The next backward pass averages gradients, as after a synchronising forward."""
        self._model()._replica.after_forward(outputs, True)

    def _rebuild_buckets(self) -> bool:
        """Buckets are rebuilt in the backward pass: never here."""
        return False

    def _delay_all_reduce(self) -> None:
        """torch's way to reduce the first pass of a static graph; ours is reduced in backward."""

    def _set_static_graph(self) -> None:
        self._model()._set_static_graph()

    def _install_post_backward_futures(self, futures: Iterable[torch.futures.Future]) -> None:
        """The end of the backward pass (of the next forward) waits for these."""
        self._model()._buffer_futures.extend(futures)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self._model()._set_ddp_runtime_logging_sample_rate(sample_rate)

    def _remove_autograd_hooks(self) -> None:
        self._model()._remove_autograd_hooks()


class Unhooked:
    """In the reducer's place once its hooks are removed: gradients stay those of this rank."""

    def __init__(self, replica, group) -> None:
        plan = replica.bucket_plan()
        self.bucket_plan = lambda: plan
        self._group = group

    def before_forward(self) -> None:
        """Nothing is timed, and parameters compute in their own precision."""

    def after_forward(self, output, sync: bool) -> bool:
        """Whether the forward recorded gradients; nothing waits for them."""
        return sync and torch.is_grad_enabled()

    def forward_failed(self, what: str, sync: bool) -> None:
        """Nothing was prepared for the backward pass, so nothing is taken back."""

    def broadcast(self, tensors, root: int = 0) -> None:
        """All ranks take these tensors' values of rank `root`."""
        with torch.no_grad():
            for tensor in tensors:
                self._group.broadcast(tensor, root)

    def __getattr__(self, name: str):
        raise StateError(
            "libddp: the model's autograd hooks have been removed, so it averages no gradients. "
            "Hint: wrap the inner module again."
        )
