"""Gradients of accumulated micro-batches: their mean, as one large batch would give it."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary

from libddp.elastic._gradient_state import GradientState


class GradientAveraging:
    """Divides what each micro-step adds to a gradient by how many of them a step consists of.

    By hooks of the parameters, which see every way to them: several losses, and terms of a loss
    that do not come from the model's output. They are made when something is accumulated.
    """

    def __init__(self, model: torch.nn.Module, gradient_state: GradientState) -> None:
        self._model = model
        self._state = gradient_state
        self._hooks = WeakIdKeyDictionary()

    def before_micro_step(self) -> None:
        """Parameters may be new, or train only now."""
        for parameter in self._model.parameters():
            if parameter.requires_grad and parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_hook(self._take)

    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._model.parameters())

    def _take(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """What a backward pass is about to add."""
        if self._state.num_accumulated == 1 or not self._state.is_in_step:
            return None
        self._state.has_averaged = True
        self._state.may_clear = False
        return gradient / self._state.num_accumulated if self._state.averages else None
