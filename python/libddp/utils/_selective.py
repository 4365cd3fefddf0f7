"""Selective checkpointing by a list of operators."""

from __future__ import annotations

import torch

from libddp._load import load

_C = load()
#: ids of the operators of a list -> the list, so that the ids stay theirs, and its C++ set
_known: dict = {}


def contexts(policy, allow_mutation: bool):
    """Contexts in C++ if they can do it, else None."""
    if not isinstance(policy, list) or torch._C._len_torch_dispatch_stack():
        return None
    if torch.compiler.is_compiling():
        return None
    key = tuple(map(id, policy))
    found = _known.get(key)
    if found is None:
        operators = _operators(policy)
        if operators is None:
            return None
        found = _known[key] = (list(policy), operators)
    return _C.selective_contexts(found[1], bool(allow_mutation))


def _operators(policy: list):
    # torch refuses what is no operator, and takes higher-order ones, which have no C++ form.
    if not _C.can_keep_results() or not all(isinstance(op, torch._ops.OpOverload) for op in policy):
        return None
    return _C.OperatorSet([(op._schema.name, op._schema.overload_name) for op in policy])
