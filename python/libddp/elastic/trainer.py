"""ElasticTrainer: a step of the optimizer takes as many samples at any number of ranks.

trainer = ElasticTrainer(model, loader)
optimizer, scheduler = trainer.prepare(optimizer, scheduler)
for inputs, targets in loader:
    with trainer.step(fix_total_batch_size=True):
        loss_function(model(inputs), targets).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

from libddp.elastic._averaging import GradientAveraging
from libddp.elastic._gradient_state import GradientState
from libddp.elastic._optimizer import _ElasticLRScheduler, _ElasticOptimizer
from libddp.errors import ArgumentError

__all__ = ["ElasticTrainer", "GradientState"]


class ElasticTrainer:
    """Accumulates gradients so that the global batch stays while the number of ranks changes.

    A step of the optimizer consists of `micro_batches` micro-batches, shared among the ranks: with
    4 of them, one of each of 4 ranks, two of each of 2, four of one. The gradient is their mean, so
    it is the same with each number of ranks, but for the order of additions.

    The signature is DLRover's. Where that one trains something else in silence, this one does not:

    - accumulated gradients are a mean; DLRover's are a sum, as many times as large as the ranks are
      fewer. A script that divides its loss by itself passes `average_gradients=False`;
    - `zero_grad` before a forward leaves what is accumulated; DLRover's clears it;
    - a number of ranks that does not divide the micro-batches is an error in step(True); DLRover
      lets ranks accumulate unequally often, after which they average different steps;
    - the scheduler counts steps of the optimizer, not micro-steps;
    - each trainer has counters of its own;
    - `zero_grad()` sets gradients to None, as torch's does, and `step(closure)` returns the loss.

    Left out are the file of metrics for DLRover's agent, and reading batch sizes in each step.

    Args:
        model: what the step's forwards run; its `no_sync()`, if it has one, is around those whose
            gradients are not averaged over ranks yet.
        dataloader: for `epoch`.
        micro_batches: of one step at any number of ranks. By default WORKER_NUM x LOCAL_WORLD_SIZE,
            DLRover's number of ranks when all are there, if WORKER_NUM is set; else the number of
            ranks now. On one host, where LOCAL_WORLD_SIZE itself changes, say it.
        average_gradients: False leaves them a sum over a rank's micro-batches.

    Attributes:
        gradient_accumulation_steps: micro-steps of this rank for one step; set by `prepare`.
        gradient_state: GradientState.

    Note:
        Gradients are whole only where `gradient_state.sync_gradients` holds: clip them, let a
        GradScaler unscale and update, and take snapshots only then.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> trainer = ElasticTrainer(model, micro_batches=2)
        >>> optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> for _ in range(4):
        ...     with trainer.step(fix_total_batch_size=True):
        ...         model(torch.ones(1, 1)).sum().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> trainer.num_steps
        2
    """

    def __init__(
        self,
        model: torch.nn.Module,
        dataloader=None,
        *,
        micro_batches: int | None = None,
        average_gradients: bool = True,
    ) -> None:
        self.model = model
        self.dataloader = dataloader
        self.gradient_state = GradientState(averages=average_gradients)
        self.gradient_accumulation_steps = 1
        self._micro_batches = _checked(micro_batches)
        #: Why step(True) is not possible with this number of ranks.
        self._problem = "prepare() was not called. Hint: it takes the optimizer"
        self._averaging = GradientAveraging(model, self.gradient_state)

    def prepare(self, optimizer: torch.optim.Optimizer, lr_scheduler=None):
        """The optimizer, or a pair with the scheduler, that knows of micro-steps.

        Call it again when the number of ranks has changed; what was accumulated is dropped then.
        """
        self._share_micro_batches()
        if isinstance(optimizer, _ElasticOptimizer):
            optimizer = optimizer.optimizer
        if self.gradient_state.num_waiting:
            optimizer.zero_grad()
            self.gradient_state.num_waiting = 0
        optimizer = _ElasticOptimizer(optimizer, self.gradient_state)
        if lr_scheduler is None:
            return optimizer
        if isinstance(lr_scheduler, _ElasticLRScheduler):
            lr_scheduler = lr_scheduler.scheduler
        return optimizer, _ElasticLRScheduler(lr_scheduler, self.gradient_state)

    @contextmanager
    def step(self, fix_total_batch_size: bool = False) -> Iterator[None]:
        """Around a forward, its backward and what the optimizer does: one micro-step.

        Args:
            fix_total_batch_size: accumulate; else each micro-step is a step.

        Raises:
            ArgumentError: this number of ranks cannot share the micro-batches equally; or False
                while some of them wait for others.
            StateError: gradients could not be averaged.

        Note:
            A micro-step that ends by an exception does not count. What its backward has added to
            gradients by then stays.
        """
        self._begin(fix_total_batch_size)
        is_last = self.gradient_state.sync_gradients
        waits = nullcontext() if is_last else getattr(self.model, "no_sync", nullcontext)()
        try:
            with waits:
                yield
        except BaseException:
            self.gradient_state.num_backward_steps -= 1
            raise
        finally:
            self.gradient_state.is_in_step = False
        self._end()

    @contextmanager
    def epoch(self, number: int) -> Iterator[None]:
        """Around the loop of one epoch: sets it in the loader's sampler, and resets `num_steps`."""
        sampler = getattr(self.dataloader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(number)
        self.reset()
        yield

    def reset(self) -> None:
        """Counts steps from 0; what is accumulated stays."""
        self.gradient_state.num_steps = 0

    @property
    def num_steps(self) -> int:
        """Steps of the optimizer, of this rank and so of all."""
        return self.gradient_state.num_steps

    def _begin(self, fix_total_batch_size: bool) -> None:
        state = self.gradient_state
        problem = self._problem if fix_total_batch_size else ""
        if state.num_waiting and not fix_total_batch_size:
            problem = (
                f"{state.num_waiting} of {state.num_accumulated} micro-steps are accumulated. "
                "Hint: pass fix_total_batch_size=True until num_steps grows"
            )
        if problem:
            raise ArgumentError(f"libddp: ElasticTrainer.step: {problem}.")
        num_accumulated = self.gradient_accumulation_steps if fix_total_batch_size else 1
        if num_accumulated > 1:
            if state.num_accumulated == 1:
                state.may_clear = self._averaging.has_gradients()
            self._averaging.before_micro_step()
        state.num_accumulated = num_accumulated
        if state.num_waiting == 0:
            state.has_averaged = False
        state.num_backward_steps += 1
        state.sync_gradients = state.num_waiting + 1 == num_accumulated
        state.is_in_step = True

    def _end(self) -> None:
        state = self.gradient_state
        if not state.sync_gradients:
            state.num_waiting += 1
            return
        state.num_waiting = 0
        state.num_steps += 1
        if state.num_accumulated > 1:
            state.check_averaged(self.model.parameters())

    def _share_micro_batches(self) -> None:
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        whole = self._micro_batches or _expected_num_ranks() or num_ranks
        self.gradient_accumulation_steps = max(1, whole // num_ranks)
        self._problem = ""
        if whole % num_ranks:
            self._problem = (
                f"{whole} micro-batches of a step cannot be shared equally among {num_ranks} "
                "ranks. Hint: use numbers of ranks that divide micro_batches (or WORKER_NUM x "
                "LOCAL_WORLD_SIZE), or step(fix_total_batch_size=False)"
            )


def _checked(micro_batches: int | None) -> int | None:
    if micro_batches is not None and (not isinstance(micro_batches, int) or micro_batches < 1):
        raise ArgumentError(
            f"libddp: ElasticTrainer: micro_batches is {micro_batches!r}. Hint: pass how many "
            "micro-batches one step of the optimizer consists of, 1 or more."
        )
    return micro_batches


def _expected_num_ranks() -> int:
    """As DLRover's agent says it; 0: it does not."""
    return int(os.environ.get("WORKER_NUM", 0)) * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
