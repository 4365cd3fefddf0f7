"""Backend names: torch's words for libddp's backend, and the creator that torch calls.

A group of libddp's moves CPU tensors by its host backend and CUDA tensors by NCCL, which it starts
with the first of them.

| name | means |
|---|---|
| None, "auto", "libddp" | that |
| "gloo", "shm", "cpu:gloo" | the same: libddp's host backend is always there |
| "nccl", "cuda:nccl" | the same, but an error where there is no CUDA |
| "cpu:gloo,cuda:nccl" | the same, with or without CUDA |
| any name that somebody has registered with torch | that backend |
| "cuda:NAME" with such a name | that backend for CUDA tensors, under libddp's DDP and FSDP |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from libddp._load import load
from libddp._torch_backend import BACKEND as HOST
from libddp._torch_backend import register_backend
from libddp.distributed import _exit, _links
from libddp.errors import ArgumentError

_C = load()
_HOST_NAMES = frozenset({HOST, "gloo", "shm"})
_ACCEPTED = 'None, "auto", "libddp", "gloo", "shm", "nccl", "cpu:gloo", "cpu:gloo,cuda:nccl"'


@dataclass(frozen=True)
class Choice:
    """A user's backend argument, understood."""

    #: What torch.distributed is given.
    torch_name: str
    #: What get_backend() answers: the name that scripts compare with.
    reported: str


def choose(backend: str | None) -> Choice:
    """Understands a `backend` argument.

    Raises:
        ArgumentError: unknown, or it needs CUDA where there is none.

    Example:
        >>> from libddp.distributed._backend import choose
        >>> choose("gloo")
        Choice(torch_name='libddp', reported='gloo')
    """
    if backend is not None and not isinstance(backend, str):
        raise _refusal(backend, f"is a {type(backend).__name__}, not a name")
    name = None if backend is None else str(backend).strip().lower()
    if name in (None, "auto", "undefined"):
        return Choice(HOST, "nccl" if torch.cuda.is_available() else "gloo")
    if ":" in name and _is_registered(name):  # as torch, which asks that first
        return Choice(name, name)
    if ":" in name:
        return _choose_per_device(name)
    if name in _HOST_NAMES:
        return Choice(HOST, name)
    if name == "nccl":
        _require_cuda(name)
        return Choice(HOST, "nccl")
    if _is_registered(name):
        return Choice(name, name)
    raise _refusal(backend, "is not known")


def _is_registered(name: str) -> bool:
    """By Backend.register_backend, as hardware vendors, fakes and torch's own nccl2 do."""
    return name != HOST and name.upper() in dist.Backend._plugins


def create(options, pg_options):
    """The c10d backend of one group; torch calls it on each of the group's ranks."""
    ranks = options.global_ranks_in_group
    _exit.install(ranks[options.group_rank] if ranks else options.group_rank)
    return _C.create_backend(options, pg_options, **vars(_links.default()))


def _choose_per_device(name: str) -> Choice:
    """ "cpu:gloo,cuda:nccl" and the like."""
    parts = {}
    for pair in name.split(","):
        device, _, backend = pair.strip().partition(":")
        if device in parts:
            raise _refusal(name, f"names device {device!r} twice")
        if _is_ours(device, backend):
            parts[device] = HOST
        elif _is_registered(backend):
            parts[device] = backend
        else:
            raise _refusal(name, f"has the part {pair.strip()!r}, which libddp does not offer")
    if "cuda" in parts and not torch.cuda.is_available():
        del parts["cuda"]
        if not parts:
            _require_cuda(name)
    if set(parts.values()) == {HOST}:
        return Choice(HOST, name)
    return Choice(",".join(f"{device}:{part}" for device, part in parts.items()), name)


def _is_ours(device: str, backend: str) -> bool:
    return (
        backend == HOST
        or (device == "cpu" and backend in _HOST_NAMES)
        # The latter is in "cpu:gloo,cuda:gloo", torch's own word for "gloo" (get_backend_config).
        or (device == "cuda" and backend in ("nccl", "gloo"))
    )


def _require_cuda(name: str) -> None:
    if not torch.cuda.is_available():
        raise ArgumentError(
            f"libddp: backend {name!r} needs CUDA, and torch.cuda.is_available() is False here. "
            'Hint: pass backend="gloo", or None to take what the machine has.'
        )


def _refusal(backend, why: str) -> ArgumentError:
    return ArgumentError(f"libddp: backend {backend!r} {why}. Hint: pass one of {_ACCEPTED}.")


register_backend(create)
