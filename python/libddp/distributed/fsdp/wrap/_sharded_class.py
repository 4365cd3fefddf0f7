"""The class of a module that fully_shard has sharded: the module's own, and FSDPModule."""

from __future__ import annotations

from functools import cache

import torch


@cache
def sharded_class(face: type, cls: type) -> type:
    """`face`: FSDPModule."""
    return type(f"FSDP{cls.__name__}", (face, cls), {})


def class_like(module: torch.nn.Module, cls: type) -> type:
    """The same with the face that `module` has."""
    face = next(base for base in type(module).__mro__ if base.__name__ == "FSDPModule")
    return sharded_class(face, cls)
