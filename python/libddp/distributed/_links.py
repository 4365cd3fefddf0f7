"""How bytes move between hosts: `inter=`, `wire_dtype=` and `sockets_per_link=` of
init_process_group and new_group.

The last two are about libddp's own TCP links; None = what the environment says. The C++ side checks
their values, so that ranks which wait for this one are told.

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
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Backend as _TorchBackend

from libddp.errors import ArgumentError


@dataclass(frozen=True)
class Links:
    """What _C.create_backend takes by these names."""

    inter: Any = None
    wire_dtype: torch.dtype | None = None
    sockets_per_link: int | None = None


#: The default group's, which groups made later have too.
_default = Links()


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


def default() -> Links:
    """For groups that are made without naming anything."""
    return _default


def set_default(inter, wire_dtype, sockets_per_link) -> None:
    """From now on, for groups that are made without naming anything."""
    global _default
    _default = _understood(inter, wire_dtype, sockets_per_link)


def forget_default() -> None:
    """The default group has ended."""
    set_default(None, None, None)


@contextmanager
def making(inter, wire_dtype, sockets_per_link):
    """The group made inside has these; None = the default group's."""
    global _default
    before = _default
    given = _understood(inter, wire_dtype, sockets_per_link)
    chosen = {name: value for name, value in vars(given).items() if value is not None}
    _default = replace(before, **chosen)
    try:
        yield
    finally:
        _default = before


def _understood(inter, wire_dtype, sockets_per_link) -> Links:
    if wire_dtype is not None and not isinstance(wire_dtype, torch.dtype):
        raise ArgumentError(
            f"libddp: wire_dtype={wire_dtype!r} is a {type(wire_dtype).__name__}. "
            "Hint: pass torch.bfloat16 or torch.float32."
        )
    if sockets_per_link is not None and type(sockets_per_link) is not int:
        raise ArgumentError(
            f"libddp: sockets_per_link={sockets_per_link!r} is not an int. Hint: pass 1 to 8."
        )
    return Links(checked(inter), wire_dtype, sockets_per_link)
