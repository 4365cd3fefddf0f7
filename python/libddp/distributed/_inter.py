"""What `inter=` of init_process_group and new_group means: who moves bytes between hosts.

| inter | means |
|---|---|
| None | libddp's own TCP links |
| "gloo" | torch's Gloo, on the addresses that libddp chose |
| "ucc" | torch's UCC, where torch was built with it |
| a torch group or backend object | that one: one rank per host, in the order of the hosts |
| a function `(store, rank, world_size, address, timeout)` | what it returns: a backend object |
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Backend as _TorchBackend

from libddp.errors import ArgumentError

#: The default group's, which groups made later have too.
_default = None


def checked(inter):
    """What the C++ side takes: None, "gloo" or a function.

    Raises:
        ArgumentError: an unknown name, a name that this torch lacks, or something else.
    """
    if inter is None or inter == "gloo":
        return inter
    if inter == "ucc":
        if not dist.is_ucc_available():
            raise ArgumentError('libddp: inter="ucc": this torch was built without UCC.')
        return lambda store, rank, size, address, timeout: dist.ProcessGroupUCC(
            store, rank, size, timeout
        )
    if isinstance(inter, c10d.ProcessGroup):
        backend = inter._get_backend(torch.device("cpu"))
        return lambda *_: backend
    if isinstance(inter, _TorchBackend):
        return lambda *_: inter
    if callable(inter):
        return inter
    raise ArgumentError(
        f'libddp: inter={inter!r} is not known. Hint: pass None, "gloo", "ucc", a torch group of '
        "one rank per host, or a function that returns a backend."
    )


def default():
    """The engine of groups that are made without naming one."""
    return _default


def set_default(inter) -> None:
    """From now on, for groups that are made without naming one."""
    global _default
    _default = checked(inter)


@contextmanager
def making(inter):
    """The group made inside has this engine; None = the default."""
    global _default
    before = _default
    if inter is not None:
        _default = checked(inter)
    try:
        yield
    finally:
        _default = before
