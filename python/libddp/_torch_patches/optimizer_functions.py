"""Puts something in the place of the functions that torch's optimizers call with their lists of
tensors (torch.optim.adam.adam), but not in what is compiled.

It is here and not where it is asked for since dynamo traces no frame of the wrappers: it would
break the graph of a compiled optimizer there, and compile what lies behind by itself. Dynamo
traces this frame, and finds torch's own function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module

import torch


def replace(name: str, make: Callable[[Callable], Callable]) -> None:
    """For good: `make(torch's)` in the place of the function `name` of torch.optim's module."""
    module = import_module(f"torch.optim.{name}")
    setattr(module, name, _unless_compiled(getattr(module, name), make))


def _unless_compiled(torchs: Callable, make: Callable[[Callable], Callable]) -> Callable:
    ours = make(torchs)

    @wraps(torchs)
    def step(*arguments, **options) -> None:
        if torch.compiler.is_compiling():
            return torchs(*arguments, **options)
        return ours(*arguments, **options)

    return step
