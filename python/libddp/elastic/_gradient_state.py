"""Where a trainer is between two steps of its optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from libddp.errors import StateError


@dataclass
class GradientState:
    """What ElasticTrainer shares with the optimizer and the scheduler that it prepares.

    DLRover has one for all trainers of a process, so that those of two models count each other's
    steps. Here each trainer has its own.
    """

    #: Does this micro-step end with averaged gradients and a step of the optimizer?
    sync_gradients: bool = True
    #: Micro-steps since the trainer was made, the one that runs among them.
    num_backward_steps: int = 0
    #: Steps of the optimizer since the trainer was made, or since its reset().
    num_steps: int = 0
    #: Micro-steps that the running step of the optimizer consists of.
    num_accumulated: int = 1
    #: Those of them that are over, their gradients waiting for the others.
    num_waiting: int = 0
    #: Are they to be averaged, and has that been done with any gradient of them?
    averages: bool = True
    has_averaged: bool = False
    #: Inside ElasticTrainer.step().
    is_in_step: bool = False
    #: The gradients are none of those that are being accumulated: zero_grad() may clear them.
    may_clear: bool = True

    def check_averaged(self, parameters: Iterable[torch.Tensor]) -> None:
        """Before anybody uses their gradients.

        Raises:
            StateError: those of several micro-steps have been added as they are.
        """
        if self.num_accumulated == 1 or not self.averages or self.has_averaged:
            return
        if any(parameter.grad is not None for parameter in parameters):
            raise StateError(
                f"libddp: ElasticTrainer: gradients of {self.num_accumulated} micro-steps were to "
                "be averaged, and the model takes them past the hooks of its parameters, so they "
                "are a sum. Hint: divide the loss by trainer.gradient_accumulation_steps, with "
                "ElasticTrainer(average_gradients=False); with fully_shard that is the way."
            )
