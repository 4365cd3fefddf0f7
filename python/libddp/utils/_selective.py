"""Selective checkpointing by a list of operators."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.utils.checkpoint as _theirs

from libddp._load import load

_C = load()
#: `in_torch`: contexts that this thread makes now are torch's.
_making = threading.local()
#: ids of the operators of a list -> the list, so that the ids stay theirs, and its C++ set
_known: dict = {}


def made(context_fn: Callable, respects_hooks: bool | None):
    """What `context_fn` makes; kept results pass the script's saved tensor hooks, if wanted."""
    _making.in_torch = respects_hooks
    try:
        contexts = context_fn()
    finally:
        _making.in_torch = False
    if respects_hooks is not None and isinstance(contexts[0], _theirs._CachingTorchDispatchMode):
        contexts[0].respect_saved_tensors_hooks = respects_hooks
    return contexts


def contexts(policy, allow_mutation: bool):
    """Contexts in C++ if they can do it, else None."""
    if not isinstance(policy, list) or torch._C._len_torch_dispatch_stack():
        return None
    if getattr(_making, "in_torch", False):
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
