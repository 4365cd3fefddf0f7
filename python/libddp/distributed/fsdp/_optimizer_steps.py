"""What is to be so when an optimizer updates parameters, asked before its step and in it.

A step may have a closure that computes the gradients (LBFGS, Lightning's Trainer): they are there
when it returns, and parameters may be updated between its calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

Check = Callable[[Optimizer], None]


def watch(check: Check, before_closures: bool) -> None:
    """From now on each step of any optimizer calls `check`, and behind each call of its closure.

    Args:
        before_closures: before a step that has a closure, too.
    """

    def before_step(optimizer, args, kwargs):
        # The optimizer is the first of them.
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            return check(optimizer)
        if before_closures:
            check(optimizer)
        checked = _checked(closure, optimizer, check)
        if "closure" in kwargs:
            return args, kwargs | {"closure": checked}
        return (args[0], checked, *args[2:]), kwargs

    register_optimizer_step_pre_hook(before_step)


def _checked(closure: Callable, optimizer: Optimizer, check: Check) -> Callable:
    @wraps(closure)
    def closure_and_check(*args, **kwargs):
        loss = closure(*args, **kwargs)
        check(optimizer)
        return loss

    return closure_and_check
