"""The optimizer and the scheduler that ElasticTrainer.prepare returns."""

from __future__ import annotations

from typing import Any

import torch

from libddp.elastic._gradient_state import GradientState


class _ElasticOptimizer(torch.optim.Optimizer):
    """A script's optimizer, which acts at the end of an accumulation only.

    `zero_grad` clears what a step has used, and nothing that is still being accumulated, wherever
    in the loop it stands: DLRover's, called before a forward, clears all but the last micro-batch.
    What is not here is the script's optimizer's.
    """

    #: Else GradScaler leaves its scale in attributes here, which the script's optimizer never sees.
    _step_supports_amp_scaling = False

    def __init__(self, optimizer: torch.optim.Optimizer, gradient_state: GradientState) -> None:
        self.optimizer = optimizer
        self.gradient_state = gradient_state

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def state(self):
        return self.optimizer.state

    @state.setter
    def state(self, state) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self):
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group) -> None:
        self.optimizer.add_param_group(param_group)

    def load_state_dict(self, state_dict) -> None:
        self.optimizer.load_state_dict(state_dict)

    def state_dict(self):
        return self.optimizer.state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        state = self.gradient_state
        if state.num_accumulated == 1 or state.may_clear:
            self.optimizer.zero_grad(set_to_none)
            state.may_clear = False

    def step(self, closure=None):
        if not self.gradient_state.sync_gradients:
            return None
        self.gradient_state.check_averaged(p for g in self.param_groups for p in g["params"])
        loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self.gradient_state.may_clear = True
        return loss

    def __getstate__(self):
        return self.__dict__.copy()

    def __setstate__(self, state) -> None:
        self.__dict__.update(state)


class _ElasticLRScheduler:
    """A script's scheduler, which does not count micro-steps that only accumulate.

    Outside of ElasticTrainer.step() it is the script's: once for an epoch, say. DLRover's goes on
    in each micro-step, so that rates depend on the number of ranks.
    """

    def __init__(self, scheduler, gradient_state: GradientState) -> None:
        self.__dict__.update(scheduler=scheduler, gradient_state=gradient_state)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.scheduler, name, value)

    def step(self, *args, **kwargs) -> None:
        state = self.gradient_state
        if state.sync_gradients or not state.is_in_step:
            self.scheduler.step(*args, **kwargs)

    def __getstate__(self):
        return self.__dict__.copy()

    def __setstate__(self, state) -> None:
        self.__dict__.update(state)
