"""Checks of communication hooks, with torch's rules and words."""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState

from libddp.errors import ArgumentError

_BUILTIN_DTYPES = {
    dist.BuiltinCommHookType.ALLREDUCE: None,
    dist.BuiltinCommHookType.FP16_COMPRESS: torch.float16,
}


class NoFutureError(ArgumentError, TypeError):
    """A communication hook returned something else; torch raises a RuntimeError."""


def check_comm_hook(hook) -> None:
    """Raises TypeError or ArgumentError unless `hook` looks like hook(state, bucket) -> Future."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    if bucket is None:
        raise ArgumentError(
            "Communication hook: it has no parameter named 'bucket'. "
            "Hint: define it as hook(state, bucket: dist.GradBucket)."
        )
    if bucket.annotation not in (inspect.Parameter.empty, dist.GradBucket, "dist.GradBucket"):
        raise ArgumentError("Communication hook: bucket annotation should be dist.GradBucket.")
    returned = signature.return_annotation
    if isinstance(returned, str) or returned is inspect.Signature.empty:
        return
    if returned != torch.futures.Future[torch.Tensor]:
        raise ArgumentError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
        )


class CommHook:
    """A hook with its state; a NoFutureError where it returns no future: torch would crash on None.

    Other objects that wrap a C++ future (torch._C.Future) are let through.
    """

    def __init__(self, hook, state: object) -> None:
        self.hook = hook
        self.state = state

    def __call__(self, _, bucket):
        future = self.hook(self.state, bucket)
        if not isinstance(future, torch._C.Future):
            raise NoFutureError(
                f"libddp: callback must return a torch.futures.Future object, but got "
                f"{type(future)}: the communication hook {_name_of(self.hook)} returned "
                f"{_kind_of(future)} for bucket {bucket.index()}. Hint: return a "
                "torch.futures.Future, whose value is what shall stand in the bucket."
            )
        return future

    def follow(self, before, group) -> None:
        """In the place of the group `before` comes `group`."""
        self.state = state_after(self.state, before, group)


def state_after(state: object, before, group) -> object:
    """A hook's state, which may be, or have, the group `before`, in whose place `group` comes."""
    if state is before:
        return group
    if getattr(state, "process_group", None) is before:
        if isinstance(state, DefaultState):  # numbers of the group's size, too
            DefaultState.__init__(state, group)
        else:  # torch's PowerSGDState
            state.process_group = group
    return state


def _name_of(hook) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def _kind_of(value) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def builtin_dtype(kind) -> torch.dtype | None:
    """The dtype that one of torch's built-in hooks sends; None = the gradients' own."""
    if kind not in _BUILTIN_DTYPES:
        raise ArgumentError(
            f"libddp: {kind!r} is no built-in communication hook. Hint: use "
            "dist.BuiltinCommHookType.ALLREDUCE or FP16_COMPRESS."
        )
    return _BUILTIN_DTYPES[kind]
