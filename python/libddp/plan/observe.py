"""Runs a pass without memory: how many bytes live at each moment of it.

Tensors of torch's FakeTensorMode have sizes and no data, and autograd keeps and frees them as it
does real ones. What kernels take inside of an operation and give back is not seen.

    with FakeTensorMode():
        model, batch = GPT(config), torch.randint(50257, (8, 1024))
        seen = observe_pass(model, lambda: model(batch).mean())
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from libddp.plan.facts import Event, OptimizerCost, Pass, Shape


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations inside of it make and that are still alive.

    `known`: tensors that don't count.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = self._recent = 0
        self._seen: dict[int, object] = {}
        for tensor in known:
            self._remember(tensor, 0)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._remember(value, value.untyped_storage().nbytes())
        self._recent = max(self._recent, self.now)
        self.peak = max(self.peak, self.now)
        return result

    def peak_since_last(self) -> int:
        """The most since the last call."""
        recent, self._recent = self._recent, self.now
        return recent

    def _remember(self, tensor: torch.Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._seen:
            return

        def forget(_, self=self, key=key, size=size):
            self._seen.pop(key, None)
            self.now -= size

        self._seen[key] = weakref.ref(storage, forget)
        self.now += size


def observe_pass(
    model: nn.Module,
    loss_of: Callable[[], tuple[torch.Tensor, object]],
    units: Sequence[nn.Module] = (),
) -> Pass:
    """Runs forward and backward once, inside a FakeTensorMode.

    Args:
        loss_of: makes the batch, runs the model; returns the loss and what the script keeps.
        units: the wrapped modules, the model first.
    """
    parameters = list(model.parameters())
    events: list[Event] = []
    hooks = [hook for unit, module in enumerate(units) for hook in _watch(module, unit, events)]

    def take(index: int):
        def hook(parameter: torch.Tensor) -> None:
            events.append(Event("gradient", index, live.peak_since_last()))
            parameter.grad = None

        return hook

    for index, parameter in enumerate(parameters):
        if parameter.requires_grad:
            hooks.append(parameter.register_post_accumulate_grad_hook(take(index)))
    with LiveBytes([*parameters, *model.buffers()]) as live:
        loss, outputs = loss_of()
        kept, num_forward = live.now, len(events)
        loss.backward()
        del loss, outputs
    for hook in hooks:
        hook.remove()
    # A recomputation runs the hooks of its modules again, which says nothing new.
    backward = [event for event in events[num_forward:] if event.what == "gradient"]
    return Pass(peak=live.peak, kept=kept, events=(*events[:num_forward], *backward))


def _watch(module: nn.Module, unit: int, events: list[Event]) -> list:
    return [
        module.register_forward_pre_hook(lambda *_: events.append(Event("forward", unit))),
        module.register_forward_hook(lambda *_: events.append(Event("forward_end", unit))),
    ]


def optimizer_cost(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    sizes: Sequence[tuple[Shape, int]],
) -> OptimizerCost:
    """What the first step of an optimizer keeps, and takes for a moment."""
    if not sizes:
        return OptimizerCost(0)
    with FakeTensorMode():
        parameters = [
            nn.Parameter(torch.empty(shape, dtype=_float_of(size))) for shape, size in sizes
        ]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        gradients = [parameter.grad for parameter in parameters]
        optimizer = make(parameters)
        with LiveBytes([*parameters, *gradients]) as live:
            optimizer.step()
        return OptimizerCost(state=live.now, transient=live.peak - live.now)


def _float_of(itemsize: int) -> torch.dtype:
    return {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]
