"""Selective checkpointing by a list of operators."""

from __future__ import annotations

from functools import cache

import torch

from libddp._load import load

_C = load()


def contexts(policy, allow_mutation: bool):
    """Contexts in C++ if they can do it, else None."""
    if not isinstance(policy, list) or torch._C._len_torch_dispatch_stack():
        return None
    if torch.compiler.is_compiling():
        return None
    # torch refuses what is no operator, and takes higher-order ones, which have no C++ form.
    if not all(isinstance(op, torch._ops.OpOverload) for op in policy):
        return None
    return _C.selective_contexts(_operators(tuple(policy)), bool(allow_mutation))


@cache
def _operators(ops: tuple):
    return _C.OperatorSet([(op._schema.name, op._schema.overload_name) for op in ops])
