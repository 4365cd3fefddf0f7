"""Checks of communication hooks, with torch's rules and words."""

from __future__ import annotations

import functools
import inspect

import torch
import torch.distributed as dist

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


def checked(hook):
    """`hook`, with a NoFutureError where it returns no future: torch would crash on None.

    Other objects that wrap a C++ future (torch._C.Future) are let through.
    """

    @functools.wraps(hook, updated=())
    def call(state, bucket):
        future = hook(state, bucket)
        if not isinstance(future, torch._C.Future):
            raise NoFutureError(
                f"libddp: callback must return a torch.futures.Future object, but got "
                f"{type(future)}: the communication hook {_name_of(hook)} returned "
                f"{_kind_of(future)} for bucket {bucket.index()}. Hint: return a "
                "torch.futures.Future, whose value is what shall stand in the bucket."
            )
        return future

    return call


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
